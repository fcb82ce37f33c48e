"""Runs as documents: as awaitly writes them and reads them, whatever a step gave."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pytest
from bson import Binary, Decimal128, Int64, ObjectId
from hypothesis import given
from hypothesis import strategies as st

from perdure import codec
from perdure.errors import StoreCorrupted, ValueTooLarge
from perdure.snapshot import Snapshot
from perdure.store import Entry, LeaseRequest, Rest, Verdict
from perdure.stores.mongo import MongoStore, mongo
from perdure.stores.mongo import documents as _mongo_documents
from perdure.stores.mongo.documents import encode_snapshot, read_run
from perdure.stores.mongo.schema import RAW_CODEC
from perdure.testing.conformance.samples import AT, as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.places import Place, place_on

HOUR = timedelta(hours=1)
UPDATED_AT = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)
AWAITLY = {
    "formatVersion": 1,
    "workflowName": "checkout-123",
    "steps": {
        "fetch-user": {"ok": True, "value": {"id": "123", "since": UPDATED_AT}},
        "void": {"ok": True, "value": None},
        "count": {"ok": True, "value": Int64(2**40)},
        "stamp": {"ok": True, "value": 1705314600000.0},
        "price.eur": {"ok": True, "value": 9.5},
        "%off": {"ok": True, "value": 1},
        "$ref": {"ok": True, "value": {"$ref": "a", "$id": 1}},
        "charge": {
            "ok": False,
            "error": "DECLINED",
            "cause": {"type": "error", "name": "Error", "message": "no funds"},
            "meta": {"origin": "result"},
        },
    },
    "execution": {"status": "running", "lastUpdated": AT, "currentStepId": "charge"},
    "metadata": {"version": 1, "stepOrder": ["fetch-user"], "stepArgs": [None]},
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda items: (
        st.lists(items, max_size=3)
        | st.dictionaries(st.text(alphabet="a$%.\0025_é") | st.text(), items, max_size=3)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def place(mongo_standalone: Server) -> Iterator[Place]:
    with place_on(mongo_standalone) as place:
        yield place


@pytest.fixture
async def store(place: Place) -> AsyncIterator[MongoStore]:
    async with mongo(place.url) as store:
        yield store
    place.clear()


@pytest.fixture
async def awaitly_store(place: Place) -> AsyncIterator[MongoStore]:
    """A store on awaitly's own collection."""
    async with mongo(place.url, collection="awaitly_snapshots") as store:
        yield store
    place.clear()


def document(place: Place, id: str = "run", collection: str = "perdure_runs") -> dict[str, Any]:
    found = place.database[collection].find_one({"_id": id})
    assert found is not None
    return found


def written(value: Any) -> Any:
    """Give a snapshot's document as it would lie on the server, read back."""
    body = encode_snapshot(codec.dumps(value), "a snapshot")
    return read_run("run", bson.decode(bson.encode({"_id": "run", **body}), RAW_CODEC), [])


async def test_at_rest_a_run_is_what_the_others_write(store: MongoStore, place: Place) -> None:
    """A string `_id`, the snapshot as an embedded document, `updatedAt` as a date."""
    whole = snapshot("fetch-user", "b.c", workflow="checkout", metadata={"user": {"id": 1}})
    await store.save("checkout-123", whole)
    found = document(place, "checkout-123")
    assert found["snapshot"] == whole
    assert list(found["snapshot"]) == list(whole)
    assert isinstance(found["updatedAt"], datetime)
    names = {"status", "awaits", "expired", "workflow", "epoch", "epochs", "settled", "incarnation"}
    assert set(found) == {"_id", "snapshot", "updatedAt", *names}


async def test_a_rest_leaves_the_same_document(store: MongoStore, place: Place) -> None:
    """When a run comes to rest nothing of its lease or journal is left in its document."""
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert grant is not None
    epoch = grant.lease.epoch
    await store.append([Entry("run", epoch, 1, as_json(snapshot("a")))])
    whole = snapshot("a", "b", status="completed")
    await store.append([Entry("run", epoch, 2, as_json(whole), rest=Rest("completed"))])
    await store.close()
    found = document(place)
    assert found["snapshot"] == whole
    assert not {"owner", "wakeAt", "consumed"} & set(found)
    assert found["epochs"] == []
    assert place.database["perdure_runs_journal"].count_documents({}) == 0


async def test_the_index_of_the_others_is_there(store: MongoStore, place: Place) -> None:
    """An index on `updatedAt` serves lists."""
    await store.list()
    indexes = place.database["perdure_runs"].index_information().values()
    assert any(index["key"][0] == ("updatedAt", -1) for index in indexes)


