"""Query plans of PostgreSQL: with 50,000 runs, every statement reads a few rows by an index."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psycopg
import pytest

from perdure import codec
from perdure.snapshot import RunStatus
from perdure.store import (
    Entry,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Query,
    Rest,
    SupportedVersions,
    Verdict,
)
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.postgres import copied_database, fresh_database
from tests.servers.process import Server

LONG = timedelta(minutes=5)
RUNS = 50_000
PAGE = 20

# One run in ten is in a queue, and one in a hundred has a tag. The first 5,000 with an odd number
# are due.
MANY_RUNS = """
    INSERT INTO perdure_runs (
        id, snapshot, workflow, status, wake_at, updated_at, queue, version, tags, created_at
    )
    SELECT 'run ' || n, '{"formatVersion":1,"steps":{},"execution":{}}',
        CASE WHEN mod(n, 3) = 0 THEN 'order' ELSE 'other' END,
        CASE WHEN mod(n, 50) = 0 THEN 'failed' WHEN mod(n, 2) = 0 THEN 'completed'
            ELSE 'suspended' END,
        CASE WHEN mod(n, 2) = 1 THEN now() + (n - 5000) * interval '1 second' END,
        now() - n * interval '1 second',
        CASE WHEN mod(n, 10) = 1 THEN 'emails/' || mod(n, 100) ELSE '' END,
        1,
        CASE WHEN mod(n, 100) = 0 THEN '["customer=1"]'::jsonb ELSE '[]' END,
        now() - n * interval '1 second'
    FROM generate_series(1, 50000) AS n
"""
MANY_TAGS = """
    INSERT INTO perdure_runs_tags (run, tag, created_at)
    SELECT id, sha256('customer=1'), created_at FROM perdure_runs WHERE tags <> '[]'
"""
EXPLAIN_ALL = """
    LOAD 'auto_explain';
    SET auto_explain.log_min_duration = 0;
    SET auto_explain.log_analyze = on;
    SET auto_explain.log_format = json;
    SET client_min_messages = log;
