"""Queues, versions, tags and counts on SQLite: migrated, searched, and kept by triggers."""

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template

import pytest

from perdure.errors import InvalidArgument, StoreError
from perdure.store import (
    Count,
    Entry,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Query,
    Rest,
    SupportedVersions,
)
from perdure.stores._migrations import read_migrations
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.stores.sqlite.connection import drive
from perdure.stores.sqlite.leases import LeasedRun
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schedule import ScheduleVerbs
from perdure.stores.sqlite.schema import split_script
from perdure.stores.sqlite.statements import Statements
from perdure.testing.conformance.samples import as_json, snapshot

HOUR = timedelta(hours=1)
FIRST = as_json(snapshot())
UPSERT_OF_AWAITLY = """
    INSERT INTO perdure_runs (id, snapshot, updated_at) VALUES (?, ?, datetime('now'))
    ON CONFLICT (id) DO UPDATE SET snapshot = excluded.snapshot, updated_at = datetime('now')
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection to the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(path) as store:
        await store.load("run")
        yield store


@pytest.fixture
def old_rows(database: sqlite3.Connection) -> sqlite3.Connection:
    """A file as it was before runs had queues and tags, with a run and three messages."""
    database.execute(
        "CREATE TABLE perdure_runs_migrations "
        "(version INTEGER PRIMARY KEY, name TEXT, applied_at TEXT DEFAULT CURRENT_TIMESTAMP)"
    )
    for migration in read_migrations("perdure.stores.sqlite")[:6]:
        for statement in split_script(migration.script):
            database.execute(Template(statement).substitute(table="perdure_runs"))
        row = (migration.version, migration.name)
        database.execute("INSERT INTO perdure_runs_migrations (version, name) VALUES (?, ?)", row)
    database.execute(
        "INSERT INTO perdure_runs (id, snapshot, updated_at, workflow, status, wake_at, epoch) "
        "VALUES ('run', ?, '2024-05-01T09:30:00.500000Z', 'mail', 'waiting', 5, 7)",
        (FIRST.decode(),),
    )
    for taken, dedup_id in ((0, None), (0, "a"), (1, "b")):
        database.execute(
            "INSERT INTO perdure_runs_inbox (run, name, payload, sent_at, dedup_id, taken) "
            "VALUES ('run', 'hello', '1', 0, ?, ?)",
            (dedup_id, taken),
        )
    return database


def tags_of(database: sqlite3.Connection) -> list[tuple[str, str]]:
    return database.execute("SELECT run, tag FROM perdure_runs_tags ORDER BY run, tag").fetchall()


async def test_old_rows_get_the_defaults(path: Path, old_rows: sqlite3.Connection) -> None:
    """A run stored before is found, due and claimed, in no queue and without a version."""
    async with sqlite(path) as store:
        [run] = (await store.search(Query(statuses=("waiting",), workflows=("mail",)), 10)).runs
        assert (run.queue, run.version, run.tags, run.summary) == ("", 0, (), b"")
        assert (run.created_at, run.wake_at) == (None, datetime(1970, 1, 1, 0, 0, 0, 5, UTC))
        [grant] = await store.claim("ana", HOUR, 10, supports=[SupportedVersions("mail", 2, 2)])
        assert (grant.queue, grant.version, len(grant.inbox)) == ("", 0, 2)


async def test_messages_sent_before_are_counted(path: Path, old_rows: sqlite3.Connection) -> None:
    """The consumed one is not."""
    async with sqlite(path) as store:
        messages = [NewMessage("run", "hello", b"1", dedup_id) for dedup_id in (None, "b")]
        receipts = await store.send(messages)
        assert [receipt.unconsumed for receipt in receipts] == [3, 3]


async def test_a_migration_that_is_interrupted_leaves_the_old_schema(
    path: Path, old_rows: sqlite3.Connection
) -> None:
    """It is one transaction, and the next start repeats it."""
    old_rows.execute("CREATE TABLE perdure_runs_unconsumed (something TEXT)")
    async with sqlite(path) as store:
        with pytest.raises(StoreError, match="perdure_runs_unconsumed"):
            await store.load("run")
        columns = old_rows.execute("SELECT name FROM pragma_table_info('perdure_runs')").fetchall()
        assert ("queue",) not in columns
        old_rows.execute("DROP TABLE perdure_runs_unconsumed")
        assert [run.id for run in (await store.search(Query(), 10)).runs] == ["run"]


async def test_an_old_run_is_found_by_its_first_tags(
    path: Path, old_rows: sqlite3.Connection
) -> None:
    """It counts as created when it got them: pages by tag are in the order of creation."""
    async with sqlite(path) as store:
        await store.enqueue([NewRun("before", "mail", FIRST, tags=("kind=a",))])
        [grant] = await store.acquire([LeaseRequest("run", "ana", HOUR)])
        assert isinstance(grant, Grant)
        rest = Rest("waiting", tags=("kind=a", "kind=b"))
        await store.append([Entry("run", grant.lease.epoch, 1, FIRST, rest=rest)])
        await store.enqueue([NewRun("after", "mail", FIRST, tags=("kind=a",))])
        page = await store.search(Query(tags=("kind=a",)), 2)
        assert [run.id for run in page.runs] == ["after", "run"]
        page = await store.search(Query(tags=("kind=a",)), 2, after=page.cursor)
        assert [run.id for run in page.runs] == ["before"]


async def test_tags_follow_every_change_of_a_run(
    store: SqliteStore, database: sqlite3.Connection
) -> None:
    """Created, rested, saved, pruned or deleted by another program: nothing stale remains."""
    tagged = [NewRun(id, "mail", FIRST, tags=("kind=a", "kind=b")) for id in ("1", "2", "3")]
    await store.enqueue(tagged)
    [grant] = await store.claim("ana", HOUR, 1)
    rest = Rest("completed", tags=("kind=b", "kind=c"))
    await store.append([Entry("1", grant.lease.epoch, 1, FIRST, rest=rest)])
    await store.save("2", snapshot())
    database.execute(UPSERT_OF_AWAITLY, ("3", "{}"))
    assert tags_of(database) == [
        *(("1", "kind=b"), ("1", "kind=c")),
        *(("3", "kind=a"), ("3", "kind=b")),
    ]
    assert await store.prune(timedelta(0), tags=["kind=c"]) == 1
    database.execute("DELETE FROM perdure_runs WHERE id = '3'")
    assert tags_of(database) == []


async def test_counts_of_messages_follow_the_inbox(
    store: SqliteStore, database: sqlite3.Connection
) -> None:
    """Sent, consumed with and without a dedup id, and deleted with the run."""
    [grant] = await store.acquire([LeaseRequest("run", "ana", HOUR, create=FIRST)])
    assert isinstance(grant, Grant)
    messages = [NewMessage("run", "hello", b"1", dedup_id) for dedup_id in (None, "a", "a", None)]
    receipts = await store.send(messages)
    assert [receipt.unconsumed for receipt in receipts] == [1, 2, 2, 3]
    first, second, _ = await store.inbox("run")
    consumed = (first.id, second.id)
    await store.append([Entry("run", grant.lease.epoch, 1, b"{}", consumes=consumed)])
    [receipt] = await store.send([NewMessage("run", "hello", b"1", "a")])
    assert receipt.unconsumed == 1
    await store.delete("run")
    assert database.execute("SELECT * FROM perdure_runs_unconsumed").fetchall() == []


async def test_a_page_of_an_inbox_begins_after_a_message(store: SqliteStore) -> None:
    """Anything but the id of a message is refused; nothing follows the highest id."""
    await store.enqueue([NewRun("run", "mail", FIRST)])
    await store.send([NewMessage("run", "hello", b"1")])
    assert await store.inbox("run", after=str(2**63 - 1)) == []
    with pytest.raises(InvalidArgument, match="the id of a message"):
        await store.inbox("run", after="x")


async def test_another_programs_update_moves_a_run_to_the_front(
    store: SqliteStore, database: sqlite3.Connection
) -> None:
    """Lists and searches by status see the new time at once."""
    await store.save("a", snapshot())
    await store.save("b", snapshot())
    text = json.dumps(snapshot("new"))
    later = "UPDATE perdure_runs SET snapshot = ?, updated_at = '2999-01-01 00:00:00' WHERE id = ?"
    database.execute(later, (text, "a"))
    for query in (Query(), Query(statuses=("running",))):
        assert [run.id for run in (await store.search(query, 10)).runs] == ["a", "b"]


async def test_more_workflows_than_sqlite_merges_are_searched_and_claimed(
    store: SqliteStore,
) -> None:
    """Searches walk all runs by time instead; claims use several statements."""
    names = [f"workflow {number:03}" for number in range(300)]
    await store.enqueue([NewRun(name, name, FIRST) for name in names])
    page = await store.search(Query(statuses=("queued",)), 400)
    assert sorted(run.id for run in page.runs) == names
    assert [count.count for count in await store.counts(Query(), 10)] == [1] * 300
    supports = [SupportedVersions(name, 1, 1) for name in names]
    grants = await store.claim("ana", HOUR, 290, supports=supports)
    assert [grant.lease.id for grant in grants] == names[:290]


async def test_versions_of_a_workflow_may_be_several_ranges(store: SqliteStore) -> None:
    """Each run is claimed once, also one without a version and one in two ranges."""
    await store.enqueue([NewRun(f"{n}", "mail", FIRST, version=n) for n in range(7)])
    supports = [
        SupportedVersions("mail", 1, 2),
        SupportedVersions("mail", 5, 5),
        SupportedVersions("mail", 2, 3),
    ]
    assert [one.id for one in await store.due(datetime.now(UTC), 4, supports=supports)] == [
        *("0", "1", "2", "3")
    ]
    grants = await store.claim("ana", HOUR, 10, supports=supports)
    assert [grant.version for grant in grants] == [0, 1, 2, 3, 5]


async def test_a_claim_replaces_runs_that_others_claimed_in_the_meantime(
    store: SqliteStore, database: sqlite3.Connection
) -> None:
    """On a server, due runs are found in one transaction and leased in another."""
    await store.enqueue([NewRun(f"{n}", "mail", FIRST) for n in range(6)])
    verbs = ScheduleVerbs(Statements("perdure_runs"), "", lambda: 2_000_000_000_000_000)
    others: list[str] = []

    def interrupted(claim: Verb[Sequence[LeasedRun]]) -> Verb[Sequence[LeasedRun]]:
        found = yield next(claim)
        rival = drive(database, verbs.claim("bob", HOUR, 3, None, {"": 3}))
        others.extend(leased.lease.id for leased in rival)
        try:
            statements = claim.send(found)
            while True:
                statements = claim.send((yield statements))
        except StopIteration as done:
            leased: Sequence[LeasedRun] = done.value
            return leased

    claim = verbs.claim("ana", HOUR, 4, [SupportedVersions("mail", 1, 1)], {"": 4})
    claimed = drive(database, interrupted(claim))
    assert [leased.lease.id for leased in claimed] == ["3", "4", "5"]
    assert others == ["0", "1", "2"]


async def test_a_search_with_a_prefix_stops_among_runs_of_others(
    path: Path, store: SqliteStore, database: sqlite3.Connection
) -> None:
    """Its pages return each of its own runs once, however many runs of others are between."""
    async with sqlite(path, prefix="m:") as mine:
        for id in ("a", "b"):
            await mine.save(id, snapshot())
            for other in ("a", "z"):
                database.execute(
                    "WITH RECURSIVE number (i) AS "
                    "(SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < 15000) "
                    "INSERT INTO perdure_runs (id, snapshot, updated_at) SELECT "
                    "printf('%s:%s:%d', ?, ?, i), '{}', "
                    "(SELECT updated_at FROM perdure_runs WHERE id = 'm:' || ?) FROM number",
                    (other, id, id),
                )
        # More than a thousand of its own, all older: its runs are not read by their ids.
        database.execute(
            "WITH RECURSIVE number (i) AS "
            "(SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < 1500) "
            "INSERT INTO perdure_runs (id, snapshot, updated_at) "
            "SELECT printf('m:old:%d', i), '{}', '2001-01-01 00:00:00' FROM number"
        )
        ids, pages, cursor = [], 0, None
        while True:
            page = await mine.search(Query(), 10, after=cursor)
            ids += [run.id for run in page.runs]
            pages, cursor = pages + 1, page.cursor
            if cursor is None or len(page.runs) == 10:
                break
        assert ids[:2] == ["b", "a"]
        assert pages >= 3
        assert await mine.counts(Query(), 5) == [Count(None, "running", 5, capped=True)]
