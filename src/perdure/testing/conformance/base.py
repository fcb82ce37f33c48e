"""Checks of the five methods that every store has."""

from datetime import timedelta
from itertools import chain

import pytest

from perdure.errors import StoreClosed
from perdure.snapshot import RunStatus, SnapshotWarning
from perdure.store import Store
from perdure.testing.conformance.harness import (
    TICK,
    Harness,
    acquire_run,
    append_entries,
    need_journal,
    need_lease,
    request_run,
    step,
    steps_of,
    summary_of,
)
from perdure.testing.conformance.samples import snapshot


class SaveChecks(Harness):
    """`save` and `load`."""

    async def test_load_returns_what_was_saved(self, store: Store) -> None:
        """A loaded snapshot is what was saved, including fields that the store does not know."""
        run_snapshot = snapshot("a", "b", workflow="order", metadata={"input": {"n": [1, None]}})
        warning = SnapshotWarning(type="lossy_value", stepId="a", path="value", reason="non-json")
        run_snapshot["warnings"] = [warning]
        await store.save("run", run_snapshot)
        assert await store.load("run") == run_snapshot

    async def test_load_returns_none_for_a_missing_run(self, store: Store) -> None:
        """Return the merged snapshot, or `None`."""
        assert await store.load("run") is None

    async def test_load_returns_an_independent_copy(self, store: Store) -> None:
        """Changes to a loaded snapshot, or to one that was saved, do not reach the store."""
        run_snapshot = snapshot("a")
        await store.save("run", run_snapshot)
        run_snapshot["steps"]["b"] = {"ok": True, "value": "b"}
        loaded = await store.load("run")
        assert loaded is not None
        loaded["steps"].clear()
        assert await steps_of(store) == ["a"]

    async def test_load_returns_steps_in_the_order_they_were_recorded(self, store: Store) -> None:
        """Return its steps in the order they were recorded, even when keys look like numbers."""
        keys = ["b", "10", "a", "9", "B", "1", "", "0", "-1", "é", "a b"]
        await store.save("run", snapshot(*keys))
        assert await steps_of(store) == keys

    async def test_save_replaces_the_whole_run(self, store: Store) -> None:
        """Replace the whole run with `snapshot`."""
        await store.save("run", snapshot("a", "b", workflow="order", metadata={"x": 1}))
        await store.save("run", snapshot("c"))
        assert await store.load("run") == snapshot("c")

    async def test_save_replaces_the_journal(self, store: Store) -> None:
        """Replace the whole run, including its journal."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"))
        await journal.save("run", snapshot("b"))
        assert await steps_of(journal) == ["b"]

    async def test_save_increases_the_epoch(self, store: Store) -> None:
        """The run's epoch increases, so that the previous owner is fenced out."""
        leases = need_lease(store)
        before = await acquire_run(leases)
        await leases.save("run", snapshot("b"))
        assert list(await leases.renew([before.lease], self.short)) == [None]
        after = await request_run(leases)
        assert after is not None
        assert after.lease.epoch > before.lease.epoch

    async def test_runs_are_independent(self, store: Store) -> None:
        """Another id is another run."""
        await store.save("run", snapshot("a"))
        await store.save("run2", snapshot("b"))
        await store.delete("run2")
        assert await steps_of(store) == ["a"]


class DeleteChecks(Harness):
    """`delete` and `close`."""

    async def test_delete_removes_the_run(self, store: Store) -> None:
        """Delete the run: it is neither loaded nor listed."""
        await store.save("run", snapshot("a"))
        await store.delete("run")
        assert await store.load("run") is None
        assert list(await store.list()) == []

    async def test_deleting_a_missing_run_is_not_an_error(self, store: Store) -> None:
        """A missing run is not an error."""
        assert not await store.delete("run")

    async def test_delete_may_return_whether_the_run_existed(self, store: Store) -> None:
        """The stores of this package return whether the run existed; others may return `None`."""
        await store.save("run", snapshot())
        assert await store.delete("run") in {True, None}
        assert await store.delete("run") in {False, None}

    async def test_delete_removes_journal_and_lease(self, store: Store) -> None:
        """Delete the run with its journal and lease: a new run with the id is new."""
        journal = need_journal(store)
        old = await acquire_run(journal, owner="ana")
        await append_entries(journal, step(old, 1, "a"))
        await journal.delete("run")
        new = await acquire_run(journal, owner="bob")
        assert new.created
        assert list(new.snapshot["steps"]) == []

    async def test_an_epoch_of_a_deleted_run_stays_stale(self, store: Store) -> None:
        """An epoch of a deleted run stays stale forever, even when the id is used again."""
        leases = need_lease(store)
        epochs = []
        for _ in range(5):
            epochs.append((await acquire_run(leases)).lease.epoch)
            await leases.delete("run")
        await leases.save("run", snapshot())
        saved = await request_run(leases)
        assert saved is not None
        epochs.append(saved.lease.epoch)
        assert epochs == sorted(set(epochs))

    async def test_a_second_close_does_nothing(self, store: Store) -> None:
        """A second call does nothing."""
        await store.save("run", snapshot("a"))
        await store.close()
        await store.close()

    async def test_a_closed_store_works_again_or_raises_store_closed(self, store: Store) -> None:
        """A call after `close` works, or raises `StoreClosed`: never an error of the driver."""
        await store.save("run", snapshot("a"))
        await store.close()
        try:
            assert await steps_of(store) == ["a"]
        except StoreClosed:
            return

    async def test_close_keeps_the_runs_for_other_instances(self, store: Store) -> None:
        """Close what the store opened itself: the runs stay."""
        another = await self.open_another(store)
        await store.save("run", snapshot("a"))
        await store.close()
        assert await steps_of(another) == ["a"]
        await another.close()


