"""Runs the verbs of a SQLite store, and keeps their statements, plans and costs."""

import sqlite3
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from perdure.stores.sqlite.connection import drive, execute
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schedule import ScheduleVerbs
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.search import SearchVerbs
from perdure.stores.sqlite.statements import Row, Statement, Statements

START = 1_900_000_000

# Each workflow has all statuses, queues and versions. Half of the queued runs are due;
# all of them await a message.
FILL = """
    WITH RECURSIVE number (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM number WHERE i + 1 < :count)
    INSERT INTO runs (
        id, snapshot, updated_at, workflow, status, awaits, wake_at, epoch, queue, version, tags,
        created_at
    )
    SELECT printf('run %08d', i * 7919 % :count), printf('{"padding": "%0500d"}', i),
        strftime('%Y-%m-%dT%H:%M:%S.000000Z', :start - i, 'unixepoch'),
        printf('workflow %d', i % 10),
        CASE i / 10 % 4 WHEN 0 THEN 'completed' WHEN 1 THEN 'failed' ELSE 'queued' END,
        CASE WHEN i / 10 % 4 > 1 THEN '["paid"]' END,
        CASE WHEN i / 10 % 4 > 1 THEN :start * 1000000 + (i - :count / 2) * 1000 END, i,
        CASE i / 40 % 2 WHEN 0 THEN '' ELSE printf('queue %d', i / 80 % 10) END,
        i / 7 % 3, CASE i / 3 % 5 WHEN 0 THEN printf('["kind=%d"]', i % 10) ELSE '[]' END,
        (:start - i) * 1000000
    FROM number
"""
FILL_JOURNAL = "INSERT INTO runs_journal SELECT id, epoch, 1, '{}' FROM runs"
FILL_INBOX = """
    INSERT INTO runs_inbox (run, name, payload, sent_at, dedup_id, taken)
    SELECT id, 'paid', '1', 0, CASE epoch % 2 WHEN 0 THEN 'first' END, epoch % 3 = 0 FROM runs
"""

Call: TypeAlias = Callable[[SearchVerbs, ScheduleVerbs], Verb[Any]]


class TrackedStatements(Statements):
    """Keeps the templates that verbs have used."""

    def __init__(self) -> None:
        super().__init__("runs")
        self.templates: set[str] = set()

    def sql(self, template: str, arm: str = "", count: int = 0) -> str:
        self.templates |= {template, arm}
        return super().sql(template, arm, count)

    def many(self, template: str, rows: Sequence[Row]) -> list[Statement]:
        self.templates |= {template} if rows else set()
        return super().many(template, rows)


STATEMENTS = TrackedStatements()
NAMES = (STATEMENTS, "", lambda: START * 1_000_000)


class Recorder:
    """Runs verbs and keeps their statements, and how many instructions these took."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.statements: list[Statement] = []
        self.steps = 0
        self._verbs = SearchVerbs(*NAMES), ScheduleVerbs(*NAMES)

    def run(self, call: Call) -> Any:
        """Return the result of a verb; what it writes is rolled back."""
        self.statements, instructions = [], count()
        self.connection.set_progress_handler(lambda: next(instructions) < 0, 10)
        self.connection.execute("BEGIN")
        try:
            return drive(self.connection, self._recorded(call(*self._verbs)))
        finally:
            self.connection.set_progress_handler(None, 0)
            self.connection.execute("ROLLBACK")
            self.steps = next(instructions) * 10

    def plans(self) -> list[str]:
        """Return the lines of the statements' query plans."""
        explained = [
            execute(self.connection, Statement(f"EXPLAIN QUERY PLAN {one.sql}", one.values))
            for one in self.statements
        ]
        return [row[3] for outcome in explained for row in outcome.rows]

    def scans(self) -> list[set[str]]:
        """Return the tables that each statement and its triggers read from end to end.

        To build a Bloom filter for a table, or an index for one statement, is to do so.
        """
        return [self._scanned_tables(one) for one in self.statements]

    def _scanned_tables(self, statement: Statement) -> set[str]:
        tables = "SELECT rootpage, tbl_name FROM sqlite_master WHERE tbl_name GLOB 'runs*'"
        names = dict(self.connection.execute(tables))
        explain = Statement(f"EXPLAIN {statement.sql}", statement.values)
        cursors: dict[int, str] = {}
        scanned: set[str] = set()
        for address, operation, cursor, page, *_ in execute(self.connection, explain).rows:
            if address == 0:
                # The program of a trigger has cursors of its own.
                cursors = {}
            if operation in ("OpenRead", "OpenWrite", "ReopenIdx"):
                cursors[cursor] = names.get(page, "")
            elif operation in ("Rewind", "Last"):
                scanned.add(cursors.get(cursor, ""))
        # The table of the floor has one row.
        return scanned - {"", "runs_floor"}

    def _recorded(self, verb: Verb[Any]) -> Verb[Any]:
        try:
            statements = next(verb)
            while True:
                self.statements += statements
                statements = verb.send((yield statements))
        except StopIteration as done:
            return done.value


def recorder(path: Path, runs: int, analyzed: int = 0) -> Recorder:
    """Return one for a file with statistics from when it had `analyzed` runs."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    drive(connection, Schema("migrations", "runs").migrate())
    if analyzed:
        fill(connection, analyzed)
        connection.execute("ANALYZE")
        connection.execute("DELETE FROM runs")
    fill(connection, runs)
    connection.execute("COMMIT")
    return Recorder(connection)


def fill(connection: sqlite3.Connection, runs: int) -> None:
    connection.execute(FILL, {"count": runs, "start": START})
    connection.execute(FILL_JOURNAL)
    connection.execute(FILL_INBOX)
