"""Forced races on PostgreSQL: a statement that waited for a row sees what it waited for.

A statement reads a snapshot of the tables as of its start. If it then waits for a row's lock, it
gets the newest version of that row, but the old contents of other tables.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from perdure.store import (
    Delivery,
    Entry,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Page,
    Query,
    Refusal,
    Rest,
    Verdict,
)
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.stores.postgres.locks import blocked, locked_row

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=1)


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    async with postgres(postgres_url) as store:
        yield store


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


async def acquire(store: PostgresStore, ttl: timedelta = LONG, owner: str = "ana") -> Grant:
    request = LeaseRequest("run", owner, ttl, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


async def write_entry(connection: asyncpg.Connection, grant: Grant, key: str) -> None:
    """Write an entry like `append`, in an open transaction."""
    values = ("run", grant.lease.epoch, 7, delta(key))
    await connection.execute("INSERT INTO perdure_runs_journal VALUES ($1, $2, $3, $4)", *values)


async def test_an_acquisition_sees_the_entry_it_waited_for(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """An entry accepted before the grant is in the grant."""
    old = await acquire(store, SHORT)
    async with locked_row(other):
        await write_entry(other, old, "late")
        task = await blocked(other, store.acquire([LeaseRequest("run", "bob", LONG)]))
    (grant,) = await task
    assert isinstance(grant, Grant)
    assert list(grant.snapshot["steps"]) == ["late"]
    assert await store.append([Entry("run", old.lease.epoch, 8, delta("stale"))]) == [
        Verdict.FENCED
    ]


async def test_the_owner_to_replace_is_compared_after_the_wait(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A run that another owner got in the meantime is not taken over."""
    await acquire(store)
    replace_ana = LeaseRequest("run", "bob", LONG, instead_of="ana")
    async with locked_row(other):
        await other.execute("UPDATE perdure_runs SET owner = 'cem', epoch = epoch + 1")
        task = await blocked(other, store.acquire([replace_ana]))
    (refusal,) = await task
    assert isinstance(refusal, Refusal)
    assert refusal.owner == "cem"
    async with locked_row(other):
        await other.execute("UPDATE perdure_runs SET owner = 'ana', epoch = epoch + 1")
        task = await blocked(other, store.acquire([replace_ana]))
    (grant,) = await task
    assert isinstance(grant, Grant)
    assert grant.takeovers == 1


async def test_a_run_that_is_lost_before_it_is_read_is_not_granted(
    store: PostgresStore, postgres_url: str
) -> None:
    """An owner that pauses between leasing a run and reading its journal does not get the old
    snapshot without the journal, which another owner has replaced in the meantime."""
    old = await acquire(store, SHORT)
    await store.append([Entry("run", old.lease.epoch, 1, delta("a"))])
    fetch = store._backend._database.fetch

    async def paused(statement: str, *values: object, repeatable: bool = True) -> object:
        if "string_agg" in statement:
            await take_over(postgres_url)
        return await fetch(statement, *values, repeatable=repeatable)

    store._backend._leases._fetch = paused  # type: ignore[assignment]  # runs between the statements
    (refusal,) = await store.acquire([LeaseRequest("run", "bob", SHORT)])
    assert isinstance(refusal, Refusal)


async def take_over(url: str) -> None:
    """Lease and suspend the run in another process."""
    async with postgres(url) as another:
        (grant,) = await another.acquire([LeaseRequest("run", "cem", LONG)])
        assert isinstance(grant, Grant)
        whole = as_json(snapshot("a", "b"))
        await another.append([Entry("run", grant.lease.epoch, 1, whole, rest=Rest("suspended"))])


