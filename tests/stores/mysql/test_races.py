"""Races on MySQL, made to happen: what waited for a row sees what it waited for."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

import asyncmy
import pytest

from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import connect_arguments
from tests.stores.mysql.kit import query

LONG, SHORT = timedelta(minutes=5), timedelta(milliseconds=1)
WAITING = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"

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
    async def holding_the_row(self) -> AsyncGenerator[None]:
        """Hold the run's row as a statement that is not committed yet does, and then commit."""
        await self.run("SELECT * FROM perdure_runs WHERE id = 'run' FOR UPDATE")
        yield
        await self.commit()

    async def commit(self) -> None:
        """Let go of what is held."""
        await self._connection.commit()

    async def journal(self, grant: Grant, key: str) -> None:
        """Write an entry as `append` does."""
        values = ("run", grant.lease.epoch, 7, delta(key).decode())
        await self.run("INSERT INTO perdure_runs_journal VALUES (%s, %s, %s, %s)", *values)

    async def mail(self, name: str, dedup: str | None = None) -> None:
        """Send an event as `send` does."""
        into = "INSERT INTO perdure_runs_inbox (run, name, payload, sent_at, dedup)"
        await self.run(f"{into} VALUES ('run', %s, '1', UTC_TIMESTAMP(6), %s)", name, dedup)

    async def is_awaited(self, work: Awaitable[T]) -> "asyncio.Future[T]":
        """Begin some work and give it when it waits for the row."""
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        while not task.done() and query(self._url, WAITING) == ((0,),):
            # MariaDB looks anew only when nobody has asked for a tenth of a second.
            await asyncio.sleep(0.11)
        assert not task.done(), "the work did not wait for the row"
        return task


@pytest.fixture
async def store(mysql_url: str) -> AsyncIterator[MysqlStore]:
    async with mysql(mysql_url) as store:
        yield store


@pytest.fixture
async def other(mysql_url: str) -> AsyncIterator[Other]:
    async with asyncmy.connect(**connect_arguments(mysql_url)) as connection:
        yield Other(connection, mysql_url)


