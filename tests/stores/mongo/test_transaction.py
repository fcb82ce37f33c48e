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
from tests.stores.mongo.places import Place, ignore_driver_leaks, no_garbage_left, place_on

__all__ = ["no_garbage_left"]

pytestmark = ignore_driver_leaks

HOUR = timedelta(hours=1)
ACCEPTED, FENCED = Verdict.ACCEPTED, Verdict.FENCED

Work = Callable[[MongoTransaction], Awaitable[Entry]]


@pytest.fixture(scope="module")
def place(mongo_server: Server) -> Iterator[Place]:
    with place_on(mongo_server) as place:
        yield place


@pytest.fixture
async def store(place: Place) -> AsyncIterator[MongoReplicaSetStore]:
    async with opened(place.url) as store:
        yield store
    place.clear()


def opened(url: str) -> MongoReplicaSetStore:
    store = mongo(url, replica_set=True)
    assert isinstance(store, MongoReplicaSetStore)
    return store


async def lease(
    store: MongoReplicaSetStore, owner: str = "ana", ttl: timedelta = HOUR
) -> Grant | None:
    (grant,) = await store.acquire([LeaseRequest("run", owner, ttl, create=as_json(snapshot()))])
    return grant


async def first_lease(store: MongoReplicaSetStore, ttl: timedelta = HOUR) -> Grant:
    grant = await lease(store, ttl=ttl)
    assert grant is not None
    return grant


def step(grant: Grant, n: int) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot(f"{n}")))


def paying(grant: Grant, n: int, *, meanwhile: Awaitable[object] | None = None) -> Work:
    """Give work that moves money and lets something else happen before it ends."""

    async def work(transaction: MongoTransaction) -> Entry:
        accounts, session = transaction.database["accounts"], transaction.session
        for account, amount in (("from", -5), ("to", 5)):
            change = {"$inc": {"balance": amount}}
            await accounts.update_one({"_id": account}, change, upsert=True, session=session)
        if meanwhile is not None:
            await meanwhile
        return step(grant, n)

    return work


def balances(place: Place) -> list[int]:
    accounts = place.database["accounts"].find().sort("_id")
    return [account["balance"] for account in accounts]


