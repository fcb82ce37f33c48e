"""The due index stays as small as the set of runs in it."""

from datetime import UTC, datetime, timedelta

from perdure.stores.memory.due_index import DueIndex, IndexedRun

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def test_stale_entries_are_dropped_without_queries() -> None:
    """Runs that are indexed again and again leave no entries behind, even if `due` is not used."""
    index: DueIndex[IndexedRun] = DueIndex()
    runs = [IndexedRun(id=f"{number}") for number in range(10)]
    for turn in range(10_000):
        run = runs[turn % 10]
        run.wake_at = NOON + turn * MINUTE
        index.put(run)
    (heap,) = index._queues[""].values()
    assert len(heap._entries) <= 64
    due = index.due(NOON + 20_000 * MINUTE, 100, None, {"": 100}, "")
    assert [run.id for run in due] == [f"{number}" for number in range(10)]


def test_a_run_that_was_removed_or_has_no_wake_time_is_not_due() -> None:
    """A previous entry of such a run does not count."""
    index: DueIndex[IndexedRun] = DueIndex()
    removed, asleep = IndexedRun(id="a", wake_at=NOON), IndexedRun(id="b", wake_at=NOON)
    index.put(removed)
    index.put(asleep)
    index.remove(removed)
    asleep.wake_at = None
    index.put(asleep)
    assert index.due(NOON, 10, None, {"": 10}, "") == []
