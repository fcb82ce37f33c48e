"""The fence of the journal: slots that only one writer fills, and seals that close a log."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from perdure.store import (
    Delivery,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    NewMessage,
    Receipt,
    Refusal,
    Rest,
    Verdict,
)
from perdure.stores.mongo import MongoStore, journal, mongo, schema, sending
from perdure.stores.mongo.journal import MAX_POSITION_AGE
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

HOUR = timedelta(hours=1)
ACCEPTED, FENCED, UNKNOWN = Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN


@pytest.fixture(scope="module")
def sandbox(mongo_standalone: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_standalone) as sandbox:
        yield sandbox


@pytest.fixture
def clock() -> TestClock:
    """The clock of the machine that `store` runs on; leases do not depend on it."""
    return TestClock()


@pytest.fixture
async def store(sandbox: Sandbox, clock: TestClock) -> AsyncIterator[MongoStore]:
    async with mongo(sandbox.url, clock=clock) as store:
        yield store
    sandbox.clear()


@pytest.fixture
async def another(sandbox: Sandbox) -> AsyncIterator[MongoStore]:
    """The store in another process."""
    async with mongo(sandbox.url) as store:
        yield store


async def lease(store: MongoStore, owner: str = "ana", ttl: timedelta = HOUR) -> Grant:
    (grant,) = await store.acquire([LeaseRequest("run", owner, ttl, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    return grant


async def take_over(store: MongoStore) -> Grant:
    """Return the lease of a run whose owner let it expire."""
    await asyncio.sleep(0.02)
    return await lease(store, "bob")


async def replace(store: MongoStore, owner: str, *, by: str) -> Grant:
    """Return the lease of a run whose owner is alive and has an unexpired one."""
    (grant,) = await store.acquire([LeaseRequest("run", by, HOUR, instead_of=owner)])
    assert isinstance(grant, Grant)
    return grant


def step(grant: Grant, n: int, key: str, *consumes: str) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot(key)), consumes=consumes)


def end(grant: Grant, n: int, *keys: str, rest: Rest | None = None) -> Entry:
    whole = as_json(snapshot(*keys, status="suspended"))
    return Entry("run", grant.lease.epoch, n, whole, rest=rest or Rest("suspended"))


async def steps(store: MongoStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


def stored_entries(sandbox: Sandbox) -> list[dict[str, Any]]:
    return list(sandbox.database["perdure_runs_journal"].find())


async def test_an_entry_is_one_document(store: MongoStore, sandbox: Sandbox) -> None:
    """Appending it does not touch the run's own document."""
    grant = await lease(store)
    before = sandbox.database["perdure_runs"].find_one()
    await store.append([step(grant, 1, "a")])
    assert sandbox.database["perdure_runs"].find_one() == before
    (entry,) = stored_entries(sandbox)
    assert entry["data"] == as_json(snapshot("a"))


async def test_a_late_entry_is_fenced_by_the_seal(
    store: MongoStore, another: MongoStore, sandbox: Sandbox
) -> None:
    """A takeover fills the slot that the previous owner would fill next."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(old, 1, "a")])
    new = await take_over(another)
    assert list(new.snapshot["steps"]) == ["a"]
    assert [("seal" in entry) for entry in stored_entries(sandbox)] == [False, True]
    assert await store.append([step(old, 2, "b"), step(old, 3, "c")]) == [FENCED, FENCED]
    assert await another.append([step(new, 1, "d")]) == [ACCEPTED]
    assert await steps(store) == ["a", "d"]


async def test_entries_after_a_seal_are_ignored(
    store: MongoStore, another: MongoStore, sandbox: Sandbox
) -> None:
    """Of a batch whose first entry met the seal, the others were written."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    new = await take_over(another)
    await store.append([step(old, 1, "a"), step(old, 2, "b")])
    assert len([entry for entry in stored_entries(sandbox) if "data" in entry]) == 1
    assert await steps(another) == []
    await another.release([new.lease])
    assert list((await lease(store, "cem")).snapshot["steps"]) == []


