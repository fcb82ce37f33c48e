"""Checks of rests that delete their run."""

from perdure.store import Entry, Rest, Store, Verdict
from perdure.testing.conformance.harness import (
    Harness,
    acquire_run,
    append_entries,
    need_journal,
    step,
    steps_of,
    write_rest,
)

ACCEPTED, FENCED, UNKNOWN = Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN


class DeletionChecks(Harness):
    """Rests with `delete`."""

    async def test_a_rest_with_delete_leaves_nothing_of_the_run(self, store: Store) -> None:
        """With `delete`, the run is deleted, and nothing of it is left."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await append_entries(journal, step(grant, 1, "a"))
        delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
        assert await append_entries(journal, delete) == [ACCEPTED]
        assert await journal.load("run") is None
        assert list(await journal.list()) == []
        assert await append_entries(journal, step(grant, 3, "b")) == [UNKNOWN]

    async def test_a_rest_with_delete_is_fenced_like_any_other(self, store: Store) -> None:
        """In the same fenced write: a previous owner deletes nothing."""
        journal = need_journal(store)
        old = await acquire_run(journal)
        await journal.release([old.lease])
        new = await acquire_run(journal, owner="bob")
        delete = Entry("run", old.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
        assert await append_entries(journal, delete, step(new, 1, "b")) == [FENCED, ACCEPTED]
        assert await steps_of(journal) == ["b"]

    async def test_entries_after_a_rest_with_delete_are_unknown(self, store: Store) -> None:
        """In order: for later entries of the same call, the run does not exist."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
        batch = [step(grant, 1, "a"), delete, step(grant, 3, "late")]
        assert await append_entries(journal, *batch) == [ACCEPTED, ACCEPTED, UNKNOWN]
        assert await journal.load("run") is None

    async def test_a_rest_with_delete_is_fenced_after_a_rest(self, store: Store) -> None:
        """A rest closes its epoch: its owner can no longer delete the run."""
        journal = need_journal(store)
        grant = await acquire_run(journal)
        await write_rest(journal, grant, Rest("completed"), "a", n=1)
        delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
        assert await append_entries(journal, delete) == [FENCED]
        assert await steps_of(journal) == ["a"]

    async def test_an_id_can_be_used_again_after_a_rest_with_delete(self, store: Store) -> None:
        """An epoch of a deleted run stays stale forever, even when the id is used again."""
        journal = need_journal(store)
        old = await acquire_run(journal)
        delete = Entry("run", old.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
        await append_entries(journal, delete)
        new = await acquire_run(journal, owner="bob")
        assert new.created
        assert new.lease.epoch > old.lease.epoch
        assert await append_entries(journal, step(old, 2, "a"), step(new, 1, "b")) == [
            FENCED,
            ACCEPTED,
        ]
        assert await steps_of(journal) == ["b"]
