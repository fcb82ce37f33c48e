"""Checks of a user's own writes that commit together with a step's record."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure.errors import PerdureError
from perdure.store import Entry, Grant, Rest, Store, Verdict
from perdure.testing.conformance.harness import (
    Harness,
    Transacting,
    appended,
    granted,
    listed,
    need_transaction,
    rested,
    step,
    steps_of,
)
from perdure.testing.conformance.samples import as_json, snapshot

Work = Callable[[Any], Awaitable[Entry]]


class Oops(Exception):
    """What a user's own code raises."""


def giving(entry: Entry, calls: list[Any] | None = None) -> Work:
    """Give a piece of work that returns the entry, and notes the connection it was called with."""

    async def work(connection: Any) -> Entry:
        if calls is not None:
            calls.append(connection)
        return entry

    return work


class TransactChecks(Harness):
    """`transact`."""

    async def test_transact_writes_the_entry_that_work_returns(self, store: Store) -> None:
        """Call `work` with the store's connection, write the entry it returns and commit."""
        transacting = need_transaction(store)
        grant = await granted(transacting)
        calls: list[Any] = []
        entry = step(grant, 1, "a")
        verdict = await transacting.transact("run", grant.lease.epoch, giving(entry, calls))
        assert verdict is Verdict.ACCEPTED
        assert len(calls) == 1
        assert calls[0] is not None
        assert await steps_of(transacting) == ["a"]

    async def test_transact_and_append_write_one_journal(self, store: Store) -> None:
        """Write the entry in the order of the journal, as `append` would."""
        transacting = need_transaction(store)
        grant = await granted(transacting)
        await appended(transacting, step(grant, 1, "c"))
        await transacting.transact("run", grant.lease.epoch, giving(step(grant, 2, "b")))
        await appended(transacting, step(grant, 3, "a"), step(grant, 2, "again"))
        assert await steps_of(transacting) == ["c", "b", "a"]

    async def test_a_stale_transaction_is_fenced(self, store: Store) -> None:
        """Fence it by the epoch: with an older one nothing is written."""
        transacting = need_transaction(store)
        old = await granted(transacting)
        await transacting.release([old.lease])
        await granted(transacting, owner="bob")
        verdict = await transacting.transact("run", old.lease.epoch, giving(step(old, 1, "a")))
        assert verdict is Verdict.FENCED
        assert await steps_of(transacting) == []

    async def test_a_transaction_of_a_closed_epoch_is_fenced(self, store: Store) -> None:
        """With an epoch that is older or closed, `work` is not called."""
        transacting = need_transaction(store)
        calls: list[Any] = []
        resting, releasing = [await granted(transacting, id) for id in ("resting", "releasing")]
        await rested(transacting, resting, Rest("completed"), "a", n=1)
        await transacting.release([releasing.lease])
        for grant in (resting, releasing):
            work = giving(step(grant, 2, "late"), calls)
            verdict = await transacting.transact(grant.lease.id, grant.lease.epoch, work)
            assert verdict is Verdict.FENCED
        assert calls == []
        assert await steps_of(transacting, "resting") == ["a"]
        assert await steps_of(transacting, "releasing") == []

    async def test_a_transaction_without_a_run_is_unknown(self, store: Store) -> None:
        """No such run: nothing is written."""
        transacting = need_transaction(store)
        work = giving(Entry("run", 1, 1, as_json(snapshot("a"))))
        assert await transacting.transact("run", 1, work) is Verdict.UNKNOWN
        assert await transacting.load("run") is None

    async def test_an_exception_rolls_back_and_is_raised_unchanged(self, store: Store) -> None:
        """An exception from `work` rolls back and comes out as it is; the run goes on."""
        transacting = need_transaction(store)
        grant = await granted(transacting)
        error = Oops("no")

        async def work(connection: Any) -> Entry:
            raise error

        with pytest.raises(Oops) as raised:
            await transacting.transact("run", grant.lease.epoch, work)
        assert raised.value is error
        assert not isinstance(error.__cause__, PerdureError)
        assert await self._writes(transacting, grant, "a") is Verdict.ACCEPTED

    async def test_a_transaction_may_write_a_rest(self, store: Store) -> None:
        """Write the entry it returns: a rest too."""
        transacting = need_transaction(store)
        grant = await granted(transacting)
        whole = as_json(snapshot("a", status="completed"))
        entry = Entry("run", grant.lease.epoch, 1, whole, rest=Rest("completed"))
        await transacting.transact("run", grant.lease.epoch, giving(entry))
        assert (await listed(transacting)).status == "completed"
        assert await steps_of(transacting) == ["a"]

    async def test_a_transaction_resets_the_takeovers(self, store: Store) -> None:
        """Any accepted entry sets `takeovers` to zero, one of a transaction too."""
        transacting = need_transaction(store)
        await granted(transacting, owner="ana", ttl=self.short)
        await self.expire()
        grant = await granted(transacting, owner="bob")
        await transacting.transact("run", grant.lease.epoch, giving(step(grant, 1, "a")))
        await transacting.release([grant.lease])
        after = await granted(transacting, owner="cem")
        assert (grant.takeovers, after.takeovers) == (1, 0)

    async def test_user_writes_commit_with_the_entry(self, store: Store) -> None:
        """All or nothing: the user's own writes are there with the entry."""
        transacting = need_transaction(store)
        self._need_user_writes()
        grant = await granted(transacting)
        assert await self._writes(transacting, grant, "committed") is Verdict.ACCEPTED
        assert list(await self.user_notes(store)) == ["committed"]
        assert await steps_of(transacting) == ["committed"]

    async def test_user_writes_roll_back_with_an_exception(self, store: Store) -> None:
        """All or nothing: an exception from `work` takes the user's own writes with it."""
        transacting = need_transaction(store)
        self._need_user_writes()
        grant = await granted(transacting)

        async def work(connection: Any) -> Entry:
            await self.user_write(connection, "rolled back")
            raise Oops

        with pytest.raises(Oops):
            await transacting.transact("run", grant.lease.epoch, work)
        assert list(await self.user_notes(store)) == []

    async def test_user_writes_of_a_stale_owner_are_not_committed(self, store: Store) -> None:
        """All or nothing: a fenced transaction leaves none of the user's own writes."""
        transacting = need_transaction(store)
        self._need_user_writes()
        old = await granted(transacting)
        await transacting.release([old.lease])
        await granted(transacting, owner="bob")
        assert await self._writes(transacting, old, "stale") is Verdict.FENCED
        assert list(await self.user_notes(store)) == []

    async def _writes(self, store: Transacting, grant: Grant, note: str) -> Verdict:
        async def work(connection: Any) -> Entry:
            if self._gives_user_writes():
                await self.user_write(connection, note)
            return step(grant, 1, note)

        return await store.transact(grant.lease.id, grant.lease.epoch, work)

    def _gives_user_writes(self) -> bool:
        return type(self).user_write is not Harness.user_write

    def _need_user_writes(self) -> None:
        if not self._gives_user_writes():
            pytest.skip(f"{type(self).__name__} gives no user_write(): user's writes not checked")


class TransactionChecks(TransactChecks):
    """What a store with transactions does."""
