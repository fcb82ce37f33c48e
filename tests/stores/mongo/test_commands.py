"""The commands that the MongoDB store sends: how many, with which indexes, to which shard."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from pymongo import monitoring

from perdure.store import Entry, Grant, Lease, LeaseRequest, NewMessage, NewRun, Rest, Verdict
from perdure.stores.mongo import MongoStore, mongo
from perdure.stores.mongo.embedding import MAX_EMBEDDED
from perdure.testing.conformance.handoff import hand_off, paid, wait_for_paid
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

HOUR = timedelta(hours=1)
MANY = 10_000
RUNS = "perdure_runs"
# A payload that is too large to be embedded in the run's document.
LARGE = b'"%b"' % (b"x" * 5000)
MAJORITY = {"w": "majority", "j": True}


class CommandLog(monitoring.CommandListener):
    """All commands that a client sent."""

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name not in ("hello", "createIndexes", "endSessions"):
            self.commands.append(dict(event.command))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Only the start is recorded."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Only the start is recorded."""

    def names(self) -> list[str]:
        """Return the names of the commands since the last call."""
        return [next(iter(command)) for command in self.flush()]

    def flush(self) -> list[dict[str, Any]]:
        """Return the commands since the last call."""
        commands, self.commands = self.commands, []
        return commands


@pytest.fixture(scope="module")
def sandbox(mongo_server: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_server) as sandbox:
        yield sandbox


@pytest.fixture
def commands() -> CommandLog:
    return CommandLog()


@pytest.fixture
async def store(sandbox: Sandbox, commands: CommandLog) -> AsyncIterator[MongoStore]:
    options = {"event_listeners": [commands]}
    async with mongo(sandbox.url, client_options=options) as store:
        await store.load("nothing")
        commands.flush()
        yield store
    sandbox.clear()


def request(n: int = 0) -> LeaseRequest:
    return LeaseRequest(f"run {n}", "ana", HOUR, create=as_json(snapshot()), workflow="w")


async def leases(store: MongoStore, count: int) -> list[Grant]:
    grants = await store.acquire([request(n) for n in range(count)])
    return [grant for grant in grants if isinstance(grant, Grant)]


def step(grant: Grant, n: int) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


def end(grant: Grant, n: int, rest: Rest) -> Entry:
    data = b"" if rest.delete else as_json(snapshot(status=rest.status))
    return Entry(grant.lease.id, grant.lease.epoch, n, data, rest=rest)


async def test_a_step_costs_one_command(store: MongoStore, commands: CommandLog) -> None:
    """From the first step to the last, however long the run is."""
    (grant,) = await leases(store, 1)
    assert commands.names() == ["insert"]
    for n in range(1, 100):
        await store.append([step(grant, n)])
    assert Counter(commands.names()) == {"insert": 99}
    await store.append([end(grant, 100, Rest("completed"))])
    assert commands.names()[0] == "update"


async def test_a_batch_costs_as_much_as_one_run(store: MongoStore, commands: CommandLog) -> None:
    """200 runs are leased, written and settled in as many round trips as one."""
    grants = await leases(store, 200)
    assert commands.names() == ["insert"]
    assert set(await store.append([step(grant, 1) for grant in grants])) == {Verdict.ACCEPTED}
    assert commands.names() == ["insert"]
    await store.renew([grant.lease for grant in grants], HOUR)
    assert commands.names() == ["update", "find"]
    now = grants[0].now
    await store.append([end(grant, 2, Rest("suspended", now)) for grant in grants])
    assert commands.names()[0] == "update"
    await store._backend._cleanup.finish()
    commands.flush()
    claimed = await store.claim("bob", HOUR, 200, supports=supports("v", "w"))
    assert len(claimed) == 200
    assert commands.names() == ["find", "update", "find"]
    await store.append([end(grant, 1, Rest("completed", delete=True)) for grant in claimed])
    assert commands.names()[0] == "delete"


async def test_a_signalled_run_is_claimed_in_two_round_trips(
    store: MongoStore, commands: CommandLog
) -> None:
    """Messages with documents are read while it is leased; their marks delay nothing."""
    (grant,) = await leases(store, 1)
    await store.append([end(grant, 1, Rest("waiting", None, ("paid",)))])
    await send_one(store, grant.lease.id, "paid", LARGE)
    assert commands.names()[-3:] == ["find", "insert", "findAndModify"]
    (claimed,) = await store.claim("bob", HOUR, 100, supports=supports("w"))
    assert sorted(commands.names()) == ["find", "find", "findAndModify"]
    (message,) = claimed.inbox
    data = as_json(snapshot("1"))
    await store.append([Entry(claimed.lease.id, claimed.lease.epoch, 1, data, (message.id,))])
    assert commands.names() == ["insert"]
    await store._backend._appender.finish()
    assert sorted(commands.names()) == ["delete", "update"]


