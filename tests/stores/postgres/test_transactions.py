"""Transactional steps on PostgreSQL: writes and record are committed together."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance.samples import as_json, delta, snapshot

LONG = timedelta(minutes=5)


@pytest.fixture
async def user(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """The user's own connection to the database, which has a table of the user."""
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE ledger (amount integer NOT NULL CHECK (amount <> 13))")
    yield connection
    await connection.close()


@pytest.fixture
async def store(postgres_url: str, user: asyncpg.Connection) -> AsyncIterator[PostgresStore]:
    async with postgres(postgres_url) as store:
        yield store


@pytest.fixture
async def grant(store: PostgresStore) -> Grant:
    request = LeaseRequest("run", "ana", LONG, create=as_json(snapshot()))
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


def entry(grant: Grant, n: int = 1) -> Entry:
    return Entry("run", grant.lease.epoch, n, delta("debit"), step="debit")


async def balance(user: asyncpg.Connection) -> int:
    return int(await user.fetchval("SELECT coalesce(sum(amount), 0) FROM ledger"))


async def recorded_steps(store: PostgresStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


async def test_a_lease_is_renewed_while_the_work_runs(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant
) -> None:
    """Long work in a transaction does not block the renewal of leases."""

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        renewed = await asyncio.wait_for(store.renew([grant.lease], LONG), 5)
        assert renewed != [None]
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert (await balance(user), await recorded_steps(store)) == (5, ["debit"])


async def test_losing_the_run_during_work_writes_nothing(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant
) -> None:
    """The fence is checked again at the end."""

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        await store.release([grant.lease])
        await store.acquire([LeaseRequest("run", "bob", LONG)])
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.FENCED
    assert (await balance(user), await recorded_steps(store)) == (0, [])


async def test_errors_of_the_user_are_raised_unchanged(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant
) -> None:
    """An exception from `work`, including the driver's, rolls back and is raised unchanged."""

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        await connection.execute("INSERT INTO ledger VALUES (13)")
        return entry(grant)

    with pytest.raises(asyncpg.CheckViolationError):
        await store.transact("run", grant.lease.epoch, work)
    assert (await balance(user), await recorded_steps(store)) == (0, [])


@pytest.mark.parametrize("by", ["client", "server"])
async def test_a_connection_lost_during_work_makes_the_store_unavailable(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant, by: str
) -> None:
    """Whatever `work` raises then, the step has not failed and may be retried."""

    async def work(connection: Any) -> Entry:
        try:
            if by == "client":
                connection.terminate()
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        except (asyncpg.PostgresError, asyncpg.InterfaceError):
            raise RuntimeError("no money today") from None
        return entry(grant)

    with pytest.raises(StoreUnavailable, match="no money today") as caught:
        await store.transact("run", grant.lease.epoch, work)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert await recorded_steps(store) == []


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
async def test_ending_the_transaction_inside_work_is_an_error(
    store: PostgresStore, grant: Grant, ending: str
) -> None:
    """The record is not written: it would not be committed together with the user's writes."""

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        await connection.execute(ending)
        return entry(grant)

    with pytest.raises(StoreError, match="ended inside"):
        await store.transact("run", grant.lease.epoch, work)
    assert await recorded_steps(store) == []
    assert await store.append([entry(grant)]) == [Verdict.ACCEPTED]


async def test_the_user_may_nest_transactions(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant
) -> None:
    """A failure in an inner transaction can be caught, and the work continues."""

    async def work(connection: Any) -> Entry:
        async with connection.transaction():
            await connection.execute("INSERT INTO ledger VALUES (5)")
        with pytest.raises(asyncpg.CheckViolationError):
            async with connection.transaction():
                await connection.execute("INSERT INTO ledger VALUES (13)")
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert (await balance(user), await recorded_steps(store)) == (5, ["debit"])


async def test_an_existing_entry_is_not_written_twice(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant
) -> None:
    """Repeated after a lost reply, the user's writes are rolled back."""

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        return entry(grant)

    for _ in range(2):
        assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert (await balance(user), await recorded_steps(store)) == (5, ["debit"])


@pytest.mark.parametrize("n", [1, 3])
async def test_a_rest_during_work_rolls_back(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant, n: int
) -> None:
    """The rest closes the epoch for the user's writes too, whatever their entry's number."""

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        whole = as_json(snapshot(status="suspended"))
        await store.append([Entry("run", grant.lease.epoch, 2, whole, rest=Rest("suspended"))])
        return entry(grant, n)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.FENCED
    assert (await balance(user), await recorded_steps(store)) == (0, [])


async def test_the_users_statements_are_planned_with_default_settings(
    store: PostgresStore, grant: Grant
) -> None:
    """The store's own settings, which prevent scans, do not apply to them."""

    async def work(connection: Any) -> Entry:
        assert await connection.fetchval("SHOW enable_seqscan") == "on"
        assert await connection.fetchval("SHOW plan_cache_mode") == "auto"
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED


async def test_the_entry_may_end_the_run(store: PostgresStore, grant: Grant) -> None:
    """The last step of a run is a step like any other."""

    async def work(_: Any) -> Entry:
        whole = as_json(snapshot("debit", status="completed"))
        return Entry("run", grant.lease.epoch, 1, whole, rest=Rest("completed"))

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert [summary.status for summary in await store.list()] == ["completed"]


async def test_an_entry_of_another_run_is_refused(store: PostgresStore, grant: Grant) -> None:
    """The fence of the wrong run would apply."""

    async def work(_: Any) -> Entry:
        return Entry("other", grant.lease.epoch, 1, b"{}")

    with pytest.raises(InvalidArgument, match="work"):
        await store.transact("run", grant.lease.epoch, work)


async def test_a_cancelled_transaction_is_rolled_back(
    store: PostgresStore, user: asyncpg.Connection, grant: Grant
) -> None:
    """And its connection is not leaked, which the fixture checks."""
    working = asyncio.Event()

    async def work(connection: Any) -> Entry:
        await connection.execute("INSERT INTO ledger VALUES (5)")
        working.set()
        await connection.execute("SELECT pg_sleep(60)")
        return entry(grant)

    task = asyncio.ensure_future(store.transact("run", grant.lease.epoch, work))
    await working.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await balance(user), await recorded_steps(store)) == (0, [])
