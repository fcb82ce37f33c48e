"""SQLite does no more work than a call needs, however large the file is."""

import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from perdure.store import Due
from perdure.stores.sqlite import SqliteStore, inbox, sqlite
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.statements import Statement, Statements
from tests.stores.append_speed import cost_of_length

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)

# One run in a hundred is due.
SLEEPERS = """
    WITH RECURSIVE number (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM number WHERE i + 1 < :count)
    INSERT INTO perdure_runs (id, snapshot, updated_at, workflow, status, wake_at, epoch)
    SELECT printf('run %08d', i), '{}', '2029-01-01T00:00:00.000000Z', 'nap', 'suspended',
        :now + (i - :count / 100) * 1000000, 1
    FROM number
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(path, durability="normal") as store:
        await store.load("run")
        yield store


@pytest.fixture
def database(path: Path, store: SqliteStore) -> Iterator[sqlite3.Connection]:
    """Another connection to the store's file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def add_sleepers(database: sqlite3.Connection, sleepers: int) -> None:
    now = int(NOW.timestamp() * 1_000_000)
    database.execute("PRAGMA synchronous = OFF")
    database.execute(SLEEPERS, {"count": sleepers, "now": now})


VALUES = dict.fromkeys(["id", "ids", "owner", "ttl", "now", "latest", "after", "limit", "page"])


PLANS = {
    "load": (
        sql.LOAD,
        {"sqlite_autoindex_perdure_runs_1", "sqlite_autoindex_perdure_runs_journal_1"},
    ),
    "claim": (sql.CLAIM, {"sqlite_autoindex_perdure_runs_1"}),
    "inbox": (inbox.INBOX, {"perdure_runs_inbox_waiting"}),
}


PLANS_OF_MANY = {
    "acquire": (sql.ACQUIRE, {"sqlite_autoindex_perdure_runs_1"}),
    "renew": (sql.RENEW, {"sqlite_autoindex_perdure_runs_1", "perdure_runs_inbox_waiting"}),
    "release": (sql.RELEASE, {"sqlite_autoindex_perdure_runs_1"}),
    "append": (sql.APPEND, {"sqlite_autoindex_perdure_runs_1"}),
    "rest": (sql.REST, {"sqlite_autoindex_perdure_runs_1", "perdure_runs_inbox_waiting"}),
    "fold": (
        sql.DELETE_FOLDED,
        {"sqlite_autoindex_perdure_runs_1", "sqlite_autoindex_perdure_runs_journal_1"},
    ),
    "forget": (
        sql.DELETE_OWNED_JOURNAL,
        {"sqlite_autoindex_perdure_runs_1", "sqlite_autoindex_perdure_runs_journal_1"},
    ),
    "delete": (sql.DELETE_OWNED, {"sqlite_autoindex_perdure_runs_1"}),
    "send": (inbox.SEND, {"sqlite_autoindex_perdure_runs_1"}),
    "wake": (
        inbox.WAKE_IF_MESSAGE,
        {"sqlite_autoindex_perdure_runs_1", "perdure_runs_inbox_waiting"},
    ),
    "recipients": (
        inbox.RECIPIENTS,
        {"sqlite_autoindex_perdure_runs_1", "perdure_runs_inbox_dedup"},
    ),
    "take": (
        sql.CONSUME,
        {"sqlite_autoindex_perdure_runs_1", "perdure_runs_inbox_waiting"},
    ),
}


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("verb", PLANS)
def test_a_verb_uses_indexes(database: sqlite3.Connection, verb: str, analyzed: bool) -> None:
    """No verb scans or sorts a table."""
    statement, indexes = PLANS[verb]
    add_sleepers(database, 1_000)
    if analyzed:
        database.execute("ANALYZE")
    plan = Statement(Statements("perdure_runs").sql(statement), VALUES)
    assert used(database, plan, indexes) == indexes


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("verb", PLANS_OF_MANY)
def test_a_statement_on_many_runs_uses_indexes(
    database: sqlite3.Connection, verb: str, rows: int, analyzed: bool
) -> None:
    """The cost of a batch depends on its size only."""
    statement, indexes = PLANS_OF_MANY[verb]
    add_sleepers(database, 1_000)
    if analyzed:
        database.execute("ANALYZE")
    [plan] = Statements("perdure_runs").many(statement, [(None,) * 12] * rows)
    assert used(database, plan, indexes) == indexes


def used(database: sqlite3.Connection, plan: Statement, indexes: set[str]) -> set[str]:
    """Return which of the indexes are used, and check that no table is scanned or sorted."""
    explained = database.execute(f"EXPLAIN QUERY PLAN {plan.sql}", plan.values)
    lines = [row[3] for row in explained]
    assert not [line for line in lines if line.startswith("SCAN perdure") or "B-TREE" in line]
    return {index for index in indexes if any(f"INDEX {index} (" in line for line in lines)}


def test_deleting_a_run_does_not_read_other_inboxes(database: sqlite3.Connection) -> None:
    """The work does not grow with the messages of other runs."""
    add_sleepers(database, 2)
    insert = "INSERT INTO perdure_runs_inbox (run, name, payload, sent_at, dedup_id) VALUES "
    few = steps_of(database, "DELETE FROM perdure_runs WHERE id = 'run 00000000'")
    for number in range(1_000):
        database.execute(f"{insert} ('other', 'hello', '1', 0, {number})")
    many = steps_of(database, "DELETE FROM perdure_runs WHERE id = 'run 00000001'")
    assert many <= few * 1.5


def steps_of(database: sqlite3.Connection, statement: str) -> int:
    """Return how many tens of virtual machine instructions a statement takes."""
    steps = count()
    database.set_progress_handler(lambda: next(steps) < 0, 10)
    database.execute(statement)
    database.set_progress_handler(None, 0)
    return next(steps)


@pytest.mark.alone
@pytest.mark.parametrize("sleepers", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
async def test_due_is_fast_among_many_sleepers(
    store: SqliteStore, database: sqlite3.Connection, sleepers: int
) -> None:
    """`due(limit=100)` among a million sleeping runs takes less than 5 ms."""
    add_sleepers(database, sleepers)
    times: list[float] = []
    due: Sequence[Due] = ()
    for _ in range(11):
        start = perf_counter()
        due = await store.due(NOW, 100)
        times.append(perf_counter() - start)
        assert len(due) == 100
    assert [one.wake_at for one in due] == sorted(one.wake_at for one in due)
    assert median(times) < 0.005


@pytest.mark.alone
async def test_the_5000th_entry_costs_as_much_as_the_10th(path: Path) -> None:
    """The cost of an append does not grow with the run."""
    async with sqlite(path) as store:
        assert await cost_of_length(store) < 1.3
