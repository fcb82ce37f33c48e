"""Commits in place, for a lone write on a quick disk while nobody else wants the event loop.

To hand a write to another thread and its answer back takes about as long as the commit itself: both
threads sleep and have to be woken. Many writes share that, a lone one need not pay it.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TypeVar

from perdure.clock import SystemClock
from perdure.stores.sqlite.connection import drive, rollback
from perdure.stores.sqlite.runs import Verb

T = TypeVar("T")

# Longer than that the event loop should not stand still.
_QUICK_SECONDS = 0.001
_WEIGHT = 1 / 16
_COMMITS_TO_TIDY = 250


class Lone:
    """A connection for lone writes, which waits for nothing.

    `tidy` is called when somebody should move the log into the file: that takes long, and is not
    for the event loop to wait for.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], tidy: Callable[[], None]) -> None:
        self._connect = connect
        self._tidy = tidy
        self._clock = SystemClock()
        self._turn = Lock()
        self._connection: sqlite3.Connection | None = None
        self._commits = 0
        self._usual = 0.0

    def took(self, seconds: float) -> None:
        """Learn how long a commit took, here or in the writer's thread."""
        self._usual += (seconds - self._usual) * _WEIGHT

    def commit(self, verb: Callable[[], Verb[T]]) -> tuple[T] | None:
        """Give what the verb gives, committed; None when it is one for the writer's thread."""
        if self._usual > _QUICK_SECONDS or _others_wait() or not self._turn.acquire(blocking=False):
            return None
        began = self._clock.monotonic()
        try:
            answer = self._commit(verb)
        except Exception:  # noqa: BLE001  # nothing was written: the writer waits, or says why not
            return None
        finally:
            self.took(self._clock.monotonic() - began)
            self._turn.release()
        self._commits += 1
        if self._commits % _COMMITS_TO_TIDY == 0:
            self._tidy()
        return (answer,)

    def _commit(self, verb: Callable[[], Verb[T]]) -> T:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            answer = drive(connection, verb())
            connection.execute("COMMIT")
        except BaseException:
            self._roll_back(connection)
            raise
        return answer

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            rollback(connection)
        except sqlite3.Error:
            # After some failures of the disk only closing ends a transaction.
            connection.close()
            self._connection = None

    def close(self) -> None:
        """Let go of the file."""
        with self._turn, suppress(sqlite3.Error):
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _others_wait() -> bool:
    # asyncio does not tell how many callbacks are ready. A loop that keeps it elsewhere, as uvloop
    # does, is taken to be busy.
    return bool(getattr(asyncio.get_running_loop(), "_ready", True))
