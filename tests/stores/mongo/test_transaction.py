"""A user's writes and a step's entry commit together on a replica set, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from pymongo.errors import OperationFailure, PyMongoError

from perdure.errors import InvalidArgument, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores.mongo import MongoReplicaSetStore, MongoTransaction, mongo
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.servers.proxy import TcpProxy
from tests.stores.mongo.databases import Sandbox, ignore_driver_leaks, no_garbage_left, sandbox_on

__all__ = ["no_garbage_left"]

pytestmark = ignore_driver_leaks

HOUR = timedelta(hours=1)
ACCEPTED, FENCED = Verdict.ACCEPTED, Verdict.FENCED

Work = Callable[[MongoTransaction], Awaitable[Entry]]


@pytest.fixture(scope="module")
def sandbox(mongo_server: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_server) as sandbox:
        yield sandbox


@pytest.fixture
async def store(sandbox: Sandbox) -> AsyncIterator[MongoReplicaSetStore]:
    async with opened(sandbox.url) as store:
        yield store
    sandbox.clear()


def opened(url: str) -> MongoReplicaSetStore:
    store = mongo(url, replica_set=True)
    assert isinstance(store, MongoReplicaSetStore)
    return store


async def lease(
    store: MongoReplicaSetStore,
    owner: str = "ana",
    ttl: timedelta = HOUR,
    instead_of: str | None = None,
) -> Grant | None:
    first = as_json(snapshot())
    (grant,) = await store.acquire(
        [LeaseRequest("run", owner, ttl, create=first, instead_of=instead_of)]
    )
    return grant if isinstance(grant, Grant) else None


async def first_lease(store: MongoReplicaSetStore, ttl: timedelta = HOUR) -> Grant:
    grant = await lease(store, ttl=ttl)
    assert grant is not None
    return grant


def step(grant: Grant, n: int) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot(f"{n}")))


def paying(grant: Grant, n: int, *, meanwhile: Awaitable[object] | None = None) -> Work:
    """Return work that moves money, and awaits `meanwhile` before it ends."""

    async def work(transaction: MongoTransaction) -> Entry:
        accounts, session = transaction.database["accounts"], transaction.session
        for account, amount in (("from", -5), ("to", 5)):
            change = {"$inc": {"balance": amount}}
            await accounts.update_one({"_id": account}, change, upsert=True, session=session)
        if meanwhile is not None:
            await meanwhile
        return step(grant, n)

    return work


def balances(sandbox: Sandbox) -> list[int]:
    accounts = sandbox.database["accounts"].find().sort("_id")
    return [account["balance"] for account in accounts]


async def steps(store: MongoReplicaSetStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


async def test_money_moves_once_per_step(store: MongoReplicaSetStore, sandbox: Sandbox) -> None:
    """Between plain entries, and when a step is sent again."""
    grant = await first_lease(store)
    epoch = grant.lease.epoch
    await store.append([step(grant, 1)])
    for n in (2, 3, 3):
        assert await store.transact("run", epoch, paying(grant, n)) is ACCEPTED
    await store.append([step(grant, 4)])
    assert balances(sandbox) == [-10, 10]
    assert await steps(store) == ["1", "2", "3", "4"]


async def test_other_steps_of_the_run_are_recorded_in_the_meantime(
    store: MongoReplicaSetStore, sandbox: Sandbox
) -> None:
    """A transaction fills its slot at the end, after those of faster steps."""
    grant = await first_lease(store)
    work = paying(grant, 2, meanwhile=store.append([step(grant, 1), step(grant, 3)]))
    assert await store.transact("run", grant.lease.epoch, work) is ACCEPTED
    assert await store.append([step(grant, 4)]) == [ACCEPTED]
    assert await steps(store) == ["1", "2", "3", "4"]


async def test_the_lease_can_be_renewed_in_the_meantime(
    store: MongoReplicaSetStore, sandbox: Sandbox
) -> None:
    """Renewal and transaction do not conflict."""
    grant = await first_lease(store)
    work = paying(grant, 1, meanwhile=store.renew([grant.lease], HOUR))
    assert await store.transact("run", grant.lease.epoch, work) is ACCEPTED
    assert balances(sandbox) == [-5, 5]


@pytest.mark.parametrize("instead_of", [None, "ana"])
async def test_a_takeover_in_the_meantime_rolls_back(
    store: MongoReplicaSetStore, sandbox: Sandbox, instead_of: str | None
) -> None:
    """An owner that lost its lease while it worked writes nothing."""
    grant = await first_lease(store, HOUR if instead_of else timedelta(milliseconds=1))
    await asyncio.sleep(0.02)
    work = paying(grant, 1, meanwhile=lease(store, "bob", instead_of=instead_of))
    assert await store.transact("run", grant.lease.epoch, work) is FENCED
    assert balances(sandbox) == []
    assert await steps(store) == []


@pytest.mark.parametrize("n", [1, 3])
async def test_a_rest_in_the_meantime_rolls_back(
    store: MongoReplicaSetStore, sandbox: Sandbox, n: int
) -> None:
    """It closes the epoch for the user's writes too, whatever number their entry has."""
    grant = await first_lease(store)
    whole = as_json(snapshot(status="suspended"))
    rest = Entry("run", grant.lease.epoch, 2, whole, rest=Rest("suspended"))
    work = paying(grant, n, meanwhile=store.append([rest]))
    assert await store.transact("run", grant.lease.epoch, work) is FENCED
    assert balances(sandbox) == []
    assert await steps(store) == []