async def granted(store: MysqlStore, ttl: timedelta = LONG, owner: str = "ana") -> Grant:
    want = LeaseRequest("run", owner, ttl, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([want])
    assert grant is not None
    return grant


async def test_a_taker_sees_the_entry_it_waited_for(store: MysqlStore, other: Other) -> None:
    """What was accepted before the grant is in the grant."""
    old = await granted(store, SHORT)
    await asyncio.sleep(0.01)
    async with other.holding_the_row():
        await other.journal(old, "late")
        task = await other.is_awaited(store.acquire([LeaseRequest("run", "bob", LONG)]))
    (grant,) = await task
    assert grant is not None
    assert list(grant.snapshot["steps"]) == ["late"]
    late = Entry("run", old.lease.epoch, 8, delta("stale"))
    assert await store.append([late]) == [Verdict.FENCED]


async def test_a_claimant_passes_by_a_run_that_is_being_written(
    store: MysqlStore, other: Other
) -> None:
    """A claim waits for nobody, and sees the whole journal when it gets the run."""
    old = await granted(store, SHORT)
    await asyncio.sleep(0.01)
    async with other.holding_the_row():
        await other.journal(old, "late")
        assert await store.claim("bob", LONG, 10) == []
    (grant,) = await store.claim("bob", LONG, 10)
    assert list(grant.snapshot["steps"]) == ["late"]


async def test_an_entry_that_waited_for_a_taker_is_fenced(store: MysqlStore, other: Other) -> None:
    """A concurrent acquisition cannot slip past the fence: one entry, a batch, a rest, an end."""
    grant = await granted(store)
    epoch = grant.lease.epoch
    entry, next_entry = (Entry("run", epoch, n, delta("late")) for n in (1, 2))
    rest = Entry("run", epoch, 3, as_json(snapshot("late")), rest=Rest("completed"))
    delete = Entry("run", epoch, 4, b"", rest=Rest("completed", delete=True))
    await store.append([Entry("run", epoch, 0, delta("kept"))])
    for batch in ([entry], [entry, next_entry], [rest], [delete], [entry, rest], [delete, rest]):
        async with other.holding_the_row():
            task = await other.is_awaited(store.append(batch))
            await other.run("UPDATE perdure_runs SET epoch = epoch + 1")
        assert set(await task) == {Verdict.FENCED}
        async with other.holding_the_row():
            await other.run("UPDATE perdure_runs SET epoch = epoch - 1")
    loaded = await store.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["kept"]


async def test_one_refusal_in_a_batch_is_decided_under_locks(
    store: MysqlStore, other: Other
) -> None:
    """The verdicts on the others are not those of a later moment."""
    grant = await granted(store)
    (kept,) = await store.acquire([LeaseRequest("kept", "ana", LONG, create=as_json(snapshot()))])
    assert kept is not None
    batch = [Entry(g.lease.id, g.lease.epoch, 1, delta("a")) for g in (kept, grant)]
    async with other.holding_the_row():
        task = await other.is_awaited(store.append(batch))
        await other.run("UPDATE perdure_runs SET epoch = epoch + 1 WHERE id = 'run'")
    assert await task == [Verdict.ACCEPTED, Verdict.FENCED]
    loaded = await store.load("kept")
    assert loaded is not None
    assert list(loaded["steps"]) == ["a"]


async def test_a_run_that_rests_is_not_deleted_later_in_the_batch(store: MysqlStore) -> None:
    """In the order of the batch: the rest has closed the epoch."""
    grant = await granted(store)
    epoch = grant.lease.epoch
    batch = [
        Entry("run", epoch, 1, delta("a")),
        Entry("run", epoch, 2, as_json(snapshot("a")), rest=Rest("suspended")),
        Entry("run", epoch, 3, b"", rest=Rest("completed", delete=True)),
        Entry("run", epoch, 4, delta("b")),
    ]
    assert await store.append(batch) == [Verdict.ACCEPTED] * 2 + [Verdict.FENCED] * 2
    assert list((await granted(store)).snapshot["steps"]) == ["a"]


async def test_a_rest_sent_again_leaves_what_a_later_owner_wrote(
    store: MysqlStore, mysql_url: str
) -> None:
    """It finds the run as it left it, or not at all."""
    old = await granted(store)
    rest = Entry("run", old.lease.epoch, 9, as_json(snapshot("a")), rest=Rest("suspended"))
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    new = await granted(store, owner="bob")
    await store.append([Entry("run", new.lease.epoch, 1, delta("b"))])
    assert await store.append([rest]) == [Verdict.FENCED]
    # As if it had looked at the run just before it was taken.
    values = (old.lease.epoch, 9)
    query(mysql_url, "UPDATE perdure_runs SET epoch = %s, folded = %s", *values)
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    assert query(mysql_url, "SELECT n FROM perdure_runs_journal") == ((1,),)


async def test_a_rest_sees_the_event_it_waited_for(store: MysqlStore, other: Other) -> None:
    """A run that goes to rest awaiting a name that lies untaken in its inbox is due at once, also
    when the event came in the very moment; alone, and in a batch."""
    for more in ([], [Entry("other", 1, 1, b"{}")]):
        grant = await granted(store)
        awaiting = Rest("waiting", None, ("paid",))
        rest = Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=awaiting)
        async with other.holding_the_row():
            await other.mail("paid")
            task = await other.is_awaited(store.append([rest, *more]))
        assert (await task)[0] is Verdict.ACCEPTED
        (claimed,) = await store.claim("bob", LONG, 10)
        assert [message.name for message in claimed.inbox] == ["paid"]
        await store.delete("run")


