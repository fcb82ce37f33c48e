"""Messages in MongoDB with documents: marked after an entry consumed them, read during a claim."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect

from perdure.store import Entry, Grant, LeaseRequest, NewMessage, Rest, Verdict
from perdure.stores.mongo import MongoStore, append, leases, mongo
from perdure.stores.mongo.inbox import first_messages, inboxes_of
from perdure.stores.mongo.schedule import find_due
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

HOUR = timedelta(hours=1)
WAITING = Rest("waiting", None, ("paid",))
# Too large to be embedded in the run's document.
FIRST, SECOND = (b'"%b"' % (letter * 5000) for letter in (b"x", b"y"))


@pytest.fixture(scope="module")
def sandbox(mongo_server: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_server) as sandbox:
        yield sandbox


@pytest.fixture
async def store(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    async with mongo(sandbox.url) as store:
        yield store
    sandbox.clear()


@pytest.fixture
def without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server be unavailable whenever an entry's messages are to be marked."""

    async def fail(*_: Any) -> None:
        raise AutoReconnect("connection lost")

    monkeypatch.setattr(append, "mark_consumed", fail)


async def lease(store: MongoStore) -> Grant:
    request = LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()), workflow="w")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


async def claim(store: MongoStore) -> Grant:
    (grant,) = await store.claim("bob", HOUR, 10, supports=supports("w"))
    return grant


def step(grant: Grant, n: int, *consumes: str) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot(f"{n}")), consumes)


def rest(grant: Grant, n: int) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot("1")), (), WAITING)


def due_again(grant: Grant, *consumes: str, n: int = 1) -> Entry:
    rest = Rest("suspended", grant.now)
    return Entry("run", grant.lease.epoch, n, as_json(snapshot("1")), consumes, rest)


async def consume_one(store: MongoStore) -> Grant:
    grant = await lease(store)
    await send_one(store, "run", "paid", FIRST)
    (message,) = await store.inbox("run")
    assert await store.append([step(grant, 1, message.id)]) == [Verdict.ACCEPTED]
    await store._backend._appender.finish()
    return grant


@pytest.mark.usefixtures("without_marks")
async def test_a_message_without_its_mark_is_consumed(store: MongoStore) -> None:
    grant = await consume_one(store)
    assert await store.inbox("run") == []
    (renewed,) = await store.renew([grant.lease], HOUR)
    assert renewed is not None
    assert not renewed.has_messages


