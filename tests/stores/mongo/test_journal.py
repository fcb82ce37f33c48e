"""The fence of the journal: slots that only one writer fills, and seals that close a log."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from perdure.store import Delivery, Entry, Grant, Lease, LeaseRequest, Rest, Verdict
from perdure.stores.mongo import MongoStore, mongo
from perdure.stores.mongo.journal import MAX_POSITION_AGE
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.places import Place, place_on

HOUR = timedelta(hours=1)
ACCEPTED, FENCED, UNKNOWN = Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN


@pytest.fixture(scope="module")
def place(mongo_standalone: Server) -> Iterator[Place]:
    with place_on(mongo_standalone) as place:
        yield place


@pytest.fixture
def clock() -> TestClock:
    """The clock of the machine that `store` runs on; leases do not live by it."""
    return TestClock()


@pytest.fixture
async def store(place: Place, clock: TestClock) -> AsyncIterator[MongoStore]:
    async with mongo(place.url, clock=clock) as store:
        yield store
    place.clear()


@pytest.fixture
async def another(place: Place) -> AsyncIterator[MongoStore]:
    """The store in another process."""
    async with mongo(place.url) as store:
        yield store


async def lease(store: MongoStore, owner: str = "ana", ttl: timedelta = HOUR) -> Grant:
    (grant,) = await store.acquire([LeaseRequest("run", owner, ttl, create=as_json(snapshot()))])
    assert grant is not None
    return grant


async def taken_over(store: MongoStore) -> Grant:
    """Give the lease of a run whose owner let it expire."""
    await asyncio.sleep(0.02)
    return await lease(store, "bob")


def step(grant: Grant, n: int, key: str, *consumes: str) -> Entry:
    return Entry("run", grant.lease.epoch, n, as_json(snapshot(key)), consumes=consumes)


def end(grant: Grant, n: int, *keys: str, rest: Rest | None = None) -> Entry:
    whole = as_json(snapshot(*keys, status="suspended"))
    return Entry("run", grant.lease.epoch, n, whole, rest=rest or Rest("suspended"))


async def steps(store: MongoStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


def journal(place: Place) -> list[dict[str, Any]]:
    return list(place.database["perdure_runs_journal"].find())


async def test_an_entry_is_one_document(store: MongoStore, place: Place) -> None:
    """An entry costs one insert: the run's own document stays as it is."""
    grant = await lease(store)
    before = place.database["perdure_runs"].find_one()
    await store.append([step(grant, 1, "a")])
    assert place.database["perdure_runs"].find_one() == before
    (entry,) = journal(place)
    assert entry["data"] == as_json(snapshot("a"))


async def test_a_late_entry_finds_the_seal(
    store: MongoStore, another: MongoStore, place: Place
) -> None:
    """A takeover fills the slot that the owner of before would fill next."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(old, 1, "a")])
    new = await taken_over(another)
    assert list(new.snapshot["steps"]) == ["a"]
    assert [("seal" in entry) for entry in journal(place)] == [False, True]
    assert await store.append([step(old, 2, "b"), step(old, 3, "c")]) == [FENCED, FENCED]
    assert await another.append([step(new, 1, "d")]) == [ACCEPTED]
    assert await steps(store) == ["a", "d"]


async def test_entries_behind_a_seal_do_not_count(
    store: MongoStore, another: MongoStore, place: Place
) -> None:
    """Of a batch whose first entry met the seal, the others were written: they are ignored."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    new = await taken_over(another)
    await store.append([step(old, 1, "a"), step(old, 2, "b")])
    assert len([entry for entry in journal(place) if "data" in entry]) == 1
    assert await steps(another) == []
    await another.release([new.lease])
    assert list((await lease(store, "cem")).snapshot["steps"]) == []


