"""Checks of user writes that are committed together with a step's record."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure.errors import PerdureError
from perdure.store import Entry, Grant, Rest, Store, Verdict
from perdure.testing.conformance.harness import (
    Harness,
    TransactingStore,
    acquire_run,
    append_entries,
    need_transaction,
    step,
    steps_of,
    summary_of,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot

Work = Callable[[Any], Awaitable[Entry]]


class Oops(Exception):
    """An exception of the user's code."""


def returning(entry: Entry, calls: list[Any] | None = None) -> Work:
    """Return a work function that returns the entry and records its connection."""

    async def work(connection: Any) -> Entry:
        if calls is not None:
            calls.append(connection)
        return entry

    return work


class TransactChecks(Harness):
    """`transact`."""

    async def test_transact_writes_the_entry_that_work_returns(self, store: Store) -> None:
        """Call `work` with the store's connection; the entry that it returns is written."""
        transactions = need_transaction(store)
        grant = await acquire_run(transactions)
        calls: list[Any] = []
        entry = step(grant, 1, "a")
        verdict = await transactions.transact("run", grant.lease.epoch, returning(entry, calls))
        assert verdict is Verdict.ACCEPTED
        assert len(calls) == 1
        assert calls[0] is not None
        assert await steps_of(transactions) == ["a"]

    async def test_transact_and_append_write_one_journal(self, store: Store) -> None:
        """The entry is written to the journal in order, as by `append`."""
        transactions = need_transaction(store)
        grant = await acquire_run(transactions)
        await append_entries(transactions, step(grant, 1, "c"))
        await transactions.transact("run", grant.lease.epoch, returning(step(grant, 2, "b")))
        await append_entries(transactions, step(grant, 3, "a"), step(grant, 2, "again"))
        assert await steps_of(transactions) == ["c", "b", "a"]

    async def test_a_stale_transaction_is_fenced(self, store: Store) -> None:
        """Fenced by the epoch: with an older epoch nothing is written."""
        transactions = need_transaction(store)
        old = await acquire_run(transactions)
        await transactions.release([old.lease])
        await acquire_run(transactions, owner="bob")
        verdict = await transactions.transact("run", old.lease.epoch, returning(step(old, 1, "a")))
        assert verdict is Verdict.FENCED
        assert await steps_of(transactions) == []

    async def test_a_transaction_of_a_closed_epoch_is_fenced(self, store: Store) -> None:
        """If the epoch is old or closed, `work` is not called."""
        transactions = need_transaction(store)
        calls: list[Any] = []
        resting, releasing = [
            await acquire_run(transactions, id) for id in ("resting", "releasing")
        ]
        await write_rest(transactions, resting, Rest("completed"), "a", n=1)
        await transactions.release([releasing.lease])
        for grant in (resting, releasing):
            work = returning(step(grant, 2, "late"), calls)
            verdict = await transactions.transact(grant.lease.id, grant.lease.epoch, work)
            assert verdict is Verdict.FENCED
        assert calls == []
        assert await steps_of(transactions, "resting") == ["a"]
        assert await steps_of(transactions, "releasing") == []

    async def test_a_transaction_without_a_run_is_unknown(self, store: Store) -> None:
        """No such run: nothing is written."""
        transactions = need_transaction(store)
        work = returning(Entry("run", 1, 1, as_json(snapshot("a"))))
        assert await transactions.transact("run", 1, work) is Verdict.UNKNOWN
        assert await transactions.load("run") is None

    async def test_an_exception_rolls_back_and_is_raised_unchanged(self, store: Store) -> None:
        """An exception from `work` rolls the transaction back and is raised unchanged."""
        transactions = need_transaction(store)
        grant = await acquire_run(transactions)
        error = Oops("no")

        async def work(connection: Any) -> Entry:
            raise error

        with pytest.raises(Oops) as raised:
            await transactions.transact("run", grant.lease.epoch, work)
        assert raised.value is error
        assert not isinstance(error.__cause__, PerdureError)
        assert await self._writes(transactions, grant, "a") is Verdict.ACCEPTED

    async def test_a_transaction_may_write_a_rest(self, store: Store) -> None:
        """The entry that `work` returns is written, even if it has a `rest`."""
        transactions = need_transaction(store)
        grant = await acquire_run(transactions)
        data = as_json(snapshot("a", status="completed"))
        entry = Entry("run", grant.lease.epoch, 1, data, rest=Rest("completed"))
        await transactions.transact("run", grant.lease.epoch, returning(entry))
        assert (await summary_of(transactions)).status == "completed"
        assert await steps_of(transactions) == ["a"]

    async def test_a_transaction_resets_the_takeovers(self, store: Store) -> None:
        """An accepted entry resets `takeovers` to zero, even in a transaction."""
        transactions = need_transaction(store)
        await acquire_run(transactions, owner="ana", ttl=self.short)
        await self.expire()
        grant = await acquire_run(transactions, owner="bob")
        await transactions.transact("run", grant.lease.epoch, returning(step(grant, 1, "a")))
        await transactions.release([grant.lease])
        after = await acquire_run(transactions, owner="cem")
        assert (grant.takeovers, after.takeovers) == (1, 0)

    async def test_user_writes_commit_with_the_entry(self, store: Store) -> None:
        """Everything is committed or nothing is: the user's writes exist with the entry."""
        transactions = need_transaction(store)
        self._need_user_writes()
        grant = await acquire_run(transactions)
        assert await self._writes(transactions, grant, "committed") is Verdict.ACCEPTED
        assert list(await self.user_notes(store)) == ["committed"]
        assert await steps_of(transactions) == ["committed"]

    async def test_user_writes_roll_back_with_an_exception(self, store: Store) -> None:
        """Everything is committed or nothing is: an exception rolls back the user's writes."""
        transactions = need_transaction(store)
        self._need_user_writes()
        grant = await acquire_run(transactions)

        async def work(connection: Any) -> Entry:
            await self.user_write(connection, "rolled back")
            raise Oops

        with pytest.raises(Oops):
            await transactions.transact("run", grant.lease.epoch, work)
        assert list(await self.user_notes(store)) == []

    async def test_user_writes_of_a_stale_owner_are_not_committed(self, store: Store) -> None:
        """Everything is committed or nothing is: a fenced transaction commits no user's writes."""
        transactions = need_transaction(store)
        self._need_user_writes()
        old = await acquire_run(transactions)
        await transactions.release([old.lease])
        await acquire_run(transactions, owner="bob")
        assert await self._writes(transactions, old, "stale") is Verdict.FENCED
        assert list(await self.user_notes(store)) == []

    async def _writes(self, store: TransactingStore, grant: Grant, note: str) -> Verdict:
        async def work(connection: Any) -> Entry:
            if self._has_user_writes():
                await self.user_write(connection, note)
            return step(grant, 1, note)

        return await store.transact(grant.lease.id, grant.lease.epoch, work)

    def _has_user_writes(self) -> bool:
        return type(self).user_write is not Harness.user_write

    def _need_user_writes(self) -> None:
        if not self._has_user_writes():
            pytest.skip(f"{type(self).__name__} has no user_write(): user writes are not checked")


class TransactionChecks(TransactChecks):
    """The abilities of a store with transactions."""
