"""Runs that are leased with the message that makes them due."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from perdure.store import (
    Delivery,
    Grant,
    Handoff,
    NewMessage,
    NewRun,
    Receipt,
    Rest,
    SupportedVersions,
)
from perdure.stores.mongo import MongoReplicaSetStore, MongoStore, handoff, mongo
from perdure.stores.mongo.embedding import MAX_EMBEDDED
from perdure.stores.mongo.sending import send_documents
from perdure.testing.conformance.handoff import hand_off, paid, wait_for_paid
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

HOUR = timedelta(hours=1)
DELIVERED = Receipt(Delivery.DELIVERED, 1)


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


def stored(sandbox: Sandbox) -> dict[str, Any]:
    """Return the document of the run."""
    run = sandbox.database["perdure_runs"].find_one({"_id": "run"})
    assert run is not None
    return run


async def fill(store: MongoStore) -> None:
    """Send as many messages as a run contains, which it does not await."""
    for _ in range(MAX_EMBEDDED):
        await send_one(store, "run", "sent", b"0")


def names(grant: Grant) -> list[str]:
    return [message.name for message in grant.inbox]


async def test_the_lease_is_the_one_of_a_claim(store: MongoStore, sandbox: Sandbox) -> None:
    """Both leave the same document, except for what is new for each lease."""
    await wait_for_paid(store, "run")
    await send_one(store, "run", "paid", b"1")
    await store.claim("ana", HOUR, 1)
    claimed = stored(sandbox)
    await store.delete("run")
    await wait_for_paid(store, "run")
    await hand_off(store, paid())
    granted = stored(sandbox)
    assert claimed.keys() == granted.keys()
    new_each_time = {"claim", "epoch", "epochs", "incarnation", "newest", "wakeAt"}
    assert [
        name
        for name in claimed.keys() - new_each_time - {"createdAt", "updatedAt"}
        if claimed[name] != granted[name]
    ] == []


async def test_a_run_that_is_already_due_is_granted(store: MongoStore) -> None:
    """With both messages, although the first one made it due."""
    await wait_for_paid(store, "run")
    await send_one(store, "run", "paid", b"1")
    (grant,) = (await hand_off(store, paid())).grants
    assert names(grant) == ["paid", "paid"]
    assert await store.claim("bob", HOUR, 1) == []


async def test_a_run_without_room_is_granted(store: MongoStore) -> None:
    """The message has a document, and the run is leased after it was sent."""
    await wait_for_paid(store, "run")
    await fill(store)
    handoff = await hand_off(store, paid())
    assert handoff.receipts == (Receipt(Delivery.DELIVERED, MAX_EMBEDDED + 1),)
    assert names(handoff.grants[0]) == [*["sent"] * MAX_EMBEDDED, "paid"]


async def test_a_run_without_room_that_another_process_claims_is_not_granted(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it waits again, and is due because of another message."""
    await wait_for_paid(store, "run")
    await fill(store)

    async def send_and_lose(*arguments: Any) -> list[Receipt]:
        receipts = await send_documents(*arguments)
        (grant,) = await store.claim("bob", HOUR, 1)
        await store.save("run", snapshot(status="waiting", event="paid", workflow="order"))
        assert grant.lease.owner == "bob"
        return receipts

    monkeypatch.setattr(handoff, "send_documents", send_and_lose)
    assert not (await hand_off(store, paid())).grants
    assert len(await store.claim("cem", HOUR, 1)) == 1


async def test_messages_with_documents_make_their_runs_due(store: MongoStore) -> None:
    """Those with a dedup id, large ones, and those of calls to several runs."""
    large = NewMessage("run", "paid", b'"%b"' % (b"x" * 5000))
    calls: Sequence[Sequence[NewMessage]] = [[paid(dedup_id="x")], [large], [paid(), paid("other")]]
    for messages in calls:
        ids = {message.to for message in messages}
        await wait_for_paid(store, *ids)
        assert await hand_off(store, *messages) == Handoff((DELIVERED,) * len(messages))
        assert {grant.lease.id for grant in await store.claim("bob", HOUR, 9)} == ids
        for id in ids:
            await store.delete(id)


