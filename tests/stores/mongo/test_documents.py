"""Runs as documents that awaitly can read and write, whatever a step returned."""

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
from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores.mongo import MongoStore, documents, mongo
from perdure.stores.mongo.documents import encode_snapshot, read_run
from perdure.stores.mongo.schema import RAW_CODEC
from perdure.testing.conformance.samples import AT, as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

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
def sandbox(mongo_standalone: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_standalone) as sandbox:
        yield sandbox


@pytest.fixture
async def store(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    async with mongo(sandbox.url) as store:
        yield store
    sandbox.clear()


@pytest.fixture
async def awaitly_store(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    """A store on awaitly's own collection."""
    async with mongo(sandbox.url, collection="awaitly_snapshots") as store:
        yield store
    sandbox.clear()


def document(sandbox: Sandbox, id: str = "run", collection: str = "perdure_runs") -> dict[str, Any]:
    stored = sandbox.database[collection].find_one({"_id": id})
    assert stored is not None
    return stored


def round_trip(value: Any) -> Any:
    """Return a snapshot that was encoded as a document and read again."""
    body = encode_snapshot(codec.dumps(value), "a snapshot")
    return read_run("run", bson.decode(bson.encode({"_id": "run", **body}), RAW_CODEC), [])


async def test_a_saved_run_has_the_document_that_awaitly_writes(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """A string `_id`, the snapshot as an embedded document, `updatedAt` as a date."""
    whole = snapshot("fetch-user", "b.c", workflow="checkout", metadata={"user": {"id": 1}})
    await store.save("checkout-123", whole)
    stored = document(sandbox, "checkout-123")
    assert stored["snapshot"] == whole
    assert list(stored["snapshot"]) == list(whole)
    assert isinstance(stored["updatedAt"], datetime)
    names = {"status", "awaits", "expired", "workflow", "epoch", "epochs", "settled", "incarnation"}
    names |= {"queue", "version", "summary", "createdAt"}
    assert set(stored) == {"_id", "snapshot", "updatedAt", *names}


async def test_a_rest_leaves_the_same_document(store: MongoStore, sandbox: Sandbox) -> None:
    """Nothing of the lease or the journal is left in it."""
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    epoch = grant.lease.epoch
    await store.append([Entry("run", epoch, 1, as_json(snapshot("a")))])
    whole = snapshot("a", "b", status="completed")
    await store.append([Entry("run", epoch, 2, as_json(whole), rest=Rest("completed"))])
    await store.close()
    stored = document(sandbox)
    assert stored["snapshot"] == whole
    assert not {"owner", "wakeAt", "consumed"} & set(stored)
    assert stored["epochs"] == []
    assert sandbox.database["perdure_runs_journal"].count_documents({}) == 0


async def test_there_is_an_index_on_updated_at(store: MongoStore, sandbox: Sandbox) -> None:
    """As awaitly has one; it is used for lists."""
    await store.list()
    indexes = sandbox.database["perdure_runs"].index_information().values()
    assert any(index["key"][0] == ("updatedAt", -1) for index in indexes)


async def test_a_document_of_awaitly_is_read_as_json(
    awaitly_store: MongoStore, sandbox: Sandbox
) -> None:
    """Dates become ISO strings and integral doubles ints; no key is unescaped."""
    sandbox.database["awaitly_snapshots"].insert_one(
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


async def test_a_document_of_awaitly_is_listed_leased_and_counted(
    awaitly_store: MongoStore, sandbox: Sandbox
) -> None:
    """A run without our header has the status that its snapshot has."""
    done = {**AWAITLY, "execution": {"status": "completed", "lastUpdated": AT}}
    sandbox.database["awaitly_snapshots"].insert_many(
        [
            {"_id": "running", "snapshot": AWAITLY, "updatedAt": UPDATED_AT},
            {"_id": "done", "snapshot": done, "updatedAt": UPDATED_AT + HOUR},
        ]
    )
    rows = await awaitly_store.list()
    assert [(row.id, row.status) for row in rows] == [
        ("done", "completed"),
        ("running", "running"),
    ]
    assert rows[1].updated_at == UPDATED_AT
    assert [row.id for row in await awaitly_store.list(status="completed")] == ["done"]
    assert [row.id for row in await awaitly_store.list(workflow="checkout-123")] == [
        "done",
        "running",
    ]
    assert (await awaitly_store.stats()).by_status == {"running": 1, "completed": 1}
    (grant,) = await awaitly_store.acquire([LeaseRequest("running", "ana", HOUR)])
    assert isinstance(grant, Grant)
    assert grant.snapshot["steps"]["price.eur"] == {"ok": True, "value": 9.5}
    assert await awaitly_store.prune(HOUR) == 1


async def test_a_serialized_resume_state_is_read(
    awaitly_store: MongoStore, sandbox: Sandbox
) -> None:
    """`{kind: "ResumeState"}` in place of a snapshot is loaded as a snapshot."""
    state = {"kind": "ResumeState", "steps": [["user:1", {"ok": True, "value": {"x": 1.0}}]]}
    sandbox.database["awaitly_snapshots"].insert_one(
        {"_id": "run", "snapshot": state, "updatedAt": UPDATED_AT}
    )
    loaded = await awaitly_store.load("run")
    assert loaded is not None
    assert loaded["steps"] == {"user:1": {"ok": True, "value": {"x": 1}}}
    assert loaded["execution"]["lastUpdated"] == "2024-01-15T10:30:00.000Z"


async def test_awaitly_can_overwrite_a_run(store: MongoStore, sandbox: Sandbox) -> None:
    """It sets `snapshot` and `updatedAt`; our header, which stays, does not matter."""
    await store.save("run", snapshot(a=3_000_000_000, b=3e9))
    loaded: Any = await store.load("run")
    kinds = {key: type(record["value"]) for key, record in loaded["steps"].items()}
    assert kinds == {"a": int, "b": float}
    steps = {"a": {"ok": True, "value": 3e9}, "%c": {"ok": True, "value": ObjectId(bytes(12))}}
    theirs = {**AWAITLY, "steps": steps}
    change = {"$set": {"snapshot": theirs, "updatedAt": UPDATED_AT}}
    sandbox.database["perdure_runs"].update_one({"_id": "run"}, change)
    loaded = await store.load("run")
    assert loaded["steps"] == {
        "a": {"ok": True, "value": 3_000_000_000},
        "%c": {"ok": True, "value": "0" * 24},
    }


async def test_only_keys_that_would_be_misread_are_escaped(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Those with `$` or `%` at the start, or NUL; all others are stored unchanged."""
    keys = ["user:1", "a.b", ".", "", "x$", "a%b", "__proto__", "$ref", "a\0b", "%", "$"]
    await store.save("run", snapshot(*keys))
    stored = list(document(sandbox)["snapshot"]["steps"])
    assert stored[:7] == keys[:7]
    assert stored[7:] == ["%$ref", "%a%00b", "%%25", "%$"]


async def test_awaitly_can_overwrite_a_packed_run(store: MongoStore, sandbox: Sandbox) -> None:
    """Our packed snapshot, which awaitly does not know, is then ignored."""
    await store.save("run", snapshot(huge=10**30))
    assert "packed" in document(sandbox)
    change = {"$set": {"snapshot": AWAITLY, "updatedAt": UPDATED_AT}}
    sandbox.database["perdure_runs"].update_one({"_id": "run"}, change)
    loaded: Any = await store.load("run")
    assert list(loaded["steps"]) == list(AWAITLY["steps"])  # type: ignore[call-overload]  # a dict


@given(JSON)
def test_every_value_is_read_with_its_type(value: object) -> None:
    """Keys, their order, integers of 64 bits and floats."""
    whole = snapshot(value=value)
    assert repr(round_trip(whole)) == repr(whole)


def test_a_snapshot_is_recognized_by_its_version_wherever_that_is() -> None:
    """A snapshot of another writer would keep the escape of its key."""
    whole: Any = snapshot(a={"$b": 1})
    for fields in (whole, dict(reversed(whole.items()))):
        assert repr(round_trip(fields)) == repr(fields)


def test_unsigned_integers_of_64_bits_are_numbers() -> None:
    """BSON's integers are too small for them: they are stored as decimals."""
    assert round_trip(snapshot(a=2**64 - 1, b=[2**63])) == snapshot(a=2**64 - 1, b=[2**63])
    body = encode_snapshot(as_json(snapshot(a=2**64 - 1)), "a snapshot")
    assert bson.decode(body["snapshot"].raw)["steps"]["a"]["value"] == Decimal128(str(2**64 - 1))


def test_a_snapshot_that_no_document_can_hold_is_packed() -> None:
    """Nested too deeply, or with integers beyond 64 bits: as JSON beside an outline."""
    deep: Any = "bottom"
    for _ in range(300):
        deep = [deep]
    for whole in (snapshot(deep=deep), snapshot(huge=10**30)):
        body = encode_snapshot(as_json(whole), "a snapshot")
        assert "packed" in body
        assert "steps" not in body["snapshot"]
        assert round_trip(whole) == whole


async def test_a_run_larger_than_a_document_is_packed(store: MongoStore, sandbox: Sandbox) -> None:
    """16 MB of BSON do not fit in a document; compressed, they do."""
    numbers = list(range(800_000))
    whole = snapshot(a=numbers, b=numbers, status="completed")
    assert len(bson.encode(whole)) > 16 * 1024 * 1024
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    rest = Entry("run", grant.lease.epoch, 1, as_json(whole), rest=Rest("completed"))
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    assert await store.load("run") == whole
    assert document(sandbox)["snapshot"]["execution"]["status"] == "completed"


async def test_a_run_too_large_even_when_packed_is_refused(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written: the journal stays, and can be read."""
    monkeypatch.setattr(documents, "MAX_DOCUMENT_SIZE", 2_000)
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    epoch = grant.lease.epoch
    await store.append([Entry("run", epoch, 1, as_json(snapshot("a")))])
    noise = "".join(map(chr, range(1_000, 9_000)))
    rest = Entry("run", epoch, 2, as_json(snapshot(noise=noise)), rest=Rest("completed"))
    with pytest.raises(ValueTooLarge, match="compressed, the snapshot of run 'run'"):
        await store.append([rest])
    loaded: Any = await store.load("run")
    assert list(loaded["steps"]) == ["a"]


async def test_an_entry_of_the_maximum_size_is_accepted(store: MongoStore) -> None:
    """The size of the document around it does not count."""
    (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    frame = len(as_json(snapshot(big="")))
    whole: Snapshot = snapshot(big="x" * (store.capabilities.max_value_size - frame))
    entry = Entry("run", grant.lease.epoch, 1, as_json(whole), step="big")
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    assert await store.load("run") == whole


async def test_a_document_that_is_not_a_snapshot_is_corrupted(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Loading it raises; a claim skips it and returns the others."""
    runs = sandbox.database["perdure_runs"]
    due = {"updatedAt": UPDATED_AT, "wakeAt": UPDATED_AT, "queue": "", "version": 0}
    runs.insert_one({"_id": "text", "snapshot": "?", **due})
    ours = {"formatVersion": Int64(1)}
    runs.insert_one({"_id": "broken", "snapshot": ours, "packed": Binary(b"?"), **due})
    runs.insert_one({"_id": "sound", "snapshot": AWAITLY, **due})
    for id in ("text", "broken"):
        with pytest.raises(StoreCorrupted, match=f"run '{id}' cannot be read"):
            await store.load(id)
    assert [grant.lease.id for grant in await store.claim("ana", HOUR, 10)] == ["sound"]
