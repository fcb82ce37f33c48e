"""The threads that own a SQLite file's connections: one writes, two read.

The writer takes everything that queued up while it was busy and commits it as one transaction, so
that many share the price of one commit. In WAL mode readers wait for nobody.
"""

import asyncio
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeAlias, TypeVar

from perdure.clock import SystemClock
from perdure.errors import StoreClosed, StoreError
from perdure.stores.sqlite.connection import (
    Durability,
    begin,
    drive,
    open_connection,
    patiently,
    rollback,
    translated,
)
from perdure.stores.sqlite.inline import Lone
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.watch import FileWatch

T = TypeVar("T")
Connect: TypeAlias = Callable[[], sqlite3.Connection]

MEMORY = ":memory:"

_READERS = 2
_MOST_TOGETHER = 1000


class Job(Generic[T]):
    """A verb that somebody waits for. It is made anew each time it is tried."""

    __slots__ = ("_answer", "_error", "_verb", "future")

    def __init__(self, verb: Callable[[], Verb[T]]) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._verb = verb
        self._answer: T
        self._error: BaseException | None = None

    def run(self, connection: sqlite3.Connection) -> None:
        """Do it, in a thread that owns a connection; nothing when nobody waits any more."""
        if not self.future.cancelled():
            self._answer = drive(connection, self._verb())

    def fail(self, error: BaseException) -> None:
        """Keep what went wrong."""
        self._error = error

    def settle(self) -> None:
        """Tell whoever waits, in their loop."""
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._answer)
        else:
            self.future.set_exception(self._error)


class Solo(ABC):
    """What has the writer's connection to itself, outside of any transaction, until it is done."""

    @abstractmethod
    def serve(self, connection: sqlite3.Connection) -> None:
        """Do it, in the writer's thread."""

    @abstractmethod
    def refuse(self, error: BaseException) -> None:
        """Learn that there is no connection, in the writer's thread."""


class _Opening(Solo):
    """Somebody who only wants the file to be there, with its tables."""

    def __init__(self) -> None:
        self.job: Job[None] = Job(_nothing)

    def serve(self, connection: sqlite3.Connection) -> None:
        self.job.run(connection)
        _deliver([self.job])

    def refuse(self, error: BaseException) -> None:
        self.job.fail(error)
        _deliver([self.job])


class _Tidying(Solo):
    """The log moved into the file, for those who only add to it."""

    def serve(self, connection: sqlite3.Connection) -> None:
        with suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def refuse(self, error: BaseException) -> None:
        """Nothing is lost: the log only stays long."""


class _Reader:
    """A thread that answers one question after another."""

    def __init__(
        self,
        path: str,
        connect_timeout: timedelta,
        connect: Connect,
        jobs: SimpleQueue[Job[Any] | None],
    ) -> None:
        self._path = path
        self._connect_timeout = connect_timeout
        self._connect = connect
        self._jobs = jobs
        self._connection: sqlite3.Connection | None = None

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._answer(job)
        if self._connection is not None:
            self._connection.close()

    def _answer(self, job: Job[Any]) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
            patiently(lambda: job.run(connection), self._path, self._connect_timeout)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            job.fail(translated(error, self._path))
        _deliver([job])


class _Writer:
    """The thread that commits."""

    def __init__(
        self,
        path: str,
        connect_timeout: timedelta,
        connect: Connect,
        turns: SimpleQueue[Job[Any] | Solo | None],
        took: Callable[[float], None],
    ) -> None:
        self._path = path
        self._connect_timeout = connect_timeout
        self._connect = connect
        self._turns = turns
        self._took = took
        self._clock = SystemClock()
        self._held: list[Solo | None] = []
        self._connection: sqlite3.Connection | None = None

    def run(self) -> None:
        while (turn := self._held.pop() if self._held else self._turns.get()) is not None:
            if isinstance(turn, Solo):
                self._serve_alone(turn)
            else:
                jobs = self._joining(turn)
                self._serve(jobs)
                _deliver(jobs)
        if self._connection is not None:
            self._connection.close()

    def _joining(self, first: Job[Any]) -> list[Job[Any]]:
        """Give the job with all those that queued up behind it."""
        jobs = [first]
        while len(jobs) < _MOST_TOGETHER and not self._turns.empty():
            turn = self._turns.get()
            if not isinstance(turn, Job):
                self._held.append(turn)
                break
            jobs.append(turn)
        return jobs

    def _serve(self, jobs: Sequence[Job[Any]]) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
            begin(connection, self._path, self._connect_timeout)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            for job in jobs:
                job.fail(translated(error, self._path))
            return
        try:
            for job in jobs:
                job.run(connection)
            began = self._clock.monotonic()
            connection.execute("COMMIT")
            self._took(self._clock.monotonic() - began)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            self._roll_back(connection)
            if len(jobs) == 1:
                jobs[0].fail(translated(error, self._path))
                return
            # Nothing was committed. One by one, the bad job harms only itself.
            for job in jobs:
                self._serve([job])

    def _serve_alone(self, solo: Solo) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            solo.refuse(translated(error, self._path))
        else:
            solo.serve(connection)
            self._roll_back(connection)

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            rollback(connection)
        except sqlite3.Error:
            # After some failures of the disk only closing ends a transaction.
            connection.close()
            self._connection = None


