"""What the MongoDB store says to the server: how often, with which indexes, and to which shard."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import monitoring

from perdure.store import Entry, Grant, Lease, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores.mongo import MongoStore, mongo
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.mongo.places import Place, place_on

HOUR = timedelta(hours=1)
MANY = 100_000
DUE, SLEEPING = 200, 5_000
RUNS = "perdure_runs"


class Overheard(monitoring.CommandListener):
    """All commands that a client sent."""

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name not in ("hello", "createIndexes", "endSessions"):
            self.commands.append(dict(event.command))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """What it sent is enough."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """What it sent is enough."""

    def names(self) -> list[str]:
        """Give the names of the commands since the last time they were asked for."""
        return [next(iter(command)) for command in self.flush()]

    def flush(self) -> list[dict[str, Any]]:
        """Give the commands since the last time they were asked for."""
        commands, self.commands = self.commands, []
        return commands


@pytest.fixture(scope="module")
def place(mongo_server: Server) -> Iterator[Place]:
    with place_on(mongo_server) as place:
        yield place


@pytest.fixture
def overheard() -> Overheard:
    return Overheard()


@pytest.fixture
async def store(place: Place, overheard: Overheard) -> AsyncIterator[MongoStore]:
    options = {"event_listeners": [overheard]}
    async with mongo(place.url, client_options=options) as store:
        await store.load("nothing")
        overheard.flush()
        yield store
    place.clear()


def want(n: int = 0) -> LeaseRequest:
    return LeaseRequest(f"run {n}", "ana", HOUR, create=as_json(snapshot()), workflow="w")


async def leases(store: MongoStore, count: int) -> list[Grant]:
    grants = await store.acquire([want(n) for n in range(count)])
    return [grant for grant in grants if grant is not None]


def step(grant: Grant, n: int) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


def end(grant: Grant, n: int, rest: Rest) -> Entry:
    data = b"" if rest.delete else as_json(snapshot(status=rest.status))
    return Entry(grant.lease.id, grant.lease.epoch, n, data, rest=rest)


async def test_a_step_costs_one_command(store: MongoStore, overheard: Overheard) -> None:
    """From the first step to the last, however long the run is."""
    (grant,) = await leases(store, 1)
    assert overheard.names() == ["insert"]
    for n in range(1, 100):
        await store.append([step(grant, n)])
    assert Counter(overheard.names()) == {"insert": 99}
    await store.append([end(grant, 100, Rest("completed"))])
    assert overheard.names()[0] == "update"


async def test_a_batch_costs_what_one_costs(store: MongoStore, overheard: Overheard) -> None:
    """Two hundred runs are leased, written and put to rest in as many round trips as one."""
    grants = await leases(store, 200)
    assert overheard.names() == ["insert"]
    assert set(await store.append([step(grant, 1) for grant in grants])) == {Verdict.ACCEPTED}
    assert overheard.names() == ["insert"]
    await store.renew([grant.lease for grant in grants], HOUR)
    assert overheard.names() == ["update", "find"]
    now = grants[0].now
    await store.append([end(grant, 2, Rest("suspended", now)) for grant in grants])
    assert overheard.names()[0] == "update"
    await store._backend._cleanup.finish()
    overheard.flush()
    claimed = await store.claim("bob", HOUR, 200, workflows=["v", "w"])
    assert len(claimed) == 200
    assert overheard.names() == ["find", "update", "find"]
    await store.append([end(grant, 1, Rest("completed", delete=True)) for grant in claimed])
    assert overheard.names()[0] == "delete"


async def test_runs_that_leave_are_swept_up_together(
    store: MongoStore, overheard: Overheard, place: Place
) -> None:
    """One after another they are gone at once; their entries follow in one command."""
    for n in range(1, 6):
        (grant,) = await store.acquire([want(n)])
        assert grant is not None
        await store.append([step(grant, 1)])
        await store.append([end(grant, 2, Rest("completed", delete=True))])
    assert overheard.names() == ["insert", "insert", "delete"] * 5
    await store._backend._cleanup.finish()
    assert overheard.names() == ["delete"]
    assert place.database[f"{RUNS}_journal"].count_documents({}) == 0


async def test_a_run_that_leaves_takes_its_letters_along(store: MongoStore, place: Place) -> None:
    """Also those that came while it ran, and those that it took."""
    (grant, other) = await leases(store, 2)
    await store.send(grant.lease.id, "paid", b"1", dedup_id="1")
    (letter,) = await store.inbox(grant.lease.id)
    taking = Entry(grant.lease.id, grant.lease.epoch, 1, as_json(snapshot("a")), (letter.id,))
    await store.append([taking])
    await store.send(grant.lease.id, "paid", b"2")
    leaving = [end(leaver, 2, Rest("completed", delete=True)) for leaver in (grant, other)]
    assert await store.append(leaving) == [Verdict.ACCEPTED] * 2
    await store._backend._cleanup.finish()
    assert place.database[f"{RUNS}_inbox"].count_documents({}) == 0


async def test_what_is_at_rest_is_read_at_once(store: MongoStore, overheard: Overheard) -> None:
    """Only the journal of a run that somebody works on has to be read beside it."""
    await store.save("run", snapshot("a"))
    overheard.flush()
    await store.load("run")
    assert overheard.names() == ["find"]


async def test_every_word_about_a_run_names_its_id(store: MongoStore, overheard: Overheard) -> None:
    """With `_id: "hashed"` as shard key, what concerns a run goes to the shard that has it."""
    (grant,) = await leases(store, 1)
    await store.send(grant.lease.id, "paid", b"1")
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
    told = [command for command in overheard.flush() if RUNS in command.values()]
    filters = [chosen for command in told for chosen in filters_of(command)]
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
            raise AssertionError(f"not looked at yet: {command}")


def names_id(chosen: dict[str, Any]) -> bool:
    return "_id" in chosen or all(map(names_id, chosen.get("$or", [{}])))


@pytest.fixture(scope="module")
def crowd(place: Place) -> Iterator[None]:
    """A hundred thousand runs, of which a few are due and some sleep."""
    now = datetime.now(UTC)
    for start in range(0, MANY, 10_000):
        runs = [crowd_member(n, now) for n in range(start, start + 10_000)]
        place.database[RUNS].insert_many(runs, ordered=False)
    yield
    place.clear()


def crowd_member(n: int, now: datetime) -> dict[str, Any]:
    run = {"_id": f"{n % 10}:{n:06}", "workflow": f"w{n % 5}", "epoch": n, "epochs": []}
    run |= {"snapshot": snapshot("a"), "updatedAt": now - timedelta(seconds=n)}
    if n < DUE:
        return {**run, "status": "suspended", "wakeAt": now - timedelta(seconds=n)}
    if n < SLEEPING:
        return {**run, "status": "suspended", "wakeAt": now + timedelta(days=n)}
    return {**run, "status": "completed" if n % 100 else "failed"}


@pytest.fixture
async def crowded(crowd: None, place: Place, overheard: Overheard) -> AsyncIterator[MongoStore]:
    options = {"event_listeners": [overheard]}
    async with mongo(place.url, client_options=options) as store:
        await store.load("nothing")
        overheard.flush()
        yield store


def examined(place: Place, overheard: Overheard) -> int:
    """Give how many documents and index keys the last commands had the server look at."""
    most = 0
    for command in overheard.flush():
        if next(iter(command)) in ("find", "update"):
            most = max(most, examined_by(place, command))
    return most


def examined_by(place: Place, command: dict[str, Any]) -> int:
    kept = {
        name: value
        for name, value in command.items()
        if not name.startswith("$") and name not in ("lsid", "txnNumber", "writeConcern")
    }
    explained = place.database.command("explain", kept, verbosity="executionStats")
    stages = explained.get("stages", [{"$cursor": explained}])
    stats = stages[0]["$cursor"]["executionStats"]
    plan = str(stages[0]["$cursor"]["queryPlanner"]["winningPlan"])
    assert "COLLSCAN" not in plan, plan
    assert "'SORT'" not in plan, plan
    return max(stats["totalDocsExamined"], stats["totalKeysExamined"])


async def test_lists_are_read_from_an_index(
    crowded: MongoStore, place: Place, overheard: Overheard
) -> None:
    """A page costs a page, wherever it is and whatever it keeps to."""
    page = await crowded.list(limit=50)
    assert examined(place, overheard) <= 51
    await crowded.list(limit=50, after=page[-1].cursor)
    assert examined(place, overheard) <= 102
    assert len(await crowded.list(limit=50, status="failed")) == 50
    assert examined(place, overheard) <= 52
    assert len(await crowded.list(limit=50, workflow="w3")) == 50
    assert examined(place, overheard) <= 300
    assert len(await crowded.list(limit=50, prefix="7:")) == 50
    assert examined(place, overheard) <= 600


async def test_what_is_due_is_read_from_an_index(
    crowded: MongoStore, place: Place, overheard: Overheard
) -> None:
    """Neither sleepers nor runs that are over are looked at."""
    now = datetime.now(UTC)
    assert len(await crowded.due(now, 20)) == 20
    assert examined(place, overheard) <= 26
    assert len(await crowded.due(now, 20, workflows=["w1", "w2"])) == 20
    assert examined(place, overheard) <= 22
    assert (await crowded.stats()).oldest_due is not None


async def test_a_claim_looks_at_what_it_claims(
    crowded: MongoStore, place: Place, overheard: Overheard
) -> None:
    """The search, the leasing and the reading are each as large as the claim."""
    grants = await crowded.claim("ana", timedelta(milliseconds=1), 20)
    assert len(grants) == 20
    assert examined(place, overheard) <= 45
    claimed = await crowded.claim("ana", timedelta(milliseconds=1), 20, workflows=["w4"])
    assert len(claimed) == 20
    assert examined(place, overheard) <= 41


async def test_a_load_looks_at_one_run(
    crowded: MongoStore, place: Place, overheard: Overheard
) -> None:
    """By its `_id`, and its journal by a range of theirs."""
    await crowded.load("7:000007")
    assert examined(place, overheard) == 1
    (grant,) = await leases(crowded, 1)
    await crowded.append([step(grant, 1)])
    overheard.flush()
    await crowded.load(grant.lease.id)
    assert examined(place, overheard) <= 2


async def test_what_is_enqueued_is_inserted(store: MongoStore, overheard: Overheard) -> None:
    """Many new runs are one insert."""
    runs = [NewRun(f"{n}", "w", as_json(snapshot())) for n in range(100)]
    await store.enqueue(runs)
    assert overheard.names() == ["insert"]
