"""Transactional steps on MySQL: writes and record are committed together."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncmy
import pytest

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import query

LONG = timedelta(minutes=5)


@pytest.fixture
async def store(mysql_url: str) -> AsyncIterator[MysqlStore]:
    query(mysql_url, "CREATE TABLE ledger (amount INT NOT NULL CHECK (amount <> 13))")
    async with mysql(mysql_url) as store:
        yield store


@pytest.fixture
async def grant(store: MysqlStore) -> Grant:
    request = LeaseRequest("run", "ana", LONG, create=as_json(snapshot()))
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


def entry(grant: Grant, n: int = 1) -> Entry:
    return Entry("run", grant.lease.epoch, n, delta("debit"), step="debit")


def balance(url: str) -> int:
    return int(query(url, "SELECT COALESCE(SUM(amount), 0) FROM ledger")[0][0])


async def debit(connection: Any, amount: int = 5) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute("INSERT INTO ledger VALUES (%s)", (amount,))


async def recorded_steps(store: MysqlStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


async def test_a_lease_is_renewed_while_the_work_runs(
    store: MysqlStore, mysql_url: str, grant: Grant
) -> None:
    """Long work in a transaction does not block the renewal of leases."""

    async def work(connection: Any) -> Entry:
        await debit(connection)
        renewed = await asyncio.wait_for(store.renew([grant.lease], LONG), 5)
        assert renewed != [None]
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert (balance(mysql_url), await recorded_steps(store)) == (5, ["debit"])


async def test_losing_the_run_during_work_writes_nothing(
    store: MysqlStore, mysql_url: str, grant: Grant
) -> None:
    """The fence is checked again at the end."""

    async def work(connection: Any) -> Entry:
        await debit(connection)
        await store.release([grant.lease])
        await store.acquire([LeaseRequest("run", "bob", LONG)])
        return entry(grant)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.FENCED
    assert (balance(mysql_url), await recorded_steps(store)) == (0, [])


async def test_errors_of_the_user_are_raised_unchanged(
    store: MysqlStore, mysql_url: str, grant: Grant
) -> None:
    """An exception from `work`, including the driver's, rolls back and is raised unchanged."""

    async def work(connection: Any) -> Entry:
        await debit(connection)
        await debit(connection, 13)
        return entry(grant)

    with pytest.raises(asyncmy.Error, match=r"(?i)constraint"):
        await store.transact("run", grant.lease.epoch, work)
    assert (balance(mysql_url), await recorded_steps(store)) == (0, [])


async def test_a_connection_lost_during_work_makes_the_store_unavailable(
    store: MysqlStore, grant: Grant
) -> None:
    """Whatever `work` raises then, the step has not failed and may be retried."""

    async def work(connection: Any) -> Entry:
        try:
            async with connection.cursor() as cursor:
                await cursor.execute("SELECT CONNECTION_ID()")
                await cursor.execute(f"KILL {(await cursor.fetchone())[0]}")
        except asyncmy.Error:
            raise RuntimeError("no money today") from None
        return entry(grant)

    with pytest.raises(StoreUnavailable, match="no money today") as caught:
        await store.transact("run", grant.lease.epoch, work)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert await recorded_steps(store) == []


async def test_an_existing_entry_is_not_written_twice(
    store: MysqlStore, mysql_url: str, grant: Grant
) -> None:
    """Repeated after a lost reply, the user's writes are rolled back."""

    async def work(connection: Any) -> Entry:
        await debit(connection)
        return entry(grant)

    for _ in range(2):
        assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert (balance(mysql_url), await recorded_steps(store)) == (5, ["debit"])


@pytest.mark.parametrize("n", [1, 3])
async def test_a_rest_during_work_rolls_back(
    store: MysqlStore, mysql_url: str, grant: Grant, n: int
) -> None:
    """The rest closes the epoch for the user's writes too, whatever their entry's number."""

    async def work(connection: Any) -> Entry:
        await debit(connection)
        whole = as_json(snapshot(status="suspended"))
        await store.append([Entry("run", grant.lease.epoch, 2, whole, rest=Rest("suspended"))])
        return entry(grant, n)

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.FENCED
    assert (balance(mysql_url), await recorded_steps(store)) == (0, [])


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "CREATE TABLE other (a INT)"])
async def test_ending_the_transaction_inside_work_is_an_error(
    store: MysqlStore, grant: Grant, statement: str
) -> None:
    """In MySQL a statement that creates a table commits too: the record would be alone."""

    async def work(connection: Any) -> Entry:
        await debit(connection)
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
        return entry(grant)

    with pytest.raises(StoreError, match="only the store may end it"):
        await store.transact("run", grant.lease.epoch, work)
    assert await recorded_steps(store) == []


async def test_the_entry_may_end_the_run(store: MysqlStore, grant: Grant) -> None:
    """The last step of a run is a step like any other."""

    async def work(_: Any) -> Entry:
        whole = as_json(snapshot("debit", status="completed"))
        return Entry("run", grant.lease.epoch, 1, whole, rest=Rest("completed"))

    assert await store.transact("run", grant.lease.epoch, work) is Verdict.ACCEPTED
    assert [summary.status for summary in await store.list()] == ["completed"]


async def test_an_entry_of_another_run_is_refused(store: MysqlStore, grant: Grant) -> None:
    """The fence of the wrong run would apply."""

    async def work(_: Any) -> Entry:
        return Entry("other", grant.lease.epoch, 1, b"{}")

    with pytest.raises(InvalidArgument, match="work"):
        await store.transact("run", grant.lease.epoch, work)


async def test_a_cancelled_transaction_is_rolled_back(
    store: MysqlStore, mysql_url: str, grant: Grant
) -> None:
    """And its connection is not leaked, which the fixture checks."""
    working = asyncio.Event()

    async def work(connection: Any) -> Entry:
        await debit(connection)
        working.set()
        async with connection.cursor() as cursor:
            await cursor.execute("SELECT SLEEP(1)")
        return entry(grant)

    task = asyncio.ensure_future(store.transact("run", grant.lease.epoch, work))
    await working.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (balance(mysql_url), await recorded_steps(store)) == (0, [])
