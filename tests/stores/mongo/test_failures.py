"""What the MongoDB store does when the server, the connection, the rights or the driver fail."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from pymongo import AsyncMongoClient, MongoClient

from perdure.clock import SystemClock
from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import open_store
from perdure.stores.mongo import MongoReplicaSetStore, MongoStore, mongo
from perdure.stores.mongo import leases as _mongo_leases
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mongo import MongoStandalone
from tests.servers.process import Server
from tests.servers.proxy import TcpProxy
from tests.stores.mongo.places import Place, ignore_driver_leaks, no_garbage_left, place_on

__all__ = ["no_garbage_left"]

pytestmark = ignore_driver_leaks

HOUR = timedelta(hours=1)
RUNS = 200


@pytest.fixture(scope="module")
def place(mongo_standalone: Server) -> Iterator[Place]:
    with place_on(mongo_standalone) as place:
        yield place


@pytest.fixture
async def store(place: Place) -> AsyncIterator[MongoStore]:
    async with mongo(place.url) as store:
        yield store
    place.clear()


def want(id: str = "run", owner: str = "ana", ttl: timedelta = HOUR) -> LeaseRequest:
    return LeaseRequest(id, owner, ttl, create=as_json(snapshot()))


async def lease(store: MongoStore, *ids: str) -> list[Grant]:
    grants = await store.acquire([want(id) for id in ids or ("run",)])
    return [grant for grant in grants if grant is not None]


def step(grant: Grant, n: int) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


async def steps(store: MongoStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


async def appending(store: MongoStore, grant: Grant, done: asyncio.Event) -> int:
    """Append one entry after another as the committer would, and give how many were accepted."""
    n = 0
    while not done.is_set():
        try:
            (verdict,) = await store.append([step(grant, n + 1)])
        except StoreUnavailable:
            await asyncio.sleep(0.05)
            continue
        assert verdict is Verdict.ACCEPTED
        n += 1
    return n


@pytest.mark.parametrize("kind", ["mongo_server", "mongo_standalone"])
async def test_nothing_acknowledged_is_lost_when_the_server_dies(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Killed and started again under 200 appending runs, it has every entry that was accepted; the
    store finds it again by itself."""
    server: Server = request.getfixturevalue(kind)
    with place_on(server) as place:
        async with mongo(place.url) as store:
            grants = await lease(store, *(f"{n}" for n in range(RUNS)))
            done = asyncio.Event()
            works = [asyncio.create_task(appending(store, grant, done)) for grant in grants]
            await asyncio.sleep(1)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.ensure)
            await asyncio.sleep(1)
            done.set()
            accepted = await asyncio.gather(*works)
            assert sum(accepted) > RUNS
            for grant, count in zip(grants, accepted, strict=True):
                wanted = [f"{n + 1}" for n in range(count)]
                assert await steps(store, grant.lease.id) == wanted


def through(proxy: TcpProxy) -> str:
    """Give a URL through the proxy, on which the driver itself sends nothing twice."""
    parts = urlsplit(proxy.url)
    return parts._replace(query="directConnection=true&retryWrites=false").geturl()


