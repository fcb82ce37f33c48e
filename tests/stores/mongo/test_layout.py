"""How a database of an older version is upgraded, and one of a newer version refused."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from pymongo import ASCENDING, DESCENDING, MongoClient
from pymongo.errors import OperationFailure

from perdure.errors import StoreError
from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewMessage, Query, Rest
from perdure.stores.mongo import MongoStore, layout, mongo
from perdure.stores.mongo.layout import LAYOUT
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mongo import ADMIN
from tests.stores.crashes import Crash

HOUR = timedelta(hours=1)
NOW = datetime.now(UTC).replace(microsecond=0)
CREATED = ObjectId.from_datetime(NOW - HOUR)

# As layout 1 had them.
OLD_WAKE_INDEX: list[tuple[str, int]] = [
    ("workflow", ASCENDING),
    ("wakeAt", ASCENDING),
    ("_id", ASCENDING),
]
OLD_STATUS_INDEX: list[tuple[str, int]] = [
    ("status", ASCENDING),
    ("updatedAt", DESCENDING),
    ("_id", DESCENDING),
]
OLD_INBOX_INDEX: list[tuple[str, int]] = [
    ("run", ASCENDING),
    ("sentAt", ASCENDING),
    ("order", ASCENDING),
]


def old_run(id: str, status: str, **fields: Any) -> dict[str, Any]:
    run = {"_id": id, "snapshot": snapshot(status=status), "updatedAt": NOW, "status": status}  # type: ignore[arg-type]
    run |= {"workflow": "w", "epoch": 5, "epochs": [], "settled": {"epoch": 5, "n": 1}}
    return {**run, "incarnation": CREATED, "claim": CREATED, "awaits": [], **fields}


def has_layout(database: Any, number: int) -> bool:
    stored_layout = database["perdure_runs_layout"].find_one()
    return bool(stored_layout == {"_id": "layout", "number": number})


def old_message(name: str, second: int) -> dict[str, Any]:
    message = {"_id": f"waiting\0{CREATED}.d{name}", "run": "waiting", "name": name}
    sent_at = NOW - HOUR + timedelta(seconds=second)
    return {**message, "order": ObjectId(), "consumed": False, "payload": b"1", "sentAt": sent_at}


@pytest.fixture
def old(mongo_url: str) -> Any:
    """A database as layout 1 had it."""
    with MongoClient[Any](mongo_url, appname=ADMIN) as client:
        database = client.get_default_database()
        runs, inbox = database["perdure_runs"], database["perdure_runs_inbox"]
        is_date = {"wakeAt": {"$type": "date"}}
        runs.create_index(OLD_WAKE_INDEX, name="perdure_wakeAt", partialFilterExpression=is_date)
        runs.create_index(OLD_STATUS_INDEX, name="perdure_status")
        unconsumed = {"consumed": False}
        inbox.create_index(
            OLD_INBOX_INDEX, name="perdure_unconsumed", partialFilterExpression=unconsumed
        )
        runs.insert_many(
            [
                old_run("due", "suspended", wakeAt=NOW - HOUR),
                old_run("sleeping", "suspended", wakeAt=NOW + HOUR),
                old_run("over", "completed", messageCount=3),
                old_run("waiting", "waiting", awaits=["paid"], messageCount=4),
                {"_id": "awaitly", "snapshot": snapshot(), "updatedAt": NOW},
            ]
        )
        inbox.insert_many([old_message("b", 2), old_message("a", 1), old_message("c", 3)])
        yield database


@pytest.fixture
async def store(mongo_url: str) -> AsyncIterator[MongoStore]:
    async with mongo(mongo_url) as store:
        yield store


async def check_upgraded(store: MongoStore, old: Any) -> None:
    """Check that everything is found in the place of the new layout."""
    assert [due.id for due in await store.due(NOW, 10)] == ["due"]
    names = {*old["perdure_runs"].index_information()}
    parts = ("updatedAt", "workflow", "wakeAt", "tags")
    assert names == {"_id_", *(f"perdure_{part}" for part in parts)}
    assert has_layout(old, LAYOUT)
    (grant,) = await store.claim("ana", HOUR, 10, supports=supports("w"))
    assert (grant.lease.id, grant.queue, grant.version) == ("due", "", 0)
    page = await store.search(Query(workflows=("w",), statuses=("completed",)), 10)
    assert [run.id for run in page.runs] == ["over"]


async def test_a_database_of_the_older_layout_is_upgraded(store: MongoStore, old: Any) -> None:
    """Runs have no queue and version 0; indexes are replaced."""
    await check_upgraded(store, old)


async def test_messages_of_the_older_layout_come_first(store: MongoStore, old: Any) -> None:
    """They keep their order, count, and are consumed like others."""
    (receipt,) = await store.send([NewMessage("waiting", "d", b"1", "d")])
    assert (receipt.delivery, receipt.unconsumed) == (Delivery.DELIVERED, 4)
    (again,) = await store.send([NewMessage("waiting", "a", b"1", "a")])
    assert again.delivery is Delivery.DUPLICATE
    assert [message.name for message in await store.inbox("waiting")] == ["a", "b", "c", "d"]
    (grant,) = await store.acquire([LeaseRequest("waiting", "ana", HOUR)])
    assert isinstance(grant, Grant)
    assert [message.name for message in grant.inbox] == ["a", "b", "c", "d"]
    consumed = tuple(message.id for message in grant.inbox[:2])
    await store.append([Entry("waiting", grant.lease.epoch, 1, as_json(snapshot("x")), consumed)])
    assert [message.name for message in await store.inbox("waiting")] == ["c", "d"]
    rest = await store.inbox("waiting", after=grant.inbox[0].id, limit=1)
    assert [message.name for message in rest] == ["c"]


async def test_messages_of_layout_2_and_embedded_ones_have_one_order(
    mongo_url: str, old: Any
) -> None:
    """All messages of layout 2 have documents; nothing is rewritten."""
    async with mongo(mongo_url) as store:
        await store.send([NewMessage("waiting", "d", b"1", "d")])
    old["perdure_runs"].update_many({}, {"$unset": {"embeddedCount": ""}})
    old["perdure_runs_layout"].update_one({"_id": "layout"}, {"$set": {"number": 2}})
    async with mongo(mongo_url) as store:
        assert len(await store.inbox("waiting")) == 4
        assert has_layout(old, LAYOUT)
        await store.send([NewMessage("waiting", "e", b"1")])
        names = [message.name for message in await store.inbox("waiting")]
        assert names == ["a", "b", "c", "d", "e"]
        (grant,) = await store.acquire([LeaseRequest("waiting", "ana", HOUR)])
        assert isinstance(grant, Grant)
        assert [message.name for message in grant.inbox] == names


async def test_a_run_of_the_older_layout_can_get_tags(store: MongoStore, old: Any) -> None:
    """It was created when its incarnation says."""
    (grant,) = await store.acquire([LeaseRequest("due", "ana", HOUR)])
    assert isinstance(grant, Grant)
    rest = Rest("completed", tags=("plan=pro",))
    entry = Entry("due", grant.lease.epoch, 1, as_json(snapshot(status="completed")), rest=rest)
    await store.append([entry])
    (run,) = (await store.search(Query(tags=("plan=pro",)), 10)).runs
    assert (run.id, run.created_at) == ("due", NOW - HOUR)


async def test_an_upgrade_that_was_killed_is_continued(
    mongo_url: str, old: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two steps."""
    for name in ("_add_queues", "_count_messages", "create_indexes"):
        with monkeypatch.context() as patch:
            patch.setattr(layout, name, crash)
            async with mongo(mongo_url) as store:
                with pytest.raises(Crash):
                    await store.load("due")
    async with mongo(mongo_url) as store:
        await check_upgraded(store, old)


