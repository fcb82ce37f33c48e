"""Checks of the five methods that every store has."""

import re
from itertools import chain

import pytest

from perdure.errors import StoreClosed
from perdure.snapshot import RunStatus, SnapshotWarning
from perdure.store import Store
from perdure.testing.conformance.harness import (
    TICK,
    Harness,
    appended,
    asked,
    granted,
    listed,
    need_journal,
    need_lease,
    step,
    steps_of,
)
from perdure.testing.conformance.samples import snapshot

ISO_UTC_MILLISECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


class SaveChecks(Harness):
    """`save` and `load`."""

    async def test_load_returns_what_was_saved(self, store: Store) -> None:
        """What was saved is what is loaded, fields that the store does not know included."""
        whole = snapshot("a", "b", workflow="order", metadata={"input": {"n": [1, None]}})
        warning = SnapshotWarning(type="lossy_value", stepId="a", path="value", reason="non-json")
        whole["warnings"] = [warning]
        await store.save("run", whole)
        assert await store.load("run") == whole

    async def test_load_returns_none_for_a_missing_run(self, store: Store) -> None:
        """Give the merged snapshot, or None."""
        assert await store.load("run") is None

    async def test_load_returns_an_independent_copy(self, store: Store) -> None:
        """What a caller does to a loaded snapshot, or to the one it saved, is not in the store."""
        whole = snapshot("a")
        await store.save("run", whole)
        whole["steps"]["b"] = {"ok": True, "value": "b"}
        loaded = await store.load("run")
        assert loaded is not None
        loaded["steps"].clear()
        assert await steps_of(store) == ["a"]

    async def test_load_returns_steps_in_the_order_they_were_recorded(self, store: Store) -> None:
        """Give its steps in the order they were recorded, also when keys look like numbers."""
        keys = ["b", "10", "a", "9", "B", "1", "", "0", "-1", "é", "a b"]
        await store.save("run", snapshot(*keys))
        assert await steps_of(store) == keys

    async def test_save_replaces_the_whole_run(self, store: Store) -> None:
        """Replace the whole run by `snapshot`: what was there before is gone."""
        await store.save("run", snapshot("a", "b", workflow="order", metadata={"x": 1}))
        await store.save("run", snapshot("c"))
        assert await store.load("run") == snapshot("c")

    async def test_save_replaces_the_journal(self, store: Store) -> None:
        """What was there before, journal and all, is gone."""
        journal = need_journal(store)
        grant = await granted(journal)
        await appended(journal, step(grant, 1, "a"))
        await journal.save("run", snapshot("b"))
        assert await steps_of(journal) == ["b"]

    async def test_save_increases_the_epoch(self, store: Store) -> None:
        """The run's epoch grows, so that an owner of before is fenced out."""
        leases = need_lease(store)
        before = await granted(leases)
        await leases.save("run", snapshot("b"))
        assert list(await leases.renew([before.lease], self.short)) == [None]
        after = await asked(leases)
        assert after is not None
        assert after.lease.epoch > before.lease.epoch

    async def test_runs_are_independent(self, store: Store) -> None:
        """A run is its own: another id is another run."""
        await store.save("run", snapshot("a"))
        await store.save("run2", snapshot("b"))
        await store.delete("run2")
        assert await steps_of(store) == ["a"]


class DeleteChecks(Harness):
    """`delete` and `close`."""

    async def test_delete_removes_the_run(self, store: Store) -> None:
        """Remove the run: it is neither loaded nor listed."""
        await store.save("run", snapshot("a"))
        await store.delete("run")
        assert await store.load("run") is None
        assert list(await store.list()) == []

    async def test_deleting_a_missing_run_is_not_an_error(self, store: Store) -> None:
        """A missing run is no error."""
        assert not await store.delete("run")

    async def test_delete_may_return_whether_the_run_existed(self, store: Store) -> None:
        """The stores in the box answer whether there was one; any other answers None."""
        await store.save("run", snapshot())
        assert await store.delete("run") in {True, None}
        assert await store.delete("run") in {False, None}

    async def test_delete_removes_journal_and_lease(self, store: Store) -> None:
        """Remove the run with its journal and lease: a new run of the id is new."""
        journal = need_journal(store)
        old = await granted(journal, owner="ana")
        await appended(journal, step(old, 1, "a"))
        await journal.delete("run")
        new = await granted(journal, owner="bob")
        assert new.created
        assert list(new.snapshot["steps"]) == []

    async def test_an_epoch_of_a_deleted_run_stays_stale(self, store: Store) -> None:
        """An epoch of the deleted run stays stale for ever, also when the id is used again."""
        leases = need_lease(store)
        epochs = []
        for _ in range(5):
            epochs.append((await granted(leases)).lease.epoch)
            await leases.delete("run")
        await leases.save("run", snapshot())
        saved = await asked(leases)
        assert saved is not None
        epochs.append(saved.lease.epoch)
        assert epochs == sorted(set(epochs))

    async def test_a_second_close_does_nothing(self, store: Store) -> None:
        """A second call does nothing."""
        await store.save("run", snapshot("a"))
        await store.close()
        await store.close()

    async def test_a_closed_store_works_again_or_raises_store_closed(self, store: Store) -> None:
        """A call after `close` works again, or raises `StoreClosed`: never a driver's own error."""
        await store.save("run", snapshot("a"))
        await store.close()
        try:
            assert await steps_of(store) == ["a"]
        except StoreClosed:
            return

    async def test_close_keeps_the_runs_for_other_instances(self, store: Store) -> None:
        """Let go of what the store opened itself: the runs stay."""
        another = await self.opened_again(store)
        await store.save("run", snapshot("a"))
        await store.close()
        assert await steps_of(another) == ["a"]
        await another.close()


