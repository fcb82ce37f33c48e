"""Workers on embedded stores notice within milliseconds what others write, and nothing else."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.store import NewRun, NotifyStore, Store, can_notify
from perdure.stores import FileStore, _watching, open_store, sqlite
from perdure.stores.file.run import FileRun
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.notify import NEWEST_DUE, DueWatch
from perdure.stores.sqlite.statements import Statements
from perdure.testing.conformance.samples import as_json, snapshot
from tests.durability.forked import forked

URLS = {"sqlite": "sqlite:///{}/runs.db", "file": "file://{}/runs"}
SOON = 0.2

_processes = forked()


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URLS[request.param].format(tmp_path)


@workflow("stamp")
async def stamp(step: Step) -> int:
    return await step("stamp", time.monotonic_ns)


@workflow("approval")
async def approval(step: Step) -> int:
    await step.wait_for_event("wait", "approved")
    return await step("stamp", time.monotonic_ns)


@workflow("busy")
async def busy(step: Step, steps: int) -> None:
    for _ in range(steps):
        await step("work", lambda: None)


def notifying(store: Store) -> NotifyStore:
    assert can_notify(store)
    return store


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[NotifyStore]:
    store = notifying(open_store(url))
    try:
        yield store
    finally:
        await store.close()


def in_another_process(call: Callable[..., None], *arguments: Any) -> BaseProcess:
    _processes.set_forkserver_preload([__name__])
    process = _processes.Process(target=call, args=arguments)
    process.start()
    return process


async def ended(process: BaseProcess) -> None:
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == 0


def trigger_in_turn(url: str, log: str, many: int) -> None:
    """Trigger runs in this process, and log when each call returned."""

    async def main() -> None:
        async with opened(url) as store:
            runtime = Runtime(store, workflows=[stamp])
            for n in range(many):
                await asyncio.sleep(0.15)
                await runtime.trigger(stamp, run_id=f"{n}", wait=False)
                append(log, time.monotonic_ns())

    asyncio.run(main())


def signal(url: str, log: str, run_id: str) -> None:
    async def main() -> None:
        async with opened(url) as store:
            await Runtime(store, workflows=[approval]).signal(run_id, "approved", wait=False)
            append(log, time.monotonic_ns())

    asyncio.run(main())


def work_hard(url: str, runs: int, steps: int) -> None:
    async def main() -> None:
        async with opened(url) as store:
            runtime = Runtime(store, workflows=[busy])
            await asyncio.gather(*(runtime.trigger(busy, steps) for _ in range(runs)))

    asyncio.run(main())


def append(log: str, value: int) -> None:
    with Path(log).open("a") as file:
        file.write(f"{value}\n")


async def output(runtime: Runtime, run_id: str) -> int:
    for _ in range(500):
        run = await runtime.get_run(run_id)
        if run is not None and run.status == "completed":
            assert isinstance(run.output, int)
            return run.output
        await asyncio.sleep(0.01)
    pytest.fail(f"run {run_id} was not driven")


@pytest.mark.alone
async def test_a_run_that_another_process_creates_is_started_soon(url: str, tmp_path: Path) -> None:
    """Without waiting for the next poll, which is an hour away."""
    log, many = tmp_path / "log", 10
    async with opened(url) as store:
        runtime = Runtime(store, workflows=[stamp])
        async with Worker(runtime, poll="1h"):
            await ended(in_another_process(trigger_in_turn, url, str(log), many))
            started = [await output(runtime, f"{n}") for n in range(many)]
    triggered = map(int, log.read_text().split())
    took = [after - before for before, after in zip(triggered, started, strict=True)]
    assert sorted(took)[many // 2] < SOON * 1e9


@pytest.mark.alone
async def test_a_signal_from_another_process_continues_a_run_soon(url: str, tmp_path: Path) -> None:
    """The run is unowned and has no wake time; the message makes it due."""
    log = tmp_path / "log"
    async with opened(url) as store:
        runtime = Runtime(store, workflows=[approval])
        run = await runtime.trigger(approval)
        async with Worker(runtime, poll="1h"):
            await ended(in_another_process(signal, url, str(log), run.id))
            continued = await output(runtime, run.id)
    assert continued - int(log.read_text()) < SOON * 1e9


@pytest.mark.alone
async def test_two_stores_of_one_process_notify_each_other(url: str) -> None:
    """They share nothing but the file."""
    async with opened(url) as store, opened(url) as another:
        runtime = Runtime(store, workflows=[stamp])
        async with Worker(runtime, poll="1h"):
            await asyncio.sleep(0.1)
            run = await Runtime(another, workflows=[stamp]).trigger(stamp, wait=False)
            before = time.monotonic_ns()
            assert await output(runtime, run.id) - before < SOON * 1e9


class CountingClaims:
    """Counts the claims of a store."""

    def __init__(self, store: NotifyStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        claim = store.claim

        async def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return await claim(*arguments, **options)

        monkeypatch.setattr(store, "claim", counted)


async def test_steps_of_other_processes_wake_no_worker(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that claimed after each change would be as busy as the others are."""
    async with opened(url) as store:
        claims = CountingClaims(store, monkeypatch)
        async with Worker(Runtime(store, workflows=[stamp]), poll="1h"):
            await asyncio.sleep(0.2)
            before = claims.count
            await ended(in_another_process(work_hard, url, 3, 300))
            await asyncio.sleep(0.1)
            assert claims.count - before <= 2