async def test_a_signal_and_its_effect_are_three_durable_writes(
    store: MongoStore, commands: CommandLog
) -> None:
    """The message, the claim, and the record of the wait; only the due run is read in between."""
    (grant,) = await leases(store, 1)
    await store.append([end(grant, 1, Rest("waiting", None, ("paid",)))])
    commands.flush()
    await send_one(store, grant.lease.id, "paid", b"1")
    assert commands.names() == ["findAndModify"]
    (claimed,) = await store.claim("bob", HOUR, 100, supports=supports("w"))
    assert commands.names() == ["find", "findAndModify"]
    (message,) = claimed.inbox
    await store.append([msgspec.structs.replace(step(claimed, 1), consumes=(message.id,))])
    assert commands.names() == ["insert"]
    await store._backend._appender.finish()
    assert commands.names() == ["update"]
    await store.append([end(claimed, 2, Rest("waiting", None, ("paid",)))])
    assert commands.names() == ["update"]


async def test_a_message_and_the_lease_of_its_run_are_one_write(
    store: MongoStore, commands: CommandLog
) -> None:
    """A handed off run is read by the write, so only the record of the wait remains."""
    await wait_for_paid(store, "run")
    commands.flush()
    (grant,) = (await hand_off(store, paid())).grants
    [command] = commands.flush()
    assert "findAndModify" in command
    assert command["writeConcern"] == MAJORITY
    await store.append([msgspec.structs.replace(step(grant, 1), consumes=(grant.inbox[0].id,))])
    assert commands.names() == ["insert"]
    await store._backend._appender.finish()
    assert commands.names() == ["update"]
    await store.append([end(grant, 2, Rest("waiting", None, ("paid",)))])
    assert commands.names() == ["update"]


async def test_a_run_that_is_not_handed_off_costs_no_more_than_sending(
    store: MongoStore, commands: CommandLog
) -> None:
    """One that has an owner, has no room in it, or needs a document for the message."""
    await wait_for_paid(store, "run")
    await store.acquire([LeaseRequest("run", "bob", HOUR)])
    commands.flush()
    for _ in range(MAX_EMBEDDED):
        await hand_off(store, paid())
    assert {*commands.names()} == {"findAndModify"}
    await hand_off(store, paid())
    assert commands.names() == ["findAndModify", "insert", "findAndModify"]
    await hand_off(store, paid(dedup_id="x"))
    assert commands.names() == ["find", "insert", "findAndModify"]


async def test_a_run_without_room_is_handed_off_by_another_write(
    store: MongoStore, commands: CommandLog
) -> None:
    """And its messages with documents are read, as by a claim."""
    await wait_for_paid(store, "run")
    for _ in range(MAX_EMBEDDED):
        await send_one(store, "run", "sent", b"0")
    commands.flush()
    assert len((await hand_off(store, paid())).grants) == 1
    sending = ["findAndModify", "insert", "findAndModify"]
    assert commands.names() == [*sending, "findAndModify", "find"]


async def test_a_run_that_contains_many_messages_is_read_by_the_attempt_to_add_one(
    store: MongoStore, commands: CommandLog
) -> None:
    """Sending a message with a document costs as much as before."""
    (grant,) = await leases(store, 1)
    for number in range(MAX_EMBEDDED):
        await send_one(store, grant.lease.id, "paid", b"%d" % number)
    assert {*commands.names()[1:]} == {"findAndModify"}
    await send_one(store, grant.lease.id, "paid", b"1")
    assert commands.names() == ["findAndModify", "insert", "findAndModify"]


async def test_messages_to_many_runs_are_sent_in_four_round_trips(
    store: MongoStore, commands: CommandLog
) -> None:
    """The last one reads how many messages each run has."""
    grants = await leases(store, 200)
    messages = [NewMessage(grant.lease.id, "paid", b"1") for grant in grants]
    commands.flush()
    assert {receipt.unconsumed for receipt in await store.send(messages)} == {1}
    assert commands.names() == ["find", "insert", "update", "find"]


async def test_consumed_messages_of_many_runs_are_counted_in_one_statement(
    store: MongoStore, commands: CommandLog
) -> None:
    """One for each run would take the server three times as long."""
    grants = await leases(store, 200)
    await store.send([NewMessage(grant.lease.id, "paid", b"1") for grant in grants])
    consumed = [(await store.inbox(grant.lease.id))[0].id for grant in grants]
    commands.flush()
    entries = zip((step(grant, 1) for grant in grants), consumed, strict=True)
    await store.append([msgspec.structs.replace(entry, consumes=(id,)) for entry, id in entries])
    await store._backend._appender.finish()
    [update] = [command for command in commands.flush() if "update" in command]
    assert len(update["updates"]) == 1
    again = [NewMessage(grant.lease.id, "paid", b"2") for grant in grants]
    assert {receipt.unconsumed for receipt in await store.send(again)} == {1}


