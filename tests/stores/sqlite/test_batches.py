"""A statement on many runs has the same effect as one statement per run."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template

import pytest

from perdure.errors import StoreError
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Refusal, Rest, Verdict
from perdure.stores._migrations import read_migrations
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.stores.sqlite.schema import split_script
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot

HOUR = timedelta(hours=1)
FIRST = as_json(snapshot())
LATER = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(path) as store:
        yield store


async def granted(store: SqliteStore, *ids: str) -> list[Grant]:
    requests = [LeaseRequest(id, "ana", HOUR, create=FIRST) for id in ids]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def rest(grant: Grant, n: int, *names: str, delete: bool = False) -> Entry:
    whole = as_json(snapshot(*names, status="completed"))
    return Entry(grant.lease.id, grant.lease.epoch, n, whole, rest=Rest("completed", delete=delete))


@pytest.mark.parametrize("many", [1, 3, 255, 257, 700])
async def test_a_batch_may_have_any_size(store: SqliteStore, many: int) -> None:
    """However the runs are divided among statements, each has its own result."""
    ids = [f"run {number}" for number in range(many)]
    grants = await granted(store, *ids)
    assert [grant.lease.id for grant in grants] == ids
    entries = [Entry(one.lease.id, one.lease.epoch, 1, delta("a")) for one in grants]
    assert await store.append(entries) == [Verdict.ACCEPTED] * many
    assert await store.append([rest(one, 2, "a") for one in grants]) == [Verdict.ACCEPTED] * many
    assert await store.load(ids[-1]) == snapshot("a", status="completed")
    again = await granted(store, *ids)
    assert not any(one.created for one in again)
    assert await store.append([rest(one, 1, delete=True) for one in again]) == (
        [Verdict.ACCEPTED] * many
    )
    assert await store.list() == []


async def test_requests_for_the_same_run_are_handled_in_order(store: SqliteStore) -> None:
    """The second owner is refused; the same owner gets a newer lease."""
    requests = [LeaseRequest("run", owner, HOUR, create=FIRST) for owner in ("ana", "bob", "ana")]
    first, other, again = await store.acquire(requests)
    assert isinstance(first, Grant)
    assert first.created
    assert isinstance(other, Refusal)
    assert other.owner == "ana"
    assert isinstance(again, Grant)
    assert not again.created
    assert again.lease.epoch > first.lease.epoch


async def test_requests_of_all_kinds_can_be_combined(store: SqliteStore) -> None:
    """Each has its own answer, independent of the others."""
    await granted(store, "mine")
    await store.acquire([LeaseRequest("theirs", "bob", HOUR, create=FIRST)])
    answers = await store.acquire(
        [
            LeaseRequest("missing", "ana", HOUR),
            LeaseRequest("mine", "ana", HOUR, create=FIRST, existing=False),
            LeaseRequest("theirs", "ana", HOUR, create=FIRST),
            LeaseRequest("new", "ana", HOUR, create=FIRST, existing=False),
            LeaseRequest("mine", "ana", 2 * HOUR),
        ]
    )
    leases = [
        (one.lease.id, one.created) if isinstance(one, Grant) else one.reason for one in answers
    ]
    assert leases == ["missing", "exists", "owned", ("new", True), ("mine", False)]


async def test_a_run_enqueued_twice_in_one_call_is_created_once(store: SqliteStore) -> None:
    """The first creates it, the second finds that it exists."""
    runs = [NewRun("run", "a", FIRST, LATER), NewRun("run", "b", FIRST), NewRun("x", "c", FIRST)]
    assert await store.enqueue(runs) == [True, False, True]
    assert {run.id: run.workflow for run in await store.list()} == {"run": "a", "x": "c"}


@pytest.mark.parametrize(
    ("second", "verdict"), [(3, Verdict.FENCED), (2, Verdict.ACCEPTED), (1, Verdict.ACCEPTED)]
)
async def test_the_first_of_two_rests_in_one_call_counts(
    store: SqliteStore, second: int, verdict: Verdict
) -> None:
    """It closes the epoch; the second is refused, or changes nothing if the first includes it."""
    [grant] = await granted(store, "run")
    rests = [rest(grant, 2, "a"), rest(grant, second, "b")]
    assert await store.append(rests) == [Verdict.ACCEPTED, verdict]
    assert await store.load("run") == snapshot("a", status="completed")


async def test_a_deleted_run_leaves_nothing_of_its_batch(store: SqliteStore, path: Path) -> None:
    """Its entries in the same batch are deleted with it, and those of other runs are not."""
    deleted, stays = await granted(store, "deleted", "stays")
    entries = [Entry(one.lease.id, one.lease.epoch, 1, delta("a")) for one in (deleted, stays)]
    stale = Entry("stays", stays.lease.epoch - 1, 3, b"", rest=Rest("completed", delete=True))
    verdicts = await store.append([*entries, rest(deleted, 2, delete=True), stale])
    assert verdicts == [*[Verdict.ACCEPTED] * 3, Verdict.FENCED]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT run FROM perdure_runs_journal").fetchall() == [("stays",)]


async def test_a_record_that_is_not_utf8_is_a_store_error(store: SqliteStore) -> None:
    """It could not be read again."""
    [grant] = await granted(store, "run")
    with pytest.raises(StoreError, match="cannot be stored"):
        await store.append([Entry("run", grant.lease.epoch, 1, b'"\xff"')])


async def test_an_older_file_is_migrated(path: Path) -> None:
    """The trigger of an older schema is replaced; a deleted run leaves nothing behind."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("CREATE TABLE perdure_runs_migrations (version INTEGER, name TEXT)")
        for migration in read_migrations("perdure.stores.sqlite")[:4]:
            for statement in split_script(migration.script):
                database.execute(Template(statement).substitute(table="perdure_runs"))
            database.execute("INSERT INTO perdure_runs_migrations VALUES (?, ?)", migration[:2])
        async with sqlite(path) as store:
            [grant] = await granted(store, "run")
            await send_one(store, "run", "a", b"1")
            await send_one(store, "run", "b", b"1", dedup_id="x")
            await send_one(store, "run", "c", b"1", dedup_id="y")
            message = (await store.inbox("run"))[2].id
            entry = Entry("run", grant.lease.epoch, 1, delta("a"), consumes=(message,))
            await store.append([entry])
            assert await store.delete("run")
        for table in ("perdure_runs_journal", "perdure_runs_inbox"):
            assert database.execute(f"SELECT * FROM {table}").fetchall() == []
        [(floor,)] = database.execute("SELECT epoch FROM perdure_runs_floor")
        assert floor == grant.lease.epoch
