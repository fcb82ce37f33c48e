"""Summaries: what a list shows of a run, in at most a kilobyte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.snapshot import Snapshot, new_snapshot
from perdure.snapshot.summary import Summary, encode_summary, read_summary, summarize
from perdure.testing.clock import TestClock


def snapshot(**metadata: object) -> Snapshot:
    return new_snapshot("order", now=TestClock().now(), metadata=metadata)


def test_a_summary_counts_the_steps() -> None:
    """It has the number of records, of failed ones, and the last step."""
    whole = snapshot(version=2, createdAt="2030-01-01T00:00:00.000Z")
    whole["steps"] = {
        "a": {"ok": True, "value": 1},
        "b": {"ok": False, "error": "no", "cause": None},
        "c": {"ok": True},
    }
    assert read_summary(summarize(whole, 99)) == Summary(
        created="2030-01-01T00:00:00.000Z", version=2, steps=3, failed=1, last_step="c", size=99
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("no money\nat all", "no money"),
        ({"code": 3}, "{'code': 3}"),
        ({"type": "ValueError", "message": "bad"}, "ValueError: bad"),
    ],
)
def test_the_error_is_its_first_line(error: object, line: str) -> None:
    """A string is shown as it is, an exception by its name and message."""
    cause = {"stringRepresentation": "{'code': 3}"}
    if isinstance(error, dict) and "message" in error:
        cause = {"name": error["type"], "message": error["message"]}
    execution = {"error": {"ok": False, "error": error, "cause": cause}}
    assert read_summary(encode_summary({}, execution, 0, 0, "", 0)).error == line


@pytest.mark.parametrize(("keys", "step"), [([], ""), (["charge", "ship"], "charge"), (None, None)])
def test_the_step_that_ended_a_run_is_not_the_last_one(
    keys: list[str] | None, step: str | None
) -> None:
    """None, if the function itself failed; unknown, if another program wrote it."""
    execution = {"status": "failed", "error": {"ok": False, "error": "no"}, "failed": keys}
    summary = read_summary(encode_summary({}, execution, 2, 1, "notify", 0))
    assert (summary.last_step, summary.ended_by) == ("notify", step)


@given(st.text(), st.text(), st.text())
def test_a_summary_fits_into_a_kilobyte(step: str, error: str, reason: str) -> None:
    """Long texts, and characters that take several bytes, are cut off."""
    execution = {
        "error": {"ok": False, "error": error * 50, "cause": None},
        "reason": reason * 50,
        "failed": [step * 50],
    }
    largest = 2**63 - 1
    metadata = {"createdAt": "2030-01-01T00:00:00.000Z", "version": largest}
    data = encode_summary(metadata, execution, largest, largest, step * 50, largest)
    assert len(data) <= 1024
    assert (step * 50).startswith(read_summary(data).last_step)


def test_a_summary_of_another_program_is_empty() -> None:
    """What cannot be read has only defaults."""
    assert read_summary(b"") == read_summary(b"\xff") == read_summary(b"[]") == Summary()
