"""The jobs of the threads that own a SQLite file's connections, and the delivery of results."""

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from perdure.stores.sqlite.connection import RunRound, drive, execute_round
from perdure.stores.sqlite.runs import Verb

T = TypeVar("T")


class Job(Generic[T]):
    """An operation, and the future of its result. Each attempt calls `verb` again."""

    __slots__ = ("_error", "_result", "_verb", "future")

    def __init__(self, verb: Callable[[], Verb[T]]) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._verb = verb
        self._result: T
        self._error: BaseException | None = None

    def run(self, connection: sqlite3.Connection, run_round: RunRound = execute_round) -> None:
        """Run the operation in a thread that owns a connection, unless the caller was cancelled."""
        if not self.future.cancelled():
            self._result = drive(connection, self._verb(), run_round)

    def fail(self, error: BaseException) -> None:
        """Let `resolve` raise this error."""
        self._error = error

    def resolve(self) -> None:
        """Resolve the future, in its event loop."""
        if self.future.done():
            return
        if self._error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(self._error)


class ExclusiveJob(ABC):
    """A job with exclusive use of a thread's connection, outside any transaction."""

    @abstractmethod
    def serve(self, connection: sqlite3.Connection) -> None:
        """Run the job, in the thread."""

    @abstractmethod
    def refuse(self, error: BaseException) -> None:
        """Handle, in the thread, that the connection could not be opened."""


class OpenFile(ExclusiveJob):
    """Opens and migrates the file, before any other job of the writer."""

    def __init__(self) -> None:
        self.job: Job[None] = Job(_no_statements)

    def serve(self, connection: sqlite3.Connection) -> None:
        self.job.run(connection)
        deliver([self.job])

    def refuse(self, error: BaseException) -> None:
        self.job.fail(error)
        deliver([self.job])


class Checkpoint(ExclusiveJob):
    """Moves the log into the file, as far as no reader still needs the old pages."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def serve(self, connection: sqlite3.Connection) -> None:
        with suppress(sqlite3.Error):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._done()

    def refuse(self, error: BaseException) -> None:
        """Do nothing else: without the checkpoint, the log only stays longer."""
        self._done()


def deliver(jobs: Sequence[Job[Any]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Job[Any]]] = {}
    for job in jobs:
        by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, finished_jobs in by_loop.items():
        # If the loop was closed in the meantime, nothing awaits the jobs.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, finished_jobs)


def _resolve(jobs: Sequence[Job[Any]]) -> None:
    for job in jobs:
        job.resolve()


def _no_statements() -> Verb[None]:
    yield ()