async def test_a_mark_that_nothing_repeats_is_as_durable_as_the_entry(
    store: MongoStore, commands: CommandLog
) -> None:
    """The next rest omits the message, so a failover must not undo the mark. What a rest itself
    consumes it names, and the next owner marks it again.
    """
    (grant,) = await leases(store, 1)
    for name in ("paid", "sent"):
        await send_one(store, grant.lease.id, name, LARGE)
    first, second = await store.inbox(grant.lease.id)
    await store.append([msgspec.structs.replace(step(grant, 1), consumes=(first.id,))])
    await store._backend._appender.finish()
    [mark] = [each for each in commands.flush() if "delete" in each]
    assert mark["writeConcern"] == MAJORITY
    rest = msgspec.structs.replace(end(grant, 2, Rest("waiting")), consumes=(second.id,))
    await store.append([rest])
    [mark] = [each for each in commands.flush() if each.get("delete") == f"{RUNS}_inbox"]
    assert mark["writeConcern"]["w"] == 1


async def test_a_removal_that_nothing_repeats_is_as_durable_as_the_entry(
    store: MongoStore, commands: CommandLog
) -> None:
    """The next rest leaves an embedded message alone that is already removed."""
    (grant,) = await leases(store, 1)
    await send_one(store, grant.lease.id, "paid", b"1")
    (message,) = await store.inbox(grant.lease.id)
    commands.flush()
    await store.append([msgspec.structs.replace(step(grant, 1), consumes=(message.id,))])
    await store._backend._appender.finish()
    [removal] = [each for each in commands.flush() if "update" in each]
    assert removal["writeConcern"] == MAJORITY


async def test_a_refusal_costs_one_more_command(store: MongoStore, commands: CommandLog) -> None:
    """However many leases are refused; a lease that is granted costs none."""
    await leases(store, 3)
    commands.flush()
    await store.acquire([LeaseRequest(f"run {n}", "bob", HOUR) for n in range(3)])
    assert commands.names() == ["update", "find", "find"]
    await store.acquire([LeaseRequest("run 0", "bob", HOUR)])
    assert commands.names() == ["findAndModify", "find"]


async def test_entries_of_deleted_runs_are_deleted_together(
    store: MongoStore, commands: CommandLog, sandbox: Sandbox
) -> None:
    """The runs are deleted one by one and at once; their entries later, in one command."""
    for n in range(1, 6):
        (grant,) = await store.acquire([request(n)])
        assert isinstance(grant, Grant)
        await store.append([step(grant, 1)])
        await store.append([end(grant, 2, Rest("completed", delete=True))])
    assert commands.names() == ["insert", "insert", "delete"] * 5
    await store._backend._cleanup.finish()
    assert commands.names() == ["delete"]
    assert sandbox.database[f"{RUNS}_journal"].count_documents({}) == 0


async def test_a_deleted_run_leaves_no_messages(store: MongoStore, sandbox: Sandbox) -> None:
    """Nor those sent while it ran, nor those it consumed."""
    (grant, other) = await leases(store, 2)
    await send_one(store, grant.lease.id, "paid", b"1", dedup_id="1")
    (message,) = await store.inbox(grant.lease.id)
    consuming = Entry(grant.lease.id, grant.lease.epoch, 1, as_json(snapshot("a")), (message.id,))
    await store.append([consuming])
    await send_one(store, grant.lease.id, "paid", LARGE)
    deletions = [end(each, 2, Rest("completed", delete=True)) for each in (grant, other)]
    assert await store.append(deletions) == [Verdict.ACCEPTED] * 2
    await store._backend._cleanup.finish()
    assert sandbox.database[f"{RUNS}_inbox"].count_documents({}) == 0


async def test_an_unowned_run_is_read_in_one_command(
    store: MongoStore, commands: CommandLog
) -> None:
    """Only a run that is being worked on has a journal to read."""
    await store.save("run", snapshot("a"))
    commands.flush()
    await store.load("run")
    assert commands.names() == ["find"]


