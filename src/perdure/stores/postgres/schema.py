"""The tables of the PostgreSQL stores: their names, and the numbered migrations that make them."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from perdure.errors import InvalidArgument, StoreError
from perdure.stores.postgres.database import Database, Transaction

# PostgreSQL cuts names at 63 bytes, and the longest of an index is the table's with this after it.
_LONGEST_TABLE = 63 - len("_updated_at_idx")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_FIND = "SELECT to_regclass($1) IS NOT NULL"
_APPLIED = "SELECT version FROM {migrations}"
_KEEP_COUNT = """
    CREATE TABLE IF NOT EXISTS {migrations} (
        version integer PRIMARY KEY,
        name text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now()
    )
"""
_COUNT = "INSERT INTO {migrations} (version, name) VALUES ($1, $2)"
# Of many that begin at once, one makes the tables and the others wait. The lock goes with the
# transaction, so that it is safe behind a pooler.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"


class Migration(NamedTuple):
    """One step of a schema: a script that wants the names of the tables."""

    version: int
    name: str
    script: str


class Names:
    """The quoted names of a table, its companions and its indexes: `{runs}`, `{journal}`, ….

    `table` may name a schema: `"billing.runs"`.
    """

    def __init__(self, table: object) -> None:
        self.table = check_table(table)
        schema, _, name = self.table.rpartition(".")
        dot = f'"{schema}".' if schema else ""
        self.schema = schema
        self.channel = name
        self.fields = {
            "table": f'{dot}"{name}"',
            "runs": f'{dot}"{name}"',
            "migrations": f'{dot}"{name}_migrations"',
            "journal": f'{dot}"{name}_journal"',
            "inbox": f'{dot}"{name}_inbox"',
        }
        indexes = "updated_at", "status", "wake_at", "expires_at", "inbox_run", "inbox_dedup"
        self.fields |= {f"{index}_idx": f'"{name}_{index}_idx"' for index in indexes}

    def fill(self, statement: str, **more: str) -> str:
        """Give a statement with the names in it."""
        return statement.format(**self.fields, **more)


class Schema:
    """The tables of one name, as the migrations in a folder make them."""

    def __init__(self, folder: str, names: Names) -> None:
        self.migrations = read_migrations(folder)
        self._names = names

    async def set_up(self, database: Database) -> None:
        """Apply the migrations that are missing, all or none, also when many try at once."""
        async with database.transaction() as transaction:
            if not await self._missing(transaction):
                return
        async with database.transaction() as transaction:
            await transaction.fetch(_LOCK, self._names.table)
            await transaction.execute(self._names.fill(_KEEP_COUNT))
            for migration in await self._missing(transaction):
                await transaction.execute(self._names.fill(migration.script))
                count = self._names.fill(_COUNT)
                await transaction.fetch(count, migration.version, migration.name)

    async def _missing(self, transaction: Transaction) -> Sequence[Migration]:
        [(is_there,)] = await transaction.fetch(_FIND, self._names.fields["migrations"])
        if not is_there:
            return self.migrations
        rows = await transaction.fetch(self._names.fill(_APPLIED))
        applied = {version for (version,) in rows}
        if unknown := applied - {migration.version for migration in self.migrations}:
            raise StoreError(
                f"table {self._names.table} was made by a newer perdure, as migration "
                f"{max(unknown)} shows; upgrade perdure, or choose another table"
            )
        return [migration for migration in self.migrations if migration.version not in applied]


def check_table(table: object, parameter: str = "table") -> str:
    """Give the table's name back, or raise: `table` or `schema.table`."""
    expected = (
        "a name of ASCII letters, digits and _, no digit first, of at most "
        f"{_LONGEST_TABLE} characters, or two with a dot between them"
    )
    if not isinstance(table, str):
        raise InvalidArgument(parameter, table, expected)
    parts = table.split(".")
    if len(parts) > 2 or not all(map(_NAME.fullmatch, parts)) or len(parts[-1]) > _LONGEST_TABLE:
        raise InvalidArgument(parameter, table, expected)
    return table


@cache
def read_migrations(folder: str) -> Sequence[Migration]:
    """Give the migrations of a folder beside the stores, by number."""
    scripts = files("perdure.stores.postgres").joinpath(folder).iterdir()
    numbered = sorted((script.name, script) for script in scripts if script.name.endswith(".sql"))
    return [
        Migration(int(name[:4]), name.removesuffix(".sql"), script.read_text())
        for name, script in numbered
    ]
