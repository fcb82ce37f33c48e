"""Checks of small fenced writes, and of rests."""

import asyncio
from typing import get_args

import pytest

from perdure.clock import SystemClock
from perdure.errors import ValueTooLarge
from perdure.snapshot import OutboxItem, RunStatus, Snapshot, merge_snapshots, outbox_of
from perdure.store import Entry, Grant, Rest, Store, Verdict, capabilities
from perdure.testing.conformance.harness import (
    LONG,
    Harness,
    acquire_run,
    append_entries,
    need_journal,
    request_run,
    step,
    steps_of,
    summary_of,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, delta, snapshot

ACCEPTED, FENCED, UNKNOWN = Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN


def with_outbox(**items: OutboxItem | None) -> Snapshot:
    """Return a snapshot, or the delta of a journal entry, with these outbox items."""
    run_snapshot = snapshot()
    run_snapshot["outbox"] = items
    return run_snapshot


class AppendChecks(Harness):
    """`append` of journal entries."""

    async def test_an_entry_of_the_newest_epoch_is_accepted(self, store: Store) -> None:
        """An entry is accepted if its epoch is the run's newest and is open."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        assert await append_entries(journal, step(grant, 1, "a")) == [ACCEPTED]
        assert await steps_of(journal) == ["a"]

    async def test_an_entry_is_accepted_after_expiry_until_the_run_is_taken_over(
        self, store: Store
    ) -> None:
        """An expired lease does not close its epoch until another owner takes over the run."""
        journal = need_journal(store)
        grant = await acquire_run(journal, ttl=self.short)
        await self.expire()
        assert await append_entries(journal, step(grant, 1, "a")) == [ACCEPTED]

    async def test_an_entry_of_an_older_epoch_is_fenced(self, store: Store) -> None:
        """Fenced when its epoch is older."""
        journal = need_journal(store)
        old = await acquire_run(journal)
        await journal.release([old.lease])
        new = await acquire_run(journal, owner="bob")
        assert await append_entries(journal, step(old, 1, "a"), step(new, 1, "b")) == [
            FENCED,
            ACCEPTED,
        ]
        assert await steps_of(journal) == ["b"]

    async def test_an_entry_of_a_deleted_run_stays_stale(self, store: Store) -> None:
        """An epoch of a deleted run stays stale forever, even when the id is used again."""
        journal = need_journal(store)
        old = await acquire_run(journal)
        await journal.delete("run")
        assert await append_entries(journal, step(old, 1, "a")) == [UNKNOWN]
        await acquire_run(journal)
        assert await append_entries(journal, step(old, 1, "a")) == [FENCED]
        assert await steps_of(journal) == []

    async def test_an_entry_is_fenced_after_save(self, store: Store) -> None:
        """The run's epoch increases, so that the previous owner is fenced out."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await journal.save("run", snapshot("saved"))
        assert await append_entries(journal, step(grant, 1, "a")) == [FENCED]
        assert await steps_of(journal) == ["saved"]

    async def test_an_entry_without_a_run_is_unknown(self, store: Store) -> None:
        """Unknown when there is no such run, and no run is created."""
        journal = need_journal(store)
        assert await append_entries(journal, Entry("run", 1, 1, delta("a"))) == [UNKNOWN]
        assert await journal.load("run") is None

    async def test_a_release_closes_its_epoch(self, store: Store) -> None:
        """Fenced if its epoch is closed, as it is by releasing the lease."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"))
        await journal.release([grant.lease])
        assert await append_entries(journal, step(grant, 2, "late")) == [FENCED]
        assert await write_rest(journal, grant, Rest("completed"), "late") is FENCED
        assert await steps_of(journal) == ["a"]
        assert (await summary_of(journal)).status == "running"

    async def test_an_entry_sent_again_after_release_is_accepted(self, store: Store) -> None:
        """While its epoch is the newest, an entry sent again is accepted and changes nothing."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"), step(grant, 2, "b"))
        await journal.release([grant.lease])
        batch = [step(grant, 1, "a"), step(grant, 3, "late"), step(grant, 2, "z")]
        assert await append_entries(journal, *batch) == [ACCEPTED, FENCED, ACCEPTED]
        assert await steps_of(journal) == ["a", "b"]

    async def test_a_refused_entry_does_not_affect_the_others(self, store: Store) -> None:
        """Return a verdict on each, in order; a refused entry does not affect the others."""
        journal = need_journal(store)
        old = await acquire_run(journal, "taken")
        await journal.release([old.lease])
        await acquire_run(journal, "taken", "bob")
        first, last = await acquire_run(journal, "first"), await acquire_run(journal, "last")
        missing = Entry("missing", 1, 1, delta("a"))
        batch = [step(first, 1, "a"), step(old, 1, "a"), missing, step(last, 1, "a")]
        assert await append_entries(journal, *batch) == [ACCEPTED, FENCED, UNKNOWN, ACCEPTED]
        assert await steps_of(journal, "first") == await steps_of(journal, "last") == ["a"]

    async def test_an_empty_batch_has_no_verdicts(self, store: Store) -> None:
        """No entries, no verdicts."""
        assert await append_entries(need_journal(store)) == []

    async def test_load_returns_the_merge_of_everything_appended(self, store: Store) -> None:
        """Afterwards, `load` returns the merge of everything appended, in order."""
        journal = need_journal(store)
        first = snapshot("a", workflow="order", metadata={"x": 1})
        second = snapshot("a", "b", metadata={"y": 2}, a=2)
        third = snapshot("c", b=3)
        grant = await acquire_run(journal, create=first)
        id, epoch = grant.lease.id, grant.lease.epoch
        await append_entries(journal, Entry(id, epoch, 1, as_json(second)))
        await append_entries(journal, Entry(id, epoch, 2, as_json(third)))
        assert await journal.load("run") == merge_snapshots(first, second, third)

    async def test_outbox_items_are_merged_by_name_and_removed_by_null(self, store: Store) -> None:
        """The outbox is merged by name, and a null removes its entry, in `load` and in a grant."""
        journal = need_journal(store)
        first = with_outbox(start={"run": "child"}, note={"to": "other"})
        second = with_outbox(note=None, more={"to": "other"})
        third = with_outbox(more=None)
        grant = await acquire_run(journal, create=first)
        epoch = grant.lease.epoch
        await append_entries(journal, Entry("run", epoch, 1, as_json(second)))
        await append_entries(journal, Entry("run", epoch, 2, as_json(third)))
        merged_snapshot = merge_snapshots(first, second, third)
        assert outbox_of(merged_snapshot) == {"start": {"run": "child"}}
        assert await journal.load("run") == merged_snapshot
        await journal.release([grant.lease])
        assert (await acquire_run(journal, owner="bob")).snapshot == merged_snapshot

    async def test_a_step_recorded_again_keeps_its_place(self, store: Store) -> None:
        """Return the merged snapshot, its steps in the order they were recorded."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        for n, key in enumerate(["b", "10", "a", "2", "b"]):
            await append_entries(journal, step(grant, n, key))
        assert await steps_of(journal) == ["b", "10", "a", "2"]

    async def test_many_entries_of_one_run_go_in_one_call(self, store: Store) -> None:
        """Write the entries in one transaction or pipeline: those of one run stay in order."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        keys = [f"{number}" for number in range(60, 0, -1)]
        batch = [step(grant, n, key) for n, key in enumerate(keys)]
        assert await append_entries(journal, *batch) == [ACCEPTED] * len(keys)
        assert await steps_of(journal) == keys

    async def test_entries_of_a_later_epoch_come_later(self, store: Store) -> None:
        """The next owner's entries follow in the journal, even though their numbers start over."""
        journal = need_journal(store)
        for owner, keys in (("ana", ["c", "b"]), ("bob", ["a", "9"]), ("ana", ["10"])):
            grant = await acquire_run(journal, owner=owner)
            for n, key in enumerate(keys):
                await append_entries(journal, step(grant, n, key))
            await journal.release([grant.lease])
        assert await steps_of(journal) == ["c", "b", "a", "9", "10"]

    async def test_an_entry_sent_again_changes_nothing(self, store: Store) -> None:
        """An entry sent again (same id, epoch and n) is accepted and changes nothing."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        first, second = step(grant, 1, "a"), step(grant, 2, "b")
        repeated_entry = Entry(first.id, first.epoch, first.n, delta(a="changed", z="new"))
        await append_entries(journal, first, second)
        before = await journal.load("run")
        assert await append_entries(journal, repeated_entry, second) == [ACCEPTED, ACCEPTED]
        assert await journal.load("run") == before

    async def test_an_entry_twice_in_one_batch_is_written_once(self, store: Store) -> None:
        """An entry sent again is accepted and changes nothing, even within one call."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        first, repeated_entry = step(grant, 1, "a"), Entry("run", grant.lease.epoch, 1, delta("b"))
        assert await append_entries(journal, first, repeated_entry) == [ACCEPTED, ACCEPTED]
        assert await steps_of(journal) == ["a"]

    async def test_an_accepted_entry_is_visible_to_another_instance(self, store: Store) -> None:
        """An accepted entry is as durable as promised: another instance reads it."""
        journal = need_journal(store)
        another = await self.open_another(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"))
        assert await steps_of(another) == ["a"]
        await another.close()

    async def test_an_entry_that_is_too_large_is_refused_with_the_name_of_its_step(
        self, store: Store
    ) -> None:
        """An entry of more than `max_value_size` bytes is rejected, naming its step."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        big = as_json(snapshot(big="x" * capabilities(store).max_value_size))
        entry = Entry("run", grant.lease.epoch, 2, big, step="the big one")
        with pytest.raises(ValueTooLarge, match="the big one"):
            await journal.append([step(grant, 1, "a"), entry])
        assert "big" not in await steps_of(journal)


class RestChecks(Harness):
    """`append` of an entry with `rest`."""

    async def test_a_rest_replaces_snapshot_and_journal(self, store: Store) -> None:
        """With `rest`, `data` is the whole snapshot: it replaces snapshot and journal."""
        journal = need_journal(store)
        grant = await acquire_run(journal, create=snapshot("first"))
        await append_entries(journal, step(grant, 1, "replaced"))
        run_snapshot = snapshot("b", "10", "9", status="completed", workflow="order")
        entry = Entry("run", grant.lease.epoch, 2, as_json(run_snapshot), rest=Rest("completed"))
        assert await append_entries(journal, entry) == [ACCEPTED]
        assert await journal.load("run") == run_snapshot
        assert await steps_of(journal) == ["b", "10", "9"]

    async def test_a_rest_may_follow_steps_in_the_same_call(self, store: Store) -> None:
        """Write the entries in order: a rest after steps of its run is accepted."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        data = as_json(snapshot("a", "b", status="completed"))
        rest = Entry("run", grant.lease.epoch, 3, data, rest=Rest("completed"))
        batch = [step(grant, 1, "a"), step(grant, 2, "b"), rest]
        assert await append_entries(journal, *batch) == [ACCEPTED] * 3
        assert await steps_of(journal) == ["a", "b"]
        assert (await summary_of(journal)).status == "completed"

    async def test_a_rest_is_one_atomic_write(self, store: Store) -> None:
        """In one atomic write: no reader sees only some of the steps."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        keys = ["a", "b", "c", "d"]
        await append_entries(journal, *(step(grant, n, key) for n, key in enumerate(keys)))
        writing = asyncio.ensure_future(write_rest(journal, grant, Rest("completed"), *keys))
        reads = [await steps_of(journal)]
        while not writing.done():
            await SystemClock().sleep(0)
            reads.append(await steps_of(journal))
        assert await writing is ACCEPTED
        assert all(steps == keys for steps in reads)

    async def test_the_run_has_the_status_of_the_rest(self, store: Store) -> None:
        """The run gets the state in `rest`."""
        journal = need_journal(store)
        statuses: tuple[RunStatus, ...] = get_args(RunStatus)
        for status in statuses:
            grant = await acquire_run(journal)
            await write_rest(journal, grant, Rest(status))
            assert (await summary_of(journal)).status == status

    async def test_a_rest_releases_the_lease(self, store: Store) -> None:
        """The lease is released: it cannot be renewed, and another owner can acquire the run."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await write_rest(journal, grant, Rest("suspended"), "a")
        assert list(await journal.renew([grant.lease], LONG)) == [None]
        assert await request_run(journal, owner="bob") is not None

    async def test_a_rest_sent_again_changes_nothing(self, store: Store) -> None:
        """An entry that is sent again changes nothing, nor does one that the rest includes."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"), step(grant, 2, "b"))
        await write_rest(journal, grant, Rest("completed"), "b", "a", n=3)
        assert await write_rest(journal, grant, Rest("failed"), "x", n=3) is ACCEPTED
        assert (
            await append_entries(journal, step(grant, 1, "a"), step(grant, 2, "z"))
            == [ACCEPTED] * 2
        )
        assert await steps_of(journal) == ["b", "a"]
        assert (await summary_of(journal)).status == "completed"

    async def test_a_call_with_a_rest_sent_again_changes_nothing(self, store: Store) -> None:
        """The reply to a call may be lost, so all of its entries can be sent again."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        data = as_json(snapshot("a", "b", status="completed"))
        rest = Entry("run", grant.lease.epoch, 3, data, rest=Rest("completed"))
        batch = [step(grant, 1, "a"), step(grant, 2, "b"), rest]
        for _ in range(2):
            assert await append_entries(journal, *batch) == [ACCEPTED] * 3
            assert await steps_of(journal) == ["a", "b"]

    async def test_a_rest_closes_its_epoch(self, store: Store) -> None:
        """A rest closes its epoch: a later entry is fenced and does not change the run."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await write_rest(journal, grant, Rest("completed"), "a", n=1)
        assert await append_entries(journal, step(grant, 2, "late")) == [FENCED]
        assert await write_rest(journal, grant, Rest("failed"), "late", n=3) is FENCED
        assert await steps_of(journal) == ["a"]
        assert (await summary_of(journal)).status == "completed"
        new = await acquire_run(journal, owner="bob")
        assert list(new.snapshot["steps"]) == ["a"]

    async def test_a_rest_closes_its_epoch_for_later_entries_of_its_call(
        self, store: Store
    ) -> None:
        """A rest closes its epoch for later entries of the same call, but not for other runs."""
        journal = need_journal(store)
        grant, other = await acquire_run(journal), await acquire_run(journal, "other")
        data = as_json(snapshot("a", status="completed"))
        first = Entry("run", grant.lease.epoch, 2, data, rest=Rest("completed"))
        late = as_json(snapshot("late", status="failed"))
        second = Entry("run", grant.lease.epoch, 4, late, rest=Rest("failed"))
        batch = [step(grant, 1, "a"), first, step(grant, 3, "late"), second, step(other, 1, "b")]
        assert await append_entries(journal, *batch) == [
            ACCEPTED,
            ACCEPTED,
            FENCED,
            FENCED,
            ACCEPTED,
        ]
        assert await steps_of(journal) == ["a"]
        assert (await summary_of(journal)).status == "completed"
        assert await steps_of(journal, "other") == ["b"]

    async def test_an_entry_that_a_rest_includes_is_accepted_beside_a_late_rest(
        self, store: Store
    ) -> None:
        """An entry whose `n` is not above that of the rest is accepted, beside a fenced one."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await write_rest(journal, grant, Rest("completed"), "a", n=2)
        data = as_json(snapshot("late", status="failed"))
        late = Entry("run", grant.lease.epoch, 3, data, rest=Rest("failed"))
        assert await append_entries(journal, step(grant, 1, "a"), late) == [ACCEPTED, FENCED]
        assert await steps_of(journal) == ["a"]

    async def test_a_stale_rest_is_fenced(self, store: Store) -> None:
        """Fenced when its epoch is older: neither the run nor its new owner's lease changes."""
        journal = need_journal(store)
        old = await acquire_run(journal, create=snapshot("a"))
        await journal.release([old.lease])
        new = await acquire_run(journal, owner="bob")
        assert await write_rest(journal, old, Rest("completed"), "x") is FENCED
        assert await steps_of(journal) == ["a"]
        assert (await summary_of(journal)).status == "running"
        assert list(await journal.renew([new.lease], LONG)) != [None]

    async def test_the_journal_continues_after_a_rest(self, store: Store) -> None:
        """After a rest, the next owner appends to the snapshot of the rest."""
        journal = need_journal(store)
        await write_rest(journal, await acquire_run(journal), Rest("suspended"), "b", "a", n=1)
        grant = await acquire_run(journal, owner="bob")
        assert list(grant.snapshot["steps"]) == ["b", "a"]
        assert await append_entries(journal, step(grant, 1, "0")) == [ACCEPTED]
        assert await steps_of(journal) == ["b", "a", "0"]

    async def test_a_crash_between_the_writes_of_a_rest_is_harmless(self, store: Store) -> None:
        """In one atomic write: after a crash, the run is as it was before the rest or after it."""
        journal = need_journal(store)
        keys = ["b", "a", "9"]
        for writes in range(50):
            id = f"crash after {writes}"
            grant = await acquire_run(journal, id, ttl=self.short)
            await append_entries(journal, *(step(grant, n, key) for n, key in enumerate(keys)))
            crashing = await self.crashing(store, writes)
            if crashing is None:
                pytest.skip(f"{type(self).__name__} has no crashing(): each write is atomic")
            finished = await _rest_until_crash(crashing, grant, keys)
            assert await steps_of(journal, id) == keys
            assert await write_rest(journal, grant, Rest("completed"), *keys) is ACCEPTED
            assert await steps_of(journal, id) == keys
            assert (await summary_of(journal, id)).status == "completed"
            if finished:
                return
        pytest.fail("a rest of three steps took more than 50 writes")


async def _rest_until_crash(store: Store, grant: Grant, keys: list[str]) -> bool:
    try:
        verdict = await write_rest(need_journal(store), grant, Rest("completed"), *keys)
    except Exception:  # noqa: BLE001 - the store's author chooses the error of a crash
        return False
    return verdict is ACCEPTED


class JournalChecks(AppendChecks, RestChecks):
    """The abilities of a store with a journal."""
