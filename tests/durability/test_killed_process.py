"""A run whose process was killed continues at once, long before the lease expires."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perdure import Err, Ok, Result, Runtime, Step, Worker, durable
from perdure.errors import AlreadyRunning
from perdure.stores.sqlite import SqliteStore, sqlite
from tests.durability.forked import forked
from tests.durability.processes import Job, job, opened, sign, signed, worker_process

LEASE = 30.0
SOON = 5.0

_processes = forked()


class PaymentDeclined(Exception):
    """Takes other arguments than it passes to its base class, as many do."""

    def __init__(self, order: str, *, code: int) -> None:
        super().__init__(f"{order}: declined")
        self.code = code


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with opened_store(tmp_path) as store:
        yield store


def opened_store(folder: Path) -> SqliteStore:
    return sqlite(folder / "runs.db", durability="normal")


async def run(store: SqliteStore, folder: Path, *, wait: float = 0) -> Result[str, object]:
    """Run the steps "a" and "b", each of which logs its process; "b" then waits."""

    async def b() -> str:
        sign(str(folder / "b"))
        await asyncio.sleep(wait)
        return "done"

    async def both(step: Step) -> str:
        await step("a", lambda: sign(str(folder / "a")))
        return await step("b", b)

    return await durable.run({}, both, id="run", store=store, lease_ttl=LEASE)


async def decline(store: SqliteStore, folder: Path, *, wait: float = 0) -> Result[str, object]:
    """Catch what the step "pay" raises, and then run "b", as above."""

    async def pay() -> None:
        sign(str(folder / "a"))
        raise PaymentDeclined("order-1", code=51)

    async def b(code: int) -> str:
        sign(str(folder / "b"))
        await asyncio.sleep(wait)
        return f"code {code}"

    async def order(step: Step) -> str:
        try:
            await step("pay", pay)
        except PaymentDeclined as error:
            return await step("b", b, error.code)
        return "paid"

    return await durable.run({}, order, id="run", store=store, lease_ttl=LEASE)


Example = Callable[..., Coroutine[object, object, object]]


def run_and_wait(folder: Path, example: Example) -> None:
    async def main() -> None:
        async with opened_store(folder) as store:
            await example(store, folder, wait=60)

    asyncio.run(main())


@contextmanager
def running_process(folder: Path, example: Example = run) -> Iterator[BaseProcess]:
    """Start the run in its own process, which is killed in the end."""
    process = _processes.Process(target=run_and_wait, args=(folder, example))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


async def until_signed(log: Path, pid: int | None, *, within: float = 20) -> None:
    """Wait until a process has logged that it works."""
    async with asyncio.timeout(within):
        while pid not in signed(log):
            await asyncio.sleep(0.01)


async def kill(process: BaseProcess) -> None:
    process.kill()
    await asyncio.to_thread(process.join)


async def test_a_run_of_a_killed_process_continues_at_once(
    store: SqliteStore, tmp_path: Path
) -> None:
    """The recorded step does not run again, the interrupted one does."""
    with running_process(tmp_path) as process:
        await until_signed(tmp_path / "b", process.pid)
        await kill(process)
        started = time.monotonic()
        assert await run(store, tmp_path) == Ok("done")
        assert time.monotonic() - started < SOON
        assert signed(tmp_path / "a") == [process.pid]
        assert signed(tmp_path / "b") == [process.pid, os.getpid()]


async def test_an_exception_is_caught_by_its_class_in_another_process(
    store: SqliteStore, tmp_path: Path
) -> None:
    """With its attributes, after `kill -9` and without being declared."""
    with running_process(tmp_path, decline) as process:
        await until_signed(tmp_path / "b", process.pid)
        await kill(process)
        assert await decline(store, tmp_path) == Ok("code 51")
        assert signed(tmp_path / "a") == [process.pid]
        assert signed(tmp_path / "b") == [process.pid, os.getpid()]


async def test_a_run_of_a_stopped_process_is_not_taken_over(
    store: SqliteStore, tmp_path: Path
) -> None:
    """It may be continued at any time. The error names the process and when its lease expires."""
    with running_process(tmp_path) as process:
        await until_signed(tmp_path / "b", process.pid)
        os.kill(process.pid or 0, signal.SIGSTOP)
        result = await run(store, tmp_path)
        assert isinstance(result, Err)
        assert isinstance(result.error, AlreadyRunning)
        assert f"process {process.pid} on {socket.gethostname()}" in str(result.error)
        assert result.error.expires_at is not None
        assert result.error.expires_at > datetime.now(UTC)
        assert signed(tmp_path / "b") == [process.pid]


async def test_a_new_worker_continues_the_runs_of_a_killed_one(
    store: SqliteStore, tmp_path: Path
) -> None:
    """It looks for them when it starts, instead of waiting for their leases to expire."""
    url, log = f"sqlite:///{tmp_path}/runs.db", tmp_path / "log"
    async with opened(url) as runtime:
        await runtime.trigger(job, Job(str(log), 60), run_id="run", wait=False)
    with worker_process(url, lease=LEASE) as victim:
        await until_signed(log, victim.pid)
        await kill(victim)
        async with Worker(Runtime(store, workflows=[job], lease_ttl=LEASE), grace=0):
            await until_signed(log, os.getpid(), within=SOON)
        assert signed(log) == [victim.pid, os.getpid()]