class Database:
    """One SQLite file, open to every event loop of the process that first uses this."""

    def __init__(
        self, path: str, schema: Schema, *, durability: Durability, connect_timeout: timedelta
    ) -> None:
        self.path = path
        self.connect_timeout = connect_timeout
        self._schema = schema
        self._durability: Durability = durability
        self._writes: SimpleQueue[Job[Any] | Solo | None] = SimpleQueue()
        self._reads: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._starting = Lock()
        self._process = 0
        self._migrated = False
        self._closed = False
        self._watch = FileWatch(path)
        self._lone = Lone(
            lambda: open_connection(path, durability, timedelta(0)),
            lambda: self._writes.put(_Tidying()),
        )

    async def write(self, verb: Callable[[], Verb[T]], *, lone: bool = False) -> T:
        """Give what the verb gives once it is committed; a small `lone` one perhaps in place."""
        self._check_open()
        if lone and self._migrated and self.path != MEMORY and self._writes.empty():
            done = self._lone.commit(verb)
            if done is not None:
                return done[0]
        job = Job(verb)
        self._writes.put(job)
        return await job.future

    async def read(self, verb: Callable[[], Verb[T]]) -> T:
        """Give what the verb gives of all that is committed."""
        if self.path == MEMORY:
            return await self.write(verb)
        if not self._migrated:
            opening = _Opening()
            self.put(opening)
            await opening.job.future
        self._check_open()
        job = Job(verb)
        self._reads.put(job)
        return await job.future

    def put(self, solo: Solo) -> None:
        """Give the writer's connection to `solo` alone, when its turn comes."""
        self._check_open()
        self._writes.put(solo)

    async def close(self) -> None:
        """End the threads, after all that was asked before."""
        with self._starting:
            self._closed = True
            threads, self._threads = self._threads, []
        self._lone.close()
        if threads and self._process == os.getpid():
            self.stop()
            await asyncio.get_running_loop().run_in_executor(None, _join, threads)

    def stop(self) -> None:
        """Let the threads end, and do not wait for it."""
        self._writes.put(None)
        for _ in range(_READERS):
            self._reads.put(None)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"the store on {self.path} was closed; open a new one")
        if not self._threads:
            self._start()
        if self._process != os.getpid():
            raise StoreError(
                f"the store on {self.path} was used before this process was forked, and SQLite's "
                "connections do not survive that; open a store in each process"
            )
        self._watch.check()

    def _start(self) -> None:
        with self._starting:
            if self._threads or self._closed:
                return
            writer = _Writer(
                self.path,
                self.connect_timeout,
                self._open_and_migrate,
                self._writes,
                self._lone.took,
            )
            readers = [
                _Reader(self.path, self.connect_timeout, self._open, self._reads)
                for _ in range(_READERS)
            ]
            self._threads = [
                Thread(target=run, name=f"perdure {self.path}", daemon=True)
                for run in (writer.run, *(reader.run for reader in readers))
            ]
            self._process = os.getpid()
            for thread in self._threads:
                thread.start()

    def _open(self) -> sqlite3.Connection:
        return open_connection(self.path, self._durability, self.connect_timeout)

    def _open_and_migrate(self) -> sqlite3.Connection:
        connection = self._open()
        try:
            if drive(connection, self._schema.missing()):
                begin(connection, self.path, self.connect_timeout)
                drive(connection, self._schema.migrate())
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        if not self._migrated and self.path != MEMORY:
            self._watch.begin()
        self._migrated = True
        return connection


def _nothing() -> Verb[None]:
    yield ()


def _join(threads: Sequence[Thread]) -> None:
    for thread in threads:
        thread.join()


def _deliver(jobs: Sequence[Job[Any]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Job[Any]]] = {}
    for job in jobs:
        by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, settled in by_loop.items():
        # A loop that was closed in the meantime has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, settled)


def _settle(jobs: Sequence[Job[Any]]) -> None:
    for job in jobs:
        job.settle()
