"""Notifications about runs in a SQLite file that may have become due, in any process."""

import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager

from perdure.stores._watching import Look
from perdure.stores.sqlite.connection import is_busy, translate_error

# The newest due runs of each queue and workflow: a run that becomes due now is among them. Only a
# run with a wake time in the past behind twenty others that no worker claims, or behind fifty
# queues, is left to the workers' polling. The last range of each queue has the runs without a
# workflow. The prefix is compared afterwards, so that not all due runs of other stores in the table
# are read.
NEWEST_DUE = """
    WITH RECURSIVE queues (name) AS (
        SELECT ''
        UNION ALL
        SELECT (
            SELECT queue FROM $runs
            WHERE wake_at IS NOT NULL AND queue > queues.name ORDER BY queue LIMIT 1
        )
        FROM queues WHERE name IS NOT NULL
        LIMIT 50
    ), ranges (queue, workflow) AS (
        SELECT name, '' FROM queues WHERE name IS NOT NULL
        UNION ALL
        SELECT queue, (
            SELECT workflow FROM $runs AS run
            WHERE wake_at IS NOT NULL AND run.queue = ranges.queue
                AND run.workflow > ranges.workflow
            ORDER BY workflow LIMIT 1
        )
        FROM ranges WHERE workflow IS NOT NULL
        LIMIT 200
    )
    SELECT run.id, run.wake_at FROM ranges CROSS JOIN $runs AS run
    WHERE run.queue = ranges.queue AND run.workflow IS ranges.workflow AND run.wake_at <= :now
        AND run.wake_at >= coalesce((
            SELECT wake_at FROM $runs AS newest
            WHERE newest.queue = ranges.queue AND newest.workflow IS ranges.workflow
                AND newest.wake_at <= :now
            ORDER BY wake_at DESC LIMIT 1 OFFSET 19
        ), -9223372036854775808)
        AND substr(run.id, 1, length(:prefix)) = :prefix
"""


class DueWatch:
    """Detects runs that became due since the last check.

    SQLite's `data_version` changes with every commit of another connection, and this connection
    never commits. A change alone says little, because every step of every process is one, so the
    newest due runs are read next. Runs of the last check are not new: a run that no worker claims,
    for example because its workflow is unknown, is reported only once.
    """

    def __init__(
        self, connection: sqlite3.Connection, newest_due: str, prefix: str, now: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._newest_due = newest_due
        self._prefix = prefix
        self._now = now
        self._version: int | None = None
        self._last_due: set[tuple[object, ...]] = set()

    def look(self) -> bool:
        """Return whether there is a due run that was not due at the last check."""
        try:
            return self._look()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            return False  # nothing was remembered: the next check finds it

    def _look(self) -> bool:
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return False
        values = {"now": self._now(), "prefix": self._prefix}
        due = {*self._connection.execute(self._newest_due, values)}
        is_new = not due <= self._last_due
        # The version was read before the runs, so a commit in between is noticed by the next check.
        self._version, self._last_due = version, due
        return is_new


@contextmanager
def watching(
    path: str,
    connect: Callable[[], sqlite3.Connection],
    newest_due: str,
    prefix: str,
    now: Callable[[], int],
) -> Generator[Look, None, None]:
    """Yield a function that checks for new due runs, on its own connection."""
    try:
        connection = connect()
        try:
            connection.execute("PRAGMA busy_timeout = 0")  # it is called again soon
            yield DueWatch(connection, newest_due, prefix, now).look
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise translate_error(error, path) from error