async def steps(store: MongoReplicaSetStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


async def test_money_moves_once_per_step(store: MongoReplicaSetStore, place: Place) -> None:
    """Between plain entries, and when a step is sent again."""
    grant = await first_lease(store)
    epoch = grant.lease.epoch
    await store.append([step(grant, 1)])
    for n in (2, 3, 3):
        assert await store.transact("run", epoch, paying(grant, n)) is ACCEPTED
    await store.append([step(grant, 4)])
    assert balances(place) == [-10, 10]
    assert await steps(store) == ["1", "2", "3", "4"]


async def test_other_steps_of_the_run_go_on_meanwhile(
    store: MongoReplicaSetStore, place: Place
) -> None:
    """A transaction takes its slot at the end: a sibling that is quicker comes before it."""
    grant = await first_lease(store)
    work = paying(grant, 2, meanwhile=store.append([step(grant, 1), step(grant, 3)]))
    assert await store.transact("run", grant.lease.epoch, work) is ACCEPTED
    assert await store.append([step(grant, 4)]) == [ACCEPTED]
    assert await steps(store) == ["1", "2", "3", "4"]


async def test_the_lease_is_renewed_meanwhile(store: MongoReplicaSetStore, place: Place) -> None:
    """However long the work takes: renewal and transaction do not wait for each other."""
    grant = await first_lease(store)
    work = paying(grant, 1, meanwhile=store.renew([grant.lease], HOUR))
    assert await store.transact("run", grant.lease.epoch, work) is ACCEPTED
    assert balances(place) == [-5, 5]


async def test_a_takeover_meanwhile_rolls_back(store: MongoReplicaSetStore, place: Place) -> None:
    """Who lost its lease while it worked writes nothing."""
    grant = await first_lease(store, timedelta(milliseconds=1))
    await asyncio.sleep(0.02)
    work = paying(grant, 1, meanwhile=lease(store, "bob"))
    assert await store.transact("run", grant.lease.epoch, work) is FENCED
    assert balances(place) == []
    assert await steps(store) == []


@pytest.mark.parametrize("n", [1, 3])
async def test_a_rest_in_the_meantime_rolls_back(
    store: MongoReplicaSetStore, place: Place, n: int
) -> None:
    """It closes the epoch for the user's writes too, whatever number their entry has."""
    grant = await first_lease(store)
    whole = as_json(snapshot(status="suspended"))
    rest = Entry("run", grant.lease.epoch, 2, whole, rest=Rest("suspended"))
    work = paying(grant, n, meanwhile=store.append([rest]))
    assert await store.transact("run", grant.lease.epoch, work) is FENCED
    assert balances(place) == []
    assert await steps(store) == []


async def test_a_takeover_and_a_commit_exclude_each_other(
    store: MongoReplicaSetStore, place: Place
) -> None:
    """Either the new owner sees the step and the money has moved, or neither."""
    async with opened(place.url) as another:
        for _ in range(20):
            grant = await first_lease(store, timedelta(milliseconds=1))
            await asyncio.sleep(0.01)
            verdict, taken = await asyncio.gather(
                store.transact("run", grant.lease.epoch, paying(grant, 1)), lease(another, "bob")
            )
            assert taken is not None
            seen = list(taken.snapshot["steps"])
            moved = [-5, 5] if verdict is ACCEPTED else []
            assert (seen, balances(place)) == (["1"] if moved else [], moved)
            place.clear()


async def test_a_commit_whose_answer_was_lost_is_known(place: Place) -> None:
    """The connection is cut between commit and answer: all of it is there, once."""
    async with TcpProxy.before(place.url) as proxy:
        url = urlsplit(proxy.url)._replace(query="directConnection=true").geturl()
        async with opened(url) as store:
            grant = await first_lease(store)
            for n in (1, 2):
                proxy.drop_next_reply(to=b"commitTransaction")
                assert await store.transact("run", grant.lease.epoch, paying(grant, n)) is ACCEPTED
            assert proxy.dropped == 2
            assert await store.append([step(grant, 3)]) == [ACCEPTED]
            assert await steps(store) == ["1", "2", "3"]
    assert balances(place) == [-10, 10]
    place.clear()


async def test_a_commit_that_never_came_leaves_nothing(place: Place) -> None:
    """The server was gone when the work ended: the step is free to run again."""
    async with TcpProxy.before(place.url) as proxy:
        query = "directConnection=true&serverSelectionTimeoutMS=100"
        url = urlsplit(proxy.url)._replace(query=query).geturl()
        async with opened(url) as store:
            grant = await first_lease(store)

            async def cut() -> None:
                proxy.refuse()

            with pytest.raises(StoreUnavailable):
                await store.transact("run", grant.lease.epoch, paying(grant, 1, meanwhile=cut()))
            proxy.accept()
            # By itself the server waits a minute before it rolls such a transaction back.
            place.client.admin.command("killAllSessions", [])
            await asyncio.sleep(0.6)
            assert await steps(store) == []
            assert await store.transact("run", grant.lease.epoch, paying(grant, 1)) is ACCEPTED
    assert balances(place) == [-5, 5]
    place.clear()


async def test_a_connection_that_the_work_lost_is_the_stores_loss(place: Place) -> None:
    """Whatever the work makes of it: the step has not failed, and may be tried again."""
    async with TcpProxy.before(place.url) as proxy:
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
    place.clear()


async def test_the_users_own_conflict_comes_out_as_it_is(
    store: MongoReplicaSetStore, place: Place
) -> None:
    """Two transactions on one account: the second fails with the driver's error, and may retry."""
    grant = await first_lease(store)
    place.database["accounts"].insert_one({"_id": "from", "balance": 0})

    async def elsewhere() -> None:
        async with opened(place.url) as another:
            other = await another.acquire(
                [LeaseRequest("2", "bob", HOUR, create=as_json(snapshot()))]
            )
            assert other[0] is not None
            epoch = other[0].lease.epoch
            with pytest.raises(OperationFailure, match="WriteConflict"):
                await another.transact("2", epoch, paying(other[0], 1))

    work = paying(grant, 1, meanwhile=elsewhere())
    assert await store.transact("run", grant.lease.epoch, work) is ACCEPTED
    assert balances(place) == [-5, 5]


async def test_an_entry_of_another_run_is_refused(
    store: MongoReplicaSetStore, place: Place
) -> None:
    """The entry is the one that the transaction was opened for."""
    grant = await first_lease(store)

    async def work(transaction: MongoTransaction) -> Entry:
        return Entry("other", grant.lease.epoch, 1, as_json(snapshot("a")))

    with pytest.raises(InvalidArgument, match="run 'run'"):
        await store.transact("run", grant.lease.epoch, work)


async def test_hints_tell_of_what_is_due_and_nothing_else(store: MongoReplicaSetStore) -> None:
    """One at the beginning, one for each run that became due; none for leases and sleeps."""
    heard = 0

    async def listen() -> None:
        nonlocal heard
        async for _ in store.notifications():
            heard += 1

    listening = asyncio.create_task(listen())
    await until(lambda: heard == 1)
    grant = await first_lease(store)
    await store.renew([grant.lease], HOUR)
    await store.enqueue([NewRun("later", "w", as_json(snapshot()), grant.now + HOUR)])
    await store.release([grant.lease], wake_at=grant.now + HOUR)
    await store.enqueue([NewRun("now", "w", as_json(snapshot()))])
    await until(lambda: heard > 1)
    # A run that is due at once is inserted, and then gets the server's time.
    assert heard <= 3
    listening.cancel()
    await asyncio.wait([listening])


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come to pass within five seconds")
