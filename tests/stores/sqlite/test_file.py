"""What is special about a SQLite file: locks, threads, shared commits, a disk."""

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.errors import (
    InvalidArgument,
    StoreClosed,
    StoreCorrupted,
    StoreError,
    StoreUnavailable,
)
from perdure.store import Capabilities, Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores._durability import Durability
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.stores.sqlite import connection as connection_module
from perdure.stores.sqlite import threads as threads_module
from perdure.stores.sqlite import watch as watch_module
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Statement
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot

HOUR = timedelta(hours=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(path) as store:
        yield store


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that is executed on connections opened from now on."""
    statements: list[str] = []

    def open_and_trace(*args: Any) -> sqlite3.Connection:
        connection = connection_module.open_connection(*args)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(threads_module, "open_connection", open_and_trace)
    return statements


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold another program's transaction on the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("COMMIT")


async def granted(store: SqliteStore, *ids: str) -> list[Grant]:
    requests = [LeaseRequest(id, "ana", HOUR, create=as_json(snapshot())) for id in ids]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def entry(grant: Grant, n: int = 1) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(f"step {n}"))


def threads_of(path: Path) -> list[threading.Thread]:
    """Return the threads of the store on this file."""
    return [thread for thread in threading.enumerate() if thread.name == f"perdure {path}"]


@pytest.mark.parametrize(
    ("durability", "survives", "synchronous"),
    [("full", "power_loss", 2), ("normal", "process_crash", 1)],
)
async def test_durability_is_what_the_file_is_opened_with(
    path: Path, durability: Durability, survives: str, synchronous: int
) -> None:
    """`full` returns after the disk has the data; `normal` must be chosen explicitly."""

    def setting() -> Verb[int]:
        [outcome] = yield [Statement("PRAGMA synchronous", ())]
        return cast(int, outcome.rows[0][0])

    async with sqlite(path, durability=durability) as store:
        assert store.capabilities.survives == survives
        assert await store._backend._write(setting) == synchronous


def test_a_store_in_memory_promises_nothing() -> None:
    """It is for tests, and declares so."""
    capabilities = sqlite(":memory:").capabilities
    assert (capabilities.shared, capabilities.survives) == ("process", "nothing")
    assert isinstance(capabilities, Capabilities)


@pytest.mark.parametrize(
    "options",
    [
        {"table": "runs; DROP TABLE runs"},
        {"table": "1runs"},
        {"table": ""},
        {"table": "main.runs"},
        {"durability": "off"},
        {"busy_timeout": -1},
        {"prefix": "a\0b"},
    ],
)
def test_invalid_options_are_refused(path: Path, options: dict[str, object]) -> None:
    """The error names the option, and nothing is opened."""
    with pytest.raises(InvalidArgument) as refused:
        sqlite(path, **options)  # type: ignore[arg-type]
    assert refused.value.parameter in options


async def test_a_table_may_have_any_plain_name(path: Path) -> None:
    """Even one that is an SQL keyword."""
    async with sqlite(path, table="order") as store:
        await store.save("run", snapshot("a"))
        assert await store.delete("run")


async def test_a_single_append_is_one_small_transaction(path: Path, executed: list[str]) -> None:
    """One statement, which SQLite commits by itself."""
    async with sqlite(path) as store:
        [grant] = await granted(store, "run")
        await store.append([entry(grant)])
        del executed[:]
        assert await store.append([entry(grant, 2)]) == [Verdict.ACCEPTED]
        assert [statement.split()[0] for statement in executed] == ["INSERT"]


async def test_queued_writes_share_a_commit(path: Path, executed: list[str]) -> None:
    """A hundred concurrent appends do not need a hundred commits."""
    async with sqlite(path) as store:
        grants = await granted(store, *(f"run {number}" for number in range(100)))
        del executed[:]
        with locked(path):
            appends = [asyncio.ensure_future(store.append([entry(grant)])) for grant in grants]
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*appends) == [[Verdict.ACCEPTED]] * 100
        assert executed.count("COMMIT") <= 2


async def test_a_bad_write_fails_alone(store: SqliteStore, path: Path) -> None:
    """Other writes in the same commit succeed."""
    grants = await granted(store, "a", "b")
    with locked(path):
        writes = [
            asyncio.ensure_future(store.append([entry(grants[0])])),
            asyncio.ensure_future(send_one(store, "a", "\ud800", b"1")),
            asyncio.ensure_future(store.append([entry(grants[1])])),
        ]
        await asyncio.sleep(0.05)
    first, bad, second = await asyncio.gather(*writes, return_exceptions=True)
    assert first == second == [Verdict.ACCEPTED]
    assert isinstance(bad, StoreError)
    assert await store.inbox("a") == []


async def test_a_run_is_deleted_even_if_another_entry_is_refused(store: SqliteStore) -> None:
    """Its verdict does not depend on other runs, and is the same when the entry is repeated."""
    deleted, stale = await granted(store, "deleted", "stale")
    await store.save("stale", snapshot())
    end = Entry("deleted", deleted.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    entries = [entry(deleted), end, entry(stale)]
    for _ in range(2):
        verdicts = await store.append(entries)
        assert verdicts == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.FENCED]
    assert await store.load("deleted") is None
    assert await store.append([entry(deleted, 3)]) == [Verdict.UNKNOWN]


async def test_a_cancelled_call_leaves_no_lease(store: SqliteStore, path: Path) -> None:
    """A caller that was cancelled while it was queued gets no lease and blocks no other."""
    await granted(store, "warm")
    with locked(path):
        first = asyncio.ensure_future(granted(store, "first"))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(granted(store, "second"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0.05)
    assert len(await first) == 1
    assert await store.load("second") is None


async def test_a_write_waits_for_another_process(store: SqliteStore, path: Path) -> None:
    """The user never sees "database is locked" within `busy_timeout`."""
    await store.save("run", snapshot("a"))
    with locked(path):
        saving = asyncio.ensure_future(store.save("run", snapshot("b")))
        await asyncio.sleep(0.2)
        assert not saving.done()
    await saving


async def test_readers_do_not_wait_for_writers(store: SqliteStore, path: Path) -> None:
    """A reader sees the last commit, even while another process writes."""
    await store.save("run", snapshot("a"))
    with locked(path):
        loaded = await asyncio.wait_for(store.load("run"), 5)
        assert loaded == snapshot("a")
        assert [run.id for run in await store.list()] == ["run"]


async def test_a_reader_opens_a_file_that_is_locked(store: SqliteStore, path: Path) -> None:
    """If the tables exist, opening the file does not write."""
    await store.save("run", snapshot("a"))
    async with sqlite(path) as another:
        with locked(path):
            assert await asyncio.wait_for(another.load("run"), 5) == snapshot("a")


async def test_a_file_locked_for_too_long_is_unavailable(path: Path) -> None:
    """The error has the path and the time waited; afterwards the store works again."""
    async with sqlite(path, busy_timeout=0.1) as store:
        await store.save("run", snapshot("a"))
        with locked(path), pytest.raises(StoreUnavailable, match=r"runs\.db.*locked for 0\.\ds"):
            await store.save("run", snapshot("b"))
        await store.save("run", snapshot("c"))
        assert await store.load("run") == snapshot("c")


async def test_a_file_is_unavailable_until_its_folder_exists(tmp_path: Path) -> None:
    """The next call tries to open it again."""
    async with sqlite(tmp_path / "folder" / "runs.db") as store:
        with pytest.raises(StoreUnavailable, match="there is no folder"):
            await store.save("run", snapshot())
        (tmp_path / "folder").mkdir()
        await store.save("run", snapshot())
        assert await store.load("run") == snapshot()


async def test_a_file_that_is_not_a_database_is_corrupted(path: Path) -> None:
    """It is neither used nor overwritten."""
    path.write_bytes(b"This is a note, not a database." * 100)
    async with sqlite(path) as store:
        with pytest.raises(StoreCorrupted, match=r"runs\.db"):
            await store.load("run")
    assert path.read_bytes().startswith(b"This is a note")


async def test_a_row_that_cannot_be_read_is_corrupted(store: SqliteStore, path: Path) -> None:
    """The error names the run, and a claim skips it."""
    await store.save("run", snapshot())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE perdure_runs SET snapshot = 'not JSON', wake_at = 0")
    with pytest.raises(StoreCorrupted, match="'run'"):
        await store.load("run")
    assert await store.claim("ana", HOUR, 10) == []


async def test_a_closed_store_refuses_calls(path: Path) -> None:
    """Nothing is opened again after `close`."""
    store = sqlite(path)
    await store.save("run", snapshot())
    await store.close()
    await store.close()
    with pytest.raises(StoreClosed, match=r"runs\.db"):
        await store.load("run")


async def test_close_finishes_calls_in_progress(path: Path) -> None:
    """Writes that were queued before are committed."""
    store = sqlite(path)
    saving = [asyncio.ensure_future(store.save(f"run {number}", snapshot())) for number in range(9)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*saving)
    async with sqlite(path) as again:
        assert len(await again.list()) == 9


async def test_a_store_leaves_no_thread_and_no_side_file(path: Path) -> None:
    """`close` ends the threads and connections, and SQLite deletes its side files."""
    async with sqlite(path) as store:
        await store.save("run", snapshot())
        await store.load("run")
        assert threads_of(path)
    assert not threads_of(path)
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]


async def test_the_threads_of_a_deleted_store_end(path: Path) -> None:
    """A store that was never closed does not keep its threads."""
    store = sqlite(path)
    await store.save("run", snapshot())
    threads = threads_of(path)
    del store
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not threads_of(path)


def test_a_store_serves_one_event_loop_after_another(path: Path) -> None:
    """A script may call `asyncio.run` several times."""
    store = sqlite(path)
    asyncio.run(store.save("run", snapshot("a")))
    assert asyncio.run(store.load("run")) == snapshot("a")
    asyncio.run(store.close())


def test_a_store_serves_event_loops_of_several_threads(path: Path) -> None:
    """Each loop gets its own results."""
    store = sqlite(path)

    async def save_and_load(id: str) -> None:
        for _ in range(20):
            await store.save(id, snapshot(id))
            assert await store.load(id) == snapshot(id)

    threads = [
        threading.Thread(target=asyncio.run, args=(save_and_load(f"run {number}"),))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asyncio.run(store.list())) == 4
    asyncio.run(store.close())


async def test_a_value_that_sqlite_cannot_store_is_a_store_error(store: SqliteStore) -> None:
    """The driver's own exception is the cause."""
    with pytest.raises(StoreError, match="cannot be stored") as refused:
        await store.append([Entry("run", 2**70, 1, b"{}")])
    assert isinstance(refused.value.__cause__, OverflowError)


async def test_a_store_is_refused_in_a_forked_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's connections do not survive a fork."""
    store = sqlite(path)
    await store.save("run", snapshot())
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreError, match="forked"):
            await store.load("run")
    await store.close()