async def test_versions_of_each_workflow_are_compared(store: MongoStore) -> None:
    """The versions of one workflow say nothing about another."""
    supported = [
        SupportedVersions("order", 2, 3),
        SupportedVersions("refund", 4, 4),
        SupportedVersions("$price", 2, 3),
    ]
    expected = {
        ("order", 3): 1,
        ("refund", 3): 0,
        ("refund", 4): 1,
        ("$price", 2): 1,
        ("price", 2): 0,
    }
    for (workflow, version), count in expected.items():
        await wait_for_paid(store, "run", workflow=workflow, version=version)
        assert len((await hand_off(store, paid(), supported=supported)).grants) == count
        await store.delete("run")


async def test_a_run_of_an_older_version_is_granted(store: MongoStore, sandbox: Sandbox) -> None:
    """It has neither a queue nor a version."""
    await wait_for_paid(store, "run")
    header = {"queue": "", "version": "", "turn": "", "embeddedCount": "", "createdAt": ""}
    sandbox.database["perdure_runs"].update_one({"_id": "run"}, {"$unset": header})
    (grant,) = (await hand_off(store, paid())).grants
    assert (grant.queue, grant.version, names(grant)) == ("", 0, ["paid"])


async def test_a_run_of_awaitly_is_not_granted(store: MongoStore, sandbox: Sandbox) -> None:
    """It has no header, so it awaits nothing; the status of one that is over is respected."""
    runs = sandbox.database["perdure_runs"]
    for id, status in (("run", "running"), ("over", "completed")):
        runs.insert_one({"_id": id, "snapshot": snapshot(status=status)})  # type: ignore[arg-type]
    assert await hand_off(store, paid()) == Handoff((DELIVERED,))
    assert await hand_off(store, paid("over")) == Handoff((Receipt(Delivery.OVER),))


async def test_a_run_that_cannot_be_read_is_not_granted(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """It is released for later, and has its message."""
    await wait_for_paid(store, "run")
    broken = {"$set": {"snapshot": {"formatVersion": 99}}}
    sandbox.database["perdure_runs"].update_one({"_id": "run"}, broken)
    assert await hand_off(store, paid()) == Handoff((DELIVERED,))
    assert stored(sandbox).get("owner") is None
    assert await store.claim("bob", HOUR, 1) == []
    assert len(await store.inbox("run")) == 1


async def test_packed_snapshots_are_granted(store: MongoStore, sandbox: Sandbox) -> None:
    """Those which are too deeply nested for a document."""
    value: Any = 1
    for _ in range(200):
        value = [value]
    data = snapshot("a", status="waiting", event="paid", workflow="order")
    data["metadata"] = {"deep": value}
    rest = Rest("waiting", awaits=("paid",))
    await store.enqueue([NewRun("run", "order", as_json(data), rest=rest)])
    assert "packed" in stored(sandbox)
    (grant,) = (await hand_off(store, paid())).grants
    assert grant.snapshot["metadata"] == {"deep": value}


async def test_a_granted_run_is_not_announced(mongo_server: Server) -> None:
    """No other process can claim it, unlike a run that a message makes due."""
    received = 0

    async def listen(store: MongoReplicaSetStore) -> None:
        nonlocal received
        async for _ in store.notifications():
            received += 1

    async def wait_until(count: int) -> None:
        async with asyncio.timeout(5):
            while received < count:
                await asyncio.sleep(0.01)

    with sandbox_on(mongo_server) as sandbox:
        async with mongo(sandbox.url) as store:
            assert isinstance(store, MongoReplicaSetStore)
            await wait_for_paid(store, "run", "other")
            listening = asyncio.create_task(listen(store))
            await wait_until(1)
            assert len((await hand_off(store, paid())).grants) == 1
            await store.send([paid("other")])
            await wait_until(2)
            listening.cancel()
            await asyncio.wait([listening])
    assert received == 2
