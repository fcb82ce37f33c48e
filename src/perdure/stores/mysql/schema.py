"""The tables of the MySQL store: their names, the server's dialect, and the migrations."""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores._migrations import (
    Migration,
    announce,
    check_table,
    pending,
    read_migrations,
    whole_script,
)
from perdure.stores.mysql.database import Database, Transaction
from perdure.stores.mysql.errors import NO_SUCH_COLUMN, NO_SUCH_TABLE, code_of
from perdure.stores.mysql.literals import Statement, Value

# MySQL accepts names of up to 64 characters, and this is the longest suffix that is added.
_MAX_TABLE_LENGTH = 64 - len("_documents_migrations")
_LOCK_SECONDS = 60
_REST_COLUMNS = {
    **dict.fromkeys(("folded", "snapshot", "status", "wake_at", "awaits"), "{new}"),
    # A rest that leaves these columns unchanged has NULL, or a negative version.
    "version": "IF({new} < 0, {old}, {new})",
    "tags": "COALESCE({new}, {old})",
    "summary": "COALESCE({new}, {old})",
}

_APPLIED_MIGRATIONS = "SELECT version FROM {migrations}"
_CREATE_MIGRATIONS_TABLE = """
    CREATE TABLE IF NOT EXISTS {migrations} (
        version INT NOT NULL PRIMARY KEY,
        name VARCHAR(100) NOT NULL,
        applied_at DATETIME(6) NOT NULL
    ) ENGINE = InnoDB
"""
_RECORD_MIGRATION = """
    INSERT INTO {migrations} (version, name, applied_at) VALUES (%s, %s, UTC_TIMESTAMP(6))
"""
# A table is altered by a single statement: if one of the columns exists, so do the others.
_PROBES = {"0004_headers": "SELECT lane FROM {runs} LIMIT 0"}
# If many processes start together, one creates the tables and the others wait. A transaction cannot
# ensure this, because it ends with the first CREATE TABLE.
_LOCK = "SELECT GET_LOCK(%s, %s)"
_UNLOCK = "SELECT RELEASE_LOCK(%s)"


class Dialect(NamedTuple):
    """The differences between MySQL and MariaDB.

    `new_value` is how an upsert refers to a column of the new row, and `new_row` the alias that
    this requires.
    """

    collation: str
    skip_locked: str = "SKIP LOCKED"
    new_value: str = "VALUES({})"
    new_row: str = ""

    def parts(self, runs: str) -> dict[str, str]:
        """Return the parts of statements: `{collation}`, `{skip_locked}` …."""
        rest = (
            f"{column} = {value.format(new=self.new_value.format(column), old=f'{runs}.{column}')}"
            for column, value in _REST_COLUMNS.items()
        )
        return {**self._asdict(), "set_rest": ", ".join(rest)}


class Tables:
    """The quoted names of a store's tables: `{runs}`, `{journal}`, `{inbox}` ….

    `table` may include a database: `"billing.runs"`. `suffix` is added to its name.
    """

    def __init__(self, table: object, suffix: str = "") -> None:
        self.table = check_table(table, _MAX_TABLE_LENGTH) + suffix
        database, _, name = self.table.rpartition(".")
        dot = f"`{database}`." if database else ""
        self._names = {
            "table": f"{dot}`{name}`",
            "runs": f"{dot}`{name}`",
            "journal": f"{dot}`{name}_journal`",
            "inbox": f"{dot}`{name}_inbox`",
            "tags": f"{dot}`{name}_tags`",
            "migrations": f"{dot}`{name}_migrations`",
            "fence": f"`{name}_fence`",
        }

    def sql(self, template: str, dialect: Dialect) -> bytes:
        """Return a statement with the names, and the parts of the dialect, filled in."""
        return template.format(**self._names, **dialect.parts(self._names["runs"])).encode()


class Schema:
    """The tables as the migrations in one folder create them.

    Creating or altering a table cannot be rolled back: after a crash, a migration is applied again,
    so it must be repeatable. Each is one statement.
    """

    def __init__(self, tables: Tables, dialect: Dialect, folder: str = "migrations") -> None:
        self._tables = tables
        self._dialect = dialect
        self._migrations = read_migrations("perdure.stores.mysql", folder)

    def script(self) -> str:
        """Return the statements that create the tables, as one script."""

        def fill(template: str) -> str:
            return self._tables.sql(template, self._dialect).decode()

        create, record = _CREATE_MIGRATIONS_TABLE, _RECORD_MIGRATION
        return whole_script(self._migrations, create, record, fill)

    async def set_up(self, database: Database) -> None:
        """Apply the missing migrations; safe to call concurrently."""
        if await database.transact(self._pending):
            await database.transact(self._migrate)

    async def _migrate(self, transaction: Transaction) -> None:
        lock = "perdure " + blake2b(self._tables.table.encode(), digest_size=16).hexdigest()
        result = await transaction.run_alone(self._bind(_LOCK, lock, _LOCK_SECONDS))
        if result.rows[0][0] != 1:
            raise StoreUnavailable(
                f"another process has been creating the table {self._tables.table} for "
                f"{_LOCK_SECONDS}s; see SHOW PROCESSLIST"
            )
        try:
            migrations = await self._pending(transaction)
            # Rebuilding a large table may take longer than any other statement.
            transaction.timeout = None
            if migrations:
                await transaction.run_alone(self._bind(_CREATE_MIGRATIONS_TABLE))
            for migration in announce(migrations, self._tables.table):
                await self._apply(transaction, migration)
        finally:
            await transaction.run_alone(self._bind(_UNLOCK, lock))

    async def _apply(self, transaction: Transaction, migration: Migration) -> None:
        if not await self._was_applied(transaction, migration):
            await transaction.run_alone(self._bind(migration.script.strip(" \n;")))
        record = self._bind(_RECORD_MIGRATION, migration.version, migration.name)
        await transaction.run_alone(record)

    async def _was_applied(self, transaction: Transaction, migration: Migration) -> bool:
        """Return whether a process applied the migration, but crashed before recording it."""
        probe = _PROBES.get(migration.name)
        try:
            if probe is not None:
                await transaction.run_alone(self._bind(probe))
        except transaction.errors as error:
            if code_of(error) != NO_SUCH_COLUMN:
                raise
            return False
        return probe is not None

    async def _pending(self, transaction: Transaction) -> Sequence[Migration]:
        try:
            result = await transaction.run_alone(self._bind(_APPLIED_MIGRATIONS))
        except transaction.errors as error:
            if code_of(error) != NO_SUCH_TABLE:
                raise
            return self._migrations
        applied_versions = [version for (version,) in result.rows]
        return pending(self._migrations, applied_versions, self._tables.table)

    def _bind(self, template: str, *values: Value) -> Statement:
        return Statement(self._tables.sql(template, self._dialect), values)


def dialect_of(version: str) -> Dialect:
    """Return the dialect of a server of this version; raise if it is too old."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if "mariadb" in version.lower():
        if numbers >= (10, 6):
            return Dialect("utf8mb4_nopad_bin")
        if numbers >= (10, 3):
            return Dialect("utf8mb4_nopad_bin", skip_locked="")
    elif numbers >= (8, 0, 19):
        return Dialect("utf8mb4_0900_bin", new_value="new.{}", new_row="AS new")
    raise StoreError(f"{version} is too old: MySQL 8.0.19 or MariaDB 10.3 or newer is required")