async def test_a_due_run_that_no_worker_claims_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workflow may be unknown here; the changes around it do not announce it again."""
    url = URLS["sqlite"].format(tmp_path)
    async with opened(url) as store:
        claims = CountingClaims(store, monkeypatch)
        async with Worker(Runtime(store, workflows=[stamp]), poll="1h"):
            unknown = NewRun("unknown", "unknown", as_json(snapshot()))
            await store.enqueue([unknown])
            await asyncio.sleep(0.2)
            before = claims.count
            await ended(in_another_process(work_hard, url, 3, 100))
            assert claims.count - before <= 2


async def test_closing_the_store_ends_its_notifications(url: str) -> None:
    """And their threads."""
    store = notifying(open_store(url))
    listening = asyncio.ensure_future(all_of(store))
    await eventually(lambda: bool(watching_threads()))
    await store.close()
    await asyncio.wait_for(listening, 1)
    assert not watching_threads()


async def test_a_listener_that_ends_leaves_no_thread(url: str) -> None:
    """A worker that has drained no longer looks at the store."""
    async with opened(url) as store:
        listening = asyncio.ensure_future(all_of(store))
        await eventually(lambda: bool(watching_threads()))
        listening.cancel()
        await asyncio.wait([listening])
        await eventually(lambda: not watching_threads())


async def all_of(store: NotifyStore) -> None:
    async for _ in store.notifications():
        pass


def watching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "perdure notifications"]


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("this did not happen within a second")


async def test_an_idle_listener_does_not_wake_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread looks at the disk, which may be slow; the loop sleeps until a run is due."""
    loop = asyncio.get_running_loop()
    wakes: list[object] = []
    schedule = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() in watching_threads():
            wakes.append(callback)
        return schedule(callback, *arguments, **options)

    async with opened(url) as store:
        listening = asyncio.ensure_future(all_of(store))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await asyncio.sleep(0.3)
        assert wakes == []
        await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
        await eventually(lambda: bool(wakes))
        monkeypatch.undo()
        listening.cancel()


class LockedConnection(sqlite3.Connection):
    """Answers a change of the version, and then that the file is locked."""

    is_locked = False

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if self.is_locked and "SELECT" in sql:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        return super().execute(sql, *arguments)


