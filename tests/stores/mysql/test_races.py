"""Forced races on MySQL: a transaction that waited for a row sees what it waited for."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

import asyncmy
import pytest

from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewRun, Refusal, Rest, Verdict
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import connect_arguments, query
from tests.stores.mysql.locks import blocked

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=1)

T = TypeVar("T")


class Other:
    """Another transaction on the same tables."""

    def __init__(self, connection: Any, url: str) -> None:
        self._connection = connection
        self._url = url

    async def run(self, statement: str, *values: object) -> None:
        """Run one statement."""
        async with self._connection.cursor() as cursor:
            await cursor.execute(statement, values or None)

    @asynccontextmanager
    async def locked_row(self) -> AsyncGenerator[None]:
        """Lock the run's row like a statement that is not committed yet, then commit."""
        await self.run("SELECT * FROM perdure_runs WHERE id = 'run' FOR UPDATE")
        yield
        await self.commit()

    async def commit(self) -> None:
        """Commit, which releases the locks."""
        await self._connection.commit()

    async def write_entry(self, grant: Grant, key: str) -> None:
        """Write an entry like `append`."""
        values = ("run", grant.lease.epoch, 7, delta(key).decode())
        await self.run("INSERT INTO perdure_runs_journal VALUES (%s, %s, %s, %s)", *values)

    async def send(self, name: str, dedup: str | None = None) -> None:
        """Send a message like `send`."""
        into = "INSERT INTO perdure_runs_inbox (run, name, payload, sent_at, dedup)"
        await self.run(f"{into} VALUES ('run', %s, '1', UTC_TIMESTAMP(6), %s)", name, dedup)

    async def blocked(self, work: Awaitable[T]) -> "asyncio.Future[T]":
        """Start the work and return its task once it waits for the row."""
        return await blocked(self._url, work)


@pytest.fixture
async def store(mysql_url: str) -> AsyncIterator[MysqlStore]:
    async with mysql(mysql_url) as store:
        yield store


@pytest.fixture
async def other(mysql_url: str) -> AsyncIterator[Other]:
    async with asyncmy.connect(**connect_arguments(mysql_url)) as connection:
        yield Other(connection, mysql_url)