async def test_an_entry_written_before_the_seal_counts(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The takeover finds the slot filled and reads again: the entry is in the grant."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(old, 1, "a")])
    seal = asyncio.Event()
    delay_first_seal(monkeypatch, seal)
    takeover = asyncio.create_task(take_over(another))
    await seal.wait()
    assert await store.append([step(old, 2, "b")]) == [ACCEPTED]
    assert list((await takeover).snapshot["steps"]) == ["a", "b"]
    assert await store.append([step(old, 3, "c")]) == [FENCED]


def delay_first_seal(monkeypatch: pytest.MonkeyPatch, reached: asyncio.Event) -> None:
    """Delay the first seal until other tasks had their turn."""
    insert = schema.insert

    async def late(*arguments: Any) -> set[int]:
        if not reached.is_set():
            reached.set()
            await asyncio.sleep(0.1)
        return await insert(*arguments)

    monkeypatch.setattr(journal, "insert", late)


async def test_a_live_owner_that_was_replaced_meets_the_seal(
    store: MongoStore, another: MongoStore, sandbox: Sandbox
) -> None:
    """Its log is sealed as if its lease had expired: neither an entry nor a rest is written."""
    old = await lease(store)
    await store.append([step(old, 1, "a")])
    new = await replace(another, "ana", by="bob")
    assert list(new.snapshot["steps"]) == ["a"]
    assert [("seal" in entry) for entry in stored_entries(sandbox)] == [False, True]
    assert await store.append([step(old, 2, "b"), end(old, 3, "a", "b")]) == [FENCED, FENCED]
    assert await store.renew([old.lease], HOUR) == [None]
    assert await another.append([step(new, 1, "c")]) == [ACCEPTED]
    assert await steps(store) == ["a", "c"]


async def test_an_entry_of_a_live_owner_before_the_seal_counts(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest does not: the run has the new epoch already."""
    old = await lease(store)
    seal = asyncio.Event()
    delay_first_seal(monkeypatch, seal)
    takeover = asyncio.create_task(replace(another, "ana", by="bob"))
    await seal.wait()
    assert await store.append([step(old, 1, "a")]) == [ACCEPTED]
    assert await store.append([end(old, 2, "a", "b")]) == [FENCED]
    new = await takeover
    assert list(new.snapshot["steps"]) == ["a"]
    assert new.takeovers == 0


async def test_live_owners_that_replace_each_other_share_one_history(
    store: MongoStore, another: MongoStore
) -> None:
    """Each gets exactly what was accepted from the others, who write until they are fenced."""
    keys: list[str] = []

    async def write(writer: MongoStore, grant: Grant) -> None:
        for n in range(1, 1_000):
            key = f"{grant.lease.owner}.{n}"
            if await writer.append([step(grant, n, key)]) != [ACCEPTED]:
                return
            keys.append(key)

    grant = await lease(store, "owner 0")
    for number in range(1, 20):
        previous, next_store = ((another, store), (store, another))[number % 2]
        writing = asyncio.create_task(write(previous, grant))
        await asyncio.sleep(0.002 * (number % 5))
        grant = await replace(next_store, grant.lease.owner, by=f"owner {number}")
        await writing
        assert list(grant.snapshot["steps"]) == keys
    assert await steps(store) == keys


@pytest.mark.parametrize("existing", [True, False])
async def test_a_new_run_that_was_taken_over_is_not_taken_back(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    """Its creator, which did not get the reply, recognizes its run and that it lost the lease."""
    leases = store._backend._leases
    create = leases._create

    async def lose_reply(*arguments: Any) -> None:
        await create(*arguments)
        await replace(another, "ana", by="bob")

    monkeypatch.setattr(leases, "_create", lose_reply)
    first = as_json(snapshot())
    request = LeaseRequest("run", "ana", HOUR, create=first, existing=existing)
    (refusal,) = await store.acquire([request])
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.owner) == ("owned" if existing else "exists", "bob")


async def test_a_batch_takes_over_only_from_the_owners_it_names(store: MongoStore) -> None:
    """In one statement, which compares each run's owner with the one named for it."""
    first = as_json(snapshot())
    owners = ("ana", "ana", "bob", "cem", "cem")
    ids = [f"{n}" for n in range(len(owners))]
    await store.acquire(
        [LeaseRequest(id, owner, HOUR, create=first) for id, owner in zip(ids, owners, strict=True)]
    )
    named = ("ana", None, "bob", "ana", "cem")
    requests = [
        LeaseRequest(id, "eva", HOUR, instead_of=owner)
        for id, owner in zip(ids, named, strict=True)
    ]
    answers = [
        answer.takeovers if isinstance(answer, Grant) else answer.owner
        for answer in await store.acquire(requests)
    ]
    assert answers == [1, "ana", 1, "cem", 1]


async def test_a_lease_that_is_lost_before_the_run_is_read_is_not_granted(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is paused between leasing a run and reading its log, which another owner then
    deletes: it must not get the old snapshot without the log."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(old, 1, "a")])
    await asyncio.sleep(0.02)

    async def another_owner() -> None:
        new = await take_over(another)
        await another.append([end(new, 1, "a", "b")])
        await another.close()

    before_logs_are_read(monkeypatch, another_owner)
    answers = await store.acquire([LeaseRequest("run", "cem", timedelta(milliseconds=1))])
    assert answers == [Refusal("run", "owned")]


def before_logs_are_read(
    monkeypatch: pytest.MonkeyPatch, event: Callable[[], Awaitable[None]]
) -> None:
    """Call `event` before the logs of a lease are read."""
    read_logs = journal.read_logs

    async def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        await event()
        return await read_logs(*arguments)

    monkeypatch.setattr(journal, "read_logs", late)


async def test_a_run_can_change_owners_many_times(store: MongoStore, another: MongoStore) -> None:
    """Each owner continues with all that was accepted, without a rest in between."""
    keys: list[str] = []
    for number in range(8):
        owner = (store, another)[number % 2]
        grant = await lease(owner, f"owner {number}")
        assert list(grant.snapshot["steps"]) == keys
        for n in range(number % 3):
            keys.append(f"{number}.{n}")
            assert await owner.append([step(grant, n + 1, keys[-1])]) == [ACCEPTED]
        await owner.release([grant.lease])
    assert await steps(store) == keys


async def test_an_old_position_is_not_trusted(
    store: MongoStore, another: MongoStore, sandbox: Sandbox, clock: TestClock
) -> None:
    """Seals are removed after a while, so an owner then reads its run before it writes."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    new = await take_over(another)
    await another.append([end(new, 1, "a")])
    sandbox.database["perdure_runs_journal"].delete_many({})
    await clock.advance(MAX_POSITION_AGE + timedelta(seconds=1))
    assert await store.append([step(old, 1, "b")]) == [FENCED]
    assert stored_entries(sandbox) == []


async def test_an_owner_continues_after_a_long_step(store: MongoStore, clock: TestClock) -> None:
    """It reads where the log ends, and then writes from memory again."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    await clock.advance(HOUR)
    assert await store.append([step(grant, 2, "b")]) == [ACCEPTED]
    assert await store.append([step(grant, 3, "c")]) == [ACCEPTED]
    assert await steps(store) == ["a", "b", "c"]


async def test_another_process_can_write_with_the_lease(
    store: MongoStore, another: MongoStore
) -> None:
    """The epoch is the right to write; two processes that use it lose nothing."""
    grant = await lease(store)
    verdicts = [
        *await store.append([step(grant, 1, "a")]),
        *await another.append([step(grant, 2, "b")]),
        *await store.append([step(grant, 3, "c")]),
        *await another.append([step(grant, 4, "d"), step(grant, 2, "again")]),
    ]
    assert set(verdicts) == {ACCEPTED}
    assert await steps(another) == ["a", "b", "c", "d"]


async def test_another_process_can_settle_a_run(store: MongoStore, another: MongoStore) -> None:
    """The log is sealed, so the owner cannot write to it any longer."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    assert await another.append([end(grant, 2, "a", "b")]) == [ACCEPTED]
    assert await store.append([step(grant, 3, "c")]) == [FENCED]
    assert await steps(another) == ["a", "b"]


async def test_another_process_can_release_a_run(store: MongoStore, another: MongoStore) -> None:
    """The log is sealed, so the owner cannot write to it any longer."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    await another.release([grant.lease])
    verdicts = await store.append([step(grant, 2, "b"), step(grant, 1, "a")])
    assert verdicts == [FENCED, ACCEPTED]
    assert await steps(another) == ["a"]


async def test_a_release_by_another_owner_does_nothing(
    store: MongoStore, another: MongoStore
) -> None:
    """It does not seal the log either."""
    grant = await lease(store)
    forged = Lease("run", "cem", grant.lease.epoch, grant.lease.expires_at)
    await another.release([forged])
    assert await store.append([step(grant, 1, "a")]) == [ACCEPTED]


async def test_entries_are_merged_by_number(store: MongoStore) -> None:
    """Whatever gaps the numbers have, and in whatever order they were written."""
    grant = await lease(store)
    for n in (7, 3, 100, 5):
        assert await store.append([step(grant, n, f"{n}")]) == [ACCEPTED]
    assert await steps(store) == ["3", "5", "7", "100"]


async def test_merged_entries_are_deleted(store: MongoStore, sandbox: Sandbox) -> None:
    """After a rest the journal is empty; after a takeover only a seal that expires is left."""
    grant = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(grant, n, f"{n}") for n in range(5)])
    grant = await take_over(store)
    await store.append([step(grant, 1, "x")])
    await store.append([end(grant, 2, "x")])
    await store.close()
    (seal,) = stored_entries(sandbox)
    assert seal["seal"]
    assert "expireAt" in seal


async def test_nothing_is_left_of_a_deleted_run(store: MongoStore, sandbox: Sandbox) -> None:
    """A rest with `delete` is one fenced write; sent again, the run is unknown."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
    delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    assert await store.append([delete]) == [ACCEPTED]
    assert await store.load("run") is None
    assert await store.append([delete, step(grant, 3, "b")]) == [UNKNOWN, UNKNOWN]
    await store.close()
    assert stored_entries(sandbox) == []
    assert list(sandbox.database["perdure_runs_inbox"].find()) == []


async def test_a_previous_owner_cannot_delete_a_run(store: MongoStore, another: MongoStore) -> None:
    """A rest with `delete` is fenced like any other."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await take_over(another)
    delete = Entry("run", old.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
    assert await store.append([delete]) == [FENCED]
    assert await store.load("run") is not None


async def test_a_batch_may_mix_everything(store: MongoStore, another: MongoStore) -> None:
    """Entries, rests and deletions of many runs, with a fenced and an unknown one among them."""
    requests = [LeaseRequest(f"{n}", "ana", HOUR, create=as_json(snapshot())) for n in range(6)]
    grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    epochs = [grant.lease.epoch for grant in grants]
    await another.save("2", snapshot("saved"))
    data, whole = as_json(snapshot("a")), as_json(snapshot("a", status="completed"))
    batch = [
        Entry("0", epochs[0], 1, data),
        Entry("1", epochs[1], 1, whole, rest=Rest("completed")),
        Entry("2", epochs[2], 1, whole, rest=Rest("completed")),
        Entry("missing", 1, 1, data),
        Entry("3", epochs[3], 1, b"", rest=Rest("completed", delete=True)),
        Entry("4", epochs[4], 1, data),
        Entry("4", epochs[4], 2, whole, rest=Rest("completed")),
        Entry("5", epochs[5], 1, whole, rest=Rest("completed")),
        Entry("5", epochs[5], 2, as_json(snapshot("late"))),
    ]
    expected = [ACCEPTED, ACCEPTED, FENCED, UNKNOWN, *[ACCEPTED] * 4, FENCED]
    assert await store.append(batch) == expected
    loaded = [await store.load(f"{n}") for n in range(6)]
    keys = [run and list(run["steps"]) for run in loaded]
    assert keys == [["a"], ["a"], ["saved"], None, ["a"], ["a"]]


async def test_a_batch_of_rests_wakes_runs_with_awaited_messages(store: MongoStore) -> None:
    """The other runs are stored as their rests say."""
    ids = ("over", "sleeps", "waits", "had a message", "got a message")
    requests = [LeaseRequest(id, "ana", HOUR, create=as_json(snapshot())) for id in ids]
    await store.save("had a message", snapshot())
    await send_one(store, "had a message", "paid", b"1")
    grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    await send_one(store, "got a message", "paid", b"2")
    waiting = Rest("waiting", None, ("paid",))
    rests = [Rest("completed"), Rest("suspended", grants[0].now + HOUR), *[waiting] * 3]
    whole = as_json(snapshot("a"))
    batch = [
        Entry(grant.lease.id, grant.lease.epoch, 1, whole, rest=rest)
        for grant, rest in zip(grants, rests, strict=True)
    ]
    assert await store.append(batch) == [ACCEPTED] * 5
    statuses = {row.id: row.status for row in await store.list()}
    assert statuses == {id: rest.status for id, rest in zip(ids, rests, strict=True)}
    claimed = await store.claim("bob", HOUR, 10)
    assert {grant.lease.id for grant in claimed} == {"had a message", "got a message"}
    assert await store.append(batch) == [ACCEPTED] * 3 + [FENCED] * 2


async def test_a_consumed_message_stays_consumed_without_its_mark(
    store: MongoStore, another: MongoStore, sandbox: Sandbox
) -> None:
    """The entry consumes it; the mark on the message may be lost in a crash."""
    grant = await lease(store, ttl=timedelta(milliseconds=1))
    for name in ("a", "b", "c"):
        await send_one(store, "run", name, b"1", dedup_id=name)
    first, second, _ = await store.inbox("run")
    await store.append([step(grant, 1, "wait", first.id)])
    await lose_marks(sandbox)
    assert [message.name for message in await store.inbox("run")] == ["b", "c"]
    new = await take_over(another)
    assert [message.name for message in new.inbox] == ["b", "c"]
    entry = Entry("run", new.lease.epoch, 1, as_json(snapshot()), (second.id,), Rest("suspended"))
    await another.append([entry])
    await lose_marks(sandbox, "b")
    assert [message.name for message in await store.inbox("run")] == ["c"]
    assert [message.name for message in (await lease(store, "cem")).inbox] == ["c"]


async def lose_marks(sandbox: Sandbox, *names: str) -> None:
    filter_by_name = {"name": {"$in": names}} if names else {}
    messages = sandbox.database["perdure_runs_inbox"]
    messages.update_many(
        {"consumed": True, **filter_by_name}, {"$set": {"consumed": False, "payload": b"1"}}
    )


async def test_messages_of_an_earlier_run_are_not_delivered(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """What a crashed sender left is not found by a later run of the same id."""
    await lease(store)
    await send_one(store, "run", "paid", b"1", dedup_id="x")
    messages = list(sandbox.database["perdure_runs_inbox"].find())
    await store.delete("run")
    await store._backend._cleanup.finish()
    sandbox.database["perdure_runs_inbox"].insert_many(messages)
    grant = await lease(store)
    assert grant.inbox == ()
    assert await send_one(store, "run", "paid", b"2", dedup_id="x") is Delivery.DELIVERED


async def test_a_renewal_ignores_messages_of_an_earlier_run(store: MongoStore) -> None:
    """Those of a deleted run are deleted a little later, in the background."""
    await lease(store)
    await send_one(store, "run", "paid", b"1")
    await store.delete("run")
    grant = await lease(store)
    await send_one(store, "run", "paid", b"2")
    (renewed,) = await store.renew([grant.lease], HOUR)
    assert renewed is not None
    assert renewed.has_messages
    (message,) = await store.inbox("run")
    await store.append([step(grant, 1, "wait", message.id)])
    (renewed,) = await store.renew([grant.lease], HOUR)
    assert renewed is not None
    assert not renewed.has_messages


async def test_a_duplicate_completes_the_work_of_a_crashed_sender(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """The message was stored but not counted: another that is the same counts and wakes the run."""
    grant = await lease(store)
    await store.append([end(grant, 1, rest=Rest("waiting", None, ("paid",)))])
    await send_one(store, "run", "paid", b"1", dedup_id="x")
    change: dict[str, Any] = {"$unset": {"wakeAt": "", "messageCount": "", "newest": ""}}
    sandbox.database["perdure_runs"].update_one({"_id": "run"}, change)
    assert await store.claim("bob", HOUR, 1) == []
    assert await store.inbox("run") == []
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
    assert [claimed.lease.id for claimed in await store.claim("bob", HOUR, 1)] == ["run"]


async def test_a_message_reported_as_duplicate_is_never_withdrawn(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends between the two writes of one sender, and another sender completes the message:
    the run has it when it is retried."""
    grant = await lease(store)

    async def end_run() -> None:
        assert await send_one(another, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
        await another.append([end(grant, 1, rest=Rest("failed"))])
        assert await send_one(another, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE

    after_the_message(monkeypatch, end_run)
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
    assert [message.name for message in (await lease(another, "bob")).inbox] == ["paid"]


async def test_the_sender_whose_payload_counts_gets_delivered(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two writes, another sender completes its message with a payload of its own."""
    await lease(store)

    async def answer_too() -> None:
        assert await send_one(another, "run", "answer", b"2", dedup_id="x") is Delivery.DUPLICATE

    after_the_message(monkeypatch, answer_too)
    assert await send_one(store, "run", "answer", b"1", dedup_id="x") is Delivery.DELIVERED
    assert [message.payload for message in await store.inbox("run")] == [b"1"]


async def test_a_message_for_a_run_deleted_in_the_meantime_is_discarded(
    store: MongoStore, another: MongoStore, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not delivered to the next run of the same id."""
    await lease(store)

    async def recreate() -> None:
        await another.delete("run")
        await another._backend._cleanup.finish()
        await lease(another)

    after_the_message(monkeypatch, recreate)
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.UNKNOWN
    assert (await lease(store)).inbox == ()
    assert sandbox.database["perdure_runs_inbox"].count_documents({}) == 0


def after_the_message(
    monkeypatch: pytest.MonkeyPatch, event: Callable[[], Awaitable[None]]
) -> None:
    """Call `event` between the two writes of the next sender."""
    insert = schema.insert

    async def slow(*arguments: Any) -> set[int]:
        monkeypatch.undo()
        existing = await insert(*arguments)
        await event()
        return existing

    monkeypatch.setattr(sending, "insert", slow)


async def test_a_message_to_a_run_that_ends_before_it_counts_is_refused(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written but not counted: the run never has it, and it can be sent again."""
    grant = await lease(store)

    async def end_run() -> None:
        await another.append([end(grant, 1, rest=Rest("failed"))])

    after_the_message(monkeypatch, end_run)
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.OVER
    assert await store.inbox("run") == []
    await lease(store, "bob")
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED


async def test_numbers_move_from_the_run_to_its_messages(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """The run's document stays small, and readers see the same messages in the same order."""
    await lease(store)
    names = [f"{n}" for n in range(130)]
    for name in names:
        await send_one(store, "run", name, b"1", dedup_id=name)
        run = sandbox.database["perdure_runs"].find_one({"_id": "run"})
        assert run is not None
        assert len(run["newest"]) <= 51
    assert [message.name for message in await store.inbox("run")] == names
    assert [message.name for message in (await lease(store)).inbox] == names
    for name in (names[0], names[-1]):
        assert await send_one(store, "run", name, b"1", dedup_id=name) is Delivery.DUPLICATE


async def test_a_crash_while_numbers_move_loses_no_message(
    store: MongoStore, sandbox: Sandbox
) -> None:
    """Between the two writes, both the run and its messages have them."""
    await lease(store)
    messages = [NewMessage("run", f"{n}", b"1", f"{n}") for n in range(60)]
    await store.send(messages)
    inbox_documents = sandbox.database["perdure_runs_inbox"]
    numbered = [each["number"] for each in inbox_documents.find()]
    newest = [
        {"name": each["_id"].partition("\0")[2], "number": each["number"], "at": each["sentAt"]}
        for each in inbox_documents.find().sort("number")
    ]
    runs = sandbox.database["perdure_runs"]
    back = {"$set": {"newest": [{**each, "by": 0} for each in newest]}, "$unset": {"numbered": ""}}
    for left in (60, 30, 0):
        runs.update_one({"_id": "run"}, back)
        inbox_documents.update_many(
            {"number": {"$gt": left}}, {"$unset": {"number": "", "sentAt": ""}}
        )
        pages = [*await store.inbox("run", limit=40)]
        pages += await store.inbox("run", after=pages[-1].id)
        assert [message.name for message in pages] == [f"{n}" for n in range(60)]
    assert sorted(numbered) == [*range(1, 61)]


async def test_a_message_is_not_counted_twice_if_numbers_move_in_the_meantime(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that is paused finds that another completed its message, and that it moved."""
    await lease(store)

    async def complete() -> None:
        others = [NewMessage("run", f"{n}", b"1") for n in range(60)]
        await another.send([NewMessage("run", "paid", b"1", "x"), *others])

    after_the_message(monkeypatch, complete)
    assert await send_one(store, "run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
    assert len(await store.inbox("run")) == 61


MANY = [NewMessage("run", f"{n}", b"1") for n in range(60)]
"""So many messages that their numbers move from the run to their documents."""

BATCH = [
    NewMessage("other", "paid", b"1"),
    NewMessage("run", "paid", b"1"),
    NewMessage("run", "sent", b"1", "x"),
]


def before_the_runs_are_read_again(
    monkeypatch: pytest.MonkeyPatch, event: Callable[[], Awaitable[object]]
) -> None:
    """Call `event` after the next sender has counted messages to several runs."""
    find_runs, calls = sending._find_runs, 0

    async def slow(*arguments: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 2:
            monkeypatch.undo()
            await event()
        return await find_runs(*arguments)

    monkeypatch.setattr(sending, "_find_runs", slow)


async def test_a_batch_is_counted_once_if_its_numbers_move_in_the_meantime(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender finds them in the messages."""
    await lease(store)
    await store.acquire([LeaseRequest("other", "ana", HOUR, create=as_json(snapshot()))])
    before_the_runs_are_read_again(monkeypatch, lambda: another.send(MANY))
    receipts = await store.send(BATCH)
    assert receipts == [Receipt(Delivery.DELIVERED, count) for count in (1, 1, 2)]
    assert len(await store.inbox("run")) == 62


async def test_a_batch_is_counted_if_numbers_moved_before(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender reads the run again, and tries again."""
    await lease(store)
    await store.acquire([LeaseRequest("other", "ana", HOUR, create=as_json(snapshot()))])

    async def send_many() -> None:
        await another.send(MANY)

    after_the_message(monkeypatch, send_many)
    receipts = await store.send(BATCH)
    assert receipts == [Receipt(Delivery.DELIVERED, count) for count in (1, 61, 62)]
    assert len(await store.inbox("run")) == 62


async def test_a_message_of_a_batch_that_was_consumed_in_the_meantime_is_not_sent_again(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number moved, and then its document was deleted."""
    grant = await lease(store)
    await store.acquire([LeaseRequest("other", "ana", HOUR, create=as_json(snapshot()))])

    async def consume() -> None:
        await another.send(MANY)
        first, *_ = await another.inbox("run")
        await another.append([step(grant, 1, "a", first.id)])
        await another._backend._appender.finish()

    before_the_runs_are_read_again(monkeypatch, consume)
    receipts = await store.send(BATCH)
    assert {receipt.delivery for receipt in receipts} == {Delivery.DELIVERED}
    assert [message.name for message in await store.inbox("run")][:2] == ["sent", "0"]


async def test_concurrent_senders_never_change_what_was_read(
    store: MongoStore, another: MongoStore
) -> None:
    """A reader that continues after the last message it knows misses none."""
    await lease(store)
    read: list[str] = []

    async def send(number: int) -> None:
        await (store, another)[number % 2].send([NewMessage("run", f"{number}", b"1")])

    sending = asyncio.gather(*map(send, range(150)))
    last: str | None = None
    while len(read) < 150:
        for message in await another.inbox("run", after=last, limit=9):
            read.append(message.name)
            last = message.id
    await sending
    assert read == [message.name for message in await store.inbox("run")]
    assert len({*read}) == 150