async def test_an_end_takes_the_event_it_waited_for_along(
    store: MysqlStore, other: Other, mysql_url: str
) -> None:
    """With `delete` nothing is left of the run, also of an event that came in the very moment."""
    grant = await granted(store)
    delete = Entry("run", grant.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
    async with other.holding_the_row():
        await other.mail("paid")
        task = await other.is_awaited(store.append([delete]))
    assert await task == [Verdict.ACCEPTED]
    assert query(mysql_url, "SELECT COUNT(*) FROM perdure_runs_inbox") == ((0,),)


async def test_an_event_that_waited_for_a_rest_wakes_the_run(
    store: MysqlStore, other: Other
) -> None:
    """An event that comes while its run goes to rest is not missed."""
    await granted(store)
    async with other.holding_the_row():
        task = await other.is_awaited(store.send("run", "paid", b"1"))
        await other.run(
            """UPDATE perdure_runs SET owner = NULL, wake_at = NULL, awaits = '["paid"]'"""
        )
    assert await task is Delivery.DELIVERED
    assert len(await store.claim("bob", LONG, 10)) == 1


async def test_nothing_of_a_deleted_run_comes_back(store: MysqlStore, other: Other) -> None:
    """What was written while the run was being deleted belongs to no later run of its id."""
    old = await granted(store)
    async with other.holding_the_row():
        await other.journal(old, "late")
        await other.mail("late", "x")
        task = await other.is_awaited(store.delete("run"))
    assert await task
    new = await granted(store)
    assert (new.created, new.inbox) == (True, ())
    again = await granted(store)
    assert (again.created, again.snapshot["steps"], again.inbox) == (False, {}, ())


async def test_what_is_made_while_it_is_asked_for_is_found(store: MysqlStore, other: Other) -> None:
    """A run that was not there, and then was made by somebody else, is granted or refused as any
    other; beside it another one is new."""
    await store.load("run")
    await other.run(
        "INSERT INTO perdure_runs (id, snapshot, epoch) VALUES ('run', %s, 5)",
        as_json(snapshot("theirs")).decode(),
    )
    wants = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot("ours"))) for id in ("run", "new")
    ]
    task = await other.is_awaited(store.acquire(wants))
    await other.commit()
    run, new = await task
    assert run is not None
    assert new is not None
    assert (run.created, new.created) == (False, True)
    assert [list(grant.snapshot["steps"]) for grant in (run, new)] == [["theirs"], ["ours"]]


async def test_batches_in_any_order_never_deadlock(store: MysqlStore, mysql_url: str) -> None:
    """Rows are locked in the order of the ids, whatever the order of the batch."""
    ids = [f"run {number}" for number in range(30)]
    wants = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in ids]
    grants = [grant for grant in await store.acquire(wants) if grant is not None]
    before = deadlocks(mysql_url)

    async def write(turn: int) -> None:
        order = grants if turn % 2 else grants[::-1]
        batch = [Entry(g.lease.id, g.lease.epoch, turn, delta(f"{turn}")) for g in order]
        await store.append(batch)
        await store.renew([grant.lease for grant in order[turn:]], LONG)
        await store.append([*batch, Entry("none", 1, 1, b"{}")])

    await asyncio.gather(*(write(turn) for turn in range(20)))
    loaded = await store.load("run 7")
    assert loaded is not None
    assert len(loaded["steps"]) == 20
    assert deadlocks(mysql_url) == before


def deadlocks(url: str) -> object:
    return query(url, "SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")


async def test_a_deadlock_is_tried_again(store: MysqlStore, other: Other) -> None:
    """When another program locks the rows in another order."""
    wants = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot())) for id in ("a", "b")]
    grants = [grant for grant in await store.acquire(wants) if grant is not None]
    # The transaction that has written less is the one that is given up: the store's.
    await other.run("INSERT INTO perdure_runs_inbox (run, name, payload, sent_at) VALUES " + MAIL)
    await other.run("SELECT * FROM perdure_runs WHERE id = 'b' FOR UPDATE")
    batch = [Entry(g.lease.id, g.lease.epoch, 1, delta("x")) for g in grants]
    task = await other.is_awaited(store.append(batch))
    await other.run("SELECT * FROM perdure_runs WHERE id = 'a' FOR UPDATE")
    await other.commit()
    assert await task == [Verdict.ACCEPTED] * 2


MAIL = ", ".join(["('none', 'x', '1', UTC_TIMESTAMP(6))"] * 50)


async def test_claims_and_everything_else_go_together(store: MysqlStore) -> None:
    """Many workers claim, write, wake and rest the same runs at once; each run is done once."""
    await store.enqueue([NewRun(f"{n:03}", "order", as_json(snapshot())) for n in range(60)])
    done: list[str] = []

    async def work(owner: str) -> None:
        while len(done) < 60:
            for grant in await store.claim(owner, LONG, 4):
                lease = grant.lease
                await store.send(lease.id, "paid", b"1")
                await store.append([Entry(lease.id, lease.epoch, 1, delta("a"))])
                await store.renew([lease], LONG)
                end = Entry(lease.id, lease.epoch, 2, as_json(snapshot()), rest=Rest("completed"))
                assert await store.append([end]) == [Verdict.ACCEPTED]
                done.append(lease.id)

    await asyncio.wait_for(asyncio.gather(*(work(f"{n}") for n in range(8))), 30)
    assert sorted(done) == [f"{n:03}" for n in range(60)]
