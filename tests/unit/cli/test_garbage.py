"""The garbage collector of `perdure worker`."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.cli.garbage import collector_for
from tests.unit.cli.processes import run

APP = """
import gc
from pathlib import Path

from perdure import Runtime, Worker, workflow

@workflow("look")
async def look(step) -> None:
    Path("seen").write_text(f"{gc.get_threshold()} {gc.get_freeze_count() > 10_000}")

runtime = Runtime("sqlite:///shop.db", workflows=[look])
worker = Worker(runtime, concurrency=3000)
"""


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def _default_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_default_thresholds")
def test_it_is_as_before_afterwards() -> None:
    with collector_for(1000):
        assert gc.get_threshold() == (20_000, 2, 2)
        assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == (700, 10, 10)
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_default_thresholds")
def test_few_runs_do_not_make_it_run_more_often() -> None:
    with collector_for(10):
        assert gc.get_threshold()[0] == 700


@pytest.mark.usefixtures("_default_thresholds")
@pytest.mark.parametrize(
    ("runs", "objects"), [(100, 4000), (500, 20_000), (2000, 20_000), (5000, 50_000)]
)
def test_the_objects_of_each_run_may_be_fewer_if_there_are_many_runs(
    runs: int, objects: int
) -> None:
    with collector_for(runs):
        assert gc.get_threshold()[0] == objects


def test_cycles_that_were_in_use_for_a_while_are_freed() -> None:
    """A full collection comes after fifteen times as many objects as start a collection."""
    with collector_for(1000):
        cycle = Cycle()
        # In the oldest generation from now on.
        gc.collect()
        freed = weakref.ref(cycle)
        del cycle
        new_objects: list[list[None]] = [[] for _ in range(300_000)]
        assert len(new_objects) == 300_000
        assert freed() is None


def test_a_worker_process_sets_it_for_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    run("start", "look", "--id", "one")
    run("worker", "app:worker", "--until-idle")
    assert (tmp_path / "seen").read_text() == "(30000, 2, 2) True"