"""


class Plan(NamedTuple):
    """How the server executed one statement: what it scanned, and how many rows it examined."""

    text: str
    scans: list[dict[str, Any]]

    @property
    def examined(self) -> int:
        """The rows that were read of any table, whether they matched or not."""
        removed = "Rows Removed by Filter"
        rows = (
            (each["Actual Rows"] + each.get(removed, 0)) * each["Actual Loops"]
            for each in self.scans
        )
        return int(sum(rows))

    def uses(self, index: str) -> bool:
        return any(scan.get("Index Name") == f"perdure_runs_{index}" for scan in self.scans)

    def scans_table(self) -> bool:
        return any(scan["Node Type"] == "Seq Scan" for scan in self.scans)


def read_plan(message: str) -> Plan:
    explained: Any = codec.loads(message.partition("plan:\n")[2].encode())
    return Plan(explained["Query Text"], [*scans_in(explained["Plan"])])


def scans_in(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # A bitmap scan consists of two nodes: one of the index, one of the table.
    if node["Node Type"].endswith("Scan") and ("Relation Name" in node or "Index Name" in node):
        yield node
    for below in node.get("Plans", []):
        yield from scans_in(below)


@pytest.fixture(scope="module", params=["our own", "awaitly's"])
def table(request: pytest.FixtureRequest) -> str:
    """The program that created the table."""
    return str(request.param)


@pytest.fixture(scope="module")
def filled(postgres_server: Server, table: str) -> Iterator[str]:
    """The URL of a database with many runs. Tests that write use copies."""
    with fresh_database(postgres_server) as url:
        if table == "awaitly's":
            execute(
                url,
                "CREATE TABLE perdure_runs (id text PRIMARY KEY, snapshot jsonb NOT NULL, "
                "updated_at timestamptz DEFAULT now())",
            )
        asyncio.run(create_tables(url))
        execute(url, MANY_RUNS, MANY_TAGS, "VACUUM ANALYZE")
        yield url


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


async def create_tables(url: str) -> None:
    async with postgres(url) as store:
        await store.load("run")


@pytest.fixture
def postgres_url(filled: str) -> str:
    """The database that all tests share that only read."""
    return filled


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    async with postgres(postgres_url, max_connections=1) as store:
        await store.load("run")
        yield store


@pytest.fixture
async def plans(store: PostgresStore) -> list[Plan]:
    """The plans of all statements of the store, as the server executed them."""
    ((connection, _),) = store._backend._database.pool._idle  # type: ignore[attr-defined]  # of ConnectionPool
    await connection.execute(EXPLAIN_ALL)
    plans: list[Plan] = []

    def add(_: object, message: Any) -> None:
        plan = read_plan(message.message)
        if "perdure" in plan.text:  # and not a statement of the driver
            plans.append(plan)

    connection.add_log_listener(add)
    return plans


def searching(count: int = PAGE, **fields: Any) -> Callable[[PostgresStore], Awaitable[None]]:
    async def search(store: PostgresStore) -> None:
        page = await store.search(Query(**fields), PAGE)
        assert len(page.runs) == count
        if page.cursor is not None:
            assert len((await store.search(Query(**fields), PAGE, after=page.cursor)).runs) > 0

    return search


def since(number: int) -> datetime:
    """Return when the run with this number was updated, nearly."""
    return datetime.now(UTC) - timedelta(seconds=number)


SEARCHES = {
    "all": (searching(), "updated_at_idx"),
    "status": (searching(statuses=("failed",)), "workflow_idx"),
    "workflow": (searching(workflows=("order",)), "workflow_idx"),
    "both": (searching(workflows=("order",), statuses=("failed", "completed")), "workflow_idx"),
    "tag": (searching(tags=("customer=1",)), "tags_tag_idx"),
    "time range": (searching(since=since(30_000), until=since(20_000)), "updated_at_idx"),
    "oldest": (searching(statuses=("failed",), oldest_first=True), "workflow_idx"),
}


@pytest.mark.parametrize("name", SEARCHES)
async def test_a_search_examines_hardly_more_runs_than_it_returns(
    store: PostgresStore, plans: list[Plan], name: str
) -> None:
    """Each group of workflow and status is a range, and so are the runs with a tag."""
    search, index = SEARCHES[name]
    await search(store)
    assert plans[-1].uses(index)
    for plan in plans:
        assert not plan.scans_table(), plan
        assert plan.examined <= 10 * PAGE, plan


async def test_a_selective_prefix_is_read_by_primary_key(
    store: PostgresStore, plans: list[Plan], table: str
) -> None:
    """In awaitly's table, whose ids have another order, it takes a bounded walk."""
    query = Query(prefix="run 4999", statuses=("completed", "suspended"))
    page = await store.search(query, PAGE)
    assert not any(plan.scans_table() for plan in plans)
    if table == "our own":
        assert len(page.runs) == 11
        assert plans[-1].uses("pkey")
        assert sum(plan.examined for plan in plans) <= 100
    else:
        assert plans[-1].examined <= 20_000 + PAGE


async def test_a_search_that_finds_nothing_is_bounded(
    store: PostgresStore, plans: list[Plan]
) -> None:
    """20,000 runs are examined, of all groups together."""
    for query in (Query(queue="none"), Query(queue="none", statuses=("completed", "suspended"))):
        plans.clear()
        page = await store.search(query, PAGE)
        assert page.runs == ()
        assert page.searched_until is not None
        assert plans[-1].examined <= 20_000 + PAGE


@pytest.mark.parametrize("statuses", [(), ("completed",)])
async def test_a_count_stops_at_the_cap(
    store: PostgresStore, plans: list[Plan], statuses: tuple[RunStatus, ...]
) -> None:
    """There are 8,000 completed runs, or more, of each workflow."""
    counts = await store.counts(Query(statuses=statuses), 5_000)
    assert {count.count for count in counts if count.status == "completed"} == {5_000}
    assert plans[-1].uses("workflow_idx")
    assert not plans[-1].scans_table()
    assert plans[-1].examined <= 4 * 5_001 + 1_000


CLAIMS: dict[str, tuple[dict[str, Any], int]] = {
    "one workflow": ({"supports": supports("order")}, 10),
    "two workflows": ({"supports": supports("order", "other")}, 10),
    "queues": ({"supports": supports("order"), "queues": {"emails/1": 3, "emails/51": 4}}, 7),
    "any workflow": ({}, 10),
    "no workflow that is due": ({"supports": supports("absent", "unknown")}, 0),
    "no version that is due": (
        {"supports": [SupportedVersions("order", 2, 9), SupportedVersions("other", 3, 3)]},
        0,
    ),
}