@pytest.mark.parametrize("change", ["deleted", "replaced"])
async def test_a_file_that_was_deleted_or_replaced_is_not_written_to(
    path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would continue with a file that its path no longer leads to; the next check raises."""
    monkeypatch.setattr(watch_module, "_INTERVAL_SECONDS", 0.0)
    async with sqlite(path) as store:
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        path.rename(path.with_suffix(".old"))
        if change == "replaced":
            path.write_bytes(b"")
        for _ in range(2):
            with pytest.raises(StoreError, match="deleted or replaced while it was open"):
                await store.append([Entry("run", grant.lease.epoch, 1, b"{}")])
            with pytest.raises(StoreError, match="deleted or replaced while it was open"):
                await store.load("run")


def test_a_connection_that_cannot_roll_back_is_closed(path: Path) -> None:
    """After some disk failures, a transaction ends only with its connection."""

    class FailingConnection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "ROLLBACK":
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *values)

    failing = sqlite3.connect(path, isolation_level=None, factory=FailingConnection)
    assert connection_module.rollback(failing)
    failing.execute("BEGIN IMMEDIATE")
    assert not connection_module.rollback(failing)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        failing.execute("SELECT 1")


async def test_the_log_is_moved_into_the_file_beside_the_commits(
    store: SqliteStore, path: Path
) -> None:
    """SQLite itself does it in a commit that makes the log longer than 1,000 pages: too late."""
    await store.load("run")
    size = path.stat().st_size
    runs = [NewRun(f"run {number}", "orders", as_json(snapshot())) for number in range(300)]
    await store.enqueue(runs)
    async with asyncio.timeout(10):
        while path.stat().st_size == size:
            await asyncio.sleep(0.01)
    with closing(sqlite3.connect(path)) as connection:
        [_, pages_in_log, _] = connection.execute("PRAGMA wal_checkpoint").fetchone()
    assert pages_in_log < 1000
