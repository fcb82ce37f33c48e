"""Run transactions in few round trips, translating the driver's errors and retrying conflicts."""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from perdure.errors import StoreError, StoreUnavailable, ValueTooLarge
from perdure.stores.mysql.errors import (
    PACKET_TOO_LARGE,
    Failure,
    code_of,
    driver_errors,
    failure_of,
    is_reusable_after,
    load_driver,
    translate,
    was_not_sent,
)
from perdure.stores.mysql.literals import NO_BACKSLASH_ESCAPES, Statement
from perdure.stores.mysql.pool import MysqlPool

T = TypeVar("T")
J = TypeVar("J", bound="Transaction")

# How often a transaction is retried after each kind of failure.
_RETRIES: dict[Failure, int] = {"deadlock": 10, "lock timeout": 2, "unavailable": 2, "error": 0}
# Every server accepts this; the actual limit is read when the store is set up.
_MIN_PACKET_SIZE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a statement: rows, the number of rows returned or written, LAST_INSERT_ID.

    Whether an UPDATE counts rows that it left unchanged depends on a flag of the connection.
    """

    rows: Sequence[Any] = ()
    count: int = 0
    last_id: int = 0


class Database:
    """Runs transactions, each on its own connection.

    After a conflict with another transaction (a deadlock), a transaction is run again. If the
    connection is lost, it is run again on a new connection if it cannot have been committed, or if
    it is `repeatable`: running it twice has the same effect as running it once.
    """

    def __init__(self, pool: MysqlPool, *, timeout: float) -> None:
        self.pool = pool
        self.max_packet_size = _MIN_PACKET_SIZE
        self.errors = driver_errors()
        self._timeout = timeout
        self._cursor_class = load_driver().cursors.Cursor

    async def transact(
        self, work: Callable[["Transaction"], Awaitable[T]], *, repeatable: bool = True
    ) -> T:
        """Return what `work` returns.

        It may be called several times. Unless it calls `finish`, its writes are rolled back.
        """
        failures: Counter[Failure] = Counter()
        while True:
            transaction = await self.open()
            try:
                return await work(transaction)
            except self.errors as error:
                failure = failure_of(error)
                failures[failure] += 1
                is_safe = repeatable or was_not_sent(error) or not transaction.is_committing
                if failures[failure] > _RETRIES[failure] or (
                    failure == "unavailable" and not is_safe
                ):
                    raise translate(error, self.pool.location) from error
            finally:
                await transaction.end()

    async def run(self, *statements: Statement, repeatable: bool = True) -> Sequence[Result]:
        """Commit the statements together and return their results."""
        return await self.transact(
            lambda transaction: transaction.finish(*statements), repeatable=repeatable
        )

    async def run_alone(self, statement: Statement, *, repeatable: bool = True) -> Result:
        """Run and commit a single statement, without a transaction if possible."""
        return await self.transact(
            lambda transaction: transaction.run_alone(statement), repeatable=repeatable
        )

    async def open(self) -> "Transaction":
        """Return a transaction that has not begun yet; the caller must call its `end`."""
        connection = await self.pool.acquire()
        return Transaction(self, connection, self._cursor_class, self._timeout)

    def adopt(self, connection: Any, kind: "type[J]") -> "J":
        """Return a `kind` of transaction that the caller has begun, and will end."""
        return kind(self, connection, self._cursor_class, self._timeout)

    @contextmanager
    def translate_errors(self) -> Generator[None]:
        """Translate the driver's errors raised in this block."""
        try:
            yield
        except self.errors as error:
            raise translate(error, self.pool.location) from error