async def crash(*_: object) -> None:
    raise Crash


async def test_several_processes_may_upgrade_at_once(mongo_url: str, old: Any) -> None:
    """None of them drops an index that another one has just created."""
    stores = [mongo(mongo_url) for _ in range(12)]
    await asyncio.gather(*(store.due(NOW, 10) for store in stores))
    await check_upgraded(stores[0], old)
    await asyncio.gather(*(store.close() for store in stores))


async def test_runs_of_an_older_process_are_found_after_the_next_start(
    mongo_url: str, store: MongoStore, old: Any
) -> None:
    """It was still running after the upgrade, and knows no queues."""
    await store.load("due")
    old["perdure_runs"].insert_one(old_run("late", "running", wakeAt=NOW - 2 * HOUR))
    async with mongo(mongo_url) as another:
        assert [due.id for due in await another.due(NOW, 1)] == ["late"]


async def test_an_older_version_refuses_the_new_layout(store: MongoStore, old: Any) -> None:
    """It creates its index of due runs when it starts, whose name has another index then."""
    await store.load("due")
    is_date = {"wakeAt": {"$type": "date"}}
    with pytest.raises(OperationFailure, match="perdure_wakeAt"):
        old["perdure_runs"].create_index(
            OLD_WAKE_INDEX, name="perdure_wakeAt", partialFilterExpression=is_date
        )


async def test_a_newer_layout_is_refused(store: MongoStore, old: Any) -> None:
    """Before anything is changed."""
    old["perdure_runs_layout"].insert_one({"_id": "layout", "number": LAYOUT + 1})
    message = (
        rf"perdure_runs was .* newer .*layout {LAYOUT + 1}; .* up to {LAYOUT}\): upgrade perdure"
    )
    with pytest.raises(StoreError, match=message):
        await store.load("due")
    assert "perdure_status" in old["perdure_runs"].index_information()