async def acquire(store: MysqlStore, ttl: timedelta = LONG, owner: str = "ana") -> Grant:
    request = LeaseRequest("run", owner, ttl, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


async def test_an_acquisition_sees_the_entry_it_waited_for(store: MysqlStore, other: Other) -> None:
    """An entry accepted before the grant is in the grant."""
    old = await acquire(store, SHORT)
    await asyncio.sleep(0.01)
    async with other.locked_row():
        await other.write_entry(old, "late")
        task = await other.blocked(store.acquire([LeaseRequest("run", "bob", LONG)]))
    (grant,) = await task
    assert isinstance(grant, Grant)
    assert list(grant.snapshot["steps"]) == ["late"]
    late = Entry("run", old.lease.epoch, 8, delta("stale"))
    assert await store.append([late]) == [Verdict.FENCED]


async def test_the_owner_to_replace_is_compared_after_the_wait(
    store: MysqlStore, other: Other
) -> None:
    """A run that another owner got in the meantime is not taken over."""
    await acquire(store)
    replace_ana = LeaseRequest("run", "bob", LONG, instead_of="ana")
    async with other.locked_row():
        await other.run("UPDATE perdure_runs SET owner = 'cem', epoch = epoch + 1")
        task = await other.blocked(store.acquire([replace_ana]))
    (refusal,) = await task
    assert isinstance(refusal, Refusal)
    assert refusal.owner == "cem"
    async with other.locked_row():
        await other.run("UPDATE perdure_runs SET owner = 'ana', epoch = epoch + 1")
        task = await other.blocked(store.acquire([replace_ana]))
    (grant,) = await task
    assert isinstance(grant, Grant)
    assert grant.takeovers == 1


async def test_a_claim_skips_a_run_that_is_being_written(store: MysqlStore, other: Other) -> None:
    """A claim does not wait, and sees the whole journal when it gets the run."""
    old = await acquire(store, SHORT)
    await asyncio.sleep(0.01)
    async with other.locked_row():
        await other.write_entry(old, "late")
        assert await store.claim("bob", LONG, 10) == []
    (grant,) = await store.claim("bob", LONG, 10)
    assert list(grant.snapshot["steps"]) == ["late"]


async def test_an_entry_that_waited_for_an_acquisition_is_fenced(
    store: MysqlStore, other: Other
) -> None:
    """No entry, batch, rest or deletion gets past the fence of a concurrent acquisition."""
    grant = await acquire(store)
    epoch = grant.lease.epoch
    entry, next_entry = (Entry("run", epoch, n, delta("late")) for n in (1, 2))
    rest = Entry("run", epoch, 3, as_json(snapshot("late")), rest=Rest("completed"))
    delete = Entry("run", epoch, 4, b"", rest=Rest("completed", delete=True))
    await store.append([Entry("run", epoch, 0, delta("kept"))])
    for batch in ([entry], [entry, next_entry], [rest], [delete], [entry, rest], [delete, rest]):
        async with other.locked_row():
            task = await other.blocked(store.append(batch))
            await other.run("UPDATE perdure_runs SET epoch = epoch + 1")
        assert set(await task) == {Verdict.FENCED}
        async with other.locked_row():
            await other.run("UPDATE perdure_runs SET epoch = epoch - 1")
    loaded = await store.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["kept"]


async def test_one_refusal_in_a_batch_is_decided_under_locks(
    store: MysqlStore, other: Other
) -> None:
    """The verdicts on the other entries are decided at the same time."""
    grant = await acquire(store)
    (kept_grant,) = await store.acquire(
        [LeaseRequest("kept", "ana", LONG, create=as_json(snapshot()))]
    )
    assert isinstance(kept_grant, Grant)
    batch = [Entry(g.lease.id, g.lease.epoch, 1, delta("a")) for g in (kept_grant, grant)]
    async with other.locked_row():
        task = await other.blocked(store.append(batch))
        await other.run("UPDATE perdure_runs SET epoch = epoch + 1 WHERE id = 'run'")
    assert await task == [Verdict.ACCEPTED, Verdict.FENCED]
    loaded = await store.load("kept")
    assert loaded is not None
    assert list(loaded["steps"]) == ["a"]


async def test_a_run_with_a_rest_is_not_deleted_later_in_the_batch(store: MysqlStore) -> None:
    """Entries are judged in order: the rest has closed the epoch."""
    grant = await acquire(store)
    epoch = grant.lease.epoch
    batch = [
        Entry("run", epoch, 1, delta("a")),
        Entry("run", epoch, 2, as_json(snapshot("a")), rest=Rest("suspended")),
        Entry("run", epoch, 3, b"", rest=Rest("completed", delete=True)),
        Entry("run", epoch, 4, delta("b")),
    ]
    assert await store.append(batch) == [Verdict.ACCEPTED] * 2 + [Verdict.FENCED] * 2
    assert list((await acquire(store)).snapshot["steps"]) == ["a"]


async def test_a_rest_sent_again_keeps_entries_of_a_later_owner(
    store: MysqlStore, mysql_url: str
) -> None:
    """It affects the run only as the first attempt left it."""
    old = await acquire(store)
    rest = Entry("run", old.lease.epoch, 9, as_json(snapshot("a")), rest=Rest("suspended"))
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    new = await acquire(store, owner="bob")
    await store.append([Entry("run", new.lease.epoch, 1, delta("b"))])
    assert await store.append([rest]) == [Verdict.FENCED]
    # As if it had read the run just before the new owner leased it.
    values = (old.lease.epoch, 9)
    query(mysql_url, "UPDATE perdure_runs SET epoch = %s, folded = %s", *values)
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    assert query(mysql_url, "SELECT n FROM perdure_runs_journal") == ((1,),)


async def test_a_rest_sees_the_message_it_waited_for(store: MysqlStore, other: Other) -> None:
    """A run that is suspended awaiting a message in its inbox is due at once.

    This includes a message that is sent at the same time, for a single entry and a batch.
    """
    for more in ([], [Entry("other", 1, 1, b"{}")]):
        grant = await acquire(store)
        awaiting = Rest("waiting", None, ("paid",))
        rest = Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=awaiting)
        async with other.locked_row():
            await other.send("paid")
            task = await other.blocked(store.append([rest, *more]))
        assert (await task)[0] is Verdict.ACCEPTED
        (claimed,) = await store.claim("bob", LONG, 10)
        assert [message.name for message in claimed.inbox] == ["paid"]
        await store.delete("run")


