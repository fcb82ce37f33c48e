"""What is special about MongoDB: messages of deleted runs, indexes, replica sets, permissions.

What all stores on servers have in common is tested in `tests/stores/test_server_failures.py`.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from pymongo import AsyncMongoClient, MongoClient

from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Receipt,
    Refusal,
    Rest,
    Verdict,
)
from perdure.stores import open_store
from perdure.stores.mongo import MongoReplicaSetStore, MongoStore, leases, mongo
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mongo import MongoStandalone
from tests.servers.process import Server
from tests.servers.proxy import TcpProxy
from tests.stores.mongo.databases import Sandbox, ignore_driver_leaks, no_garbage_left, sandbox_on

__all__ = ["no_garbage_left"]

pytestmark = ignore_driver_leaks

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def sandbox(mongo_standalone: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_standalone) as sandbox:
        yield sandbox


@pytest.fixture
async def store(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    async with mongo(sandbox.url) as store:
        yield store
    sandbox.clear()


async def lease(store: MongoStore, *ids: str) -> list[Grant]:
    create = as_json(snapshot())
    requests = [LeaseRequest(id, "ana", HOUR, create=create) for id in ids or ("run",)]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def step(grant: Grant, n: int) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


async def steps(store: MongoStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


def through(proxy: TcpProxy) -> str:
    """Return a URL through the proxy with which the driver itself repeats nothing."""
    parts = urlsplit(proxy.url)
    return parts._replace(query="directConnection=true&retryWrites=false").geturl()


async def test_a_deletion_is_accepted_if_the_marks_on_messages_are_lost(sandbox: Sandbox) -> None:
    """The reply to the mark of one run's message is lost; another run of the batch is deleted."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        settled, deleted = await lease(store, "settled", "deleted")
        await send_one(store, "settled", "paid", b"1", dedup_id="x")
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


async def test_a_message_whose_count_is_lost_is_sent_once(sandbox: Sandbox) -> None:
    """The reply to the second write of `send` is lost: it is counted again, and wakes the run."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        (grant,) = await lease(store)
        waiting = Rest("waiting", None, ("paid",))
        entry = Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=waiting)
        await store.append([entry])
        proxy.drop_next_reply(to=b"setIntersection")
        delivery = await send_one(store, "run", "paid", b"1", dedup_id="x")
        assert (delivery, proxy.dropped) == (Delivery.DUPLICATE, 1)
        (claimed,) = await store.claim("bob", HOUR, 10)
        assert [message.payload for message in claimed.inbox] == [b"1"]
    sandbox.clear()


async def test_messages_to_many_runs_whose_count_is_lost_are_sent_once(sandbox: Sandbox) -> None:
    """Each has a dedup id, so they are counted again."""
    async with TcpProxy.before(sandbox.url) as proxy, mongo(through(proxy)) as store:
        await lease(store, "a", "b")
        messages = [NewMessage(id, "paid", b"1", "x") for id in ("a", "b")]
        proxy.drop_next_reply(to=b"setIntersection")
        receipts = await store.send(messages)
        assert receipts == [Receipt(Delivery.DUPLICATE, 1)] * 2
        assert proxy.dropped == 1
        assert [len(await store.inbox(id)) for id in ("a", "b")] == [1, 1]
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
        parts = ("", "_journal", "_inbox", "_layout")
        assert set(database.list_collection_names()) == {f"perdure_runs{part}" for part in parts}
        assert len(database["perdure_runs"].index_information()) == 5


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
        for name in ("named", "named_journal", "named_inbox", "named_layout"):
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
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pymongo is not installed; run: pip install 'perdure[mongo]'" in process.stderr


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


async def test_a_cancellation_that_the_driver_swallowed_is_raised(sandbox: Sandbox) -> None:
    """Before Python 3.12, asyncio.wait_for swallows it if what it awaits has just ended."""

    async def use() -> None:
        with opened._backend._connection.use(), suppress(asyncio.CancelledError):
            await asyncio.sleep(10)

    async with mongo(sandbox.url) as opened:
        call = asyncio.ensure_future(use())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()


async def test_closing_does_not_wait_for_a_server_that_does_not_answer(
    sandbox: Sandbox, mongo_standalone: Server
) -> None:
    """Then a consumed message is not marked, and merged entries are not deleted."""
    if not mongo_standalone.ours:
        pytest.skip("the server is not ours to pause")
    server = sandbox.client.admin.command("serverStatus")["pid"]
    store = mongo(sandbox.url)
    await leave_work_in_the_background(store)
    os.kill(server, signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            await store.close()
    finally:
        os.kill(server, signal.SIGCONT)
    async with mongo(sandbox.url) as store:
        (refusal,) = await store.acquire([LeaseRequest("consuming", "bob", HOUR)])
        assert isinstance(refusal, Refusal)
        (grant,) = await lease(store, "consuming")
        assert (list(grant.snapshot["steps"]), grant.inbox) == (["1"], ())
        assert await steps(store, "settled") == []
    sandbox.clear()


@pytest.mark.parametrize("is_passed_in", [False, True])
async def test_closing_does_not_wait_for_a_server_that_is_unavailable(
    sandbox: Sandbox, is_passed_in: bool
) -> None:
    """A client that was passed in stays open, and can be used when the server is available."""
    async with TcpProxy.before(sandbox.url) as proxy, AsyncMongoClient[Any](through(proxy)) as own:
        store = mongo(through(proxy), client=own if is_passed_in else None)
        await leave_work_in_the_background(store)
        proxy.refuse()
        await asyncio.sleep(0.1)  # the driver notices it
        async with asyncio.timeout(20):
            await store.close()
        proxy.accept()
        assert await own.get_default_database()["perdure_runs"].count_documents({}) == 2
    sandbox.clear()


async def leave_work_in_the_background(store: MongoStore) -> None:
    """Write an entry whose message is not marked yet, and a rest with entries to delete."""
    consuming, settled = await lease(store, "consuming", "settled")
    await send_one(store, "consuming", "paid", b"1", dedup_id="x")
    (message,) = await store.inbox("consuming")
    await store.append([step(settled, 1)])
    whole = as_json(snapshot(status="suspended"))
    await store.append([Entry("settled", settled.lease.epoch, 2, whole, rest=Rest("suspended"))])
    await store.append([replace(step(consuming, 1), consumes=(message.id,))])


async def test_a_cancellation_while_closing_is_raised_if_the_driver_swallows_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is closed nevertheless."""
    close = AsyncMongoClient[Any].close

    async def swallow(client: AsyncMongoClient[Any]) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        await close(client)

    monkeypatch.setattr(AsyncMongoClient, "close", swallow)
    store = mongo(sandbox.url)
    await store.load("run")
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