@pytest.mark.parametrize("instead_of", [None, "ana"])
async def test_a_takeover_and_a_commit_exclude_each_other(
    store: MongoReplicaSetStore, sandbox: Sandbox, instead_of: str | None
) -> None:
    """Either the new owner sees the step and the money has moved, or neither."""
    async with opened(sandbox.url) as another:
        for _ in range(20):
            grant = await first_lease(store, HOUR if instead_of else timedelta(milliseconds=1))
            await asyncio.sleep(0.01)
            verdict, grant_of_bob = await asyncio.gather(
                store.transact("run", grant.lease.epoch, paying(grant, 1)),
                lease(another, "bob", instead_of=instead_of),
            )
            assert grant_of_bob is not None
            recorded = list(grant_of_bob.snapshot["steps"])
            moved = [-5, 5] if verdict is ACCEPTED else []
            assert (recorded, balances(sandbox)) == (["1"] if moved else [], moved)
            sandbox.clear()


async def test_a_commit_whose_reply_was_lost_is_recognized(sandbox: Sandbox) -> None:
    """Everything was written, once."""
    async with TcpProxy.before(sandbox.url) as proxy:
        url = urlsplit(proxy.url)._replace(query="directConnection=true").geturl()
        async with opened(url) as store:
            grant = await first_lease(store)
            for n in (1, 2):
                proxy.drop_next_reply(to=b"commitTransaction")
                assert await store.transact("run", grant.lease.epoch, paying(grant, n)) is ACCEPTED
            assert proxy.dropped == 2
            assert await store.append([step(grant, 3)]) == [ACCEPTED]
            assert await steps(store) == ["1", "2", "3"]
    assert balances(sandbox) == [-10, 10]
    sandbox.clear()


async def test_a_commit_that_was_never_sent_leaves_nothing(sandbox: Sandbox) -> None:
    """The server was unavailable when the work ended: the step can run again."""
    async with TcpProxy.before(sandbox.url) as proxy:
        query = "directConnection=true&serverSelectionTimeoutMS=100"
        url = urlsplit(proxy.url)._replace(query=query).geturl()
        async with opened(url) as store:
            grant = await first_lease(store)

            async def cut() -> None:
                proxy.refuse()

            with pytest.raises(StoreUnavailable):
                await store.transact("run", grant.lease.epoch, paying(grant, 1, meanwhile=cut()))
            proxy.accept()
            # Otherwise the server would wait a minute before it rolls the transaction back.
            sandbox.client.admin.command("killAllSessions", [])
            await asyncio.sleep(0.6)
            assert await steps(store) == []
            assert await store.transact("run", grant.lease.epoch, paying(grant, 1)) is ACCEPTED
    assert balances(sandbox) == [-5, 5]
    sandbox.clear()