async def test_every_command_about_a_run_names_its_id(
    store: MongoStore, commands: CommandLog
) -> None:
    """With `_id: "hashed"` as shard key, it goes to the one shard that has the run."""
    (grant,) = await leases(store, 1)
    await send_one(store, grant.lease.id, "paid", b"1")
    await store.inbox(grant.lease.id)
    await store.append([step(grant, 1)])
    await store.load(grant.lease.id)
    (lease,) = await store.renew([grant.lease], HOUR)
    assert isinstance(lease, Lease)
    await store.release([lease])
    await store.append([step(grant, 2), end(grant, 3, Rest("waiting", None, ("paid",)))])
    await store.save(grant.lease.id, snapshot("a"))
    await leases(store, 3)
    await store.delete(grant.lease.id)
    about_runs = [command for command in commands.flush() if RUNS in command.values()]
    filters = [chosen for command in about_runs for chosen in filters_of(command)]
    assert len(filters) > 12
    assert [chosen for chosen in filters if not names_id(chosen)] == []


def filters_of(command: dict[str, Any]) -> list[dict[str, Any]]:
    match command:
        case {"insert": _, "documents": documents}:
            return [dict(document) for document in documents]
        case {"update": _, "updates": writes} | {"delete": _, "deletes": writes}:
            return [write["q"] for write in writes]
        case {"find": _, "filter": chosen} | {"findAndModify": _, "query": chosen}:
            return [chosen]
        case _:
            raise AssertionError(f"unknown command: {command}")


def names_id(chosen: dict[str, Any]) -> bool:
    return "_id" in chosen or all(map(names_id, chosen.get("$or", [{}])))


@pytest.fixture(scope="module")
def crowd(sandbox: Sandbox) -> Iterator[None]:
    """Many runs."""
    now = datetime.now(UTC)
    runs = [crowd_member(n, now) for n in range(MANY)]
    sandbox.database[RUNS].insert_many(runs, ordered=False)
    yield
    sandbox.clear()


def crowd_member(n: int, now: datetime) -> dict[str, Any]:
    run = {"_id": f"{n % 10}:{n:06}", "workflow": f"w{n % 5}", "epoch": n, "epochs": []}
    run |= {"snapshot": snapshot("a"), "status": "completed", "updatedAt": now}
    return run


@pytest.fixture
async def crowded(crowd: None, sandbox: Sandbox, commands: CommandLog) -> AsyncIterator[MongoStore]:
    options = {"event_listeners": [commands]}
    async with mongo(sandbox.url, client_options=options) as store:
        await store.load("nothing")
        commands.flush()
        yield store


def examined(sandbox: Sandbox, commands: CommandLog) -> int:
    """Return how many documents or index keys the server examined for the largest command."""
    most = 0
    for command in commands.flush():
        if next(iter(command)) in ("find", "update"):
            most = max(most, examined_by(sandbox, command))
    return most


def examined_by(sandbox: Sandbox, command: dict[str, Any]) -> int:
    bare = {
        name: value
        for name, value in command.items()
        if not name.startswith("$") and name not in ("lsid", "txnNumber", "writeConcern")
    }
    explained = sandbox.database.command("explain", bare, verbosity="executionStats")
    stages = explained.get("stages", [{"$cursor": explained}])
    stats = stages[0]["$cursor"]["executionStats"]
    plan = str(stages[0]["$cursor"]["queryPlanner"]["winningPlan"])
    assert "COLLSCAN" not in plan, plan
    assert "'SORT'" not in plan, plan
    return int(max(stats["totalDocsExamined"], stats["totalKeysExamined"]))


async def test_leases_by_id_examine_only_these_runs(
    crowded: MongoStore, sandbox: Sandbox, commands: CommandLog
) -> None:
    """Even if they are taken over from another owner, or refused."""
    ids = [f"{n % 10}:{n:06}" for n in range(1_000, 1_020)]
    for owner, instead_of in (("ana", None), ("bob", "ana"), ("cem", "ana")):
        requests = [LeaseRequest(id, owner, HOUR, instead_of=instead_of) for id in ids]
        answers = await crowded.acquire(requests)
        assert all(isinstance(answer, Grant) for answer in answers) is (owner != "cem")
        assert examined(sandbox, commands) <= 2 * len(ids) + 1


async def test_a_load_examines_one_run(
    crowded: MongoStore, sandbox: Sandbox, commands: CommandLog
) -> None:
    """By its `_id`, and its journal by a range of `_id`."""
    await crowded.load("7:000007")
    assert examined(sandbox, commands) == 1
    (grant,) = await leases(crowded, 1)
    await crowded.append([step(grant, 1)])
    commands.flush()
    await crowded.load(grant.lease.id)
    assert examined(sandbox, commands) <= 2


async def test_enqueueing_is_one_insert(store: MongoStore, commands: CommandLog) -> None:
    """However many runs there are."""
    runs = [NewRun(f"{n}", "w", as_json(snapshot())) for n in range(100)]
    await store.enqueue(runs)
    assert commands.names() == ["insert"]