@pytest.mark.parametrize("kind", ["mongo_server", "mongo_standalone"])
async def test_an_entry_whose_answer_was_lost_is_there_once(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """A connection cut between commit and answer neither loses nor doubles an entry."""
    with place_on(request.getfixturevalue(kind)) as place:
        async with TcpProxy.before(place.url) as proxy, mongo(through(proxy)) as store:
            (grant,) = await lease(store)
            await store.append([step(grant, 1)])
            for n in range(2, 6):
                proxy.drop_next_reply(to=b"\x02insert\x00")
                assert await store.append([step(grant, n)]) == [Verdict.ACCEPTED]
            assert proxy.dropped == 4
            journal = place.database["perdure_runs_journal"]
            assert [entry["n"] for entry in journal.find().sort("_id")] == [1, 2, 3, 4, 5]


async def test_a_batch_whose_answer_was_lost_is_there_once(place: Place) -> None:
    """The same for a batch of entries and rests of many runs."""
    async with TcpProxy.before(place.url) as proxy, mongo(through(proxy)) as store:
        grants = await lease(store, *(f"{n}" for n in range(20)))
        whole = as_json(snapshot("end", status="completed"))
        batch = [
            step(grant, 1)
            if number % 2
            else Entry(grant.lease.id, grant.lease.epoch, 1, whole, rest=Rest("completed"))
            for number, grant in enumerate(grants)
        ]
        proxy.drop_next_reply(to=b"\x02update\x00")
        assert set(await store.append(batch)) == {Verdict.ACCEPTED}
        assert proxy.dropped == 1
        for number, grant in enumerate(grants):
            assert await steps(store, grant.lease.id) == (["1"] if number % 2 else ["end"])
    place.clear()


async def test_a_departure_whose_answer_was_lost_is_accepted(place: Place) -> None:
    """A run that should be gone and is gone: nobody else was meant."""
    async with TcpProxy.before(place.url) as proxy, mongo(through(proxy)) as store:
        (grant,) = await lease(store)
        delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
        proxy.drop_next_reply(to=b"\x02delete\x00")
        assert await store.append([step(grant, 1), delete]) == [Verdict.ACCEPTED] * 2
        assert proxy.dropped == 1
        assert await store.load("run") is None


async def test_a_lease_whose_answer_was_lost_can_be_asked_for_again(place: Place) -> None:
    """The owner that asks again gets it, and what it appends counts."""
    async with TcpProxy.before(place.url) as proxy, mongo(through(proxy)) as store:
        await store.save("run", snapshot())
        proxy.drop_next_reply(to=b"findAndModify")
        with pytest.raises(StoreUnavailable):
            await lease(store)
        (grant,) = await lease(store)
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
    place.clear()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_new_run_whose_answer_was_lost_is_created_once(place: Place, count: int) -> None:
    """It is known again by the call that created it, also where only a new run would do."""
    async with TcpProxy.before(place.url) as proxy, mongo(through(proxy)) as store:
        await store.load("run")
        proxy.drop_next_reply(to=b"\x02insert\x00")
        first = as_json(snapshot())
        wants = [
            LeaseRequest(f"{n}", "ana", HOUR, create=first, existing=False) for n in range(count)
        ]
        grants = await store.acquire(wants)
        assert proxy.dropped == 1
        assert [grant.created for grant in grants if grant is not None] == [True] * count
        entries = [step(grant, 1) for grant in grants if grant is not None]
        assert await store.append(entries) == [Verdict.ACCEPTED] * count
        assert await store.acquire(wants) == [None] * count
    place.clear()


async def test_a_process_that_was_stopped_asks_for_a_new_epoch(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first one may be older than one that the id had in an earlier life."""
    monkeypatch.setattr(_mongo_leases, "_MAX_CREATION_TIME", -HOUR)
    epochs = []
    for _ in range(2):
        (grant,) = await lease(store)
        epochs.append(grant.lease.epoch)
        assert grant.created
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
        await store.delete("run")
    assert epochs[0] < epochs[1]


async def test_a_cancelled_append_leaves_no_doubt(store: MongoStore) -> None:
    """Whether it arrived is looked up before the next entry is written."""
    (grant,) = await lease(store)
    cancelled = 0
    for n in range(1, 10):
        work = asyncio.create_task(store.append([step(grant, n)]))
        await asyncio.sleep(0.0002 * (n - 1))
        work.cancel()
        await asyncio.wait([work])
        cancelled += work.cancelled()
        # The driver gives the connection up; the next one shall be there before it is needed.
        await store.load("run")
    assert cancelled
    assert await store.append([step(grant, 10)]) == [Verdict.ACCEPTED]
    assert await store.append([step(grant, n) for n in range(1, 10)]) == [Verdict.ACCEPTED] * 9
    assert await steps(store) == [f"{n}" for n in range(1, 11)]


async def test_a_server_that_is_away_is_named() -> None:
    """What, where, and how long it was tried."""
    options = {"serverSelectionTimeoutMS": 50}
    async with mongo("mongodb://u:secret@127.0.0.1:1/db", client_options=options) as store:
        with pytest.raises(StoreUnavailable) as raised:
            await store.load("run")
    assert "MongoDB at 127.0.0.1:1 cannot be reached, tried for 0." in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_failed_set_up_is_tried_again(place: Place) -> None:
    """A store that was used too early works as soon as the server does."""
    async with TcpProxy.before(place.url) as proxy:
        proxy.refuse()
        options = {"serverSelectionTimeoutMS": 50}
        async with mongo(through(proxy), client_options=options) as store:
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await store.save("run", snapshot("a"))
            proxy.accept()
            await asyncio.sleep(0.6)
            await store.save("run", snapshot("a"))
            assert await steps(store) == ["a"]
    place.clear()


async def test_fifty_first_uses_at_once(mongo_url: str) -> None:
    """Stores of many processes that begin together make the same collections and indexes once."""
    stores = [mongo(mongo_url) for _ in range(50)]
    await asyncio.gather(
        *(store.save(f"{n}", snapshot("a")) for n, store in enumerate(stores)),
        *(store.enqueue([NewRun("new", "w", as_json(snapshot()))]) for store in stores),
    )
    assert len(await stores[0].list()) == 51
    await asyncio.gather(*(store.close() for store in stores))
    with MongoClient[Any](mongo_url) as client:
        database = client.get_default_database()
        names = {"perdure_runs", "perdure_runs_journal", "perdure_runs_inbox"}
        assert set(database.list_collection_names()) == names
        assert len(database["perdure_runs"].index_information()) == 4


async def test_two_machines_an_hour_apart_share_leases(place: Place) -> None:
    """Leases, sleeps and what is due live by the server's clock alone."""
    now = SystemClock().now()
    slow, fast = TestClock(now - HOUR), TestClock(now + HOUR)
    async with mongo(place.url, clock=slow) as early, mongo(place.url, clock=fast) as late:
        short = timedelta(milliseconds=150)
        for first, second in ((early, late), (late, early)):
            id = f"run of {'early' if first is early else 'late'}"
            (grant,) = await first.acquire([want(id, "ana", short)])
            assert grant is not None
            assert abs(grant.now - now) < timedelta(minutes=1)
            assert await second.acquire([want(id, "bob")]) == [None]
            assert await second.claim("bob", HOUR, 10) == []
            await asyncio.sleep(0.2)
            (taken,) = await second.claim("bob", HOUR, 10)
            assert taken.lease.id == id
            assert await first.append([step(grant, 1)]) == [Verdict.FENCED]
            await first.enqueue([NewRun(f"new {id}", "w", as_json(snapshot()))])
            assert len(await second.claim("bob", HOUR, 10)) == 1
            assert len(await lease(first, f"1 {id}", f"2 {id}")) == 2
    place.clear()


async def test_a_client_that_was_passed_in_stays_open(place: Place) -> None:
    """Whoever opens, closes; the URL still names the database."""
    client = AsyncMongoClient[Any](place.url)
    async with mongo(place.url, client=client) as store:
        await store.save("run", snapshot("a"))
    assert await client.get_default_database()["perdure_runs"].count_documents({}) == 1
    with pytest.raises(StoreClosed):
        await store.load("run")
    async with mongo(place.url, client=client) as store:
        await client.close()
        with pytest.raises(StoreClosed, match="client"):
            await store.load("run")
    place.clear()


async def test_the_database_is_the_given_one_or_the_urls_or_ours(place: Place) -> None:
    """An option goes before the URL, and the URL before the default."""
    server = urlsplit(place.url)._replace(path="/").geturl()
    for url, database, wanted in (
        (place.url, None, place.database.name),
        (place.url, f"{place.database.name}_2", f"{place.database.name}_2"),
        (server, None, "perdure"),
    ):
        async with mongo(url, database=database, collection="named") as store:
            await store.save("run", snapshot("a"))
        found = place.client[wanted]
        assert found["named"].count_documents({}) == 1
        for name in ("named", "named_journal", "named_inbox"):
            found[name].drop()
    place.client.drop_database(f"{place.database.name}_2")


@pytest.mark.parametrize(
    ("url", "replica_set"),
    [
        ("mongodb://h/db", False),
        ("mongodb://h/db?replicaSet=rs", True),
        ("mongodb://h/db?replicaset=rs", True),
        ("mongodb://u:p%2Fw@h1,h2/db", True),
        ("mongodb+srv://cluster.example.org/db", True),
    ],
)
def test_the_url_tells_what_the_server_can(url: str, replica_set: bool) -> None:
    """Transactions and hints are declared where the URL names a replica set, or the caller does."""
    for asked in (None, True, False):
        store = mongo(url, replica_set=asked)
        can = replica_set if asked is None else asked
        assert isinstance(store, MongoReplicaSetStore) is can
        assert (store.capabilities.transaction, store.capabilities.notify) == (can, can)


async def test_a_server_that_is_alone_says_so(place: Place) -> None:
    """What was declared and is not there is refused at first use, not in the midst of work."""
    async with mongo(place.url, replica_set=True) as store:
        with pytest.raises(StoreError, match="pass replica_set=False"):
            await store.load("run")


@pytest.mark.parametrize(
    "options",
    [
        {"collection": "a$b"},
        {"collection": "system.users"},
        {"collection": ""},
        {"collection": "x" * 101},
        {"database": "a.b"},
        {"database": "a b"},
        {"prefix": "\0"},
        {"durability": "some"},
    ],
)
def test_names_are_checked(options: dict[str, Any]) -> None:
    """An impossible name is refused when the store is made."""
    (parameter,) = options
    with pytest.raises(InvalidArgument, match=parameter):
        mongo("mongodb://localhost/db", **options)


def test_an_impossible_url_is_refused_without_its_password() -> None:
    """The driver says what is wrong with it."""
    with pytest.raises(InvalidArgument) as raised:
        mongo("mongodb://user:sec/ret@localhost/db")
    assert "sec" not in str(raised.value)
    assert "ret" not in str(raised.value)


async def test_a_url_opens_it(place: Place) -> None:
    """`open_store` knows MongoDB's URLs."""
    store = open_store(place.url, prefix="orders:")
    assert isinstance(store, MongoStore)
    await store.save("run", snapshot("a"))
    await store.close()
    assert place.database["perdure_runs"].find_one({"_id": "orders:run"})
    place.clear()


def test_a_missing_driver_is_named() -> None:
    """The message holds the command that installs it."""
    code = "import sys; sys.modules['pymongo'] = None; import perdure.stores.mongo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    wanted = "pymongo is not installed; run: pip install 'perdure[mongo]'"
    assert wanted in done.stderr


async def test_normal_durability_is_a_choice(place: Place) -> None:
    """The declaration says what it means."""
    async with mongo(place.url, durability="normal") as store:
        assert store.capabilities.survives == "process_crash"
        (grant,) = await lease(store)
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
    place.clear()


class Guarded(MongoStandalone):
    """A server that wants users to log in."""

    extra_flags = ("--auth", "--setParameter", "enableLocalhostAuthBypass=1")


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a server with an administrator, and users who may read and write, or read."""
    server = Guarded().start()
    with MongoClient[Any](server.url) as client:
        admin = {"pwd": "x", "roles": ["root"]}
        client.admin.command("createUser", "admin", **admin)
    address = server.url.removeprefix("mongodb://").rstrip("/")
    with MongoClient[Any](f"mongodb://admin:x@{address}/") as client:
        for user, roles in (("reader", ["read"]), ("writer", ["readWrite"])):
            client["db"].command("createUser", user, pwd="x", roles=roles)
    yield address
    server.close()


async def test_missing_rights_come_with_the_remedy(guarded: str) -> None:
    """Which statement an administrator has to run."""
    async with mongo(f"mongodb://reader:x@{guarded}/db") as store:
        with pytest.raises(StoreError, match=r"grantRolesToUser\(.*readWrite.*\"db\""):
            await store.save("run", snapshot("a"))


async def test_a_wrong_password_is_told_apart(guarded: str) -> None:
    """It is no outage: trying again would not help."""
    async with mongo(f"mongodb://writer:y@{guarded}/db") as store:
        with pytest.raises(StoreError, match="does not accept this user") as raised:
            await store.load("run")
    assert not isinstance(raised.value, StoreUnavailable)


async def test_who_may_only_use_what_is_there_can(guarded: str) -> None:
    """An administrator may have made the indexes; then the store does not need to."""
    async with mongo(f"mongodb://writer:x@{guarded}/db") as store:
        await store.save("run", snapshot("a"))
    async with mongo(f"mongodb://reader:x@{guarded}/db") as store:
        assert await steps(store) == ["a"]


async def test_a_store_belongs_to_one_loop_at_a_time(store: MongoStore) -> None:
    """Another loop is told, and what the first one has stays as it is."""
    await store.save("run", snapshot("a"))
    with pytest.raises(StoreError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, store.load("run"))
    assert await steps(store) == ["a"]


def test_stores_of_successive_loops(place: Place) -> None:
    """A store may be used in one loop after another, as by `asyncio.run` in a script."""
    store = mongo(place.url)

    async def use(n: int) -> None:
        await store.save(f"{n}", snapshot("a"))
        client = store._backend._connection._client
        assert client is not None
        await client.close()

    for n in range(2):
        asyncio.run(use(n))
    assert place.database["perdure_runs"].count_documents({}) == 2
    place.clear()
