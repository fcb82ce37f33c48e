"""What the server examines for searches and claims, among 50,000 runs."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.store import Query
from perdure.stores.mongo import MongoStore, mongo
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.samples import snapshot
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

MANY, SLEEPING = 50_000, 20_000
RUNS = "perdure_runs"
MINUTE = timedelta(minutes=1)
NOW = datetime.now(UTC).replace(microsecond=0)


def member(n: int) -> dict[str, Any]:
    """Return one of many runs: a fifth is due, in no queue or in one of a thousand."""
    at = NOW - timedelta(seconds=n)
    run: dict[str, Any] = {"_id": f"{n % 10}:{n:06}", "workflow": f"w{n % 5}", "version": 1}
    run |= {"snapshot": snapshot("a"), "queue": f"q/{n % 1000:03}" if n % 2 else "", "turn": 0}
    run |= {"updatedAt": at, "createdAt": at, "epoch": n, "epochs": [], "expired": []}
    if n % 100 == 0:
        run["tags"] = [f"customer={n % 1000}", "plan=pro"]
    if n < SLEEPING:
        wake_at = at - MINUTE if n % 2 else NOW + timedelta(days=1 + n)
        return {**run, "status": "suspended", "wakeAt": at - MINUTE if n % 4 < 2 else wake_at}
    return {**run, "status": "completed" if n % 50 else "failed"}


@pytest.fixture(scope="module")
def crowd(mongo_server: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_server) as sandbox:
        for start in range(0, MANY, 10_000):
            runs = [member(n) for n in range(start, start + 10_000)]
            sandbox.database[RUNS].insert_many(runs, ordered=False)
        yield sandbox


@pytest.fixture
async def store(crowd: Sandbox) -> AsyncIterator[MongoStore]:
    async with mongo(crowd.url) as store:
        await store.load("nothing")
        yield store


class Profile:
    """What the server's profiler recorded of the commands on the runs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._database = sandbox.database

    def __enter__(self) -> "Profile":
        self._database["system.profile"].drop()
        self._database.command("profile", 2)
        return self

    def __exit__(self, *_: object) -> None:
        self._database.command("profile", 0)
        runs = f"{self._database.name}.{RUNS}"
        self._commands = [*self._database["system.profile"].find({"ns": runs})]
        for command in self._commands:
            assert "COLLSCAN" not in str(command.get("planSummary")), command

    @property
    def keys(self) -> int:
        """How many entries of indexes were examined."""
        return sum(command.get("keysExamined", 0) for command in self._commands)

    @property
    def documents(self) -> int:
        """How many runs were read."""
        return sum(command.get("docsExamined", 0) for command in self._commands)

    @property
    def round_trips(self) -> int:
        """How many commands there were, those that ran in parallel included."""
        return len(self._commands)

    @property
    def sorted(self) -> bool:
        """Whether runs were sorted in memory."""
        return any(command.get("hasSortStage") for command in self._commands)


QUERIES = {
    "all": Query(),
    "oldest first": Query(oldest_first=True),
    "status": Query(statuses=("failed",)),
    "statuses, oldest first": Query(statuses=("failed", "suspended"), oldest_first=True),
    "workflow": Query(workflows=("w3",)),
    "both": Query(workflows=("w1", "w3"), statuses=("failed", "completed")),
    "tag": Query(tags=("plan=pro",)),
    "time range": Query(
        since=NOW - timedelta(seconds=30_000), until=NOW - timedelta(seconds=20_000)
    ),
    "status and time": Query(statuses=("completed",), until=NOW - timedelta(seconds=30_000)),
    "prefix": Query(prefix="7:"),
    "queue": Query(queue=""),
}


@pytest.mark.parametrize("kind", QUERIES)
async def test_the_cost_of_a_page_depends_on_its_size_only(
    store: MongoStore, crowd: Sandbox, kind: str
) -> None:
    """Wherever it begins, and whatever is searched for."""
    query = QUERIES[kind]
    after: str | None = None
    for _ in range(3):
        with Profile(crowd) as profile:
            page = await store.search(query, 50, after=after)
        assert len(page.runs) == 50
        assert page.searched_until is None
        # A prefix is counted first, up to a thousand; one of ten runs has it.
        most = 5_600 if query.prefix else 320
        assert profile.keys <= most
        assert profile.documents <= most
        assert not profile.sorted
        after = page.cursor


async def test_a_search_for_rare_runs_is_bounded(store: MongoStore, crowd: Sandbox) -> None:
    """It examines at most 20,000 runs, and says how far it looked."""
    with Profile(crowd) as profile:
        page = await store.search(Query(queue="missing"), 50)
    assert page.runs == ()
    assert page.searched_until == NOW - timedelta(seconds=19_999)
    # To find out how far it may look, the server may examine them more than once.
    assert profile.documents <= 40_002
    assert profile.keys <= 60_002
    page = await store.search(Query(queue="missing"), 50, after=page.cursor)
    page = await store.search(Query(queue="missing"), 50, after=page.cursor)
    assert (page.cursor, page.searched_until) == (None, None)


