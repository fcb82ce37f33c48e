"""Messages that are embedded in the documents of their runs."""

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect

from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewMessage, Receipt, Rest, Verdict
from perdure.stores.mongo import MongoStore, append, mongo
from perdure.stores.mongo.embedding import MAX_EMBEDDED
from perdure.testing.conformance.batches import pages
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

HOUR = timedelta(hours=1)
LARGE = b'"%b"' % (b"x" * 5000)
WAITING = Rest("waiting", None, ("paid",))


@pytest.fixture(scope="module", params=["mongo_server", "mongo_standalone"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    server: Server = request.getfixturevalue(request.param)
    with sandbox_on(server) as sandbox:
        yield sandbox


@pytest.fixture
async def store(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    async with mongo(sandbox.url) as store:
        yield store
    sandbox.clear()


@pytest.fixture
def without_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server be unavailable whenever consumed messages are to be removed."""

    async def fail(*_: Any) -> None:
        raise AutoReconnect("connection lost")

    monkeypatch.setattr(append.Appender, "_mark", fail)


async def lease(store: MongoStore, owner: str = "ana") -> Grant:
    request = LeaseRequest("run", owner, HOUR, create=as_json(snapshot()), workflow="w")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


async def claim(store: MongoStore) -> list[Grant]:
    return [*await store.claim("bob", HOUR, 10, supports=supports("w"))]


def step(grant: Grant, n: int, *consumes: str) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot(f"{n}")), consumes)


def wait(grant: Grant, n: int, *consumes: str) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot("1")), consumes, WAITING)


async def write(store: MongoStore, entry: Entry) -> None:
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    await store._backend._appender.finish()


async def consume_one(store: MongoStore) -> Grant:
    grant = await lease(store)
    await send_one(store, "run", "paid", b"1")
    (message,) = await store.inbox("run")
    await write(store, step(grant, 1, message.id))
    return grant


def embedded(sandbox: Sandbox) -> list[bytes]:
    """Return the payloads of the messages in the run's document."""
    run = sandbox.database["perdure_runs"].find_one({"_id": "run"})
    assert run is not None
    return [each["payload"] for each in run.get("newest", ()) if "payload" in each]


def documents(sandbox: Sandbox) -> int:
    return sandbox.database["perdure_runs_inbox"].count_documents({})


async def test_a_small_message_is_in_the_document_of_its_run(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Until the rest that replaces the entry which consumed it, at the latest."""
    await write(store, wait(await lease(store), 1))
    await send_one(store, "run", "paid", b"1")
    assert (embedded(sandbox), documents(sandbox)) == ([b"1"], 0)
    (grant,) = await claim(store)
    (message,) = grant.inbox
    assert (message.name, message.payload) == ("paid", b"1")
    await write(store, wait(grant, 1, message.id))
    assert embedded(sandbox) == []
    assert await claim(store) == []


async def test_other_messages_have_documents(store: MongoStore, sandbox: Sandbox) -> None:
    """Those with a dedup id, and large ones."""
    await lease(store)
    await send_one(store, "run", "paid", b"1", dedup_id="x")
    await send_one(store, "run", "paid", LARGE)
    assert (embedded(sandbox), documents(sandbox)) == ([], 2)


async def test_embedded_messages_and_others_have_one_order(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """In the inbox, in its pages, and in a grant."""
    payloads = [b"0", LARGE, b"2", b"3", LARGE, b"5"]
    await lease(store)
    for number, payload in enumerate(payloads):
        await send_one(store, "run", f"{number}", payload, dedup_id="x" if number == 3 else None)
    assert (len(embedded(sandbox)), documents(sandbox)) == (3, 3)
    names = [f"{number}" for number in range(len(payloads))]
    for limit in (1, 2, 4, 10):
        assert [each.name for each in await pages(store, "run", limit)] == names
    grant = await lease(store)
    assert [(each.name, each.payload) for each in grant.inbox] == [
        *zip(names, payloads, strict=True)
    ]
    await write(store, step(grant, 1, grant.inbox[1].id, grant.inbox[2].id))
    assert [each.name for each in await pages(store, "run", 2)] == ["0", "3", "4", "5"]


async def test_a_run_contains_a_limited_number_of_messages(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """It contains more as soon as it has consumed some."""
    grant = await lease(store)
    names = [f"{number}" for number in range(MAX_EMBEDDED + 2)]
    for number, name in enumerate(names):
        (receipt,) = await store.send([NewMessage("run", name, b"1")])
        assert receipt == Receipt(Delivery.DELIVERED, number + 1)
    assert (len(embedded(sandbox)), documents(sandbox)) == (MAX_EMBEDDED, 2)
    messages = await store.inbox("run")
    assert [each.name for each in messages] == names
    await write(store, step(grant, 1, messages[0].id, messages[1].id))
    await store.send([NewMessage("run", "last", b"1"), NewMessage("run", "end", b"1")])
    assert (len(embedded(sandbox)), documents(sandbox)) == (MAX_EMBEDDED, 2)
    assert [each.name for each in await store.inbox("run")] == [*names[2:], "last", "end"]


async def test_messages_of_one_call_are_embedded_together(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """All or none of them, with a receipt for each."""
    await lease(store)
    few = [NewMessage("run", f"{number}", b"1") for number in range(MAX_EMBEDDED - 1)]
    counts = [receipt.unconsumed for receipt in await store.send(few)]
    assert counts == [*range(1, MAX_EMBEDDED)]
    assert [receipt.unconsumed for receipt in await store.send(few[:2])] == [
        MAX_EMBEDDED,
        MAX_EMBEDDED + 1,
    ]
    assert (len(embedded(sandbox)), documents(sandbox)) == (MAX_EMBEDDED - 1, 2)
    names = [each.name for each in few]
    assert [each.name for each in await store.inbox("run")] == [*names, *names[:2]]


async def test_numbers_of_many_messages_leave_embedded_ones_in_the_run(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Only messages with documents get their numbers there."""
    await lease(store)
    await send_one(store, "run", "first", b"1")
    await store.send([NewMessage("run", f"{n}", b"1", f"{n}") for n in range(100)])
    assert embedded(sandbox) == [b"1"]
    names = ["first", *(f"{n}" for n in range(100))]
    assert [each.name for each in await store.inbox("run")] == names
    assert [each.name for each in await pages(store, "run", 7)] == names


@pytest.mark.usefixtures("without_removals")
async def test_a_message_that_was_not_removed_is_consumed(store: MongoStore) -> None:
    grant = await consume_one(store)
    assert await store.inbox("run") == []
    (renewed,) = await store.renew([grant.lease], HOUR)
    assert renewed is not None
    assert not renewed.has_messages


@pytest.mark.usefixtures("without_removals")
async def test_a_rest_removes_consumed_messages(store: MongoStore, sandbox: Sandbox) -> None:
    """It replaces the entry that consumed the message, which must not wake the run again."""
    grant = await consume_one(store)
    assert embedded(sandbox) == [b"1"]
    await write(store, wait(grant, 2))
    assert embedded(sandbox) == []
    assert await claim(store) == []
    await send_one(store, "run", "paid", b"2")
    (again,) = await claim(store)
    assert [message.payload for message in again.inbox] == [b"2"]


@pytest.mark.usefixtures("without_removals")
async def test_the_rest_of_another_process_removes_consumed_messages(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """It does not know the position of the lease, and reads what the entries consumed."""
    grant = await consume_one(store)
    async with mongo(sandbox.url) as another:
        await write(another, wait(grant, 2))
    assert embedded(sandbox) == []
    assert await claim(store) == []


@pytest.mark.usefixtures("without_removals")
async def test_the_next_owner_does_not_receive_consumed_messages(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """The journal shows that an earlier owner consumed them; the next rest removes them."""
    grant = await consume_one(store)
    await store.release([grant.lease])
    (next_grant,) = await claim(store)
    assert next_grant.inbox == ()
    assert not next_grant.lease.has_messages
    await write(store, wait(next_grant, 1))
    assert embedded(sandbox) == []
    assert await claim(store) == []


@pytest.mark.usefixtures("without_removals")
async def test_a_message_that_an_earlier_owner_consumed_does_not_wake_the_run(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Not even if the next owner's rest is written by another process."""
    grant = await consume_one(store)
    await store.release([grant.lease])
    (next_grant,) = await claim(store)
    async with mongo(sandbox.url) as another:
        await write(another, wait(next_grant, 1))
    assert await claim(store) == []
    assert embedded(sandbox) == []


@pytest.mark.usefixtures("without_removals")
async def test_a_saved_run_does_not_receive_consumed_messages_again(store: MongoStore) -> None:
    """The entry that consumed the message is replaced with the run."""
    await consume_one(store)
    await store.save("run", snapshot(status="waiting", event="paid"))
    assert await store.inbox("run") == []
    assert await store.claim("bob", HOUR, 10) == []


async def test_a_saved_run_keeps_its_messages(store: MongoStore, sandbox: Sandbox) -> None:
    """They wake it if it awaits them, and no document is looked for."""
    await lease(store)
    await send_one(store, "run", "paid", b"1")
    await store.save("run", snapshot(status="waiting", event="paid"))
    run = sandbox.database["perdure_runs"].find_one({"_id": "run"})
    assert run is not None
    assert run["messageCount"] == run["embeddedCount"] == 1
    (message,) = await store.inbox("run")
    (grant,) = await store.claim("bob", HOUR, 10)
    assert grant.inbox == (message,)


async def test_messages_of_one_run_are_removed_in_a_batch_of_many(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """The others keep theirs, or have none."""
    ids = ("run", "other", "silent")
    requests = [LeaseRequest(id, "ana", HOUR, create=as_json(snapshot())) for id in ids]
    grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    for id in ids[:2]:
        await send_one(store, id, "sent", b"1")
    (message,) = await store.inbox("run")
    entries = [
        Entry(
            grant.lease.id, grant.lease.epoch, 1, as_json(snapshot("1")), consumed, Rest("paused")
        )
        for grant, consumed in zip(grants, ((message.id,), (), ()), strict=True)
    ]
    assert await store.append(entries) == [Verdict.ACCEPTED] * 3
    assert [len(await store.inbox(id)) for id in ids] == [0, 1, 0]
    silent = sandbox.database["perdure_runs"].find_one({"_id": "silent"})
    assert silent is not None
    assert "newest" not in silent


async def test_a_new_run_has_none_of_its_predecessors_messages(store: MongoStore) -> None:
    """Nor are ids of old messages those of new ones."""
    ids: list[str] = []
    for _ in range(2):
        await lease(store)
        await send_one(store, "run", "paid", b"1")
        (message,) = await store.inbox("run")
        ids.append(message.id)
        await store.delete("run")
    await lease(store)
    assert await store.inbox("run") == []
    assert len({*ids}) == 2


async def test_a_message_to_a_run_of_awaitly_has_a_document(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Such a run has no header with its status."""
    runs = sandbox.database["perdure_runs"]
    for id, status in (("run", "running"), ("over", "completed")):
        runs.insert_one({"_id": id, "snapshot": snapshot(status=status)})  # type: ignore[arg-type]
    assert await send_one(store, "run", "paid", b"1") is Delivery.DELIVERED
    assert await send_one(store, "over", "paid", b"1") is Delivery.OVER
    assert documents(sandbox) == 1
