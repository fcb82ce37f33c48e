"""`SqlStore` finds runs by an index: what a verb reads does not grow with the number of runs."""

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import aiosqlite
import asyncmy
import asyncpg
import pytest

from perdure.snapshot import RunStatus
from perdure.store import Query, SupportedVersions
from perdure.stores import SqlStore
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql.executor import digest
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers import mysql, postgres
from tests.stores.sql.clients import AiosqliteClient, AsyncmyClient, mysql_options

RUNS = 50_000
START = to_microseconds(datetime(2025, 1, 1, tzinfo=UTC))
FAR = to_microseconds(datetime(2099, 1, 1, tzinfo=UTC))
LONG = timedelta(minutes=5)
FEW = RUNS / 10
SNAPSHOT = as_json(snapshot()).decode()
COLUMNS = (
    "id, snapshot, updated_at, workflow, status, wake_at, epoch, created_epoch, folded_epoch,"
    " queue, version, tags"
)


def values_of(n: int) -> tuple[object, ...]:
    """Return one of many runs: most are over or asleep, some are due, few have what is sought."""
    workflow, status = ("order", "import", "report")[n % 3], "completed"
    wake_at: int | None = None
    queue, version, tags = "", 0, None
    if n % 4 == 0:
        status, wake_at = "suspended", FAR + n
    elif n % 10 == 1:
        # Due, but of a version and workflows that no worker supports.
        status, wake_at, version = "queued", START + n, 9
    elif n % 10 == 2:
        status, wake_at, queue = "queued", START + n, f"keys/{n % 97:02}"
    elif n % 1000 == 3:
        status = "failed"
    elif n % 500 == 5:
        tags = '["plan=pro"]'
    at = START + n * 1_000_000
    return f"run {n:05}", SNAPSHOT, at, workflow, status, wake_at, at, at, at, queue, version, tags


def insertions() -> Iterator[str]:
    """Yield the statements that fill the tables."""
    for start in range(0, RUNS, 1000):
        runs = [values_of(n) for n in range(start, start + 1000)]
        rows = ", ".join(map(literals, runs))
        yield f"INSERT INTO workflow_runs ({COLUMNS}) VALUES {rows}"
    tagged = [values_of(n) for n in range(RUNS) if values_of(n)[-1]]
    rows = ", ".join(literals((digest("plan=pro"), run[7], run[0])) for run in tagged)
    yield f"INSERT INTO workflow_runs_tags (tag, created_at, run) VALUES {rows}"


def literals(values: Sequence[object]) -> str:
    texts = ("NULL" if v is None else f"'{v}'" if isinstance(v, str) else f"{v}" for v in values)
    return f"({', '.join(texts)})"


class Meter(Protocol):
    """A store, and how much of its database a call reads."""

    store: SqlStore

    async def run(self, statement: str) -> None:
        """Run a statement without parameters."""
        ...

    async def effort(self, call: Callable[[], Awaitable[Any]]) -> float:
        """Return how many rows and index entries were read, more or less."""
        ...


class SqliteMeter:
    """Counts the instructions of SQLite, of which one row takes about ten."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self.store = SqlStore(AiosqliteClient(connection), dialect="sqlite")
        self._connection = connection
        self._ticks = 0

    async def run(self, statement: str) -> None:
        await self._connection.execute(statement)

    def _tick(self) -> int:
        self._ticks += 1
        return 0

    async def effort(self, call: Callable[[], Awaitable[Any]]) -> float:
        await self._connection.set_progress_handler(self._tick, 100)
        self._ticks = 0
        await call()
        return self._ticks * 100 / 10


class MysqlMeter:
    """Counts what the storage engine was asked for."""

    def __init__(self, pool: Any) -> None:
        self._client = AsyncmyClient(pool)
        self.store = SqlStore(self._client, dialect="mysql")

    async def run(self, statement: str) -> None:
        await self._client.query(statement, ())

    async def effort(self, call: Callable[[], Awaitable[Any]]) -> float:
        await self._client.query("FLUSH STATUS", ())
        await call()
        rows, _ = await self._client.query("SHOW SESSION STATUS LIKE 'Handler_read%%'", ())
        return float(sum(int(number) for name, number in rows if name != "Handler_read_deleted"))


class PostgresMeter:
    """Adds up what the scans of each plan have returned and left out."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._read = 0.0
        self.store = SqlStore(self, dialect="postgres")

    async def run(self, statement: str) -> None:
        await self._connection.execute(statement)

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Sequence[Any], int]:
        if sql.lstrip().startswith(("SELECT", "WITH")):
            explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}"
            ((plan,),) = await self._connection.fetch(explain, *params)
            self._read += rows_read(json.loads(plan)[0]["Plan"])
        statement = await self._connection.prepare(sql)
        rows = await statement.fetch(*params)
        affected = statement.get_statusmsg().split()[-1]
        return rows, int(affected) if affected.isdigit() else 0

    async def effort(self, call: Callable[[], Awaitable[Any]]) -> float:
        self._read = 0
        await call()
        return self._read


def rows_read(plan: dict[str, Any]) -> float:
    """Return how many rows the scans in a plan read."""
    own = 0.0
    if "Relation Name" in plan or "Index Name" in plan:
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Heap Fetches", 0)
        own = plan["Actual Loops"] * (1 + plan["Actual Rows"] + removed)
    return own + sum(map(rows_read, plan.get("Plans", ())))


