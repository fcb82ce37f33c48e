"""The effort of MySQL's queries among 50,000 runs: the server counts the rows it reads."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.store import NewRun, Query, SupportedVersions
from perdure.stores import mysql
from perdure.stores._searching import MAX_EXAMINED
from perdure.stores.mysql import MysqlStore
from perdure.stores.mysql.tags import tag_digest
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mysql import fresh_database, query
from tests.servers.process import Server

LONG = timedelta(minutes=5)
START = datetime(2026, 1, 1, tzinfo=UTC)
DIGIT = "(SELECT 0 AS d" + "".join(f" UNION ALL SELECT {d}" for d in range(1, 10)) + ")"
# Every fifth run is scheduled: half of those in no queue, the others in ten queues. Those of one
# workflow are all of version 3.
MANY_RUNS = f"""
    INSERT INTO perdure_runs (
        id, snapshot, workflow, status, queue, version, wake_at, updated_at, created_at, epoch, tags
    )
    SELECT CONCAT(IF(MOD(n, 5000) = 0, 'rare ', 'run '), n),
        '{{"formatVersion":1,"steps":{{}},"execution":{{}}}}',
        CONCAT('workflow ', MOD(n, 7)),
        CASE MOD(n, 5) WHEN 0 THEN 'suspended' WHEN 1 THEN 'failed' ELSE 'completed' END,
        IF(MOD(n, 2) = 0, '', CONCAT('queue ', MOD(n, 20))),
        IF(MOD(n, 7) = 3, 3, 0),
        IF(MOD(n, 5) = 0, '2026-01-01' + INTERVAL n SECOND, NULL),
        '2026-01-01' + INTERVAL n SECOND, '2026-01-01' + INTERVAL n SECOND, 1,
        IF(MOD(n, 100) = 0, '["color=red"]', NULL)
    FROM (
        SELECT a.d + 10 * b.d + 100 * c.d + 1000 * d.d + 10000 * e.d AS n
        FROM {DIGIT} AS a, {DIGIT} AS b, {DIGIT} AS c, {DIGIT} AS d, {DIGIT} AS e
    ) AS number
    WHERE n < 50000
"""
TAGS = """
    INSERT INTO perdure_runs_tags (run, tag, created_at)
    SELECT id, %s, created_at FROM perdure_runs WHERE tags IS NOT NULL
"""
READ = "SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_read%'"


@pytest.fixture(scope="module")
def url(mysql_server: Server) -> Iterator[str]:
    """A database with 50,000 runs, all of them due that have a wake time."""
    with fresh_database(mysql_server) as url:
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[MysqlStore]:
    """A store with one connection, so that the server's counters are those of the store."""
    async with mysql(url, max_connections=1) as store:
        if await store.load("run 77") is None:
            query(url, MANY_RUNS)
            query(url, TAGS, tag_digest("color=red"))
            for table in ("perdure_runs", "perdure_runs_tags"):
                query(url, f"ANALYZE TABLE {table}")
        yield store


async def run_statement(store: MysqlStore, statement: str) -> Any:
    """Run a statement on the store's own connection, which counts for itself."""
    pool = store._backend._database.pool
    connection = await pool.acquire()
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        rows = await cursor.fetchall()
    await pool.release(connection, reusable=True)
    return rows


async def rows_read(store: MysqlStore, verb: Awaitable[Any]) -> tuple[Any, int]:
    """Return the verb's result, and how many rows the server read for it."""
    await run_statement(store, "FLUSH STATUS")
    result = await verb
    return result, sum(int(number) for _, number in await run_statement(store, READ))


QUERIES = {
    "all": Query(),
    "status": Query(statuses=("failed",)),
    "statuses": Query(statuses=("failed", "suspended")),
    "workflow": Query(workflows=("workflow 2",)),
    "both": Query(workflows=("workflow 2",), statuses=("failed",)),
    "tag": Query(tags=("color=red",)),
    "tag and status": Query(tags=("color=red",), statuses=("suspended",)),
    "rare prefix": Query(prefix="rare "),
    "common prefix": Query(prefix="run "),
    "time": Query(since=START + timedelta(hours=1), until=START + timedelta(hours=2)),
    "time and status": Query(until=START + timedelta(hours=2), statuses=("failed",)),
    "oldest first": Query(statuses=("completed",), oldest_first=True),
}


@pytest.mark.parametrize("name", QUERIES)
async def test_a_page_reads_about_as_many_rows_as_it_has(store: MysqlStore, name: str) -> None:
    """So does the next page."""
    page, number = await rows_read(store, store.search(QUERIES[name], 10))
    assert len(page.runs) == 10
    assert number < 3_000
    following, number = await rows_read(store, store.search(QUERIES[name], 10, after=page.cursor))
    assert number < 3_000
    assert not {run.id for run in page.runs} & {run.id for run in following.runs}


