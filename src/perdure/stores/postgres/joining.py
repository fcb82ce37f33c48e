"""Run statements in the caller's transaction, on the caller's own asyncpg connection."""

from typing import Any, NamedTuple

from perdure.stores._joining import no_transaction, unsuitable_connection
from perdure.stores.postgres.database import Database, Transaction
from perdure.stores.postgres.errors import load_driver

_EXPECTED = "an asyncpg connection, or an AsyncSession or AsyncConnection on postgresql+asyncpg"

LOCATE_TABLE = "SELECT current_database()::text, to_regclass($1)::oid::bigint"


class Place(NamedTuple):
    """The location of a table: the name of its database, and its number, if it exists."""

    database: str
    table: int | None


async def join(connection: Any, database: Database, table: str, place: Place) -> Transaction:
    """Return the transaction that is open on a connection to the store's tables."""
    driver = load_driver()
    if not isinstance(connection, driver.Connection | driver.pool.PoolConnectionProxy):
        raise unsuitable_connection(connection, _EXPECTED)
    if not connection.is_in_transaction():
        raise no_transaction(connection)
    transaction = database.adopt(connection)
    # A statement for a missing table would abort the transaction; a table of the same name in
    # another schema would get a run that no worker finds.
    [row] = await transaction.fetch(LOCATE_TABLE, table)
    if Place(*row) != place:
        expected = f"a connection to database {place.database!r}"
        raise unsuitable_connection(connection, f"{expected} that sees the store's table {table}")
    return transaction
