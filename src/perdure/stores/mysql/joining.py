"""Run statements in the caller's transaction, on the caller's own asyncmy connection."""

from collections.abc import Sequence
from typing import Any

from perdure.stores._joining import no_transaction, unsuitable_connection
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.errors import load_driver
from perdure.stores.mysql.literals import Statement

_EXPECTED = "an asyncmy connection, or an AsyncSession or AsyncConnection on mysql+asyncmy"
_CHARSET = "utf8mb4"

DATABASE = Statement(b"SELECT DATABASE()")


class JoinedTransaction(Transaction):
    """A transaction that the caller has begun, and will end."""

    async def _run(self, statements: Sequence[Statement], *, ends: bool) -> Sequence[Result]:
        # Sent one by one, because the connection may not allow several statements in a packet.
        return [(await self._send([self._encode(each)]))[0] for each in statements]


async def join(connection: Any, database: Database, schema: str | None) -> JoinedTransaction:
    """Return the transaction that is open on a connection to the store's database.

    `schema` is `None` if the names of the store's tables include it.
    """
    if not isinstance(connection, load_driver().Connection):
        raise unsuitable_connection(connection, _EXPECTED)
    # Without autocommit, the first statement begins a transaction.
    if connection.get_autocommit() and not connection.get_transaction_status():
        raise no_transaction(connection)
    if connection.character_set_name() != _CHARSET:
        raise unsuitable_connection(connection, f"a connection with the character set {_CHARSET}")
    transaction = database.adopt(connection, JoinedTransaction)
    [result] = await transaction.run(DATABASE)
    if schema is not None and result.rows[0][0] != schema:
        raise unsuitable_connection(connection, f"a connection to the store's database {schema!r}")
    return transaction
