"""Migrations of the SQLite schema, each applied once, even if many processes start together."""

import sqlite3
from collections.abc import Generator, Iterator, Sequence
from string import Template
from typing import Any

from perdure.stores._migrations import (
    Migration,
    announce,
    pending,
    read_migrations,
    whole_script,
)
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Statement

_FIND = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
_APPLIED_MIGRATIONS = 'SELECT version FROM "${table}_migrations"'
_CREATE_MIGRATIONS_TABLE = """
    CREATE TABLE IF NOT EXISTS "${table}_migrations" (
        version INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    )
"""
_RECORD_MIGRATION = 'INSERT INTO "${table}_migrations" (version, name) VALUES (?, ?)'


class Schema:
    """The tables of one store, as the migrations in a folder create them."""

    def __init__(self, folder: str, table: str) -> None:
        self._migrations = read_migrations("perdure.stores.sqlite", folder)
        self._table = table

    def missing(self) -> Verb[Sequence[Migration]]:
        """Return the migrations that were not applied yet."""
        [table] = yield [Statement(_FIND, (f"{self._table}_migrations",))]
        if not table.rows:
            return self._migrations
        [outcome] = yield [self._statement(_APPLIED_MIGRATIONS)]
        return pending(self._migrations, {version for (version,) in outcome.rows}, self._table)

    def migrate(self) -> Verb[None]:
        """Apply the missing migrations in one round: all of them or none."""
        missing = yield from self.missing()
        if missing:
            # If two processes try at once, the primary key of the versions lets only one succeed.
            yield [statement for step in self._steps(missing) for statement in step]

    def migrate_in_transaction(self) -> Verb[None]:
        """Apply the missing migrations, one per round, in the caller's transaction."""
        missing = yield from self.missing()
        yield from self._steps(missing)

    def script(self) -> str:
        """Return the statements that create the tables, as one script."""
        create, record = _CREATE_MIGRATIONS_TABLE, _RECORD_MIGRATION
        return whole_script(self._migrations, create, record, self._fill)

    def _steps(self, migrations: Sequence[Migration]) -> Generator[Sequence[Statement], Any, None]:
        for migration in announce(migrations, self._table):
            yield [
                self._statement(_CREATE_MIGRATIONS_TABLE),
                *map(self._statement, split_script(migration.script)),
                self._statement(_RECORD_MIGRATION, migration.version, migration.name),
            ]

    def _statement(self, template: str, *values: int | str) -> Statement:
        return Statement(self._fill(template), values)

    def _fill(self, template: str) -> str:
        return Template(template).substitute(table=self._table)


def split_script(script: str) -> Iterator[str]:
    """Yield the statements of a script, without their semicolons."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip().removesuffix(";")
            statement = ""
