"""The migrations of a `SqlStore`, for any client."""

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores._migrations import announce, pending
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import SqlClient, query
from perdure.stores.sql.dialects import Statements

# More than the number of statements of a first set-up: each may fail once because of another
# process.
_ATTEMPTS = 60


async def set_up(client: SqlClient, statements: Statements) -> None:
    """Apply the migrations that are missing."""
    # Two processes may migrate at the same time, so each statement can be repeated; one that
    # fails because of the other process finds its work done at the next attempt.
    for attempt in range(_ATTEMPTS):
        try:
            return await _migrate(client, statements)
        except StoreError as error:
            if isinstance(error, StoreUnavailable) or attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


async def _migrate(client: SqlClient, statements: Statements) -> None:
    await query(client, statements.sql(sql.CREATE_MIGRATIONS_TABLE), ())
    result = await query(client, statements.sql(sql.APPLIED_MIGRATIONS), ())
    applied_versions = {version for (version,) in result.rows}
    missing = pending(statements.migrations, applied_versions, statements.table)
    for migration in announce(missing, statements.table):
        for statement in statements.split_script(migration.script):
            if statement.unless and (await query(client, statement.unless, ())).rows:
                continue
            await query(client, statement.sql, ())
        await query(client, statements.sql(sql.RECORD_MIGRATION), (migration.version,))
