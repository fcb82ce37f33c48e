"""What only a SQLite file has: locks of other processes, threads, shared commits, a disk."""

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from perdure.errors import (
    InvalidArgument,
    StoreClosed,
    StoreCorrupted,
    StoreError,
    StoreUnavailable,
)
from perdure.store import Capabilities, Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.stores.sqlite import threads as _sqlite_threads
from perdure.stores.sqlite import watch as _sqlite_watch
from perdure.stores.sqlite.connection import Durability
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Statement
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
def spoken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that a connection opened from now on is given."""
    statements: list[str] = []
    open_connection = _sqlite_threads.open_connection

    def open_and_listen(*args: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = open_connection(*args)  # type: ignore[arg-type]
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(_sqlite_threads, "open_connection", open_and_listen)
    return statements


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program's transaction on the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("COMMIT")


async def granted(store: SqliteStore, *ids: str) -> list[Grant]:
    wants = [LeaseRequest(id, "ana", HOUR, create=as_json(snapshot())) for id in ids]
    return [grant for grant in await store.acquire(wants) if grant is not None]


def entry(grant: Grant, n: int = 1) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(f"step {n}"))


def perdure_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("perdure ")]


@pytest.mark.parametrize(
    ("durability", "survives", "synchronous"),
    [("full", "power_loss", 2), ("normal", "process_crash", 1)],
)
async def test_durability_is_what_the_file_is_opened_with(
    path: Path, durability: Durability, survives: str, synchronous: int
) -> None:
    """`full` answers after the disk has it; `normal` is the user's explicit choice."""

    def setting() -> Verb[int]:
        [found] = yield [Statement("PRAGMA synchronous", ())]
        return cast(int, found.rows[0][0])

    async with sqlite(path, durability=durability) as store:
        assert store.capabilities.survives == survives
        assert await store._write(setting) == synchronous


def test_a_store_in_memory_promises_nothing() -> None:
    """It is for tests, and says so."""
    declared = sqlite(":memory:").capabilities
    assert (declared.shared, declared.survives) == ("process", "nothing")
    assert isinstance(declared, Capabilities)


@pytest.mark.parametrize(
    "options",
    [
        {"table": "runs; DROP TABLE runs"},
        {"table": "1runs"},
        {"table": ""},
        {"durability": "off"},
        {"busy_timeout": -1},
        {"prefix": "a\0b"},
    ],
)
def test_options_that_cannot_be_are_refused(path: Path, options: dict[str, object]) -> None:
    """A wrong option is a clear error before anything is opened."""
    with pytest.raises(InvalidArgument) as refused:
        sqlite(path, **options)  # type: ignore[arg-type]
    assert refused.value.parameter in options


async def test_a_table_may_have_any_plain_name(path: Path) -> None:
    """A name that SQL itself uses is as good as another."""
    async with sqlite(path, table="order") as store:
        await store.save("run", snapshot("a"))
        assert await store.delete("run")


async def test_a_lone_append_is_one_small_transaction(path: Path, spoken: list[str]) -> None:
    """One round trip, one commit, one statement besides."""
    async with sqlite(path) as store:
        [grant] = await granted(store, "run")
        await store.append([entry(grant)])
        del spoken[:]
        assert await store.append([entry(grant, 2)]) == [Verdict.ACCEPTED]
        assert [statement.split()[0] for statement in spoken] == ["BEGIN", "INSERT", "COMMIT"]


async def test_what_queues_up_shares_a_commit(path: Path, spoken: list[str]) -> None:
    """A hundred concurrent appends do not pay for a hundred commits."""
    async with sqlite(path) as store:
        grants = await granted(store, *(f"run {number}" for number in range(100)))
        del spoken[:]
        with locked(path):
            appends = [asyncio.ensure_future(store.append([entry(grant)])) for grant in grants]
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*appends) == [[Verdict.ACCEPTED]] * 100
        assert spoken.count("COMMIT") <= 2


async def test_a_bad_write_harms_only_itself(store: SqliteStore, path: Path) -> None:
    """Writes that share a commit do not share a fate."""
    grants = await granted(store, "a", "b")
    unspeakable = LeaseRequest("c", "\ud800", HOUR, create=as_json(snapshot()))
    with locked(path):
        writes = [
            asyncio.ensure_future(store.append([entry(grants[0])])),
            asyncio.ensure_future(store.acquire([unspeakable])),
            asyncio.ensure_future(store.append([entry(grants[1])])),
        ]
        await asyncio.sleep(0.05)
    first, bad, second = await asyncio.gather(*writes, return_exceptions=True)
    assert first == second == [Verdict.ACCEPTED]
    assert isinstance(bad, StoreError)
    assert await store.load("c") is None


async def test_a_run_that_leaves_does_so_whatever_else_is_refused(store: SqliteStore) -> None:
    """The verdict on the end of one run does not depend on another's; sent again, it stands."""
    leaving, stale = await granted(store, "leaving", "stale")
    await store.save("stale", snapshot())
    end = Entry("leaving", leaving.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    entries = [entry(leaving), end, entry(stale)]
    for _ in range(2):
        verdicts = await store.append(entries)
        assert verdicts == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.FENCED]
    assert await store.load("leaving") is None
    assert await store.append([entry(leaving, 3)]) == [Verdict.UNKNOWN]


async def test_a_cancelled_wait_leaves_no_lease(store: SqliteStore, path: Path) -> None:
    """Who stopped waiting before its turn came gets nothing, and blocks nobody."""
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


async def test_another_process_is_waited_for(store: SqliteStore, path: Path) -> None:
    """ "database is locked" never reaches the user while the other one goes on."""
    await store.save("run", snapshot("a"))
    with locked(path):
        saving = asyncio.ensure_future(store.save("run", snapshot("b")))
        await asyncio.sleep(0.2)
        assert not saving.done()
    await saving


