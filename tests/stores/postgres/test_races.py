"""Races on PostgreSQL, made to happen: a statement that waited for a row sees what it waited for.

A statement reads by a snapshot that is taken when it begins. When it then waits for a row's lock,
it gets the newest version of that row, but of other tables only what was there before.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TypeVar

import asyncpg
import pytest

from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance.samples import as_json, delta, snapshot

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=1)

T = TypeVar("T")


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    async with postgres(postgres_url) as store:
        yield store


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


async def granted(store: PostgresStore, ttl: timedelta = LONG, owner: str = "ana") -> Grant:
    want = LeaseRequest("run", owner, ttl, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([want])
    assert grant is not None
    return grant


@asynccontextmanager
async def held_row(connection: asyncpg.Connection) -> AsyncGenerator[None]:
    """Hold the run's row as a statement that is not committed yet does, and then commit."""
    async with connection.transaction():
        await connection.execute("SELECT FROM perdure_runs WHERE id = 'run' FOR NO KEY UPDATE")
        yield


async def waiting(connection: asyncpg.Connection, work: Awaitable[T]) -> "asyncio.Future[T]":
    """Begin some work and give it when it waits for a lock."""
    task = asyncio.ensure_future(work)
    blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    while not task.done() and not await connection.fetchval(blocked):
        await asyncio.sleep(0.01)
    assert not task.done(), "the work did not wait for the row"
    return task


async def journalled(connection: asyncpg.Connection, grant: Grant, key: str) -> None:
    """Write an entry as `append` does, in a transaction that is open."""
    values = ("run", grant.lease.epoch, 7, delta(key))
    await connection.execute("INSERT INTO perdure_runs_journal VALUES ($1, $2, $3, $4)", *values)