async def test_what_awaitly_wrote_is_read_as_json(awaitly_store: MongoStore, place: Place) -> None:
    """Dates are ISO texts, whole numbers integers, and no key is taken for an escaped one."""
    place.database["awaitly_snapshots"].insert_one(
        {"_id": "checkout-123", "snapshot": AWAITLY, "updatedAt": UPDATED_AT}
    )
    loaded: Any = await awaitly_store.load("checkout-123")
    values = {key: record.get("value") for key, record in loaded["steps"].items()}
    assert values == {
        "fetch-user": {"id": "123", "since": "2024-01-15T10:30:00.000Z"},
        "void": None,
        "count": 2**40,
        "stamp": 1705314600000,
        "price.eur": 9.5,
        "%off": 1,
        "$ref": {"$ref": "a", "$id": 1},
        "charge": None,
    }
    assert type(values["stamp"]) is type(values["count"]) is int
    assert loaded["steps"]["charge"] == AWAITLY["steps"]["charge"]  # type: ignore[index]  # a dict
    assert list(loaded["steps"]) == list(AWAITLY["steps"])  # type: ignore[call-overload]  # a dict


async def test_what_awaitly_wrote_is_listed_leased_and_counted(
    awaitly_store: MongoStore, place: Place
) -> None:
    """A run without our header is a run: its snapshot says how it lies."""
    done = {**AWAITLY, "execution": {"status": "completed", "lastUpdated": AT}}
    place.database["awaitly_snapshots"].insert_many(
        [
            {"_id": "going", "snapshot": AWAITLY, "updatedAt": UPDATED_AT},
            {"_id": "done", "snapshot": done, "updatedAt": UPDATED_AT + HOUR},
        ]
    )
    lines = await awaitly_store.list()
    assert [(line.id, line.status) for line in lines] == [
        ("done", "completed"),
        ("going", "running"),
    ]
    assert lines[1].updated_at == "2024-01-15T10:30:00.000Z"
    assert [line.id for line in await awaitly_store.list(status="completed")] == ["done"]
    assert [line.id for line in await awaitly_store.list(workflow="checkout-123")] == [
        "done",
        "going",
    ]
    assert (await awaitly_store.stats()).by_status == {"running": 1, "completed": 1}
    (grant,) = await awaitly_store.acquire([LeaseRequest("going", "ana", HOUR)])
    assert grant is not None
    assert grant.snapshot["steps"]["price.eur"] == {"ok": True, "value": 9.5}
    assert await awaitly_store.prune(HOUR) == 1


async def test_a_serialized_resume_state_is_read(awaitly_store: MongoStore, place: Place) -> None:
    """`{kind: "ResumeState"}` lies where a snapshot lies, and is given as one."""
    state = {"kind": "ResumeState", "steps": [["user:1", {"ok": True, "value": {"x": 1.0}}]]}
    place.database["awaitly_snapshots"].insert_one(
        {"_id": "run", "snapshot": state, "updatedAt": UPDATED_AT}
    )
    loaded = await awaitly_store.load("run")
    assert loaded is not None
    assert loaded["steps"] == {"user:1": {"ok": True, "value": {"x": 1}}}
    assert loaded["execution"]["lastUpdated"] == "2024-01-15T10:30:00.000Z"


async def test_a_save_of_awaitlys_upon_ours_counts(store: MongoStore, place: Place) -> None:
    """awaitly sets `snapshot` and `updatedAt`; what it left of our header does not matter."""
    await store.save("run", snapshot(a=3_000_000_000, b=3e9))
    loaded: Any = await store.load("run")
    kinds = {key: type(record["value"]) for key, record in loaded["steps"].items()}
    assert kinds == {"a": int, "b": float}
    steps = {"a": {"ok": True, "value": 3e9}, "%c": {"ok": True, "value": ObjectId(bytes(12))}}
    theirs = {**AWAITLY, "steps": steps}
    change = {"$set": {"snapshot": theirs, "updatedAt": UPDATED_AT}}
    place.database["perdure_runs"].update_one({"_id": "run"}, change)
    loaded = await store.load("run")
    assert loaded["steps"] == {
        "a": {"ok": True, "value": 3_000_000_000},
        "%c": {"ok": True, "value": "0" * 24},
    }


async def test_only_what_would_be_misread_is_escaped(store: MongoStore, place: Place) -> None:
    """Keys lie in the document as others would write them, but for `$`, NUL and `%` before them."""
    keys = ["user:1", "a.b", ".", "", "x$", "a%b", "__proto__", "$ref", "a\0b", "%", "$"]
    await store.save("run", snapshot(*keys))
    stored = list(document(place)["snapshot"]["steps"])
    assert stored[:7] == keys[:7]
    assert stored[7:] == ["%$ref", "%a%00b", "%%25", "%$"]