async def test_a_rare_tag_and_a_rare_prefix_are_found_at_once(
    store: MongoStore, crowd: Sandbox
) -> None:
    """By their own indexes."""
    with Profile(crowd) as profile:
        page = await store.search(
            Query(tags=("customer=300", "plan=pro"), statuses=("failed",)), 50
        )
    assert len(page.runs) == 30
    assert profile.documents <= 51
    with Profile(crowd) as profile:
        page = await store.search(Query(prefix="7:00001", statuses=("suspended",)), 50)
    assert [run.id for run in page.runs] == ["7:000017"]
    assert profile.documents <= 1


async def test_a_prefix_of_the_store_is_searched_by_id(store: MongoStore, crowd: Sandbox) -> None:
    """If it has few runs among many others."""
    async with mongo(crowd.url, prefix="few:") as few:
        await few.save("run", snapshot("a"))
        with Profile(crowd) as profile:
            assert [run.id for run in await few.list()] == ["run"]
        assert profile.documents <= 1
        await few.delete("run")


async def test_counts_stop_at_their_cap(store: MongoStore, crowd: Sandbox) -> None:
    """In the index alone."""
    with Profile(crowd) as profile:
        counts = await store.counts(Query(statuses=("completed", "failed")), 100)
    assert {each.count for each in counts if each.status == "completed"} == {100}
    assert len(counts) == 6
    assert profile.keys <= 6 * 101 + 20
    assert profile.documents == 0


async def test_summaries_are_read_by_id(store: MongoStore, crowd: Sandbox) -> None:
    """In one round trip, if the runs have no owner."""
    with Profile(crowd) as profile:
        runs = await store.summaries([f"{n % 10}:{n:06}" for n in range(20)])
    assert None not in runs
    assert (profile.round_trips, profile.documents) == (1, 20)


async def test_a_claim_examines_only_what_it_claims(store: MongoStore, crowd: Sandbox) -> None:
    """Finding, leasing and reading each cost as much as the claim is large."""
    ttl = timedelta(milliseconds=1)
    with Profile(crowd) as profile:
        grants = await store.claim("ana", ttl, 20, supports=supports("w1", "w4"))
    assert len(grants) == 20
    assert profile.round_trips == 3
    assert profile.documents <= 60
    assert profile.keys <= 110
    assert not profile.sorted


async def test_a_claim_of_a_hundred_queues_takes_three_round_trips(
    store: MongoStore, crowd: Sandbox
) -> None:
    """Whatever number of workflows is asked for."""
    queues = {f"q/{n:03}": 2 for n in range(1, 201, 2)}
    with Profile(crowd) as profile:
        grants = await store.claim(
            "ana",
            timedelta(milliseconds=1),
            100,
            supports=supports(*"abcd", "w1", "w3"),
            queues=queues,
        )
    assert len(grants) == 80
    assert profile.round_trips == 3
    assert profile.documents <= 400
    assert profile.keys <= 1_500


async def test_runs_that_cannot_be_driven_are_not_read(store: MongoStore, crowd: Sandbox) -> None:
    """Those of other workflows are not even examined; versions are skipped in the index."""
    with Profile(crowd) as profile:
        assert await store.claim("ana", MINUTE, 20, supports=supports("other")) == []
    assert profile.keys <= 1
    assert profile.documents == 0
    newer = [supported.__class__(supported.workflow, 2, 3) for supported in supports("w1", "w2")]
    with Profile(crowd) as profile:
        assert await store.claim("ana", MINUTE, 20, supports=newer) == []
    assert profile.documents == 0


async def test_due_runs_are_read_from_an_index(store: MongoStore, crowd: Sandbox) -> None:
    """Sleeping runs are not examined, even if all workflows are asked for."""
    for supported in (None, supports("w1", "w2")):
        with Profile(crowd) as profile:
            assert len(await store.due(NOW, 20, supports=supported)) == 20
        assert profile.documents <= 20
        assert profile.keys <= 40
        assert not profile.sorted


async def test_queues_are_found_without_examining_their_runs(
    store: MongoStore, crowd: Sandbox
) -> None:
    """A page of them costs a few pages, and then one seek for each queue."""
    with Profile(crowd) as profile:
        names = await store.queues(NOW, 10, prefix="q/", after="q/500")
    assert names == [f"q/{n}" for n in range(501, 521, 2)]
    assert profile.documents == 0
    assert profile.keys <= 600
    assert profile.round_trips <= 4


async def test_old_runs_are_found_by_their_age(store: MongoStore, crowd: Sandbox) -> None:
    """Those that are newer are not examined."""
    for options in ({}, {"workflow": "w0"}, {"status": "failed"}):
        with Profile(crowd) as profile:
            old = timedelta(seconds=49_000)
            assert await store.prune(old, dry_run=True, limit=10, **options) == 10  # type: ignore[arg-type]
        assert profile.documents <= 10
        assert profile.keys <= 60
