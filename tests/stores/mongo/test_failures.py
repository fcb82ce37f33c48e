"""The MongoDB store when the server, the connection, permissions or the driver fail."""

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
from perdure.stores.mongo import MongoReplicaSetStore, MongoStore, leases, mongo
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mongo import MongoStandalone
from tests.servers.process import Server
from tests.servers.proxy import TcpProxy
from tests.stores.mongo.databases import Sandbox, ignore_driver_leaks, no_garbage_left, sandbox_on

__all__ = ["no_garbage_left"]

pytestmark = ignore_driver_leaks

HOUR = timedelta(hours=1)
RUNS = 200


@pytest.fixture(scope="module")
def sandbox(mongo_standalone: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_standalone) as sandbox:
        yield sandbox


@pytest.fixture
async def store(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    async with mongo(sandbox.url) as store:
        yield store
    sandbox.clear()


def request(id: str = "run", owner: str = "ana", ttl: timedelta = HOUR) -> LeaseRequest:
    return LeaseRequest(id, owner, ttl, create=as_json(snapshot()))


async def lease(store: MongoStore, *ids: str) -> list[Grant]:
    grants = await store.acquire([request(id) for id in ids or ("run",)])
    return [grant for grant in grants if grant is not None]


def step(grant: Grant, n: int) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


async def steps(store: MongoStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


async def append_until(store: MongoStore, grant: Grant, done: asyncio.Event) -> int:
    """Append one entry after another, as the committer does; return how many were accepted."""
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
async def test_no_accepted_entry_is_lost_when_the_server_is_killed(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The store reconnects by itself, and every accepted entry is there."""
    server: Server = request.getfixturevalue(kind)
    with sandbox_on(server) as sandbox:
        async with mongo(sandbox.url) as store:
            grants = await lease(store, *(f"{n}" for n in range(RUNS)))
            done = asyncio.Event()
            tasks = [asyncio.create_task(append_until(store, grant, done)) for grant in grants]
            await asyncio.sleep(1)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.ensure)
            await asyncio.sleep(1)
            done.set()
            accepted = await asyncio.gather(*tasks)
            assert sum(accepted) > RUNS
            for grant, count in zip(grants, accepted, strict=True):
                expected = [f"{n + 1}" for n in range(count)]
                assert await steps(store, grant.lease.id) == expected


def through(proxy: TcpProxy) -> str:
    """Return a URL through the proxy with which the driver itself repeats nothing."""
    parts = urlsplit(proxy.url)
    return parts._replace(query="directConnection=true&retryWrites=false").geturl()


@pytest.mark.parametrize("kind", ["mongo_server", "mongo_standalone"])
async def test_an_entry_whose_reply_was_lost_is_written_once(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """A connection lost between commit and reply neither loses nor duplicates it."""
    with sandbox_on(request.getfixturevalue(kind)) as sandbox:
        async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
            (grant,) = await lease(store)
            await store.append([step(grant, 1)])
            for n in range(2, 6):
                proxy.drop_next_reply(to=b"\x02insert\x00")
                assert await store.append([step(grant, n)]) == [Verdict.ACCEPTED]
            assert proxy.dropped == 4
            journal = sandbox.database["perdure_runs_journal"]
            assert [entry["n"] for entry in journal.find().sort("_id")] == [1, 2, 3, 4, 5]


async def test_a_batch_whose_reply_was_lost_is_written_once(sandbox: Sandbox) -> None:
    """Also one of entries and rests of many runs."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
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
    sandbox.clear()


async def test_a_deletion_whose_reply_was_lost_is_accepted(sandbox: Sandbox) -> None:
    """The run should be deleted, and is."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        (grant,) = await lease(store)
        delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
        proxy.drop_next_reply(to=b"\x02delete\x00")
        assert await store.append([step(grant, 1), delete]) == [Verdict.ACCEPTED] * 2
        assert proxy.dropped == 1
        assert await store.load("run") is None


async def test_a_deletion_is_accepted_if_the_marks_on_messages_are_lost(sandbox: Sandbox) -> None:
    """The reply to the mark of one run's message is lost; another run of the batch is deleted."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        settled, deleted = await lease(store, "settled", "deleted")
        await store.send("settled", "paid", b"1")
        (message,) = await store.inbox("settled")
        whole = as_json(snapshot(status="completed"))
        epochs = settled.lease.epoch, deleted.lease.epoch
        batch = [
            Entry("settled", epochs[0], 1, whole, (message.id,), Rest("completed")),
            Entry("deleted", epochs[1], 1, b"", rest=Rest("completed", delete=True)),
        ]
        proxy.drop_next_reply(to=b"perdure_runs_inbox")
        assert await store.append(batch) == [Verdict.ACCEPTED] * 2
        assert proxy.dropped == 1
        assert await store.inbox("settled") == []
        assert await store.load("deleted") is None
    sandbox.clear()


async def test_a_lease_whose_reply_was_lost_can_be_requested_again(sandbox: Sandbox) -> None:
    """The same owner gets it, and can append."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        await store.save("run", snapshot())
        proxy.drop_next_reply(to=b"findAndModify")
        with pytest.raises(StoreUnavailable):
            await lease(store)
        (grant,) = await lease(store)
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
    sandbox.clear()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_new_run_whose_reply_was_lost_is_created_once(sandbox: Sandbox, count: int) -> None:
    """The call recognizes the run it created, also with `existing=False`."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        await store.load("run")
        proxy.drop_next_reply(to=b"\x02insert\x00")
        first = as_json(snapshot())
        requests = [
            LeaseRequest(f"{n}", "ana", HOUR, create=first, existing=False) for n in range(count)
        ]
        grants = await store.acquire(requests)
        assert proxy.dropped == 1
        assert [grant.created for grant in grants if grant is not None] == [True] * count
        entries = [step(grant, 1) for grant in grants if grant is not None]
        assert await store.append(entries) == [Verdict.ACCEPTED] * count
        assert await store.acquire(requests) == [None] * count
    sandbox.clear()


async def test_a_process_that_was_suspended_requests_a_new_epoch(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first one may be lower than one of an earlier run of the same id."""
    monkeypatch.setattr(leases, "_MAX_CREATION_TIME", -HOUR)
    epochs = []
    for _ in range(2):
        (grant,) = await lease(store)
        epochs.append(grant.lease.epoch)
        assert grant.created
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
        await store.delete("run")
    assert epochs[0] < epochs[1]


async def test_a_cancelled_append_is_looked_up(store: MongoStore) -> None:
    """Before the next entry is written, the store finds out whether it arrived."""
    (grant,) = await lease(store)
    cancelled = 0
    for n in range(1, 10):
        task = asyncio.create_task(store.append([step(grant, n)]))
        await asyncio.sleep(0.0002 * (n - 1))
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        # The driver dropped the connection: open the next one before it is needed.
        await store.load("run")
    assert cancelled
    assert await store.append([step(grant, 10)]) == [Verdict.ACCEPTED]
    assert await store.append([step(grant, n) for n in range(1, 10)]) == [Verdict.ACCEPTED] * 9
    assert await steps(store) == [f"{n}" for n in range(1, 11)]


async def test_an_unavailable_server_is_named() -> None:
    """With how long it was tried, and without the password."""
    options = {"serverSelectionTimeoutMS": 50}
    async with mongo("mongodb://u:secret@127.0.0.1:1/db", client_options=options) as store:
        with pytest.raises(StoreUnavailable) as raised:
            await store.load("run")
    assert "MongoDB at 127.0.0.1:1 cannot be reached, tried for 0." in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_failed_set_up_is_tried_again(sandbox: Sandbox) -> None:
    """A store that was used too early works as soon as the server does."""
    async with TcpProxy.before(sandbox.url) as proxy:
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
    sandbox.clear()


async def test_fifty_stores_can_be_opened_at_once(mongo_url: str) -> None:
    """They create the same collections and indexes once."""
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


async def test_machines_with_clocks_an_hour_apart_share_leases(sandbox: Sandbox) -> None:
    """Leases, sleeps and due runs depend on the server's clock alone."""
    now = SystemClock().now()
    slow, fast = TestClock(now - HOUR), TestClock(now + HOUR)
    async with mongo(sandbox.url, clock=slow) as early, mongo(sandbox.url, clock=fast) as late:
        short = timedelta(milliseconds=150)
        for first, second in ((early, late), (late, early)):
            id = f"run of {'early' if first is early else 'late'}"
            (grant,) = await first.acquire([request(id, "ana", short)])
            assert grant is not None
            assert abs(grant.now - now) < timedelta(minutes=1)
            assert await second.acquire([request(id, "bob")]) == [None]
            assert await second.claim("bob", HOUR, 10) == []
            await asyncio.sleep(0.2)
            (new,) = await second.claim("bob", HOUR, 10)
            assert new.lease.id == id
            assert await first.append([step(grant, 1)]) == [Verdict.FENCED]
            await first.enqueue([NewRun(f"new {id}", "w", as_json(snapshot()))])
            assert len(await second.claim("bob", HOUR, 10)) == 1
            assert len(await lease(first, f"1 {id}", f"2 {id}")) == 2
    sandbox.clear()


async def test_a_client_that_was_passed_in_stays_open(sandbox: Sandbox) -> None:
    """The URL still names the database."""
    client = AsyncMongoClient[Any](sandbox.url)
    async with mongo(sandbox.url, client=client) as store:
        await store.save("run", snapshot("a"))
    assert await client.get_default_database()["perdure_runs"].count_documents({}) == 1
    with pytest.raises(StoreClosed):
        await store.load("run")
    async with mongo(sandbox.url, client=client) as store:
        await client.close()
        with pytest.raises(StoreClosed, match="client"):
            await store.load("run")
    sandbox.clear()


async def test_the_database_is_an_option_or_in_the_url_or_the_default(sandbox: Sandbox) -> None:
    """In this order."""
    server = urlsplit(sandbox.url)._replace(path="/").geturl()
    for url, database, expected in (
        (sandbox.url, None, sandbox.database.name),
        (sandbox.url, f"{sandbox.database.name}_2", f"{sandbox.database.name}_2"),
        (server, None, "perdure"),
    ):
        async with mongo(url, database=database, collection="named") as store:
            await store.save("run", snapshot("a"))
        stored = sandbox.client[expected]
        assert stored["named"].count_documents({}) == 1
        for name in ("named", "named_journal", "named_inbox"):
            stored[name].drop()
    sandbox.client.drop_database(f"{sandbox.database.name}_2")


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
def test_the_url_decides_which_capabilities_are_declared(url: str, replica_set: bool) -> None:
    """Transactions and notifications, where it or the caller names a replica set."""
    for option in (None, True, False):
        store = mongo(url, replica_set=option)
        expected = replica_set if option is None else option
        assert isinstance(store, MongoReplicaSetStore) is expected
        assert (store.capabilities.transaction, store.capabilities.notify) == (expected,) * 2


async def test_a_standalone_server_is_refused_as_a_replica_set(sandbox: Sandbox) -> None:
    """At first use, and not when a transaction is needed."""
    async with mongo(sandbox.url, replica_set=True) as store:
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
def test_invalid_names_are_refused(options: dict[str, Any]) -> None:
    """When the store is created."""
    (parameter,) = options
    with pytest.raises(InvalidArgument, match=parameter):
        mongo("mongodb://localhost/db", **options)


def test_an_invalid_url_is_refused_without_showing_the_password() -> None:
    """Not even parts of it."""
    with pytest.raises(InvalidArgument) as raised:
        mongo("mongodb://user:sec/ret@localhost/db")
    assert "sec" not in str(raised.value)
    assert "ret" not in str(raised.value)


async def test_open_store_accepts_a_mongodb_url(sandbox: Sandbox) -> None:
    """With options."""
    store = open_store(sandbox.url, prefix="orders:")
    assert isinstance(store, MongoStore)
    await store.save("run", snapshot("a"))
    await store.close()
    assert sandbox.database["perdure_runs"].find_one({"_id": "orders:run"})
    sandbox.clear()


def test_a_missing_driver_is_named() -> None:
    """The error has the command that installs it."""
    code = "import sys; sys.modules['pymongo'] = None; import perdure.stores.mongo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pymongo is not installed; run: pip install 'perdure[mongo]'" in done.stderr


async def test_normal_durability_is_declared(sandbox: Sandbox) -> None:
    """As surviving a crash of the process, and no more."""
    async with mongo(sandbox.url, durability="normal") as store:
        assert store.capabilities.survives == "process_crash"
        (grant,) = await lease(store)
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
    sandbox.clear()


class Guarded(MongoStandalone):
    """A server that requires users to log in."""

    extra_flags = ("--auth", "--setParameter", "enableLocalhostAuthBypass=1")


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a server with an administrator, a user who may write and one who may read."""
    server = Guarded().start()
    with MongoClient[Any](server.url) as client:
        client.admin.command("createUser", "admin", pwd="x", roles=["root"])
    address = server.url.removeprefix("mongodb://").rstrip("/")
    with MongoClient[Any](f"mongodb://admin:x@{address}/") as client:
        for user, roles in (("reader", ["read"]), ("writer", ["readWrite"])):
            client["db"].command("createUser", user, pwd="x", roles=roles)
    yield address
    server.close()


async def test_a_missing_permission_is_named(guarded: str) -> None:
    """The error has the statement for the administrator."""
    async with mongo(f"mongodb://reader:x@{guarded}/db") as store:
        with pytest.raises(StoreError, match=r"grantRolesToUser\(.*readWrite.*\"db\""):
            await store.save("run", snapshot("a"))


async def test_a_wrong_password_is_not_unavailability(guarded: str) -> None:
    """Trying again would not help."""
    async with mongo(f"mongodb://writer:y@{guarded}/db") as store:
        with pytest.raises(StoreError, match="does not accept this user") as raised:
            await store.load("run")
    assert not isinstance(raised.value, StoreUnavailable)


async def test_existing_indexes_can_be_used_without_permission_to_create_them(guarded: str) -> None:
    """An administrator may have created them."""
    async with mongo(f"mongodb://writer:x@{guarded}/db") as store:
        await store.save("run", snapshot("a"))
    async with mongo(f"mongodb://reader:x@{guarded}/db") as store:
        assert await steps(store) == ["a"]


async def test_a_store_belongs_to_one_loop_at_a_time(store: MongoStore) -> None:
    """A second loop is refused, and the first is not disturbed."""
    await store.save("run", snapshot("a"))
    with pytest.raises(StoreError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, store.load("run"))
    assert await steps(store) == ["a"]


def test_a_store_can_be_used_in_successive_loops(sandbox: Sandbox) -> None:
    """As by `asyncio.run` in a script."""
    store = mongo(sandbox.url)

    async def use(n: int) -> None:
        await store.save(f"{n}", snapshot("a"))
        client = store._backend._connection._client
        assert client is not None
        await client.close()

    for n in range(2):
        asyncio.run(use(n))
    assert sandbox.database["perdure_runs"].count_documents({}) == 2
    sandbox.clear()