async def test_a_connection_lost_by_the_work_is_unavailability(sandbox: Sandbox) -> None:
    """Whatever error the work makes of it: the step did not fail, and can be tried again."""
    async with TcpProxy.before(sandbox.url) as proxy:
        query = "directConnection=true&serverSelectionTimeoutMS=100"
        url = urlsplit(proxy.url)._replace(query=query).geturl()
        async with opened(url) as store:
            grant = await first_lease(store)

            async def work(transaction: MongoTransaction) -> Entry:
                proxy.refuse()
                accounts = transaction.database["accounts"]
                try:
                    await accounts.insert_one({"_id": "a"}, session=transaction.session)
                except PyMongoError as error:
                    raise RuntimeError("no money today") from error
                return step(grant, 1)

            with pytest.raises(StoreUnavailable) as caught:
                await store.transact("run", grant.lease.epoch, work)
            assert isinstance(caught.value.__cause__, RuntimeError)
            proxy.accept()
    sandbox.clear()


async def test_a_conflict_of_the_users_own_writes_is_raised_unchanged(
    store: MongoReplicaSetStore, sandbox: Sandbox
) -> None:
    """Of two transactions on one account, the second fails with the driver's error."""
    grant = await first_lease(store)
    sandbox.database["accounts"].insert_one({"_id": "from", "balance": 0})

    async def elsewhere() -> None:
        async with opened(sandbox.url) as another:
            (other,) = await another.acquire(
                [LeaseRequest("2", "bob", HOUR, create=as_json(snapshot()))]
            )
            assert isinstance(other, Grant)
            with pytest.raises(OperationFailure, match="WriteConflict"):
                await another.transact("2", other.lease.epoch, paying(other, 1))

    work = paying(grant, 1, meanwhile=elsewhere())
    assert await store.transact("run", grant.lease.epoch, work) is ACCEPTED
    assert balances(sandbox) == [-5, 5]


async def test_an_entry_of_another_run_is_refused(
    store: MongoReplicaSetStore, sandbox: Sandbox
) -> None:
    """The work must return an entry of the run that the transaction is for."""
    grant = await first_lease(store)

    async def work(transaction: MongoTransaction) -> Entry:
        return Entry("other", grant.lease.epoch, 1, as_json(snapshot("a")))

    with pytest.raises(InvalidArgument, match="run 'run'"):
        await store.transact("run", grant.lease.epoch, work)


async def test_notifications_are_sent_for_due_runs_only(store: MongoReplicaSetStore) -> None:
    """One at the start, one for each run that became due; none for leases and sleeps."""
    received = 0

    async def listen() -> None:
        nonlocal received
        async for _ in store.notifications():
            received += 1

    listening = asyncio.create_task(listen())
    await until(lambda: received == 1)
    grant = await first_lease(store)
    await store.renew([grant.lease], HOUR)
    await store.enqueue([NewRun("later", "w", as_json(snapshot()), grant.now + HOUR)])
    await store.release([grant.lease], wake_at=grant.now + HOUR)
    await store.enqueue([NewRun("now", "w", as_json(snapshot()))])
    await until(lambda: received > 1)
    assert received <= 3
    listening.cancel()
    await asyncio.wait([listening])


async def test_notifications_end_when_the_store_is_closed(sandbox: Sandbox) -> None:
    """Without an error, even while a caller waits for the next."""
    store = opened(sandbox.url)
    received = asyncio.Event()

    async def listen() -> None:
        async for _ in store.notifications():
            received.set()

    listening = asyncio.create_task(listen())
    await received.wait()
    await store.close()
    await listening


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not become true within five seconds")