class ListChecks(Harness):
    """`list`."""

    async def test_list_returns_the_newest_first(self, store: Store) -> None:
        """Return the most recently updated runs first: saving a run again updates it."""
        for id in ("a", "b", "c", "a"):
            await store.save(id, snapshot())
            await self.pass_time(TICK)
        assert [run.id for run in await store.list()] == ["a", "c", "b"]

    async def test_list_sorts_before_it_applies_the_limit(self, store: Store) -> None:
        """Return up to `limit` runs, and these are the most recently updated."""
        for id in ("a", "b", "c", "d", "a"):
            await store.save(id, snapshot())
            await self.pass_time(TICK)
        assert [run.id for run in await store.list(limit=2)] == ["a", "d"]

    async def test_a_limit_of_zero_returns_nothing(self, store: Store) -> None:
        """0 returns nothing."""
        await store.save("run", snapshot())
        assert list(await store.list(limit=0)) == []

    async def test_the_default_limit_is_100(self, store: Store) -> None:
        """Return up to `limit` runs, which is 100 by default."""
        for number in range(101):
            await store.save(f"run-{number}", snapshot())
        assert len(await store.list()) == 100

    async def test_updated_at_is_an_aware_time_in_utc(self, store: Store) -> None:
        """Times are aware UTC datetimes of the store's own clock."""
        await store.save("run", snapshot())
        assert (await summary_of(store)).updated_at.utcoffset() == timedelta(0)

    async def test_prefix_is_exact_and_case_sensitive(self, store: Store) -> None:
        """`prefix` is exact and case-sensitive."""
        ids = ["a_b:1", "axb:1", "A_b:1", "a_b", "a_b:2", "b:a_b:1", "a%:1", "a_B:1"]
        for id in ids:
            await store.save(id, snapshot())
        assert sorted(run.id for run in await store.list(prefix="a_b:")) == ["a_b:1", "a_b:2"]
        assert [run.id for run in await store.list(prefix="a%")] == ["a%:1"]

    async def test_list_filters_by_status(self, store: Store) -> None:
        """`status` restricts the list to runs with this status."""
        statuses: list[RunStatus] = ["queued", "running", "suspended", "waiting", "paused"]
        over: list[RunStatus] = ["completed", "failed", "cancelled"]
        for status in statuses + over:
            await store.save(f"run {status}", snapshot(status=status))
        for status in statuses + over:
            runs = await store.list(status=status)
            assert [(run.id, run.status) for run in runs] == [(f"run {status}", status)]

    async def test_list_filters_by_workflow(self, store: Store) -> None:
        """`workflow` restricts the list to runs with exactly this name."""
        for name in ("order", "Order", "order2", "ord_r"):
            await store.save(name, snapshot(workflow=name))
        await store.save("nameless", snapshot())
        for name in ("order", "Order", "ord_r"):
            runs = await store.list(workflow=name)
            assert [(run.id, run.workflow) for run in runs] == [(name, name)]
        assert (await summary_of(store, "nameless")).workflow is None

    async def test_paging_skips_and_repeats_nothing(self, store: Store) -> None:
        """No run is skipped or repeated, even when many were updated at the same time."""
        for number in range(23):
            await store.save(f"run-{number}", snapshot())
        pages = await pages_of(store, limit=5)
        assert [len(page) for page in pages] == [5, 5, 5, 5, 3]
        assert sorted(chain(*pages)) == sorted(f"run-{number}" for number in range(23))

    async def test_paging_continues_while_other_runs_change(self, store: Store) -> None:
        """No run that stays unchanged is skipped or repeated."""
        for number in range(9):
            await store.save(f"run-{number}", snapshot())
            await self.pass_time(TICK)
        page = await store.list(limit=3)
        await store.delete(page[-1].id)
        await store.save("run-0", snapshot())
        await store.save("new", snapshot())
        next_page = await store.list(after=page[-1].cursor)
        assert [run.id for run in next_page] == [f"run-{number}" for number in (5, 4, 3, 2, 1)]

    async def test_paging_respects_the_filters(self, store: Store) -> None:
        """`after` can be combined with `prefix`, `status` and `workflow`."""
        for number in range(12):
            name = "order" if number % 2 else "other"
            await store.save(f"a-{number}", snapshot(workflow=name))
            await store.save(f"b-{number}", snapshot(workflow=name))
        pages = await pages_of(store, limit=4, prefix="a-", workflow="order", status="running")
        assert sorted(chain(*pages)) == sorted(f"a-{number}" for number in range(1, 12, 2))


async def pages_of(
    store: Store,
    *,
    limit: int,
    prefix: str = "",
    status: RunStatus | None = None,
    workflow: str | None = None,
) -> list[list[str]]:
    """Return the ids on each page of a list, or fail if there is no last page."""
    pages: list[list[str]] = []
    after: str | None = None
    for _ in range(100):
        page = await store.list(
            prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )
        if not page:
            return pages
        pages.append([run.id for run in page])
        after = page[-1].cursor
    pytest.fail("the list has no last page: nothing may follow `after` the last run")


class BaseChecks(SaveChecks, DeleteChecks, ListChecks):
    """The methods of every store."""
