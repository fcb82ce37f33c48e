"""The threads that own a SQLite file's connections: one writes, two read.

The writer takes all jobs that were queued while it was busy, and commits them as one transaction,
so that many writes share the cost of one commit. A job that it runs alone is committed round by
round, most of which are a single statement. In WAL mode, readers never wait.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeAlias, TypeVar

from perdure.clock import SystemClock
from perdure.errors import StoreClosed, StoreError
from perdure.stores._durability import Durability
from perdure.stores.sqlite.connection import (
    begin,
    commit_round,
    drive,
    open_connection,
    retry_while_busy,
    rollback,
    translate_error,
)
from perdure.stores.sqlite.inline import InlineCommit
from perdure.stores.sqlite.jobs import Checkpoint, ExclusiveJob, Job, OpenFile, deliver
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.statements import Outcome, Statement
from perdure.stores.sqlite.watch import FileWatch

T = TypeVar("T")
Connect: TypeAlias = Callable[[], sqlite3.Connection]

MEMORY = ":memory:"

_READERS = 2
_MAX_BATCH = 1000
_CHANGES_PER_CHECKPOINT = 250
_FEW_ROWS = 16


class _Reader:
    """A thread that runs reading jobs one after another."""

    def __init__(
        self,
        path: str,
        busy_timeout: timedelta,
        connect: Connect,
        jobs: SimpleQueue[Job[Any] | Checkpoint | None],
    ) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._connect = connect
        self._jobs = jobs
        self._connection: sqlite3.Connection | None = None

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Checkpoint):
                self._move_log(job)
            else:
                self._serve(job)
        if self._connection is not None:
            self._connection.close()

    def _serve(self, job: Job[Any]) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
            retry_while_busy(partial(job.run, connection), self._path, self._busy_timeout)
        except BaseException as error:  # noqa: BLE001 - raised where the job is awaited
            job.fail(translate_error(error, self._path))
        deliver([job])

    def _move_log(self, checkpoint: Checkpoint) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
        except BaseException as error:  # noqa: BLE001 - reported by the next read
            checkpoint.refuse(error)
        else:
            checkpoint.serve(connection)


class _Writer:
    """The thread that commits."""

    def __init__(
        self,
        path: str,
        busy_timeout: timedelta,
        connect: Connect,
        jobs: SimpleQueue[Job[Any] | ExclusiveJob | None],
        record_duration: Callable[[float], None],
        record_changes: Callable[[int], None],
    ) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._connect = connect
        self._jobs = jobs
        self._record_duration = record_duration
        self._record_changes = record_changes
        self._clock = SystemClock()
        self._next: list[ExclusiveJob | None] = []
        self._connection: sqlite3.Connection | None = None

    def run(self) -> None:
        while (job := self._next.pop() if self._next else self._jobs.get()) is not None:
            if isinstance(job, ExclusiveJob):
                self._serve_exclusive(job)
            else:
                jobs = self._batch(job)
                self._serve(jobs)
                deliver(jobs)
        if self._connection is not None:
            self._connection.close()

    def _batch(self, first: Job[Any]) -> list[Job[Any]]:
        """Return the job and all jobs queued behind it, up to the next exclusive one."""
        jobs = [first]
        while len(jobs) < _MAX_BATCH and not self._jobs.empty():
            job = self._jobs.get()
            if not isinstance(job, Job):
                self._next.append(job)
                break
            jobs.append(job)
        return jobs

    def _serve(self, jobs: Sequence[Job[Any]]) -> None:
        if len(jobs) == 1:
            self._serve_alone(jobs[0])
            return
        try:
            connection = self._connection = self._connection or self._connect()
            begin(connection, self._path, self._busy_timeout)
        except BaseException as error:  # noqa: BLE001 - raised where the jobs are awaited
            for job in jobs:
                job.fail(translate_error(error, self._path))
            return
        try:
            changes_before = connection.total_changes
            for job in jobs:
                job.run(connection)
            # Measured, because single writes are committed on the event loop only on a fast disk.
            start = self._clock.monotonic()
            connection.execute("COMMIT")
            self._record_duration(self._clock.monotonic() - start)
            self._record_changes(connection.total_changes - changes_before)
        except BaseException:  # noqa: BLE001 - raised where the jobs are awaited
            self._roll_back(connection)
            # Nothing was committed. Run one at a time, only the bad job fails.
            for job in jobs:
                self._serve_alone(job)

    def _serve_alone(self, job: Job[Any]) -> None:
        """Run a job, and commit each of its rounds."""
        try:
            connection = self._connection = self._connection or self._connect()
            changes_before, start = connection.total_changes, self._clock.monotonic()
            job.run(connection, self._commit_round)
            seconds = self._clock.monotonic() - start
            changes = connection.total_changes - changes_before
            # A job that changes nothing is not committed, and a large one takes long on any disk.
            if 0 < changes <= _FEW_ROWS:
                self._record_duration(seconds)
            self._record_changes(changes)
        except BaseException as error:  # noqa: BLE001 - raised where the job is awaited
            if self._connection is not None:
                self._roll_back(self._connection)
            job.fail(translate_error(error, self._path))

    def _commit_round(
        self, connection: sqlite3.Connection, statements: Sequence[Statement]
    ) -> Sequence[Outcome]:
        commit = partial(commit_round, connection, statements)
        return retry_while_busy(commit, self._path, self._busy_timeout)

    def _serve_exclusive(self, job: ExclusiveJob) -> None:
        try:
            connection = self._connection = self._connection or self._connect()
        except BaseException as error:  # noqa: BLE001 - raised where the job is awaited
            job.refuse(translate_error(error, self._path))
        else:
            job.serve(connection)
            self._roll_back(connection)

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        if not rollback(connection):
            self._connection = None


class Database:
    """One SQLite file, for all event loops of the process that first used it."""

    def __init__(
        self, path: str, schema: Schema, *, durability: Durability, busy_timeout: timedelta
    ) -> None:
        self.path = path
        self.busy_timeout = busy_timeout
        self._schema = schema
        self._durability: Durability = durability
        self._writes: SimpleQueue[Job[Any] | ExclusiveJob | None] = SimpleQueue()
        self._reads: SimpleQueue[Job[Any] | Checkpoint | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._starting = Lock()
        self._process = 0
        self._is_migrated = False
        self._is_closed = False
        self._changed_rows = 0
        self._is_log_moving = False
        self._watch = FileWatch(path)
        self._inline = InlineCommit(
            lambda: open_connection(path, durability, timedelta(0)),
            lambda: self._writes.put(Checkpoint(self._inline.resume)),
        )

    async def write(
        self,
        verb: Callable[[], Verb[T]],
        *,
        inline: bool = False,
    ) -> T:
        """Run an operation and return its result once committed, here if `inline` is possible."""
        self._check_open()
        # Handing a job to the thread and its result back takes almost as long as the commit.
        if inline and self._can_commit:
            outcome = self._inline.commit(verb)
            if outcome is not None:
                return outcome[0]
        job = Job(verb)
        self._writes.put(job)
        return await job.future

    def claim_inline(self, verb: Callable[[], Verb[T]]) -> tuple[T] | None:
        """Claim runs here, and return the result; `None` if the writer thread should do that."""
        self._check_open()
        return self._inline.claim(verb) if self._can_commit else None

    @property
    def _can_commit(self) -> bool:
        """Whether this thread may write: the file is open, and no earlier write waits."""
        return self._is_migrated and self.path != MEMORY and self._writes.empty()

    async def read(self, verb: Callable[[], Verb[T]]) -> T:
        """Run an operation that only reads committed data, and return its result."""
        if self.path == MEMORY:
            return await self.write(verb)
        await self.ready()
        self._check_open()
        job = Job(verb)
        self._reads.put(job)
        return await job.future

    @property
    def is_ready(self) -> bool:
        """Whether the file was opened and migrated."""
        return self._is_migrated

    async def ready(self) -> None:
        """Open and migrate the file, unless that is done."""
        if not self._is_migrated:
            opening = OpenFile()
            self.put(opening)
            await opening.job.future

    def connect(self) -> sqlite3.Connection:
        """Return another connection to the file, which the caller closes."""
        return open_connection(self.path, self._durability, self.busy_timeout)

    def put(self, job: ExclusiveJob) -> None:
        """Queue a job that needs exclusive use of the writer's connection."""
        self._check_open()
        self._writes.put(job)

    async def close(self) -> None:
        """End the threads once they have finished all queued jobs."""
        with self._starting:
            self._is_closed = True
            threads, self._threads = self._threads, []
        self._inline.close()
        if threads and self._process == os.getpid():
            self.stop()
            await asyncio.get_running_loop().run_in_executor(None, _join, threads)

    def stop(self) -> None:
        """Ask the threads to end, without waiting for them."""
        self._writes.put(None)
        for _ in range(_READERS):
            self._reads.put(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed(f"the store on {self.path} is closed; open a new one")
        if not self._threads:
            self._start()
        if self._process != os.getpid():
            raise StoreError(
                f"the store on {self.path} was used before this process was forked, and SQLite's "
                "connections do not survive a fork; open a store in each process"
            )
        self._watch.check()

    def _start(self) -> None:
        with self._starting:
            if self._threads or self._is_closed:
                return
            writer = _Writer(
                self.path,
                self.busy_timeout,
                self._open_and_migrate,
                self._writes,
                self._inline.record_duration,
                self._record_changes,
            )
            readers = [
                _Reader(self.path, self.busy_timeout, self.connect, self._reads)
                for _ in range(_READERS)
            ]
            self._threads = [
                Thread(target=run, name=f"perdure {self.path}", daemon=True)
                for run in (writer.run, *(reader.run for reader in readers))
            ]
            self._process = os.getpid()
            for thread in self._threads:
                thread.start()

    def _record_changes(self, rows: int) -> None:
        """Let a reader move the log into the file after every few hundred changed rows.

        SQLite does it by itself, but within the commit after which the log exceeds 1,000 pages:
        every write then waits for 10 to 30 ms. With this, little is left for that commit to move.
        It is still needed: the log restarts only if nothing was appended while it was moved.
        """
        self._changed_rows += rows
        is_due = self._changed_rows >= _CHANGES_PER_CHECKPOINT and not self._is_log_moving
        if is_due and self.path != MEMORY:
            self._changed_rows = 0
            self._is_log_moving = True
            self._reads.put(Checkpoint(self._end_log_move))

    def _end_log_move(self) -> None:
        self._is_log_moving = False

    def _open_and_migrate(self) -> sqlite3.Connection:
        connection = self.connect()
        try:
            if drive(connection, self._schema.missing()):
                begin(connection, self.path, self.busy_timeout)
                drive(connection, self._schema.migrate_in_transaction())
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        if not self._is_migrated and self.path != MEMORY:
            self._watch.begin()
        self._is_migrated = True
        return connection


def _join(threads: Sequence[Thread]) -> None:
    for thread in threads:
        thread.join()
