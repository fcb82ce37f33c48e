"""`Keep`: what it accepts, and what it says."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Keep, Runtime, Step, workflow
from perdure.durable.reports import _TTL as REPORT_TTL
from perdure.errors import InvalidArgument, InvalidDuration
from perdure.retention import FLOOR, check_keep
from perdure.runtime.pruning import LARGEST, SMALLEST, TARGET, Pace


def test_a_policy_names_a_time_for_each_status() -> None:
    keep = Keep(completed="7d", failed=timedelta(days=90))
    assert keep.spans == {"completed": timedelta(days=7), "failed": timedelta(days=90)}
    assert keep == Keep(completed="1w", failed="90d")
    assert hash(keep) == hash(Keep(completed="1w", failed="90d"))
    assert keep != Keep(completed="7d")
    assert repr(Keep(failed="1d", what="result")) == "Keep(failed='1 day, 0:00:00', what='result')"


@pytest.mark.parametrize("value", ["23h", 0, timedelta(hours=1), -1, "-1d", "soon", True])
def test_less_than_a_day_is_refused(value: Any) -> None:
    """A run that was started, and its start that is repeated, must find it."""
    with pytest.raises(InvalidDuration, match="completed"):
        Keep(completed=value)


def test_an_unknown_status_is_refused() -> None:
    options: Any = {"paused": "7d"}
    with pytest.raises(InvalidArgument, match="not over, and are never removed"):
        Keep(**options)


def test_only_a_run_or_its_result_is_kept() -> None:
    what: Any = "steps"
    with pytest.raises(InvalidArgument, match="'run' or 'result'"):
        Keep(what=what)


@pytest.mark.parametrize("keep", ["7d", 7, {"completed": "7d"}, "steps"])
def test_a_workflow_and_a_runtime_refuse_anything_else(keep: Any) -> None:
    with pytest.raises(InvalidArgument, match="a Keep"):
        workflow("w", keep=keep)
    with pytest.raises(InvalidArgument, match="a Keep"):
        Runtime(keep=keep)


def test_the_result_alone_is_a_short_form() -> None:
    @workflow("w", keep="result")
    async def short(step: Step) -> None: ...

    assert short.keep == Keep(what="result")
    assert check_keep(None) is None


def test_documents_of_a_run_expire_before_the_run_is_removed() -> None:
    """So that a run is removed with everything of it."""
    assert REPORT_TTL <= FLOOR


def test_batches_follow_the_speed_of_the_store() -> None:
    pace = Pace()
    for _ in range(20):
        pace.adapt(TARGET / 100)
    assert pace.limit == LARGEST
    busy = pace.pause
    for _ in range(20):
        pace.adapt(TARGET * 50)
    assert pace.limit == SMALLEST
    assert pace.pause > 100 * busy


def test_pauses_become_shorter_while_runs_are_left() -> None:
    """Otherwise more runs might end than are removed."""
    pauses = []
    for hours in (0, 2.9, 3, 6, 12, 15, 9000):
        pace = Pace()
        pace.adapt(TARGET, timedelta(hours=hours))
        pauses.append(pace.pause)
    assert pauses[0] == pauses[1] > pauses[2] > pauses[3] > pauses[4] == pauses[5] == pauses[6]


def test_a_store_that_answers_at_once_is_not_waited_for() -> None:
    pace = Pace()
    pace.adapt(0)
    assert pace.pause == 0