@pytest.mark.usefixtures("without_marks")
async def test_a_rest_names_consumed_messages_without_a_mark(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """It replaces the entry that consumed the message, which must not wake the run again."""
    grant = await consume_one(store)
    assert await store.append([rest(grant, 2)]) == [Verdict.ACCEPTED]
    assert await store.inbox("run") == []
    assert await store.claim("bob", HOUR, 10) == []
    await send_one(store, "run", "paid", SECOND)
    again = await claim(store)
    assert [message.payload for message in again.inbox] == [SECOND]
    assert sandbox.database["perdure_runs_inbox"].count_documents({}) == 1


@pytest.mark.usefixtures("without_marks")
async def test_the_next_owner_marks_consumed_messages(store: MongoStore, sandbox: Sandbox) -> None:
    grant = await consume_one(store)
    await store.release([grant.lease])
    assert (await claim(store)).inbox == ()
    assert sandbox.database["perdure_runs_inbox"].count_documents({}) == 0


@pytest.mark.usefixtures("without_marks")
async def test_a_saved_run_does_not_receive_consumed_messages_again(store: MongoStore) -> None:
    """The entry that consumed the message, and was not marked, is replaced with the run."""
    await consume_one(store)
    await store.save("run", snapshot("a"))
    assert await store.inbox("run") == []


async def test_a_mark_is_written_before_the_store_is_closed(
    store: MongoStore, sandbox: Sandbox
) -> None:
    grant = await lease(store)
    await send_one(store, "run", "paid", FIRST)
    (message,) = await store.inbox("run")
    await store.append([step(grant, 1, message.id)])
    await store.close()
    assert sandbox.database["perdure_runs_inbox"].count_documents({}) == 0


async def unconsumed_after(store: MongoStore, payload: bytes) -> int:
    (receipt,) = await store.send([NewMessage("run", "paid", payload)])
    return receipt.unconsumed


@pytest.mark.parametrize("payload", [b"1", FIRST], ids=["embedded", "document"])
async def test_a_message_that_another_instance_read_is_counted_as_consumed(
    store: MongoStore, sandbox: Sandbox, payload: bytes
) -> None:
    grant = await lease(store)
    await send_one(store, "run", "paid", payload)
    async with mongo(sandbox.url) as other:
        (message,) = await other.inbox("run")
    await store.append([step(grant, 1, message.id, "unknown")])
    assert await unconsumed_after(store, payload) == 1


@pytest.mark.parametrize("payload", [b"1", FIRST], ids=["embedded", "document"])
async def test_the_next_owner_counts_no_unknown_message_of_a_previous_entry(
    store: MongoStore, sandbox: Sandbox, payload: bytes
) -> None:
    """The previous owner crashed before a rest: its entries say what was consumed."""
    await consume_one(store)
    async with mongo(sandbox.url) as other:
        (grant,) = await other.acquire([LeaseRequest("run", "bob", HOUR, instead_of="ana")])
        assert isinstance(grant, Grant)
        await other.append([step(grant, 1, "unknown")])
        await other.release([grant.lease])
    grant = await claim(store)
    await store.append([step(grant, 1, "unknown", "another")])
    assert await unconsumed_after(store, payload) == 1
    await store.append([due_again(grant, "unknown", n=2)])
    assert await unconsumed_after(store, payload) == 2


async def test_an_entry_that_is_sent_again_consumes_what_it_consumed(store: MongoStore) -> None:
    """The store may be asked to write it again after a lost reply."""
    grant = await lease(store)
    await send_one(store, "run", "paid", FIRST)
    (message,) = await store.inbox("run")
    await store.append([step(grant, 1, message.id, "unknown")])
    assert await store.append([step(grant, 1, message.id, "unknown")]) == [Verdict.ACCEPTED]
    assert await unconsumed_after(store, FIRST) == 1


def before_the_lease(
    monkeypatch: pytest.MonkeyPatch, event: Callable[[], Awaitable[object]]
) -> None:
    """Call `event` after a claim has found the due runs, and has read their messages."""

    async def early(*arguments: Any) -> Any:
        return read_early.pop() if read_early else await first_messages(*arguments)

    read_early: list[Any] = []

    async def find_and_read(db: Any, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(leases, "find_due", find_due)
        due_runs = await find_due(db, *arguments, **options)
        messages = await first_messages(db, inboxes_of({run["_id"]: run for run in due_runs}))
        await event()
        read_early.append(messages)
        return due_runs

    monkeypatch.setattr(leases, "find_due", find_and_read)
    monkeypatch.setattr(leases, "first_messages", early)


async def wait_for_payment(store: MongoStore) -> None:
    await store.append([rest(await lease(store), 1)])
    await send_one(store, "run", "paid", FIRST)


async def test_a_message_that_is_sent_during_a_claim_is_granted(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted between the search for due runs and the lease."""
    await wait_for_payment(store)
    before_the_lease(monkeypatch, lambda: send_one(store, "run", "paid", SECOND))
    assert [message.payload for message in (await claim(store)).inbox] == [FIRST, SECOND]


async def test_a_message_that_another_owner_consumed_during_a_claim_is_not_granted(
    store: MongoStore, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wait_for_payment(store)

    async def another_owner() -> None:
        async with mongo(sandbox.url) as another:
            grant = await claim(another)
            (message,) = grant.inbox
            await another.append([due_again(grant, message.id)])
            await another.append([due_again(await claim(another))])

    before_the_lease(monkeypatch, another_owner)
    assert (await claim(store)).inbox == ()
