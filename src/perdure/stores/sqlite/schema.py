"""Numbered migrations of the SQLite schema: each applied once, also when many start together."""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import NamedTuple

from perdure.errors import StoreError
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Statement

_FIND = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
_APPLIED = 'SELECT version FROM "${table}_migrations"'
_KEEP_COUNT = """
    CREATE TABLE IF NOT EXISTS "${table}_migrations" (
        version INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    )
"""
_COUNT = 'INSERT INTO "${table}_migrations" (version, name) VALUES (?, ?)'


class Migration(NamedTuple):
    """One step of a schema, as templates that want the name of the table."""

    version: int
    name: str
    statements: Sequence[str]


class Schema:
    """The tables of one name as the migrations in a folder make them."""

    def __init__(self, folder: str, table: str) -> None:
        self.migrations = read_migrations(folder)
        self._table = table

    def missing(self) -> Verb[Sequence[Migration]]:
        """Give the migrations that were not applied yet."""
        [table] = yield [Statement(_FIND, (f"{self._table}_migrations",))]
        if not table.rows:
            return self.migrations
        [found] = yield [self._on(_APPLIED)]
        applied = {version for (version,) in found.rows}
        if unknown := applied - {migration.version for migration in self.migrations}:
            raise StoreError(
                f"table {self._table!r} was made by a newer perdure (migration {max(unknown)}); "
                "upgrade perdure, or choose another table"
            )
        return [migration for migration in self.migrations if migration.version not in applied]

    def migrate(self) -> Verb[None]:
        """Apply what is missing, in one round: all of it or nothing."""
        missing = yield from self.missing()
        if missing:
            # Of two that try at once, the count's key lets only one through.
            yield [self._on(_KEEP_COUNT), *self._steps(missing)]

    def _steps(self, migrations: Sequence[Migration]) -> Iterator[Statement]:
        for migration in migrations:
            for statement in migration.statements:
                yield self._on(statement)
            yield self._on(_COUNT, migration.version, migration.name)

    def _on(self, statement: str, *values: int | str) -> Statement:
        return Statement(Template(statement).substitute(table=self._table), values)


@cache
def read_migrations(folder: str) -> Sequence[Migration]:
    """Give the migrations of a folder beside the stores, by number."""
    scripts = files("perdure.stores.sqlite").joinpath(folder).iterdir()
    numbered = sorted((script.name, script) for script in scripts if script.name.endswith(".sql"))
    return [
        Migration(int(name[:4]), name.removesuffix(".sql"), tuple(_split(script.read_text())))
        for name, script in numbered
    ]


def _split(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip().removesuffix(";")
            statement = ""