async def test_queues_cost_a_few_lookups_each(store: PostgresStore, plans: list[Plan]) -> None:
    """However many runs they have."""
    names = [f"emails/{n}" for n in ("1", "11", "21", "31", "41")]
    assert list(await store.queues(datetime.now(UTC), 5, prefix="emails")) == names
    assert plans[-1].uses("due_idx")
    assert plans[-1].examined <= 4 * 5 * 2


class TestWriting:
    """Each of these tests has a copy of the database, which is made faster than the database."""

    @pytest.fixture
    def postgres_url(self, postgres_server: Server, filled: str) -> Iterator[str]:
        with copied_database(postgres_server, urlsplit(filled).path[1:]) as url:
            yield url

    @pytest.mark.parametrize("name", CLAIMS)
    async def test_a_claim_examines_only_runs_that_it_may_take(
        self, store: PostgresStore, plans: list[Plan], name: str
    ) -> None:
        """Whatever else is due, even when none of it can be driven."""
        restrictions, count = CLAIMS[name]
        assert len(await store.due(datetime.now(UTC), 10, **restrictions)) == count
        assert len(await store.claim("ana", LONG, 10, **restrictions)) == count
        for plan in plans:
            assert not plan.scans_table(), plan
            assert plan.uses("due_idx")
            assert plan.examined <= 10 * count + 10, plan

    async def test_a_claim_locks_no_more_runs_than_it_takes(
        self, store: PostgresStore, postgres_url: str
    ) -> None:
        """Another claimant gets the others, although each of two workflows has enough of them."""
        wanted = supports("order", "other")
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT FROM perdure_runs WHERE wake_at IS NULL FOR UPDATE")
            claimed = [
                await store.claim(owner, LONG, 10, supports=wanted) for owner in ("ana", "bob")
            ]
        ids = [int(grant.lease.id.removeprefix("run ")) for grants in claimed for grant in grants]
        assert ids == [n for n in range(1, 100, 2) if n % 10 != 1][:20]

    async def test_a_handoff_examines_only_its_runs(
        self, store: PostgresStore, plans: list[Plan]
    ) -> None:
        """Neither at first, nor once the server uses a generic plan."""
        for number in range(7):
            await hand_off(store, number)
        handoffs = [plan for plan in plans if "supported" in plan.text]
        assert len(handoffs) == 7 * 5
        for plan in handoffs:
            runs = 40 if "row_number" in plan.text else 1
            assert plan.uses("pkey")
            assert not plan.scans_table(), plan
            assert plan.examined <= 4 * runs, plan

    async def test_no_verb_scans(self, store: PostgresStore, plans: list[Plan]) -> None:
        """Neither at first, nor once the server uses a generic plan."""
        for verb in (list_runs, schedule, write, hand_off, maintain):
            for number in range(7):
                await verb(store, number)
        assert len(plans) > 100
        for plan in plans:
            # To count runs by status, the snapshots that awaitly wrote have to be read.
            looks_into = "#>> '{execution,status}'" in plan.text and "GROUP BY" in plan.text
            assert looks_into or not plan.scans_table(), plan


class TestNewDatabase:
    """A database that was never analyzed: the server chooses other plans."""

    @pytest.fixture
    def postgres_url(self, postgres_server: Server) -> Iterator[str]:
        with fresh_database(postgres_server) as url:
            yield url

    @pytest.mark.parametrize("runs", [1, 3])
    async def test_a_rest_examines_only_the_entries_of_its_activation(
        self, store: PostgresStore, plans: list[Plan], runs: int
    ) -> None:
        """Those that earlier rests have deleted stay in the index until a vacuum."""
        new = as_json(snapshot())
        requests = [LeaseRequest(f"new {n}", "ana", LONG, create=new) for n in range(runs)]
        for _ in range(20):
            grants = [each for each in await store.acquire(requests) if isinstance(each, Grant)]
            places = [(grant.lease, n) for grant in grants for n in (1, 2, 3)]
            entries = [Entry(lease.id, lease.epoch, n, delta("a")) for lease, n in places]
            assert {*await store.append(entries)} == {Verdict.ACCEPTED}
            rests = [rest_entry(grant, 4) for grant in grants]
            assert {*await store.append(rests)} == {Verdict.ACCEPTED}
            assert plans[-1].examined <= 14 * runs, plans[-1]


