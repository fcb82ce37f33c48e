"""Processes that write to a store with the SQLite schema until they finish or are killed.

Run as a program, this module reads one task per line and forks a process for each, so that modules
are imported once. For each write that the store acknowledged, the process writes a line to the log
file of the task.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import TypeAlias

import httpx  # noqa: F401  # imported before forking: libsql() loads it lazily

from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores.libsql import LibsqlStore, libsql
from perdure.stores.sqlite import SqliteStore, Transaction, sqlite

HOUR = timedelta(hours=1)
AnyStore: TypeAlias = LibsqlStore | SqliteStore
MOVE = "UPDATE account SET balance = balance + ? WHERE id = ?"


class Writers:
    """Processes that write to one database, and what was acknowledged to them."""

    def __init__(self, place: str, folder: Path, parent: Process) -> None:
        self.place = place
        self._folder = folder
        self._parent = parent
        self._starting = asyncio.Lock()
        self._alive: set[int] = set()

    async def start(self, task: str, run: str, turn: int = 0) -> int:
        """Start a writer and return its process id."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        message = [self.place, task, run, turn, str(self._log(run))]
        async with self._starting:
            self._parent.stdin.write(json.dumps(message).encode() + b"\n")
            process = int(await self._parent.stdout.readline())
        self._alive.add(process)
        return process

    async def kill_one_after_another(
        self, task: str, run: str, turns: int, max_delay: float = 0.2
    ) -> list[str]:
        """Start writers, kill each after a random time, and return what was acknowledged.

        Every other one is killed after its first acknowledgement, however slow the machine is.
        """
        random = Random(run)
        for turn in range(turns):
            acknowledged_count = len(self.acknowledged(run))
            process = await self.start(task, run, turn)
            while turn % 2 and len(self.acknowledged(run)) == acknowledged_count:
                await asyncio.sleep(0.005)
            await asyncio.sleep(random.uniform(0, max_delay))
            os.kill(process, signal.SIGKILL)
            await self.ended(process)
        return self.acknowledged(run)

    async def ended(self, process: int) -> None:
        """Wait until a writer has ended."""
        with suppress(ProcessLookupError):
            while True:
                os.kill(process, 0)
                await asyncio.sleep(0.002)
        self._alive.discard(process)

    def kill_all(self) -> None:
        """Kill the writers that still run."""
        for process in self._alive:
            os.kill(process, signal.SIGKILL)

    def acknowledged(self, run: str) -> list[str]:
        """Return what was acknowledged to the writers of a run."""
        log = self._log(run)
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def _log(self, run: str) -> Path:
        return self._folder / f"{run}.log"


@asynccontextmanager
async def writers_on(place: str, folder: Path) -> AsyncIterator[Writers]:
    """Yield writers on a file or a server, and kill the remaining ones at the end."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, __file__, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    writers = Writers(place, folder, parent)
    try:
        yield writers
    finally:
        writers.kill_all()
        _, errors = await parent.communicate(b"")
    assert not errors, errors.decode()


def snapshot(*keys: str, status: str = "running") -> bytes:
    steps = {key: {"ok": True, "value": "x" * 99} for key in keys}
    execution = {"status": status, "lastUpdated": "2030-01-01T00:00:00.000Z"}
    return json.dumps({"formatVersion": 1, "steps": steps, "execution": execution}).encode()


async def granted(store: AnyStore, run: str) -> Grant:
    [grant] = await store.acquire([LeaseRequest(run, "the writer", HOUR, create=snapshot())])
    assert isinstance(grant, Grant)
    return grant


def triple(grant: Grant, turn: int, number: int) -> list[Entry]:
    """Three entries that are appended together."""
    lease = grant.lease
    return [
        Entry(lease.id, lease.epoch, 3 * number + part, snapshot(f"{turn}.{number}.{part}"))
        for part in range(3)
    ]


async def append_forever(store: AnyStore, run: str, turn: int, log: int) -> None:
    grant = await granted(store, run)
    for number in count():
        verdicts = await store.append(triple(grant, turn, number))
        assert verdicts == [Verdict.ACCEPTED] * 3
        os.write(log, f"{turn}.{number}\n".encode())


async def move_forever(store: AnyStore, run: str, turn: int, log: int) -> None:
    lease = (await granted(store, run)).lease

    for number in count():

        async def work(transaction: Transaction, number: int = number) -> Entry:
            await transaction.execute(MOVE, (-1, "ana"))
            await transaction.execute(MOVE, (1, "bob"))
            return Entry(run, lease.epoch, number, snapshot(f"{turn}.{number}"))

        assert await store.transact(run, lease.epoch, work) is Verdict.ACCEPTED
        os.write(log, f"{turn}.{number}\n".encode())


async def ten_steps(store: AnyStore, run: str) -> None:
    lease = (await granted(store, run)).lease
    keys = [f"step {number}" for number in range(10)]
    for number, key in enumerate(keys):
        [verdict] = await store.append([Entry(run, lease.epoch, number, snapshot(key))])
        assert verdict is Verdict.ACCEPTED
    whole = snapshot(*keys, status="completed")
    [verdict] = await store.append([Entry(run, lease.epoch, 10, whole, rest=Rest("completed"))])
    assert verdict is Verdict.ACCEPTED


async def main(place: str, task: str, run: str, turn: int, log: int) -> None:
    async with libsql(place) if "://" in place else sqlite(place) as store:
        match task:
            case "append":
                await append_forever(store, run, turn, log)
            case "move":
                await move_forever(store, run, turn, log)
            case "fifty":
                await asyncio.gather(*(ten_steps(store, f"{run} {number}") for number in range(50)))
                os.write(log, b"done\n")


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        place, task, run, turn, log = json.loads(line)
        child = os.fork()
        if not child:
            with Path(log).open("ab", buffering=0) as file:
                asyncio.run(main(place, task, run, turn, file.fileno()))
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