async def test_an_acquisition_returns_the_current_inbox(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A message consumed during the wait is not in the grant, and one sent during it is.

    The number of messages alone does not show the difference.
    """
    first = await acquire(store)
    await send_one(store, "run", "old", b"1")
    (message,) = await store.inbox("run")
    await store.acquire([LeaseRequest("another", "ana", SHORT, create=as_json(snapshot()))])
    async with other.transaction():
        await other.execute("SELECT FROM perdure_runs WHERE id = 'another' FOR NO KEY UPDATE")
        requests = [LeaseRequest("another", "bob", LONG), LeaseRequest("run", "bob", LONG)]
        task = await blocked(other, store.acquire(requests))
        rest = Entry(
            "run", first.lease.epoch, 1, as_json(snapshot()), (message.id,), Rest("suspended")
        )
        await store.append([rest])
        await send_one(store, "run", "new", b"2")
    _, grant = await task
    assert isinstance(grant, Grant)
    assert [message.name for message in grant.inbox] == ["new"]


async def test_a_claim_skips_a_run_that_is_being_written(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A claim does not wait, and sees the whole journal when it gets the run."""
    old = await acquire(store, SHORT)
    await asyncio.sleep(0.01)
    async with locked_row(other):
        await write_entry(other, old, "late")
        assert await store.claim("bob", LONG, 10) == []
    (grant,) = await store.claim("bob", LONG, 10)
    assert list(grant.snapshot["steps"]) == ["late"]


async def test_an_entry_that_waited_for_an_acquisition_is_fenced(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """No entry, batch, rest or deletion gets past the fence of a concurrent acquisition."""
    grant = await acquire(store)
    epoch = grant.lease.epoch
    entry = Entry("run", epoch, 1, delta("late"))
    rest = Entry("run", epoch, 2, as_json(snapshot("late")), rest=Rest("completed"))
    delete = Entry("run", epoch, 3, b"{}", rest=Rest("completed", delete=True))
    await store.append([Entry("run", epoch, 0, delta("kept"))])
    for batch in ([entry], [rest], [delete], [entry, rest], [rest, Entry("other", 1, 1, b"{}")]):
        async with locked_row(other):
            task = await blocked(other, store.append(batch))
            await other.execute("UPDATE perdure_runs SET epoch = epoch + 1")
        assert (await task)[0] is Verdict.FENCED
        await other.execute("UPDATE perdure_runs SET epoch = epoch - 1")
    loaded = await store.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["kept"]


async def test_a_rest_sees_the_message_it_waited_for(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A run that is suspended awaiting a message in its inbox is due at once.

    This includes a message that is sent at the same time, for a single entry and a batch.
    """
    for more in ([], [Entry("other", 1, 1, b"{}")]):
        grant = await acquire(store)
        rest = Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=awaiting("paid"))
        async with locked_row(other):
            await other.execute(
                "INSERT INTO perdure_runs_inbox (run, first_epoch, name, payload, sent_at) "
                "SELECT id, first_epoch, 'paid', '1', now() FROM perdure_runs"
            )
            await other.execute("UPDATE perdure_runs SET messages = messages + 1")
            task = await blocked(other, store.append([rest, *more]))
        assert (await task)[0] is Verdict.ACCEPTED
        (claimed,) = await store.claim("bob", LONG, 10)
        assert [message.name for message in claimed.inbox] == ["paid"]
        await store.delete("run")


def awaiting(*names: str) -> Rest:
    return Rest("waiting", None, names)


async def test_a_message_that_waited_for_a_rest_wakes_the_run(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A message sent while its run is being suspended is not missed."""
    await acquire(store)
    async with locked_row(other):
        task = await blocked(other, send_one(store, "run", "paid", b"1"))
        await other.execute(
            """UPDATE perdure_runs SET owner = NULL, wake_at = NULL, awaits = '["paid"]'"""
        )
    assert await task is Delivery.DELIVERED
    assert len(await store.claim("bob", LONG, 10)) == 1


async def test_a_new_run_gets_nothing_of_a_deleted_one(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """Entries and messages written during the deletion do not belong to a later run."""
    old = await acquire(store)
    async with locked_row(other):
        await write_entry(other, old, "late")
        await other.execute(
            "INSERT INTO perdure_runs_inbox (run, first_epoch, name, payload, sent_at, dedup) "
            "SELECT id, first_epoch, 'late', '1', now(), 'x' FROM perdure_runs"
        )
        task = await blocked(other, store.delete("run"))
    assert await task
    new = await acquire(store)
    assert new.created
    assert new.inbox == ()
    (again,) = await store.acquire([LeaseRequest("run", "ana", LONG)])
    assert isinstance(again, Grant)
    assert again.snapshot["steps"] == {}
    assert await store.inbox("run") == []


async def test_a_batch_that_deletes_a_run_deletes_old_entries_too(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """An entry that a rest did not see, since both were written at once, is left behind by it."""
    grant = await acquire(store)
    rest = Entry("run", grant.lease.epoch, 8, as_json(snapshot("a")), rest=Rest("suspended"))
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    await write_entry(other, grant, "late")
    grant = await acquire(store)
    entries = [
        Entry("run", grant.lease.epoch, 1, delta("b")),
        Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True)),
    ]
    assert await store.append(entries) == [Verdict.ACCEPTED] * 2
    assert await other.fetchval("SELECT count(*) FROM perdure_runs_journal") == 0


async def test_a_run_that_is_deleted_leaves_no_consumed_message(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A consumed message with a dedup id is kept only as long as its run."""
    grant = await acquire(store)
    await send_one(store, "run", "paid", b"1", dedup_id="x")
    (message,) = await store.inbox("run")
    delete = Rest("completed", delete=True)
    end = Entry("run", grant.lease.epoch, 1, b"{}", consumes=(message.id,), rest=delete)
    assert await store.append([end]) == [Verdict.ACCEPTED]
    assert await other.fetchval("SELECT count(*) FROM perdure_runs_inbox") == 0


async def test_a_claim_of_settled_runs_is_one_statement(
    store: PostgresStore, other: asyncpg.Connection, postgres_url: str
) -> None:
    """It leases and loads; only runs that may have a journal are read again."""
    await store.enqueue([NewRun(f"{n}", "order", as_json(snapshot("a"))) for n in range(5)])
    statements: list[str] = []
    fetch = store._backend._database.fetch

    async def counted(statement: str, *values: object, repeatable: bool = True) -> object:
        statements.append(statement)
        return await fetch(statement, *values, repeatable=repeatable)

    store._backend._leases._fetch = counted  # type: ignore[assignment]  # counts the statements
    grants = await store.claim("bob", LONG, 10, supports=supports("order"))
    assert len(grants) == 5
    assert len(statements) == 1
    await send_one(store, "0", "paid", b"1")
    await store.release([grant.lease for grant in grants])
    statements.clear()
    again = await store.claim("bob", LONG, 10, supports=supports("order"))
    assert [len(grant.inbox) for grant in again] == [1, 0, 0, 0, 0]
    assert len(statements) == 2


async def test_batches_in_any_order_never_deadlock(store: PostgresStore, postgres_url: str) -> None:
    """Rows are locked in the order of their ids, whatever the order of the batch."""
    ids = [f"run {number}" for number in range(30)]
    requests = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in ids]
    grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]

    async def write(number: int) -> None:
        order = grants if number % 2 else grants[::-1]
        batch = [Entry(g.lease.id, g.lease.epoch, number, delta(f"{number}")) for g in order]
        await store.append(batch)
        await store.renew([grant.lease for grant in order[number:]], LONG)

    await asyncio.gather(*(write(number) for number in range(20)))
    async with postgres(postgres_url) as another:
        loaded = await another.load("run 7")
    assert loaded is not None
    assert len(loaded["steps"]) == 20


async def test_messages_in_any_order_never_deadlock(store: PostgresStore) -> None:
    """Rows are locked in the order of their ids, whatever the order of the call."""
    ids = [f"run {number}" for number in range(30)]
    await store.enqueue([NewRun(id, "order", as_json(snapshot())) for id in ids])

    async def send(number: int) -> None:
        order = ids if number % 2 else ids[::-1]
        receipts = await store.send([NewMessage(id, "paid", b"1") for id in order])
        assert {receipt.delivery for receipt in receipts} == {Delivery.DELIVERED}

    await asyncio.gather(*(send(number) for number in range(20)))
    assert len(await store.inbox("run 7")) == 20


async def test_a_new_run_is_not_found_by_the_tags_of_a_deleted_one(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """A tag that is added during the deletion stays behind, and belongs to no run."""
    await acquire(store)
    async with locked_row(other):
        await other.execute("""UPDATE perdure_runs SET tags = '["customer=1"]'""")
        await other.execute(
            "INSERT INTO perdure_runs_tags (run, tag, created_at) "
            "SELECT id, sha256('customer=1'), created_at FROM perdure_runs"
        )
        task = await blocked(other, store.delete("run"))
    assert await task
    query = Query(tags=("customer=1",))
    assert await store.search(query, 10) == Page(())
    new = await acquire(store)
    assert await store.search(query, 10) == Page(())
    rest = Rest("suspended", tags=query.tags)
    await store.append([Entry("run", new.lease.epoch, 1, as_json(snapshot()), rest=rest)])
    assert [run.id for run in (await store.search(query, 10)).runs] == ["run"]


async def test_a_rest_that_waited_replaces_the_tags_it_finds(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    """The tags are compared with those of the locked row."""
    grant = await acquire(store)
    rest = Rest("suspended", tags=("customer=2",))
    entry = Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=rest)
    async with locked_row(other):
        task = await blocked(other, store.append([entry]))
        await other.execute("""UPDATE perdure_runs SET tags = '["customer=1"]'""")
    assert await task == [Verdict.ACCEPTED]
    assert (await store.search(Query(tags=("customer=1",)), 10)).runs == ()
    (run,) = (await store.search(Query(tags=("customer=2",)), 10)).runs
    assert run.tags == ("customer=2",)


async def consuming(store: PostgresStore, grant: Grant) -> Entry:
    """Return the record of a wait that received the only message in the inbox."""
    (message,) = await store.inbox("run")
    return Entry("run", grant.lease.epoch, 1, delta("wait"), (message.id,))


async def test_a_message_that_is_sent_while_another_is_consumed_is_counted(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    grant = await acquire(store)
    await send_one(store, "run", "go", b"1")
    entry = await consuming(store, grant)
    async with locked_row(other):
        await other.execute(
            "INSERT INTO perdure_runs_inbox (run, first_epoch, name, payload, sent_at) "
            "SELECT id, first_epoch, 'go', '2', now() FROM perdure_runs"
        )
        await other.execute("UPDATE perdure_runs SET messages = messages + 1")
        task = await blocked(other, store.append([entry]))
    assert await task == [Verdict.ACCEPTED]
    assert [message.payload for message in await store.inbox("run")] == [b"2"]
    (lease,) = await store.renew([grant.lease], LONG)
    assert lease is not None
    assert lease.has_messages


async def test_an_entry_that_waited_for_the_next_owner_consumes_nothing(
    store: PostgresStore, other: asyncpg.Connection
) -> None:
    grant = await acquire(store)
    await send_one(store, "run", "go", b"1")
    entry = await consuming(store, grant)
    async with locked_row(other):
        await other.execute("UPDATE perdure_runs SET owner = 'bob', epoch = epoch + 1")
        task = await blocked(other, store.append([entry]))
    assert await task == [Verdict.FENCED]
    assert [message.payload for message in await store.inbox("run")] == [b"1"]
    assert await other.fetchval("SELECT count(*) FROM perdure_runs_journal") == 0


@pytest.mark.parametrize("dedup_id", [None, "x"])
async def test_a_message_that_is_consumed_twice_is_counted_once(
    store: PostgresStore, dedup_id: str | None
) -> None:
    """Nor is a message that never existed: the count decides whether the inbox is read."""
    grant = await acquire(store)
    await send_one(store, "run", "go", b"1", dedup_id=dedup_id)
    (message,) = await store.inbox("run")
    await send_one(store, "run", "go", b"2")
    epoch = grant.lease.epoch
    for n, id in enumerate((message.id, message.id, "123456789", "never"), start=1):
        assert await store.append([Entry("run", epoch, n, delta(f"{n}"), (id,))]) == [
            Verdict.ACCEPTED
        ]
    (lease,) = await store.renew([grant.lease], LONG)
    assert lease is not None
    assert lease.has_messages
    assert [message.payload for message in await store.inbox("run")] == [b"2"]