async def list_runs(store: PostgresStore, number: int) -> None:
    page = await store.list(limit=20)
    assert len(page) == 20
    await store.list(limit=20, after=page[-1].cursor)
    await store.list(limit=20, status="failed")
    await store.list(limit=20, prefix="run 9", workflow="order", after=page[-1].cursor)
    assert await store.load("run 77") is not None
    assert None not in await store.summaries([f"run {n}" for n in range(1, 50)])


async def schedule(store: PostgresStore, number: int) -> None:
    now = datetime.now(UTC)
    assert len(await store.due(now, 100)) == 100
    await store.due(now, 100, supports=supports("order", "other"))
    grants = await store.claim("ana", LONG, 50)
    assert len(grants) == 50
    await store.claim("ana", LONG, 50, supports=supports("order"))
    await store.renew([grant.lease for grant in grants], LONG)
    await store.release([grant.lease for grant in grants])


async def write(store: PostgresStore, number: int) -> None:
    ids = [f"new {number} {n}" for n in range(40)]
    tags = ("customer=2",)
    requests = [LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), tags=tags) for id in ids]
    one, *many = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
    await store.acquire(requests)
    await store.acquire([LeaseRequest(id, "bob", LONG) for id in ids])
    await store.acquire([LeaseRequest(f"lone {number}", "ana", LONG, create=as_json(snapshot()))])
    entries = [Entry(g.lease.id, g.lease.epoch, 1, delta("a")) for g in many]
    await store.append([Entry(one.lease.id, one.lease.epoch, 1, delta("a"))])
    await store.append(entries)
    await store.append([*entries, rest_entry(many[0], 2), rest_entry(many[1], 2, delete=True)])
    await store.append([rest_entry(one, 2)])
    await store.append([rest_entry(many[2], 2, delete=True)])
    await store.append([rest_entry(many[3], 2, tags=("customer=3",))])


async def hand_off(store: PostgresStore, number: int) -> None:
    rest = Rest("waiting", awaits=("paid",))
    id, data, wanted = f"waiting {number}", as_json(snapshot()), supports("order", "other")
    await store.enqueue([NewRun(id, "order", data, rest=rest)])
    for unconsumed in (1, 2):
        await store.send_and_claim(
            [NewMessage("run 7", "paid", b"1")], "ana", LONG, 1, supports=wanted
        )
        messages = [NewMessage(id, "paid", b"1")]
        handoff = await store.send_and_claim(messages, "ana", LONG, 1, supports=wanted)
        assert handoff.receipts[0].unconsumed == unconsumed
        assert len(handoff.grants) == (unconsumed == 1)
    ids = [f"waiting {number} {n}" for n in range(40)]
    await store.enqueue([NewRun(id, "order", data, rest=rest) for id in ids])
    messages = [NewMessage(id, "paid", b"1") for id in ids]
    handoff = await store.send_and_claim(messages, "ana", LONG, 30, supports=wanted)
    assert len(handoff.grants) == 30


async def maintain(store: PostgresStore, number: int) -> None:
    await send_one(store, "run 5", "paid", b"1", dedup_id=f"{number}")
    await store.send([NewMessage("run 5", "paid", b"1"), NewMessage("run 7", "paid", b"1")])
    messages = [message.id for message in await store.inbox("run 5")]
    await store.acquire([LeaseRequest("run 5", "bob", LONG)])
    [grant] = await store.acquire([LeaseRequest("run 5", "ana", LONG, instead_of="bob")])
    assert isinstance(grant, Grant)
    entry = Entry("run 5", grant.lease.epoch, number, b"{}", consumes=tuple(messages))
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    assert await store.inbox("run 5") == []
    await store.save(f"saved {number}", snapshot())
    await store.enqueue([NewRun(f"queued {number} {n}", "order", b"{}") for n in range(20)])
    await store.delete(f"saved {number}")
    assert await store.prune(timedelta(0), status="failed", limit=10) == 10
    assert await store.prune(timedelta(0), tags=["customer=1"], limit=10) == 10
    assert (await store.stats()).by_status["suspended"] > 0


def rest_entry(
    grant: Grant, n: int, *, delete: bool = False, tags: tuple[str, ...] | None = None
) -> Entry:
    rest = Rest("completed", delete=delete, tags=tags)
    data = as_json(snapshot("a", status="completed"))
    return Entry(grant.lease.id, grant.lease.epoch, n, data, rest=rest)