async def test_a_save_of_awaitlys_upon_a_packed_run_counts(store: MongoStore, place: Place) -> None:
    """The packed snapshot of ours, which awaitly does not know of, is not taken for its own."""
    await store.save("run", snapshot(huge=10**30))
    assert "packed" in document(place)
    change = {"$set": {"snapshot": AWAITLY, "updatedAt": UPDATED_AT}}
    place.database["perdure_runs"].update_one({"_id": "run"}, change)
    loaded: Any = await store.load("run")
    assert list(loaded["steps"]) == list(AWAITLY["steps"])  # type: ignore[call-overload]  # a dict


@given(JSON)
def test_every_value_comes_back_with_its_type(value: object) -> None:
    """What is embedded is what is read: keys, order, integers of 64 bits, floats."""
    whole = snapshot(value=value)
    assert repr(written(whole)) == repr(whole)


def test_unsigned_integers_of_64_bits_are_numbers() -> None:
    """Where BSON's integers end, its decimals go on."""
    assert written(snapshot(a=2**64 - 1, b=[2**63])) == snapshot(a=2**64 - 1, b=[2**63])
    body = encode_snapshot(as_json(snapshot(a=2**64 - 1)), "a snapshot")
    assert bson.decode(body["snapshot"].raw)["steps"]["a"]["value"] == Decimal128(str(2**64 - 1))


def test_what_no_document_holds_is_packed() -> None:
    """Nested too deep for the server, or integers beyond 64 bits: beside an outline, as JSON."""
    deep: Any = "bottom"
    for _ in range(300):
        deep = [deep]
    for whole in (snapshot(deep=deep), snapshot(huge=10**30)):
        body = encode_snapshot(as_json(whole), "a snapshot")
        assert "packed" in body
        assert "steps" not in body["snapshot"]
        assert written(whole) == whole


async def test_a_run_larger_than_a_document_is_kept(store: MongoStore, place: Place) -> None:
    """16 MB of BSON are too many for one document, compressed they are not."""
    numbers = list(range(800_000))
    whole = snapshot(a=numbers, b=numbers, status="completed")
    assert len(bson.encode(whole)) > 16 * 1024 * 1024  # type: ignore[arg-type]  # a dict
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert grant is not None
    rest = Entry("run", grant.lease.epoch, 1, as_json(whole), rest=Rest("completed"))
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    assert await store.load("run") == whole
    assert document(place)["snapshot"]["execution"]["status"] == "completed"


async def test_a_run_too_large_for_anything_is_refused_in_time(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: the journal stays as it was, and can be read."""
    monkeypatch.setattr(_mongo_documents, "MAX_DOCUMENT_SIZE", 2_000)
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert grant is not None
    epoch = grant.lease.epoch
    await store.append([Entry("run", epoch, 1, as_json(snapshot("a")))])
    noise = "".join(map(chr, range(1_000, 9_000)))
    rest = Entry("run", epoch, 2, as_json(snapshot(noise=noise)), rest=Rest("completed"))
    with pytest.raises(ValueTooLarge, match="compressed, the snapshot of run 'run'"):
        await store.append([rest])
    loaded: Any = await store.load("run")
    assert list(loaded["steps"]) == ["a"]


async def test_an_entry_of_the_largest_size_is_kept(store: MongoStore) -> None:
    """`max_value_size` is as much as a document; what is around the entry must not count."""
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert grant is not None
    frame = len(as_json(snapshot(big="")))
    whole: Snapshot = snapshot(big="x" * (store.capabilities.max_value_size - frame))
    entry = Entry("run", grant.lease.epoch, 1, as_json(whole), step="big")
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    assert await store.load("run") == whole


async def test_what_is_no_snapshot_is_corrupted(store: MongoStore, place: Place) -> None:
    """A document of somebody else's among the runs says so when it is read, and harms no other."""
    runs = place.database["perdure_runs"]
    due = {"updatedAt": UPDATED_AT, "wakeAt": UPDATED_AT}
    runs.insert_one({"_id": "text", "snapshot": "?", **due})
    ours = {"formatVersion": Int64(1)}
    runs.insert_one({"_id": "broken", "snapshot": ours, "packed": Binary(b"?"), **due})
    runs.insert_one({"_id": "sound", "snapshot": AWAITLY, **due})
    for id in ("text", "broken"):
        with pytest.raises(StoreCorrupted, match=f"run '{id}' cannot be read"):
            await store.load(id)
    assert [grant.lease.id for grant in await store.claim("ana", HOUR, 10)] == ["sound"]