class ListChecks(Harness):
    """`list`."""

    async def test_list_returns_the_newest_first(self, store: Store) -> None:
        """Give runs newest first: a run that is saved again is new again."""
        for id in ("a", "b", "c", "a"):
            await store.save(id, snapshot())
            await self.let_pass(TICK)
        assert [line.id for line in await store.list()] == ["a", "c", "b"]

    async def test_list_sorts_before_it_applies_the_limit(self, store: Store) -> None:
        """At most `limit`, and these are the newest."""
        for id in ("a", "b", "c", "d", "a"):
            await store.save(id, snapshot())
            await self.let_pass(TICK)
        assert [line.id for line in await store.list(limit=2)] == ["a", "d"]

    async def test_a_limit_of_zero_returns_nothing(self, store: Store) -> None:
        """0 gives nothing."""
        await store.save("run", snapshot())
        assert list(await store.list(limit=0)) == []

    async def test_the_default_limit_is_100(self, store: Store) -> None:
        """At most `limit`, which is 100 when it is not given."""
        for number in range(101):
            await store.save(f"run-{number}", snapshot())
        assert len(await store.list()) == 100

    async def test_updated_at_is_iso_8601_with_milliseconds(self, store: Store) -> None:
        """`updated_at` is ISO 8601 in UTC with milliseconds and `Z`."""
        await store.save("run", snapshot())
        assert ISO_UTC_MILLISECONDS.fullmatch((await listed(store)).updated_at)

    async def test_prefix_is_exact_and_case_sensitive(self, store: Store) -> None:
        """`prefix` is exact and case-sensitive."""
        ids = ["a_b:1", "axb:1", "A_b:1", "a_b", "a_b:2", "b:a_b:1", "a%:1", "a_B:1"]
        for id in ids:
            await store.save(id, snapshot())
        assert sorted(line.id for line in await store.list(prefix="a_b:")) == ["a_b:1", "a_b:2"]
        assert [line.id for line in await store.list(prefix="a%")] == ["a%:1"]

    async def test_list_filters_by_status(self, store: Store) -> None:
        """`status` keeps to runs of this status."""
        statuses: list[RunStatus] = ["running", "suspended", "waiting", "paused"]
        over: list[RunStatus] = ["completed", "failed", "cancelled"]
        for status in statuses + over:
            await store.save(f"run {status}", snapshot(status=status))
        for status in statuses + over:
            lines = await store.list(status=status)
            assert [(line.id, line.status) for line in lines] == [(f"run {status}", status)]

    async def test_list_filters_by_workflow(self, store: Store) -> None:
        """`workflow` keeps to runs of this name, exactly."""
        for name in ("order", "Order", "order2", "ord_r"):
            await store.save(name, snapshot(workflow=name))
        await store.save("nameless", snapshot())
        for name in ("order", "Order", "ord_r"):
            lines = await store.list(workflow=name)
            assert [(line.id, line.workflow) for line in lines] == [(name, name)]
        assert (await listed(store, "nameless")).workflow is None

    async def test_paging_skips_and_repeats_nothing(self, store: Store) -> None:
        """`after` is the `cursor` of the last line of the page before: no run is skipped or shown
        twice, also when many were updated at the same moment."""
        for number in range(23):
            await store.save(f"run-{number}", snapshot())
        pages = await pages_of(store, limit=5)
        assert [len(page) for page in pages] == [5, 5, 5, 5, 3]
        assert sorted(chain(*pages)) == sorted(f"run-{number}" for number in range(23))

    async def test_paging_continues_while_other_runs_change(self, store: Store) -> None:
        """No run that stays as it is is skipped or shown twice."""
        for number in range(9):
            await store.save(f"run-{number}", snapshot())
            await self.let_pass(TICK)
        page = await store.list(limit=3)
        await store.delete(page[-1].id)
        await store.save("run-0", snapshot())
        await store.save("new", snapshot())
        rest = await store.list(after=page[-1].cursor)
        assert [line.id for line in rest] == [f"run-{number}" for number in (5, 4, 3, 2, 1)]

    async def test_paging_respects_the_filters(self, store: Store) -> None:
        """`after` goes with `prefix`, `status` and `workflow`."""
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
    """Return the ids on each page of a list, or fail when there is no last page."""
    pages: list[list[str]] = []
    after: str | None = None
    for _ in range(100):
        page = await store.list(
            prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )
        if not page:
            return pages
        pages.append([line.id for line in page])
        after = page[-1].cursor
    pytest.fail("the list has no last page: what comes `after` the last line must be nothing")


class BaseChecks(SaveChecks, DeleteChecks, ListChecks):
    """What every store does."""