@asynccontextmanager
async def meter_of(kind: str, address: str) -> AsyncGenerator[Meter]:
    """Open a database."""
    if kind == "postgres":
        connection = await asyncpg.connect(address)
        yield PostgresMeter(connection)
        await connection.close()
    elif kind == "mysql":
        pool = await asyncmy.create_pool(**mysql_options(address), autocommit=True, maxsize=1)
        yield MysqlMeter(pool)
        pool.close()
        await pool.wait_closed()
    else:
        async with aiosqlite.connect(address, isolation_level=None) as file:
            await file.execute("PRAGMA synchronous = OFF")
            yield SqliteMeter(file)


async def fill(kind: str, address: str) -> None:
    async with meter_of(kind, address) as meter:
        await meter.store.load("run")
        for statement in insertions():
            await meter.run(statement)
        for table in ("workflow_runs", "workflow_runs_tags"):
            await meter.run(f"ANALYZE TABLE {table}" if kind == "mysql" else f"ANALYZE {table}")


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.server),
        pytest.param("mysql", marks=pytest.mark.server),
    ],
)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The kind and the address of a database with many runs."""
    kind: str = request.param
    with ExitStack() as stack:
        address = str(tmp_path_factory.mktemp("plans") / "runs.db")
        if kind != "sqlite":
            server = request.getfixturevalue(f"{kind}_server")
            fresh = postgres.fresh_database if kind == "postgres" else mysql.fresh_database
            address = stack.enter_context(fresh(server))
        asyncio.run(fill(kind, address))
        yield kind, address


@pytest.fixture
async def meter(database: tuple[str, str]) -> AsyncIterator[Meter]:
    async with meter_of(*database) as meter:
        await meter.store.load("run")
        yield meter


def at(n: int) -> datetime:
    """Return the last update of a run."""
    return from_microseconds(START + n * 1_000_000)


SEARCHES = {
    "everything": (Query(), 20),
    "status": (Query(statuses=("failed",)), 20),
    "workflow": (Query(workflows=("import",)), 20),
    "workflow and status": (Query(workflows=("import",), statuses=("failed", "queued")), 20),
    "oldest first": (Query(statuses=("failed",), oldest_first=True), 20),
    "tag": (Query(tags=("plan=pro",)), 20),
    "tag that no run has": (Query(tags=("plan=free",)), 0),
    "prefix": (Query(prefix="run 0100"), 10),
    "prefix of many": (Query(prefix="run "), 20),
    "prefix of none": (Query(prefix="other"), 0),
    "time range": (Query(since=at(30_000), until=at(30_020)), 20),
    "status in a time range": (Query(statuses=("failed",), until=at(30_000)), 20),
}


@pytest.mark.parametrize("name", SEARCHES)
async def test_a_search_reads_little_more_than_it_returns(meter: Meter, name: str) -> None:
    query, number = SEARCHES[name]

    async def search() -> None:
        assert len((await meter.store.search(query, 20)).runs) == number

    assert await meter.effort(search) < FEW


async def test_a_page_in_the_middle_reads_no_more_than_the_first(meter: Meter) -> None:
    query = Query(statuses=("completed",))
    page = await meter.store.search(query, 15_000)

    async def continue_search() -> None:
        assert len((await meter.store.search(query, 20, after=page.cursor)).runs) == 20

    assert await meter.effort(continue_search) < FEW


async def test_a_claim_reads_only_what_the_worker_drives(meter: Meter) -> None:
    """Runs of other workflows and queues are due earlier."""
    assert await meter.effort(lambda: claim(meter, supports("absent"), 0)) < FEW
    queues = {f"keys/{n:02}": 5 for n in range(90)}
    assert await meter.effort(lambda: claim(meter, supports("absent"), 0, queues)) < FEW
    assert await meter.effort(lambda: claim(meter, supports("order"), 5, {"keys/05": 5})) < FEW


async def claim(
    meter: Meter,
    supported: Sequence[SupportedVersions],
    number: int,
    queues: Mapping[str, int] | None = None,
) -> None:
    claimed = await meter.store.claim("ana", LONG, 20, supports=supported, queues=queues)
    assert len(claimed) == number


async def test_due_runs_are_read_by_the_index(meter: Meter) -> None:
    async def due() -> None:
        assert (
            len(await meter.store.due(at(RUNS), 20, supports=[SupportedVersions("order", 9, 9)]))
            == 20
        )
        assert len(await meter.store.due(at(RUNS), 20)) == 20

    assert await meter.effort(due) < FEW


async def test_versions_that_are_not_supported_are_skipped_in_the_index(meter: Meter) -> None:
    """There are more than a thousand of them."""
    newest = [SupportedVersions("order", 1, 1)]
    assert await meter.effort(lambda: claim(meter, newest, 0)) < FEW


async def test_queues_are_found_one_by_one(meter: Meter) -> None:
    async def queues() -> None:
        names = await meter.store.queues(at(RUNS), 20)
        assert list(names) == [f"keys/{n:02}" for n in range(20)]

    assert await meter.effort(queues) < FEW


async def test_counts_stop_at_the_cap(meter: Meter) -> None:
    async def count() -> None:
        statuses: tuple[RunStatus, ...] = ("completed", "failed", "queued")
        counts = await meter.store.counts(Query(statuses=statuses), 100)
        assert {(count.workflow, count.status): count.capped for count in counts} == {
            (workflow, status): status != "failed"
            for workflow in ("order", "import", "report")
            for status in statuses
        }

    assert await meter.effort(count) < FEW