async def test_readers_do_not_wait_for_writers(store: SqliteStore, path: Path) -> None:
    """A reader sees the last commit, also while somebody else writes."""
    await store.save("run", snapshot("a"))
    with locked(path):
        loaded = await asyncio.wait_for(store.load("run"), 5)
        assert loaded == snapshot("a")
        assert [line.id for line in await store.list()] == ["run"]


async def test_a_reader_opens_a_file_that_another_writes_to(store: SqliteStore, path: Path) -> None:
    """Where the tables are there, nothing must be written to read them."""
    await store.save("run", snapshot("a"))
    async with sqlite(path) as another:
        with locked(path):
            assert await asyncio.wait_for(another.load("run"), 5) == snapshot("a")


async def test_a_file_locked_for_too_long_is_unavailable(path: Path) -> None:
    """The error says what and how long; afterwards the store works as if nothing had been."""
    async with sqlite(path, busy_timeout=0.1) as store:
        await store.save("run", snapshot("a"))
        with locked(path), pytest.raises(StoreUnavailable, match=r"runs\.db.*locked for 0\.\ds"):
            await store.save("run", snapshot("b"))
        await store.save("run", snapshot("c"))
        assert await store.load("run") == snapshot("c")


async def test_a_missing_folder_is_unavailable_until_it_is_made(tmp_path: Path) -> None:
    """Opening is retried: the first failure is not remembered."""
    async with sqlite(tmp_path / "folder" / "runs.db") as store:
        with pytest.raises(StoreUnavailable, match="folder must exist"):
            await store.save("run", snapshot())
        (tmp_path / "folder").mkdir()
        await store.save("run", snapshot())
        assert await store.load("run") == snapshot()


async def test_a_file_of_something_else_is_corrupted(path: Path) -> None:
    """A file that is no database is neither used nor overwritten."""
    path.write_bytes(b"This is a letter, and no database at all." * 100)
    async with sqlite(path) as store:
        with pytest.raises(StoreCorrupted, match=r"runs\.db"):
            await store.load("run")
    assert path.read_bytes().startswith(b"This is a letter")


async def test_a_row_of_something_else_is_corrupted(store: SqliteStore, path: Path) -> None:
    """What cannot be read is named, and left out of a claim."""
    await store.save("run", snapshot())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE perdure_runs SET snapshot = 'no JSON', wake_at = 0")
    with pytest.raises(StoreCorrupted, match="'run'"):
        await store.load("run")
    assert await store.claim("ana", HOUR, 10) == []


async def test_a_closed_store_refuses(path: Path) -> None:
    """After `close` nothing is opened again behind the user's back."""
    store = sqlite(path)
    await store.save("run", snapshot())
    await store.close()
    await store.close()
    with pytest.raises(StoreClosed, match=r"runs\.db"):
        await store.load("run")


async def test_closing_finishes_what_was_asked(path: Path) -> None:
    """A write that was asked for before the end is written."""
    store = sqlite(path)
    saving = [asyncio.ensure_future(store.save(f"run {number}", snapshot())) for number in range(9)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*saving)
    async with sqlite(path) as again:
        assert len(await again.list()) == 9


async def test_a_store_leaves_no_thread_and_no_side_file(path: Path) -> None:
    """Closing gives back everything: threads, connections and SQLite's own side files."""
    async with sqlite(path) as store:
        await store.save("run", snapshot())
        await store.load("run")
        assert perdure_threads()
    assert not perdure_threads()
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]


async def test_a_forgotten_store_lets_its_threads_go(path: Path) -> None:
    """A store that nobody closed does not keep threads for ever."""
    store = sqlite(path)
    await store.save("run", snapshot())
    threads = perdure_threads()
    del store
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not perdure_threads()


def test_a_store_serves_one_event_loop_after_another(path: Path) -> None:
    """A script may call `asyncio.run` as often as it likes."""
    store = sqlite(path)
    asyncio.run(store.save("run", snapshot("a")))
    assert asyncio.run(store.load("run")) == snapshot("a")
    asyncio.run(store.close())


def test_a_store_serves_event_loops_of_several_threads(path: Path) -> None:
    """Each loop gets its own answers."""
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


async def test_a_value_that_sqlite_cannot_hold_is_a_store_error(store: SqliteStore) -> None:
    """The driver's own exception is the cause."""
    with pytest.raises(StoreError, match="cannot be stored") as refused:
        await store.append([Entry("run", 2**70, 1, b"{}")])
    assert isinstance(refused.value.__cause__, OverflowError)


async def test_a_store_refuses_to_work_in_a_forked_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's connections do not survive a fork: the error says so."""
    store = sqlite(path)
    await store.save("run", snapshot())
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreError, match="forked"):
            await store.load("run")
    await store.close()


@pytest.mark.parametrize("then", ["deleted", "replaced"])
async def test_a_file_that_was_deleted_or_replaced_is_not_written_to(
    path: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would go on with a file that nobody else can find: the next look says so."""
    monkeypatch.setattr(_sqlite_watch, "_SECONDS", 0.0)
    async with sqlite(path) as store:
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))]
        )
        assert grant is not None
        path.rename(path.with_suffix(".old"))
        if then == "replaced":
            path.write_bytes(b"")
        for _ in range(2):
            with pytest.raises(StoreError, match="deleted or replaced while it was open"):
                await store.append([Entry("run", grant.lease.epoch, 1, b"{}")])
            with pytest.raises(StoreError, match="deleted or replaced while it was open"):
                await store.load("run")