async def test_a_deletion_includes_the_message_it_waited_for(
    store: MysqlStore, other: Other, mysql_url: str
) -> None:
    """With `delete`, nothing is left of the run, including a message sent at the same time."""
    grant = await acquire(store)
    delete = Entry("run", grant.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
    async with other.locked_row():
        await other.send("paid")
        task = await other.blocked(store.append([delete]))
    assert await task == [Verdict.ACCEPTED]
    assert query(mysql_url, "SELECT COUNT(*) FROM perdure_runs_inbox") == ((0,),)


async def test_a_message_that_waited_for_a_rest_wakes_the_run(
    store: MysqlStore, other: Other
) -> None:
    """A message sent while its run is being suspended is not missed."""
    await acquire(store)
    async with other.locked_row():
        task = await other.blocked(send_one(store, "run", "paid", b"1"))
        await other.run(
            """UPDATE perdure_runs SET owner = NULL, wake_at = NULL, awaits = '["paid"]'"""
        )
    assert await task is Delivery.DELIVERED
    assert len(await store.claim("bob", LONG, 10)) == 1


async def test_a_new_run_gets_nothing_of_a_deleted_one(store: MysqlStore, other: Other) -> None:
    """Entries and messages written during the deletion do not belong to a later run."""
    old = await acquire(store)
    async with other.locked_row():
        await other.write_entry(old, "late")
        await other.send("late", "x")
        task = await other.blocked(store.delete("run"))
    assert await task
    new = await acquire(store)
    assert (new.created, new.inbox) == (True, ())
    again = await acquire(store)
    assert (again.created, again.snapshot["steps"], again.inbox) == (False, {}, ())


async def test_a_run_created_during_an_acquisition_is_found(
    store: MysqlStore, other: Other
) -> None:
    """A run that another process creates in the meantime is granted or refused like any other.

    A new run in the same call is created.
    """
    await store.load("run")
    await other.run(
        "INSERT INTO perdure_runs (id, snapshot, epoch) VALUES ('run', %s, 5)",
        as_json(snapshot("theirs")).decode(),
    )
    requests = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot("ours"))) for id in ("run", "new")
    ]
    task = await other.blocked(store.acquire(requests))
    await other.commit()
    run, new = await task
    assert isinstance(run, Grant)
    assert isinstance(new, Grant)
    assert (run.created, new.created) == (False, True)
    assert [list(grant.snapshot["steps"]) for grant in (run, new)] == [["theirs"], ["ours"]]


async def test_batches_in_any_order_never_deadlock(store: MysqlStore, mysql_url: str) -> None:
    """Rows are locked in the order of their ids, whatever the order of the batch."""
    ids = [f"run {number}" for number in range(30)]
    requests = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in ids]
    grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    before = deadlocks(mysql_url)

    async def write(number: int) -> None:
        order = grants if number % 2 else grants[::-1]
        batch = [Entry(g.lease.id, g.lease.epoch, number, delta(f"{number}")) for g in order]
        await store.append(batch)
        await store.renew([grant.lease for grant in order[number:]], LONG)
        await store.append([*batch, Entry("none", 1, 1, b"{}")])

    await asyncio.gather(*(write(number) for number in range(20)))
    loaded = await store.load("run 7")
    assert loaded is not None
    assert len(loaded["steps"]) == 20
    assert deadlocks(mysql_url) == before


def deadlocks(url: str) -> object:
    return query(url, "SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")


async def test_a_deadlock_is_retried(store: MysqlStore, other: Other) -> None:
    """Another program locks the rows in another order."""
    requests = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in ("a", "b")]
    grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    # The server rolls back the transaction that has written less: the store's.
    await other.run(
        "INSERT INTO perdure_runs_inbox (run, name, payload, sent_at) VALUES " + MESSAGES
    )
    await other.run("SELECT * FROM perdure_runs WHERE id = 'b' FOR UPDATE")
    batch = [Entry(g.lease.id, g.lease.epoch, 1, delta("x")) for g in grants]
    task = await other.blocked(store.append(batch))
    await other.run("SELECT * FROM perdure_runs WHERE id = 'a' FOR UPDATE")
    await other.commit()
    assert await task == [Verdict.ACCEPTED] * 2


MESSAGES = ", ".join(["('none', 'x', '1', UTC_TIMESTAMP(6))"] * 50)


async def test_concurrent_workers_complete_each_run_once(store: MysqlStore) -> None:
    """Many workers claim, write, wake and settle the same runs at once."""
    await store.enqueue([NewRun(f"{n:03}", "order", as_json(snapshot())) for n in range(60)])
    completed_ids: list[str] = []

    async def work(owner: str) -> None:
        while len(completed_ids) < 60:
            for grant in await store.claim(owner, LONG, 4):
                lease = grant.lease
                await send_one(store, lease.id, "paid", b"1")
                await store.append([Entry(lease.id, lease.epoch, 1, delta("a"))])
                await store.renew([lease], LONG)
                end = Entry(lease.id, lease.epoch, 2, as_json(snapshot()), rest=Rest("completed"))
                assert await store.append([end]) == [Verdict.ACCEPTED]
                completed_ids.append(lease.id)

    await asyncio.wait_for(asyncio.gather(*(work(f"{n}") for n in range(8))), 30)
    assert sorted(completed_ids) == [f"{n:03}" for n in range(60)]


async def test_runs_of_several_queues_are_leased_at_one_time(store: MysqlStore) -> None:
    """Each queue is locked by a statement with a time of its own."""
    names = ["", "a", "b", "c"]
    data = as_json(snapshot())
    await store.enqueue([NewRun(f"run {name}", "order", data, queue=name) for name in names])
    grants = await store.claim("ana", LONG, 10, queues=dict.fromkeys(names, 1))
    assert [grant.queue for grant in grants] == names
    assert len({(grant.now, grant.lease.expires_at) for grant in grants}) == 1
    leases = [grant.lease for grant in grants]
    verdicts = await store.append([Entry(each.id, each.epoch, 1, delta("a")) for each in leases])
    assert verdicts == [Verdict.ACCEPTED] * len(names)
    assert None not in await store.renew(leases, LONG)