async def test_an_entry_that_beats_the_seal_counts(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who seals and finds the slot filled reads again: what was accepted is in the grant."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(old, 1, "a")])
    seal = asyncio.Event()
    meet_at_seal(monkeypatch, seal)
    taking = asyncio.create_task(taken_over(another))
    await seal.wait()
    assert await store.append([step(old, 2, "b")]) == [ACCEPTED]
    assert list((await taking).snapshot["steps"]) == ["a", "b"]
    assert await store.append([step(old, 3, "c")]) == [FENCED]


def meet_at_seal(monkeypatch: pytest.MonkeyPatch, reached: asyncio.Event) -> None:
    """Let the first seal wait until others had their turn."""
    from perdure.stores.mongo import journal as _mongo_log

    insert = _mongo_log.insert

    async def late(*arguments: Any) -> set[int]:
        if not reached.is_set():
            reached.set()
            await asyncio.sleep(0.1)
        return await insert(*arguments)

    monkeypatch.setattr(_mongo_log, "insert", late)


async def test_a_run_that_is_lost_before_it_is_read_is_not_granted(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that is paused after it leased a run and before it read the log does not get its
    old snapshot without the log, which another owner has emptied in the meantime."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(old, 1, "a")])
    await asyncio.sleep(0.02)

    async def take_over() -> None:
        new = await taken_over(another)
        await another.append([end(new, 1, "a", "b")])
        await another.close()

    before_logs_are_read(monkeypatch, take_over)
    assert await store.acquire([LeaseRequest("run", "cem", timedelta(milliseconds=1))]) == [None]


def before_logs_are_read(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]
) -> None:
    """Let something happen before the logs of a lease are read."""
    from perdure.stores.mongo import journal as _mongo_log

    read_logs = _mongo_log.read_logs

    async def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        await happens()
        return await read_logs(*arguments)

    monkeypatch.setattr(_mongo_log, "read_logs", late)


async def test_a_run_changes_hands_many_times(store: MongoStore, another: MongoStore) -> None:
    """Each owner goes on with all that was accepted, though no one comes to rest."""
    keys: list[str] = []
    for turn in range(8):
        who = (store, another)[turn % 2]
        grant = await lease(who, f"owner {turn}")
        assert list(grant.snapshot["steps"]) == keys
        for n in range(turn % 3):
            keys.append(f"{turn}.{n}")
            assert await who.append([step(grant, n + 1, keys[-1])]) == [ACCEPTED]
        await who.release([grant.lease])
    assert await steps(store) == keys


async def test_nobody_goes_by_old_memory(
    store: MongoStore, another: MongoStore, place: Place, clock: TestClock
) -> None:
    """Seals do not stay for ever: after a while an owner looks at its run before it writes."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    new = await taken_over(another)
    await another.append([end(new, 1, "a")])
    place.database["perdure_runs_journal"].delete_many({})
    await clock.advance(MAX_POSITION_AGE + timedelta(seconds=1))
    assert await store.append([step(old, 1, "b")]) == [FENCED]
    assert journal(place) == []


async def test_a_long_step_does_not_cost_the_position(store: MongoStore, clock: TestClock) -> None:
    """After a pause without a word the owner goes on where the log ends."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    await clock.advance(HOUR)
    assert await store.append([step(grant, 2, "b")]) == [ACCEPTED]
    assert await store.append([step(grant, 3, "c")]) == [ACCEPTED]
    assert await steps(store) == ["a", "b", "c"]


async def test_another_process_may_write_with_the_lease(
    store: MongoStore, another: MongoStore
) -> None:
    """The epoch is the right to write, wherever it is used; two who use it lose nothing."""
    grant = await lease(store)
    verdicts = [
        *await store.append([step(grant, 1, "a")]),
        *await another.append([step(grant, 2, "b")]),
        *await store.append([step(grant, 3, "c")]),
        *await another.append([step(grant, 4, "d"), step(grant, 2, "again")]),
    ]
    assert set(verdicts) == {ACCEPTED}
    assert await steps(another) == ["a", "b", "c", "d"]


async def test_another_process_may_put_a_run_to_rest(
    store: MongoStore, another: MongoStore
) -> None:
    """Then the log is closed, and the one who went by memory cannot write into it any more."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    assert await another.append([end(grant, 2, "a", "b")]) == [ACCEPTED]
    assert await store.append([step(grant, 3, "c")]) == [FENCED]
    assert await steps(another) == ["a", "b"]


async def test_another_process_may_release_a_run(store: MongoStore, another: MongoStore) -> None:
    """Then the log is closed, and the one who went by memory cannot write into it any more."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    await another.release([grant.lease])
    verdicts = await store.append([step(grant, 2, "b"), step(grant, 1, "a")])
    assert verdicts == [FENCED, ACCEPTED]
    assert await steps(another) == ["a"]


async def test_a_forged_release_closes_nothing(store: MongoStore, another: MongoStore) -> None:
    """Releasing a lease that is not one's own does nothing."""
    grant = await lease(store)
    forged = Lease("run", "cem", grant.lease.epoch, grant.lease.expires_at)
    await another.release([forged])
    assert await store.append([step(grant, 1, "a")]) == [ACCEPTED]


async def test_numbers_may_have_gaps_and_come_in_any_order(store: MongoStore) -> None:
    """Entries are merged by number, whichever came first."""
    grant = await lease(store)
    for n in (7, 3, 100, 5):
        assert await store.append([step(grant, n, f"{n}")]) == [ACCEPTED]
    assert await steps(store) == ["3", "5", "7", "100"]


async def test_folded_entries_are_removed(store: MongoStore, place: Place) -> None:
    """After a rest the journal is empty, and after a takeover only a seal that expires is left."""
    grant = await lease(store, ttl=timedelta(milliseconds=1))
    await store.append([step(grant, n, f"{n}") for n in range(5)])
    grant = await taken_over(store)
    await store.append([step(grant, 1, "x")])
    await store.append([end(grant, 2, "x")])
    await store.close()
    (seal,) = journal(place)
    assert seal["seal"]
    assert "expireAt" in seal


async def test_nothing_is_left_of_a_run_that_is_gone(store: MongoStore, place: Place) -> None:
    """`delete` deletes in the same fenced write; sent again, it is still what was wanted."""
    grant = await lease(store)
    await store.append([step(grant, 1, "a")])
    assert await store.send("run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
    delete = Entry("run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    assert await store.append([delete]) == [ACCEPTED]
    assert await store.load("run") is None
    assert await store.append([delete, step(grant, 3, "b")]) == [UNKNOWN, UNKNOWN]
    await store.close()
    assert journal(place) == []
    assert list(place.database["perdure_runs_inbox"].find()) == []


async def test_a_stale_owner_cannot_make_a_run_go(store: MongoStore, another: MongoStore) -> None:
    """`delete` is fenced like any rest."""
    old = await lease(store, ttl=timedelta(milliseconds=1))
    await taken_over(another)
    delete = Entry("run", old.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
    assert await store.append([delete]) == [FENCED]
    assert await store.load("run") is not None


async def test_a_batch_may_hold_everything(store: MongoStore, another: MongoStore) -> None:
    """Entries, rests and departures of many runs, with a stale one and a missing one among them."""
    wants = [LeaseRequest(f"{n}", "ana", HOUR, create=as_json(snapshot())) for n in range(6)]
    grants = [grant for grant in await store.acquire(wants) if grant is not None]
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
    wanted = [ACCEPTED, ACCEPTED, FENCED, UNKNOWN, *[ACCEPTED] * 4, FENCED]
    assert await store.append(batch) == wanted
    loaded = [await store.load(f"{n}") for n in range(6)]
    keys = [run and list(run["steps"]) for run in loaded]
    assert keys == [["a"], ["a"], ["saved"], None, ["a"], ["a"]]


async def test_a_batch_of_rests_wakes_what_has_mail(store: MongoStore) -> None:
    """Of runs that go to rest together, each lies as it says; one with awaited mail is due."""
    ids = ("over", "sleeps", "waits", "has mail", "got mail")
    wants = [LeaseRequest(id, "ana", HOUR, create=as_json(snapshot())) for id in ids]
    await store.save("has mail", snapshot())
    await store.send("has mail", "paid", b"1")
    grants = [grant for grant in await store.acquire(wants) if grant is not None]
    await store.send("got mail", "paid", b"2")
    waiting = Rest("waiting", None, ("paid",))
    rests = [Rest("completed"), Rest("suspended", grants[0].now + HOUR), *[waiting] * 3]
    whole = as_json(snapshot("a"))
    batch = [
        Entry(grant.lease.id, grant.lease.epoch, 1, whole, rest=rest)
        for grant, rest in zip(grants, rests, strict=True)
    ]
    assert await store.append(batch) == [ACCEPTED] * 5
    lines = {line.id: line.status for line in await store.list()}
    assert lines == {id: rest.status for id, rest in zip(ids, rests, strict=True)}
    claimed = await store.claim("bob", HOUR, 10)
    assert {grant.lease.id for grant in claimed} == {"has mail", "got mail"}
    assert await store.append(batch) == [ACCEPTED] * 3 + [FENCED] * 2


async def test_what_was_taken_stays_taken_without_its_mark(
    store: MongoStore, another: MongoStore, place: Place
) -> None:
    """A message is taken by the entry that names it; the mark on it may be lost in a crash."""
    grant = await lease(store, ttl=timedelta(milliseconds=1))
    for name in ("a", "b", "c"):
        await store.send("run", name, b"1", dedup_id=name)
    first, second, _ = await store.inbox("run")
    await store.append([step(grant, 1, "wait", first.id)])
    await lose_marks(place)
    assert [message.name for message in await store.inbox("run")] == ["b", "c"]
    new = await taken_over(another)
    assert [message.name for message in new.inbox] == ["b", "c"]
    entry = Entry("run", new.lease.epoch, 1, as_json(snapshot()), (second.id,), Rest("suspended"))
    await another.append([entry])
    await lose_marks(place, "b")
    assert [message.name for message in await store.inbox("run")] == ["c"]
    assert [message.name for message in (await lease(store, "cem")).inbox] == ["c"]


async def lose_marks(place: Place, *names: str) -> None:
    lost = {"name": {"$in": names}} if names else {}
    inbox = place.database["perdure_runs_inbox"]
    inbox.update_many({"consumed": True, **lost}, {"$set": {"consumed": False, "payload": b"1"}})


async def test_mail_of_an_earlier_run_is_not_delivered(store: MongoStore, place: Place) -> None:
    """A sender that died half-way leaves nothing that a later run of the same id could find."""
    await lease(store)
    await store.send("run", "paid", b"1", dedup_id="x")
    left = list(place.database["perdure_runs_inbox"].find())
    await store.delete("run")
    await store._backend._cleanup.finish()
    place.database["perdure_runs_inbox"].insert_many(left)
    grant = await lease(store)
    assert grant.inbox == ()
    assert await store.send("run", "paid", b"2", dedup_id="x") is Delivery.DELIVERED


async def test_a_sender_that_died_is_finished_by_the_next(store: MongoStore, place: Place) -> None:
    """The message lay there, but nobody was told: its duplicate wakes the run."""
    grant = await lease(store)
    await store.append([end(grant, 1, rest=Rest("waiting", None, ("paid",)))])
    await store.send("run", "paid", b"1", dedup_id="x")
    change: dict[str, Any] = {"$unset": {"wakeAt": "", "messageCount": ""}}
    place.database["perdure_runs"].update_one({"_id": "run"}, change)
    assert await store.claim("bob", HOUR, 1) == []
    assert await store.send("run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
    assert [claimed.lease.id for claimed in await store.claim("bob", HOUR, 1)] == ["run"]


async def test_an_event_that_a_sender_was_told_is_known_is_never_withdrawn(
    store: MongoStore, another: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends between a sender's two writes, and another sender finds the message: the run
    has it when it is retried."""
    grant = await lease(store)

    async def end_of_run() -> None:
        assert await another.send("run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        await another.append([end(grant, 1, rest=Rest("failed"))])
        assert await another.send("run", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE

    after_the_message(monkeypatch, end_of_run)
    assert await store.send("run", "paid", b"1", dedup_id="x") is Delivery.DELIVERED
    assert [message.name for message in (await lease(another, "bob")).inbox] == ["paid"]


async def test_an_event_for_a_run_that_is_deleted_meanwhile_is_for_nobody(
    store: MongoStore, another: MongoStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not delivered to the next run of the same id, and leaves nothing."""
    await lease(store)

    async def begun_again() -> None:
        await another.delete("run")
        await another._backend._cleanup.finish()
        await lease(another)

    after_the_message(monkeypatch, begun_again)
    assert await store.send("run", "paid", b"1", dedup_id="x") is Delivery.UNKNOWN
    assert (await lease(store)).inbox == ()
    assert place.database["perdure_runs_inbox"].count_documents({}) == 0


def after_the_message(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]
) -> None:
    """Let something happen between the two writes of the next sender."""
    from perdure.stores.mongo import inbox as _mongo_inbox

    put = _mongo_inbox._put

    async def slow(*arguments: Any) -> Any:
        monkeypatch.undo()
        message = await put(*arguments)
        await happens()
        return message

    monkeypatch.setattr(_mongo_inbox, "_put", slow)
