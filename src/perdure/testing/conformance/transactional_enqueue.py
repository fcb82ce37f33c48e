"""Checks of runs that are created in the user's transaction."""

import pytest

from perdure.errors import PerdureError
from perdure.store import NewRun, Store
from perdure.testing.conformance.harness import (
    Harness,
    JoiningStore,
    acquire_run,
    append_entries,
    need_transactional_enqueue,
    step,
    steps_of,
)
from perdure.testing.conformance.samples import as_json, snapshot

RUN = NewRun("run", "order", as_json(snapshot("a")))
OTHER = NewRun("other", "order", as_json(snapshot()))


class Oops(Exception):
    """An exception of the user's code."""


class TransactionalEnqueueChecks(Harness):
    """`enqueue_in`."""

    async def test_a_run_exists_when_the_users_transaction_is_committed(self, store: Store) -> None:
        """The runs exist if and only if that transaction is committed: not before, and then due."""
        joining = self._joining(store)
        await joining.load("run")
        async with self.user_transaction(store) as connection:
            assert list(await joining.enqueue_in(connection, [RUN, OTHER])) == [None, None]
            assert await joining.load("run") is None
        assert await steps_of(joining) == ["a"]
        claimed = await joining.claim("ana", self.short, 10)
        assert sorted(grant.lease.id for grant in claimed) == ["other", "run"]

    async def test_nothing_is_left_when_the_users_transaction_is_rolled_back(
        self, store: Store
    ) -> None:
        """The runs exist if and only if that transaction is committed: not if it is rolled back."""
        joining = self._joining(store)
        await joining.load("run")
        with pytest.raises(Oops):
            await self._enqueue_and_fail(joining)
        assert await joining.load("run") is None
        assert list(await joining.enqueue([RUN])) == [True]

    async def test_an_existing_run_does_not_abort_the_users_transaction(self, store: Store) -> None:
        """That run stays unchanged, and the transaction can continue."""
        joining = self._joining(store)
        grant = await acquire_run(joining)
        await append_entries(joining, step(grant, 1, "b"))
        async with self.user_transaction(store) as connection:
            [existing] = await joining.enqueue_in(connection, [RUN])
            assert existing is not None
            assert list(existing["steps"]) == ["b"]
            assert list(await joining.enqueue_in(connection, [OTHER])) == [None]
        assert await steps_of(joining) == ["b"]
        assert await joining.load("other") is not None

    async def test_a_run_is_found_in_the_transaction_that_creates_it(self, store: Store) -> None:
        """Return the snapshot of an existing run as the transaction sees it."""
        joining = self._joining(store)
        await joining.load("run")
        async with self.user_transaction(store) as connection:
            await joining.enqueue_in(connection, [RUN])
            [existing] = await joining.enqueue_in(connection, [NewRun("run", "order", b"{}")])
            assert existing is not None
            assert list(existing["steps"]) == ["a"]
        assert await steps_of(joining) == ["a"]

    async def test_a_connection_of_another_kind_is_refused(self, store: Store) -> None:
        """`connection` must be a connection of the store's driver."""
        joining = need_transactional_enqueue(store)
        with pytest.raises(PerdureError, match="connection"):
            await joining.enqueue_in(object(), [RUN])
        assert await joining.load("run") is None

    async def _enqueue_and_fail(self, store: JoiningStore) -> None:
        async with self.user_transaction(store) as connection:
            await store.enqueue_in(connection, [RUN])
            raise Oops

    def _joining(self, store: Store) -> JoiningStore:
        joining = need_transactional_enqueue(store)
        if type(self).user_transaction is Harness.user_transaction:
            pytest.skip(f"{type(self).__name__} has no user_transaction(): not checked")
        return joining