async def test_a_search_that_finds_nothing_stops(store: MysqlStore) -> None:
    """It examines a bounded number of runs: each attempt, and the last place of each."""
    page, number = await rows_read(store, store.search(Query(queue="none", prefix="run "), 10))
    assert page.runs == ()
    assert page.searched_until is not None
    assert number < 5 * MAX_EXAMINED


async def test_counts_stop_at_the_cap(store: MysqlStore) -> None:
    """One seek finds each group."""
    counts, number = await rows_read(store, store.counts(Query(statuses=("failed",)), 10))
    assert {(each.count, each.capped) for each in counts} == {(10, True)}
    assert len(counts) == 7
    assert number < 4 * MAX_EXAMINED


CLAIMS: dict[str, tuple[Callable[[MysqlStore], Awaitable[Any]], int]] = {
    "one workflow": (
        lambda store: store.due(datetime.now(UTC), 10, supports=supports("workflow 1")),
        10,
    ),
    "workflows": (
        lambda store: store.due(
            datetime.now(UTC), 10, supports=supports(*(f"workflow {n}" for n in range(7)))
        ),
        10,
    ),
    "queues": (
        lambda store: store.due(
            datetime.now(UTC),
            10,
            supports=supports("workflow 1", "workflow 2"),
            queues={"queue 5": 3, "queue 15": 3},
        ),
        6,
    ),
    "any workflow": (lambda store: store.due(datetime.now(UTC), 10), 10),
    "claim": (lambda store: store.claim("ana", LONG, 10, supports=supports("workflow 1")), 10),
    "claim of any workflow": (lambda store: store.claim("ana", LONG, 10), 10),
    "claim of no known workflow": (
        lambda store: store.claim("ana", LONG, 10, supports=supports("unknown", "other")),
        0,
    ),
    "claim of no known queue": (lambda store: store.claim("ana", LONG, 10, queues={"none": 5}), 0),
}


@pytest.mark.parametrize("name", CLAIMS)
async def test_due_runs_are_found_by_the_index(store: MysqlStore, name: str) -> None:
    """However many others are due."""
    verb, expected = CLAIMS[name]
    runs, number = await rows_read(store, verb(store))
    assert len(runs) == expected
    assert number < 500


async def test_due_runs_are_found_by_the_index_without_statistics(mysql_url: str) -> None:
    """After many runs of one workflow were created, the server still takes the table for empty."""
    new = [NewRun(f"run {n}", "busy", as_json(snapshot()), wake_at=START) for n in range(2_000)]
    known = supports("busy", "unknown", "other")
    async with mysql(mysql_url, max_connections=1) as store:
        await store.enqueue(new)
        grants, number = await rows_read(store, store.claim("ana", LONG, 10, supports=known))
        assert (len(grants), number < 500) == (10, True)
        due, number = await rows_read(store, store.due(datetime.now(UTC), 10, supports=known))
        assert (len(due), number < 500) == (10, True)


async def test_a_claim_of_new_runs_takes_few_statements(mysql_url: str) -> None:
    """It finds their lane, locks them, reads the clock and messages, but no journal."""
    async with mysql(mysql_url, max_connections=1) as store:
        await store.enqueue([NewRun(f"run {n}", "busy", as_json(snapshot())) for n in range(20)])
        await run_statement(store, "FLUSH STATUS")
        assert len(await store.claim("ana", LONG, 10, supports=supports("busy", "other"))) == 10
        status = dict(await run_statement(store, "SHOW SESSION STATUS LIKE 'Com_%'"))
    assert (status["Com_select"], status["Com_update"]) == ("4", "1")


async def test_versions_that_cannot_be_driven_are_skipped_in_the_index(store: MysqlStore) -> None:
    """No row is read of the hundreds of runs that are due."""
    old = [SupportedVersions("workflow 3", 1, 2)]
    for verb in (store.claim("ana", LONG, 10, supports=old), store.due(datetime.now(UTC), 9)):
        _, number = await rows_read(store, verb)
        assert number < 500


async def test_queues_are_found_by_a_seek_each(store: MysqlStore) -> None:
    """A seek for each workflow of a queue, and none for the runs in no queue."""
    names, number = await rows_read(store, store.queues(datetime.now(UTC), 10))
    assert names == ["queue 15", "queue 5"]
    assert number < 200


async def test_old_runs_are_found_by_the_index(store: MysqlStore) -> None:
    """By status, by workflow, and by tag."""
    for options in ({}, {"status": "failed"}, {"workflow": "workflow 4"}, {"tags": ["color=red"]}):
        found = store.prune(timedelta(0), limit=10, dry_run=True, **options)
        _, number = await rows_read(store, found)
        assert number < 3_000, options
