"""The tables of the PostgreSQL stores: their names, and the migrations that create them."""

from collections.abc import Sequence

from perdure.stores._migrations import (
    Migration,
    announce,
    check_table,
    pending,
    read_migrations,
    whole_script,
)
from perdure.stores.postgres.database import Database, Transaction

# PostgreSQL truncates names to 63 bytes, and this is the longest suffix that is added.
_MAX_TABLE_LENGTH = 63 - len("_documents_expires_at_idx")

_INDEXES = (
    *("updated_at", "workflow", "due", "inbox_run", "inbox_dedup", "tags_tag", "expires_at"),
    *("status", "wake_at"),  # before migration 4
)

_TABLE_EXISTS = "SELECT to_regclass($1) IS NOT NULL"
_APPLIED_MIGRATIONS = "SELECT version FROM {migrations}"
_CREATE_MIGRATIONS_TABLE = """
    CREATE TABLE IF NOT EXISTS {migrations} (
        version integer PRIMARY KEY,
        name text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now()
    )
"""
_RECORD_MIGRATION = "INSERT INTO {migrations} (version, name) VALUES ($1, $2)"
# If many processes start together, one creates the tables and the others wait. The lock ends with
# the transaction, which makes it safe behind a pooler.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))"


class Tables:
    """The quoted names of a store's tables and indexes: `{runs}`, `{journal}`, `{inbox}` ….

    `table` may include a schema: `"billing.runs"`. `suffix` is added to its name.
    """

    def __init__(self, table: object, suffix: str = "") -> None:
        self.table = check_table(table, _MAX_TABLE_LENGTH) + suffix
        schema, _, name = self.table.rpartition(".")
        dot = f'"{schema}".' if schema else ""
        self.channel = name
        self.names = {
            "table": f'{dot}"{name}"',
            "runs": f'{dot}"{name}"',
            "migrations": f'{dot}"{name}_migrations"',
            "journal": f'{dot}"{name}_journal"',
            "inbox": f'{dot}"{name}_inbox"',
            "tags": f'{dot}"{name}_tags"',
            "schema": dot,
        }
        self.names |= {f"{index}_idx": f'"{name}_{index}_idx"' for index in _INDEXES}

    def sql(self, template: str, **parts: str) -> str:
        """Return a statement with the names, and other parts, filled in."""
        return template.format(**self.names, **parts)


class Schema:
    """The tables as the migrations in one folder create them."""

    def __init__(self, tables: Tables, folder: str = "migrations") -> None:
        self._tables = tables
        self._migrations = read_migrations("perdure.stores.postgres", folder)

    def script(self) -> str:
        """Return the statements that create the tables, as one script."""
        create, record = _CREATE_MIGRATIONS_TABLE, _RECORD_MIGRATION
        return whole_script(self._migrations, create, record, self._tables.sql)

    async def set_up(self, database: Database) -> None:
        """Apply the missing migrations, all or none; safe to call concurrently."""
        async with database.transaction() as transaction:
            if not await self._pending(transaction):
                return
        async with database.transaction() as transaction:
            await transaction.fetch(_LOCK, self._tables.table)
            await transaction.execute(self._tables.sql(_CREATE_MIGRATIONS_TABLE))
            for migration in announce(await self._pending(transaction), self._tables.table):
                await transaction.migrate(self._tables.sql(migration.script))
                record = self._tables.sql(_RECORD_MIGRATION)
                await transaction.fetch(record, migration.version, migration.name)

    async def _pending(self, transaction: Transaction) -> Sequence[Migration]:
        [(exists,)] = await transaction.fetch(_TABLE_EXISTS, self._tables.names["migrations"])
        if not exists:
            return self._migrations
        rows = await transaction.fetch(self._tables.sql(_APPLIED_MIGRATIONS))
        return pending(self._migrations, [version for (version,) in rows], self._tables.table)
