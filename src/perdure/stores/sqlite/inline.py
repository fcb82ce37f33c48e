"""Commits on the event loop, for a single small write on a fast disk while nothing else is ready.

A claim is one if few runs are due: the event loop decodes them anyway, which takes longer than to
read them.

Handing a write to another thread, and its result back, takes about as long as the commit itself,
because both threads sleep and must be woken. Many writes share that cost; this way a single write
avoids it.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TypeVar

from perdure.clock import SystemClock
from perdure.engine.asyncio_internals import has_ready_callbacks
from perdure.stores.sqlite.connection import commit_round, drive, rollback
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement

T = TypeVar("T")

# The event loop must not be blocked for longer than this.
_FAST_SECONDS = 0.001
_WEIGHT = 1 / 16
_COMMITS_PER_CHECKPOINT = 250


class InlineCommit:
    """A connection for single writes, which never waits for a lock.

    `checkpoint` is called when another thread should move the log into the file, which takes too
    long for the event loop. Until that thread has called `resume`, nothing is committed here:
    SQLite restarts the log only if nothing was appended during the checkpoint, so concurrent
    commits would let it grow without bound.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], checkpoint: Callable[[], None]
    ) -> None:
        self._connect = connect
        self._checkpoint = checkpoint
        self._clock = SystemClock()
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._commits = 0
        self._is_checkpointing = False
        self._average_seconds = 0.0
        self._average_claim = 0.0

    def record_duration(self, seconds: float) -> None:
        """Update the average duration of a commit, here or in the writer thread."""
        self._average_seconds += (seconds - self._average_seconds) * _WEIGHT

    def commit(self, verb: Callable[[], Verb[T]]) -> tuple[T] | None:
        """Commit an operation and return its result; `None` if the writer thread should run it.

        The thread may run it for the second time: after an error, earlier rounds are committed.
        """
        if self._average_seconds > _FAST_SECONDS or self._is_checkpointing or _is_loop_busy():
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return (self._commit(verb),)
        except Exception:  # noqa: BLE001  # the thread runs it again, or reports the error
            return None
        finally:
            self._lock.release()

    def claim(self, verb: Callable[[], Verb[T]]) -> tuple[T] | None:
        """Commit a claim like `commit`, unless recent claims were slow.

        It may read many rows to find few: due runs of another prefix, or of other versions.
        """
        if self._average_claim > _FAST_SECONDS:
            self._average_claim *= 1 - _WEIGHT
            return None
        start = self._clock.monotonic()
        outcome = self.commit(verb)
        seconds = self._clock.monotonic() - start
        self._average_claim += (seconds - self._average_claim) * _WEIGHT
        return outcome

    def resume(self) -> None:
        """Allow commits again, after a checkpoint."""
        self._is_checkpointing = False

    def _commit(self, verb: Callable[[], Verb[T]]) -> T:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        try:
            return drive(self._connection, verb(), self._commit_round)
        except BaseException:
            if not rollback(self._connection):
                self._connection = None
            raise

    def _commit_round(
        self, connection: sqlite3.Connection, statements: Sequence[Statement]
    ) -> Sequence[Outcome]:
        start, changes_before = self._clock.monotonic(), connection.total_changes
        outcomes = commit_round(connection, statements)
        # What only reads does not show how fast the disk is.
        if connection.total_changes > changes_before:
            self._count_commit(self._clock.monotonic() - start)
        return outcomes

    def _count_commit(self, seconds: float) -> None:
        self.record_duration(seconds)
        self._commits += 1
        if self._commits % _COMMITS_PER_CHECKPOINT == 0:
            self._is_checkpointing = True
            self._checkpoint()

    def close(self) -> None:
        """Close the connection."""
        with self._lock, suppress(sqlite3.Error):
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _is_loop_busy() -> bool:
    # A loop that does not expose this, such as uvloop's, counts as busy.
    return has_ready_callbacks() is not False