async def test_closing_a_store_does_not_wait_for_an_idle_listener(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks less often; but the pause ends with the store."""
    monkeypatch.setattr(_watching, "GROWTH", 1e9)
    monkeypatch.setattr(_watching, "IDLE_INTERVAL_SECONDS", 3600)
    async with opened(url) as store:
        listening = asyncio.ensure_future(anext(store.notifications()))
        await asyncio.wait([listening], timeout=SOON)
        await asyncio.wait_for(store.close(), 5)
    listening.cancel()


class TestSqlite:
    @pytest.fixture
    def store(self, tmp_path: Path) -> SqliteStore:
        return sqlite(tmp_path / "runs.db")

    async def test_a_poll_of_a_locked_file_is_repeated(
        self, store: SqliteStore, tmp_path: Path
    ) -> None:
        """SQLite locks readers out for a moment, for example while it recovers a log."""
        async with store:
            await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
            connection = sqlite3.connect(tmp_path / "runs.db", factory=LockedConnection)
            newest_due = Statements("perdure_runs").sql(NEWEST_DUE)
            watch = DueWatch(connection, newest_due, "", lambda: 2**60)
            for is_locked, is_new in ((True, False), (False, True), (False, False)):
                connection.is_locked = is_locked
                assert watch.look() is is_new
            connection.close()

    async def test_a_poll_reads_only_due_runs(self, store: SqliteStore, tmp_path: Path) -> None:
        """By an index: it is done up to 50 times a second."""
        async with store:
            await store.load("run")
            with sqlite3.connect(tmp_path / "runs.db") as connection:
                statement = "EXPLAIN QUERY PLAN " + Statements("perdure_runs").sql(NEWEST_DUE)
                plan = [row[3] for row in connection.execute(statement, {"now": 0, "prefix": ""})]
        tables = ("perdure_runs", "run", "newest")
        reads = [line for line in plan if any(f" {table} " in line for table in tables)]
        assert len(reads) == 4
        assert all("USING COVERING INDEX perdure_runs_due" in line for line in reads), plan
        assert all(line.startswith("SEARCH") for line in reads), plan
        assert not any("B-TREE" in line for line in plan), plan

    async def test_due_runs_of_another_prefix_send_nothing(self, tmp_path: Path) -> None:
        """Stores with different prefixes share a table, not their runs."""
        path = tmp_path / "runs.db"
        async with sqlite(path, prefix="a:") as store, sqlite(path, prefix="b:") as another:
            waiting = asyncio.ensure_future(anext(notifying(store).notifications()))
            await another.enqueue([NewRun("run", "w", as_json(snapshot()))])
            assert not (await asyncio.wait([waiting], timeout=0.2))[0]
            await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
            await asyncio.wait_for(waiting, 1)

    async def test_a_failure_is_raised_to_the_listener(
        self, store: SqliteStore, tmp_path: Path
    ) -> None:
        """The worker reports it, polls, and listens again."""
        async with store:
            await store.load("run")
            with sqlite3.connect(tmp_path / "runs.db") as other:
                other.execute("ALTER TABLE perdure_runs RENAME COLUMN wake_at TO gone")
            with pytest.raises(Exception, match="wake_at") as failure:
                await anext(notifying(store).notifications())
            assert type(failure.value).__name__ == "StoreError"


class TestFiles:
    async def test_a_notified_worker_finds_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The notification follows the write of the run, which follows that of its wake line."""
        settle = FileRun.settle

        async def slow_settle(run: FileRun, *arguments: Any) -> Any:
            time.sleep(0.1)
            return await settle(run, *arguments)

        monkeypatch.setattr(FileRun, "settle", slow_settle)
        async with FileStore(tmp_path, durability="normal") as store:
            waiting = asyncio.ensure_future(anext(store.notifications()))
            await asyncio.sleep(0.1)
            enqueued = asyncio.ensure_future(store.enqueue([NewRun("a", "w", as_json(snapshot()))]))
            await asyncio.wait_for(waiting, 1)
            assert len(await store.claim("ana", timedelta(hours=1), 1)) == 1
            assert await enqueued == [True]

    async def test_a_notification_that_cannot_be_sent_fails_no_write(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The run is written; workers find it when they poll."""
        (tmp_path / "notifications").mkdir()
        async with FileStore(tmp_path) as store:
            assert await store.enqueue([NewRun("run", "w", as_json(snapshot()))]) == [True]
        assert "no notification sent" in caplog.text

    async def test_the_file_stays_small(self, tmp_path: Path) -> None:
        """It starts over, and that is noticed, too."""
        async with FileStore(tmp_path, durability="normal") as store:
            await store.load("run")
            file = tmp_path / "notifications"
            file.write_bytes(b"." * 64 * 1024)
            notifications = store.notifications()
            await asyncio.wait_for(anext(notifications), 1)
            waiting = asyncio.ensure_future(anext(notifications))
            await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
            await asyncio.wait_for(waiting, 1)
            assert file.stat().st_size == 1