async def test_a_taker_sees_the_entry_it_waited_for(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """What was accepted before the grant is in the grant."""
    old = await granted(store, SHORT)
    async with held_row(other):
        await journalled(other, old, "late")
        task = await waiting(other, store.acquire([LeaseRequest("run", "bob", LONG)]))
    (grant,) = await task
    assert grant is not None
    assert list(grant.snapshot["steps"]) == ["late"]
    assert await store.append([Entry("run", old.lease.epoch, 8, delta("stale"))]) == [
        Verdict.FENCED
    ]


async def test_a_run_that_is_lost_before_it_is_read_is_not_granted(
    store: PostgresStore, postgres_url: str
) -> None:
    """An owner that is paused after it leased a run and before it read the journal does not get
    its old snapshot without the journal, which another owner has emptied in the meantime."""
    old = await granted(store, SHORT)
    await store.append([Entry("run", old.lease.epoch, 1, delta("a"))])
    fetch = store._backend._database.fetch

    async def paused(statement: str, *values: object, repeatable: bool = True) -> object:
        if "string_agg" in statement:
            await take_over(postgres_url)
        return await fetch(statement, *values, repeatable=repeatable)

    store._backend._leases._fetch = paused  # type: ignore[assignment]  # comes between the statements
    assert await store.acquire([LeaseRequest("run", "bob", SHORT)]) == [None]


async def take_over(url: str) -> None:
    """Lease the run in another process, and put it to rest."""
    async with postgres(url) as another:
        (grant,) = await another.acquire([LeaseRequest("run", "cem", LONG)])
        assert grant is not None
        whole = as_json(snapshot("a", "b"))
        await another.append([Entry("run", grant.lease.epoch, 1, whole, rest=Rest("suspended"))])


async def test_a_taker_sees_the_inbox_as_it_is_when_it_gets_the_run(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A message that was consumed while the taker waited is not in the grant, and one that was
    sent meanwhile is: the number of messages alone does not tell."""
    first = await granted(store)
    await store.send("run", "old", b"1")
    (message,) = await store.inbox("run")
    await store.acquire([LeaseRequest("another", "ana", SHORT, create=as_json(snapshot()))])
    async with other.transaction():
        await other.execute("SELECT FROM perdure_runs WHERE id = 'another' FOR NO KEY UPDATE")
        wants = [LeaseRequest("another", "bob", LONG), LeaseRequest("run", "bob", LONG)]
        task = await waiting(other, store.acquire(wants))
        rest = Entry(
            "run", first.lease.epoch, 1, as_json(snapshot()), (message.id,), Rest("suspended")
        )
        await store.append([rest])
        await store.send("run", "new", b"2")
    _, grant = await task
    assert grant is not None
    assert [message.name for message in grant.inbox] == ["new"]


async def test_a_claimant_passes_by_a_run_that_is_being_written(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A claim waits for nobody, and sees the whole journal when it gets the run."""
    old = await granted(store, SHORT)
    await asyncio.sleep(0.01)
    async with held_row(other):
        await journalled(other, old, "late")
        assert await store.claim("bob", LONG, 10) == []
    (grant,) = await store.claim("bob", LONG, 10)
    assert list(grant.snapshot["steps"]) == ["late"]


async def test_an_entry_that_waited_for_a_taker_is_fenced(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A concurrent acquisition cannot slip past the fence: one entry, a batch, a rest, an end."""
    grant = await granted(store)
    epoch = grant.lease.epoch
    entry = Entry("run", epoch, 1, delta("late"))
    rest = Entry("run", epoch, 2, as_json(snapshot("late")), rest=Rest("completed"))
    delete = Entry("run", epoch, 3, b"{}", rest=Rest("completed", delete=True))
    await store.append([Entry("run", epoch, 0, delta("kept"))])
    for batch in ([entry], [rest], [delete], [entry, rest], [rest, Entry("other", 1, 1, b"{}")]):
        async with held_row(other):
            task = await waiting(other, store.append(batch))
            await other.execute("UPDATE perdure_runs SET epoch = epoch + 1")
        assert (await task)[0] is Verdict.FENCED
        await other.execute("UPDATE perdure_runs SET epoch = epoch - 1")
    loaded = await store.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["kept"]


async def test_a_rest_sees_the_event_it_waited_for(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A run that goes to rest awaiting a name that lies untaken in its inbox is due at once, also
    when the event came in the very moment; alone, and in a batch."""
    for more in ([], [Entry("other", 1, 1, b"{}")]):
        grant = await granted(store)
        rest = Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=awaiting("paid"))
        async with held_row(other):
            await other.execute(
                "INSERT INTO perdure_runs_inbox (run, first_epoch, name, payload, sent_at) "
                "SELECT id, first_epoch, 'paid', '1', now() FROM perdure_runs"
            )
            await other.execute("UPDATE perdure_runs SET messages = messages + 1")
            task = await waiting(other, store.append([rest, *more]))
        assert (await task)[0] is Verdict.ACCEPTED
        (claimed,) = await store.claim("bob", LONG, 10)
        assert [message.name for message in claimed.inbox] == ["paid"]
        await store.delete("run")


def awaiting(*names: str) -> Rest:
    return Rest("waiting", None, names)


async def test_an_event_that_waited_for_a_rest_wakes_the_run(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """An event that comes while its run goes to rest is not missed."""
    await granted(store)
    async with held_row(other):
        task = await waiting(other, store.send("run", "paid", b"1"))
        await other.execute(
            """UPDATE perdure_runs SET owner = NULL, wake_at = NULL, awaits = '["paid"]'"""
        )
    assert await task is Delivery.DELIVERED
    assert len(await store.claim("bob", LONG, 10)) == 1


async def test_nothing_of_a_deleted_run_comes_back(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """What was written while the run was being deleted belongs to no later run of its id."""
    old = await granted(store)
    async with held_row(other):
        await journalled(other, old, "late")
        await other.execute(
            "INSERT INTO perdure_runs_inbox (run, first_epoch, name, payload, sent_at, dedup) "
            "SELECT id, first_epoch, 'late', '1', now(), 'x' FROM perdure_runs"
        )
        task = await waiting(other, store.delete("run"))
    assert await task
    new = await granted(store)
    assert new.created
    assert new.inbox == ()
    again = await store.acquire([LeaseRequest("run", "ana", LONG)])
    assert again[0] is not None
    assert again[0].snapshot["steps"] == {}
    assert await store.inbox("run") == []


async def test_a_run_that_is_deleted_leaves_no_consumed_message(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A consumed message with a dedup id is kept only as long as its run."""
    grant = await granted(store)
    await store.send("run", "paid", b"1", dedup_id="x")
    (message,) = await store.inbox("run")
    delete = Rest("completed", delete=True)
    end = Entry("run", grant.lease.epoch, 1, b"{}", consumes=(message.id,), rest=delete)
    assert await store.append([end]) == [Verdict.ACCEPTED]
    assert await other.fetchval("SELECT count(*) FROM perdure_runs_inbox") == 0


async def test_a_claim_of_a_run_at_rest_is_one_statement(
    store: PostgresStore, other: asyncpg.Connection, postgres_url: str
) -> None:
    """Lease, load and mail in one go; only what may have a journal is read once more."""
    await store.enqueue([NewRun(f"{n}", "order", as_json(snapshot("a"))) for n in range(5)])
    statements: list[str] = []
    fetch = store._backend._database.fetch

    async def counted(statement: str, *values: object, repeatable: bool = True) -> object:
        statements.append(statement)
        return await fetch(statement, *values, repeatable=repeatable)

    store._backend._leases._fetch = counted  # type: ignore[assignment]  # looks on
    grants = await store.claim("bob", LONG, 10)
    assert len(grants) == 5
    assert len(statements) == 1
    await store.send("0", "paid", b"1")
    await store.release([grant.lease for grant in grants])
    statements.clear()
    again = await store.claim("bob", LONG, 10)
    assert [len(grant.inbox) for grant in again] == [1, 0, 0, 0, 0]
    assert len(statements) == 2


async def test_batches_in_any_order_never_deadlock(store: PostgresStore, postgres_url: str) -> None:
    """Rows are locked in the order of the ids, whatever the order of the batch."""
    ids = [f"run {number}" for number in range(30)]
    wants = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in ids]
    grants = [grant for grant in await store.acquire(wants) if grant is not None]

    async def write(turn: int) -> None:
        order = grants if turn % 2 else grants[::-1]
        batch = [Entry(g.lease.id, g.lease.epoch, turn, delta(f"{turn}")) for g in order]
        await store.append(batch)
        await store.renew([grant.lease for grant in order[turn:]], LONG)

    await asyncio.gather(*(write(turn) for turn in range(20)))
    async with postgres(postgres_url) as another:
        loaded = await another.load("run 7")
    assert loaded is not None
    assert len(loaded["steps"]) == 20