class Transaction:
    """Statements of one connection that are committed together.

    The statements of one call are sent together and cost one round trip. `timeout` is how many
    seconds the server's reply may take; `None` means no limit.
    """

    def __init__(
        self, database: Database, connection: Any, cursor_class: Any, timeout: float
    ) -> None:
        self.connection = connection
        self.errors = database.errors
        self.is_committing = False
        self.timeout: float | None = timeout
        self._database = database
        self._cursor_class = cursor_class
        self._is_open = False
        self._is_reusable = True

    async def run(self, *statements: Statement) -> Sequence[Result]:
        """Run statements and return their results; the first call begins the transaction."""
        return await self._run(statements, ends=False)

    async def finish(self, *statements: Statement) -> Sequence[Result]:
        """Run statements, commit, and return the results."""
        return await self._run(statements, ends=True)

    async def run_alone(self, statement: Statement) -> Result:
        """Run and commit a single statement; only outside a transaction."""
        self._is_open = not self._database.pool.autocommit
        self.is_committing = True
        [result, *_] = await self._send([self._encode(statement)])
        if self.connection.get_transaction_status():
            await self._commit()
        self._is_open = False
        return result

    async def end(self) -> None:
        """Roll back unless committed, and release the connection."""
        try:
            if self._is_open and self._is_reusable:
                await self._request(self.connection.rollback())
        except self.errors:
            pass  # the server rolls back when the connection is closed
        finally:
            await self._database.pool.release(self.connection, reusable=self._is_reusable)

    @asynccontextmanager
    async def lend(self) -> AsyncGenerator[Any]:
        """Lend the connection to the user's code.

        Exceptions are raised unchanged, or as `StoreUnavailable` if the connection was lost.
        """
        try:
            yield self.connection
        except Exception as error:
            self._is_open = False
            try:
                await self._request(self.connection.rollback())
            except self.errors as rollback_error:
                reason = translate(rollback_error, self._database.pool.location)
                raise StoreUnavailable(f"{reason}; the transaction raised: {error}") from error
            raise

    def check_open(self) -> None:
        """Raise `StoreError` if the user's code ended the transaction."""
        if not self.connection.get_transaction_status():
            self._is_open = False
            raise StoreError(
                "the transaction was ended inside `work`: by commit() or rollback(), or by a "
                "statement that commits, such as CREATE TABLE; only the store may end it"
            )

    async def _run(self, statements: Sequence[Statement], *, ends: bool) -> Sequence[Result]:
        queries = [self._encode(statement) for statement in statements]
        skip = 0
        if not self._is_open:
            begin = self._database.pool.begin
            queries.insert(0, begin)
            skip = 1 + begin.count(b";")  # the results of BEGIN, which may be two statements
            self._is_open = True
        commits = ends and self.connection.get_autocommit()
        if commits:
            queries.append(b"COMMIT")
        results: list[Result] = []
        packets = list(_packets(queries, self._database.max_packet_size))
        for number, packet in enumerate(packets, 1):
            self.is_committing = commits and number == len(packets)
            results += await self._send(packet)
        if commits:
            self._is_open = False
        elif ends:
            await self._commit()
        return results[skip : skip + len(statements)]

    async def _commit(self) -> None:
        # In a session without autocommit, the driver learns that the transaction is over only from
        # its own commit(). Without it, the driver's pool would discard the connection.
        self.is_committing = True
        await self._request(self.connection.commit())
        self._is_open = False

    def _encode(self, statement: Statement) -> bytes:
        mode = self.connection.server_status
        return statement.encode(backslashes=not mode & NO_BACKSLASH_ESCAPES)

    async def _send(self, queries: Sequence[bytes]) -> list[Result]:
        packet, limit = b";".join(queries), self._database.max_packet_size
        try:
            if len(packet) < limit:
                return await self._request(self._exchange(packet))
        except self.errors as error:
            if code_of(error) != PACKET_TOO_LARGE:
                raise
        what = "a statement for MySQL (limited by max_allowed_packet)"
        raise ValueTooLarge(what, len(packet), limit)

    async def _exchange(self, packet: bytes) -> list[Result]:
        # The cursor need not be closed: closing it would only read the remaining results.
        cursor = self.connection.cursor(self._cursor_class)
        await cursor.execute(packet)
        results = [await _result(cursor)]
        while await cursor.nextset():
            results.append(await _result(cursor))
        return results

    async def _request(self, request: Awaitable[T]) -> T:
        """Await the server's reply, and record whether the connection can still be used."""
        # If this is cancelled, the reply is still to come.
        self._is_reusable = False
        try:
            # The driver's own timeout creates a task for every read.
            async with asyncio.timeout(self.timeout):  # noqa: TID251 - real time
                reply = await request
        except self.errors as error:
            self._is_reusable = is_reusable_after(error)
            raise
        self._is_reusable = True
        return reply


async def _result(cursor: Any) -> Result:
    return Result(await cursor.fetchall(), cursor.rowcount, cursor.lastrowid)


def _packets(queries: Iterable[bytes], limit: int) -> Iterator[Sequence[bytes]]:
    """Yield the statements in as few packets as the limit allows."""
    packet: list[bytes] = []
    size = 0
    for statement in queries:
        if packet and size + len(statement) + 1 >= limit:
            yield packet
            packet, size = [], 0
        packet.append(statement)
        size += len(statement) + 1
    yield packet
