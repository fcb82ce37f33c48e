"""A transactional step on SQLite: the user's writes and the step's record are one commit."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable, ValueTooLarge
from perdure.store import Entry, Grant, LeaseRequest, Verdict
from perdure.stores.sqlite import SqliteStore, Transaction, sqlite
from perdure.testing.conformance.samples import as_json, delta, snapshot

HOUR = timedelta(hours=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER)")
        connection.execute("INSERT INTO account VALUES ('ana', 10), ('bob', 0)")
        connection.commit()
    async with sqlite(path) as store:
        yield store


@pytest.fixture
async def epoch(store: SqliteStore) -> int:
    [grant] = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    return grant.lease.epoch


def balances(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT id, balance FROM account"))


async def move(transaction: Transaction, amount: int) -> None:
    sql = "UPDATE account SET balance = balance + ? WHERE id = ?"
    await transaction.execute(sql, (-amount, "ana"))
    await transaction.execute(sql, (amount, "bob"))


def entry(epoch: int, n: int = 1) -> Entry:
    return Entry("run", epoch, n, delta(f"step {n}"))


async def steps(store: SqliteStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


async def test_writes_and_record_commit_together(
    store: SqliteStore, epoch: int, path: Path
) -> None:
    """The writes of `work` are stored with the entry."""

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 3)
        assert balances(path) == {"ana": 10, "bob": 0}
        return entry(epoch)

    assert await store.transact("run", epoch, work) is Verdict.ACCEPTED
    assert balances(path) == {"ana": 7, "bob": 3}
    assert await steps(store) == ["step 1"]


async def test_a_transaction_reads_its_own_writes(store: SqliteStore, epoch: int) -> None:
    """Rows are tuples; values are bound by position or by name."""

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 3)
        assert await transaction.fetchall("SELECT id, balance FROM account ORDER BY id") == [
            ("ana", 7),
            ("bob", 3),
        ]
        by_name = "SELECT balance FROM account WHERE id = :id"
        assert await transaction.fetchone(by_name, {"id": "bob"}) == (3,)
        assert await transaction.fetchone(by_name, {"id": "eve"}) is None
        assert await transaction.execute("DELETE FROM account") == 2
        return entry(epoch)

    assert await store.transact("run", epoch, work) is Verdict.ACCEPTED


async def test_an_entry_that_exists_has_no_second_effect(
    store: SqliteStore, epoch: int, path: Path
) -> None:
    """The same entry is accepted again, and the second writes of `work` are rolled back."""

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 3)
        return entry(epoch)

    for _ in range(2):
        assert await store.transact("run", epoch, work) is Verdict.ACCEPTED
    assert balances(path) == {"ana": 7, "bob": 3}


async def test_an_error_of_a_statement_is_raised_unchanged(
    store: SqliteStore, epoch: int, path: Path
) -> None:
    """`work` may catch it and continue; only the statement had no effect."""

    async def work(transaction: Transaction) -> Entry:
        with pytest.raises(sqlite3.IntegrityError):
            await transaction.execute("INSERT INTO account VALUES ('eve', 1), ('ana', 1)")
        await move(transaction, 1)
        return entry(epoch)

    assert await store.transact("run", epoch, work) is Verdict.ACCEPTED
    assert balances(path) == {"ana": 9, "bob": 1}


@pytest.mark.parametrize(
    "sql", ["COMMIT", " -- so\n /* it */ rollback", "BEGIN", "end transaction"]
)
async def test_work_cannot_end_the_transaction(
    store: SqliteStore, epoch: int, path: Path, sql: str
) -> None:
    """Only the store commits."""

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 3)
        await transaction.execute(sql)
        return entry(epoch)

    with pytest.raises(InvalidArgument, match="leaves the transaction open"):
        await store.transact("run", epoch, work)
    assert balances(path) == {"ana": 10, "bob": 0}
    assert await steps(store) == []


async def test_a_savepoint_is_the_users_own(store: SqliteStore, epoch: int, path: Path) -> None:
    """Part of the work can be rolled back."""

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 1)
        await transaction.execute("SAVEPOINT attempt")
        await move(transaction, 5)
        await transaction.execute("ROLLBACK TO attempt")
        await transaction.execute("RELEASE attempt")
        return entry(epoch)

    assert await store.transact("run", epoch, work) is Verdict.ACCEPTED
    assert balances(path) == {"ana": 9, "bob": 1}


async def test_a_transaction_that_sqlite_ended_is_not_recorded(
    store: SqliteStore, epoch: int, path: Path
) -> None:
    """A clause that rolls back also prevents the record, even if `work` ignores the error."""

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 3)
        with pytest.raises(sqlite3.IntegrityError):
            await transaction.execute("INSERT OR ROLLBACK INTO account VALUES ('ana', 1)")
        return entry(epoch)

    with pytest.raises(StoreError, match="rolled the transaction back"):
        await store.transact("run", epoch, work)
    assert balances(path) == {"ana": 10, "bob": 0}
    assert await steps(store) == []


async def test_a_disk_failure_in_the_work_makes_the_store_unavailable(
    store: SqliteStore, epoch: int
) -> None:
    """Whatever `work` raises instead: the step has not failed, and can be retried."""

    async def work(transaction: Transaction) -> Entry:
        await transaction.fetchall("PRAGMA max_page_count = 1")
        try:
            await transaction.execute("CREATE TABLE large AS SELECT zeroblob(1000000)")
        except sqlite3.OperationalError:
            raise RuntimeError("payment failed") from None
        return entry(epoch)

    with pytest.raises(StoreUnavailable, match="disk") as caught:
        await store.transact("run", epoch, work)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert await steps(store) == []


async def test_the_store_cannot_be_called_inside_its_own_transaction(
    store: SqliteStore, epoch: int
) -> None:
    """It would deadlock: the error says what to use instead."""

    async def work(_: Transaction) -> Entry:
        await store.append([entry(epoch, 2)])
        return entry(epoch)

    with pytest.raises(StoreError, match="use the connection"):
        await store.transact("run", epoch, work)
    assert await store.append([entry(epoch, 2)]) == [Verdict.ACCEPTED]


async def test_other_writes_wait_until_it_is_done(store: SqliteStore, epoch: int) -> None:
    """Reads do not wait."""
    has_begun, may_finish = asyncio.Event(), asyncio.Event()

    async def work(_: Transaction) -> Entry:
        has_begun.set()
        await may_finish.wait()
        return entry(epoch)

    transacting = asyncio.ensure_future(store.transact("run", epoch, work))
    await has_begun.wait()
    appending = asyncio.ensure_future(store.append([entry(epoch, 2)]))
    assert await steps(store) == []
    assert not appending.done()
    may_finish.set()
    assert await transacting is Verdict.ACCEPTED
    assert await appending == [Verdict.ACCEPTED]
    assert await steps(store) == ["step 1", "step 2"]


async def test_a_cancelled_transaction_is_rolled_back(
    store: SqliteStore, epoch: int, path: Path
) -> None:
    """Other writes can continue."""
    has_begun = asyncio.Event()

    async def work(transaction: Transaction) -> Entry:
        await move(transaction, 3)
        has_begun.set()
        await asyncio.Event().wait()
        return entry(epoch)

    transacting = asyncio.ensure_future(store.transact("run", epoch, work))
    await has_begun.wait()
    transacting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transacting
    assert await store.append([entry(epoch, 2)]) == [Verdict.ACCEPTED]
    assert balances(path) == {"ana": 10, "bob": 0}


async def test_a_connection_cannot_be_used_afterwards(store: SqliteStore, epoch: int) -> None:
    """A task that outlives its transaction gets an error and does not hang."""
    transactions: list[Transaction] = []

    async def work(transaction: Transaction) -> Entry:
        transactions.append(transaction)
        return entry(epoch)

    await store.transact("run", epoch, work)
    with pytest.raises(StoreError, match="over"):
        await transactions[0].execute("SELECT 1")


async def test_an_entry_of_another_run_is_refused(store: SqliteStore, epoch: int) -> None:
    """The entry must belong to the run and epoch that were checked."""

    async def work(_: Transaction) -> Entry:
        return Entry("another", epoch, 1, b"{}")

    with pytest.raises(InvalidArgument, match="'run'"):
        await store.transact("run", epoch, work)


async def test_an_entry_that_is_too_large_rolls_back(path: Path) -> None:
    """The limit also applies in a transaction."""
    async with sqlite(path, max_value_size=200) as store:
        [grant] = await store.acquire(
            [LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        epoch = grant.lease.epoch

        async def work(transaction: Transaction) -> Entry:
            await transaction.execute("CREATE TABLE note (text TEXT)")
            return Entry("run", epoch, 1, delta(a="x" * 200))

        with pytest.raises(ValueTooLarge):
            await store.transact("run", epoch, work)
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.OperationalError):
        connection.execute("SELECT * FROM note")


async def test_a_transaction_on_a_locked_file_is_unavailable(path: Path) -> None:
    """`work` is not called."""
    async with sqlite(path, busy_timeout=0.1) as store:
        [grant] = await store.acquire(
            [LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)

        async def work(_: Transaction) -> Entry:
            raise AssertionError

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked"):
                await store.transact("run", grant.lease.epoch, work)


async def test_a_transaction_without_a_file_is_unavailable(tmp_path: Path) -> None:
    """The same error as for any other call."""
    async with sqlite(tmp_path / "missing" / "runs.db") as store:

        async def work(_: Transaction) -> Entry:
            raise AssertionError

        with pytest.raises(StoreUnavailable, match="there is no folder"):
            await store.transact("run", 1, work)
