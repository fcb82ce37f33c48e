"""Checks with random sequences of calls: the store must always agree with a simple model."""

from itertools import count
from typing import Any

from hypothesis import strategies as st

from perdure.snapshot import merge_snapshots
from perdure.store import Entry, Rest, Store, Verdict
from perdure.testing.conformance.harness import Harness, acquire_run, need_everything, need_journal
from perdure.testing.conformance.random_cases import JSON, TEXT, for_all, run_machine
from perdure.testing.conformance.reference import StoreMachine
from perdure.testing.conformance.samples import AT, as_json, snapshot

KEYS = st.sampled_from(["a", "b", "A", "10", "9", "", "a.b", "$a", "é"]) | TEXT
STEPS = st.dictionaries(
    KEYS, st.fixed_dictionaries({"ok": st.just(True)}, optional={"value": JSON}), max_size=4
)
WARNINGS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("lossy_value"),
            "stepId": KEYS,
            "path": st.just("value"),
            "reason": st.just("non-json"),
        }
    ),
    min_size=1,
    max_size=2,
)
OUTBOX = st.dictionaries(KEYS, st.dictionaries(TEXT, JSON, max_size=2) | st.none(), max_size=3)
EXECUTION = st.just({"status": "running", "lastUpdated": AT})
DELTAS = st.fixed_dictionaries(
    {"formatVersion": st.just(1), "steps": STEPS, "execution": EXECUTION},
    optional={
        "metadata": st.dictionaries(TEXT, JSON, max_size=3),
        "outbox": OUTBOX,
        "warnings": WARNINGS,
    },
)
BATCHES = st.lists(st.lists(DELTAS, min_size=1, max_size=4), max_size=4)


class ModelChecks(Harness):
    """Properties that hold for any sequence of calls."""

    async def test_load_is_the_merge_of_snapshot_and_journal(self, store: Store) -> None:
        """`load` returns `merge_snapshots(snapshot, *journal)`, whatever the batches."""
        journal = need_journal(store)

        async def check(batches: Any) -> None:
            await journal.delete("run")
            first = snapshot("b", "10", metadata={"x": 1})
            grant = await acquire_run(journal, create=first)
            numbers = count(1)
            for batch in batches:
                epoch = grant.lease.epoch
                entries = [Entry("run", epoch, next(numbers), as_json(delta)) for delta in batch]
                assert set(await journal.append(entries)) == {Verdict.ACCEPTED}
            merged = merge_snapshots(first, *(delta for batch in batches for delta in batch))
            await same(journal, merged)
            rest = Entry("run", grant.lease.epoch, 999, as_json(merged), rest=Rest("completed"))
            await journal.append([rest])
            await same(journal, merged)

        await for_all(BATCHES, self.examples, check)

    async def test_every_snapshot_is_loaded_unchanged(self, store: Store) -> None:
        """A loaded snapshot is what was saved."""

        async def check(run_snapshot: Any) -> None:
            await store.save("run", run_snapshot)
            await same(store, run_snapshot)

        await for_all(DELTAS, self.examples, check)

    async def test_the_store_agrees_with_a_simple_model(self, store: Store) -> None:
        """Every method does what it promises after any sequence of calls."""
        full_store = need_everything(store)
        await run_machine(
            lambda bridge: StoreMachine(full_store, bridge, self), self.examples, shrink=self.shrink
        )


async def same(store: Store, expected: Any) -> None:
    """Check that the run is loaded as expected, its steps in order."""
    loaded = await store.load("run")
    assert loaded == expected
    assert loaded is not None
    assert list(loaded["steps"]) == list(expected["steps"])
