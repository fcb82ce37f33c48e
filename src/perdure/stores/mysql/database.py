"""Transactions in few round trips, with the driver's errors translated and conflicts retried."""

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
    TOO_LARGE,
    Failure,
    code_of,
    errors_of,
    failure_of,
    is_sound,
    load_driver,
    translated,
    was_not_sent,
)
from perdure.stores.mysql.literals import NO_BACKSLASH_ESCAPES, Statement
from perdure.stores.mysql.pool import Connections

T = TypeVar("T")

# How often a transaction is run again after each kind of failure.
_TRIES: dict[Failure, int] = {"deadlock": 10, "held": 2, "away": 2, "error": 0}
# What every server takes; the real limit is asked for when the store is set up.
_SMALLEST_PACKET = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Result:
    """What one statement gave: its rows, how many it gave or wrote, and its LAST_INSERT_ID.

    An UPDATE counts rows that it left as they were or not, as a flag of the connection says.
    """

    rows: Sequence[Any] = ()
    count: int = 0
    last_id: int = 0


class Database:
    """Runs transactions, each on a connection of its own.

    One that met another (a deadlock) is run again. One whose connection was lost is run again on a
    new connection when it cannot have been committed, or when it is `repeatable`: when doing it
    twice is as good as once.
    """

    def __init__(self, connections: Connections, *, timeout: float) -> None:
        driver = load_driver()
        self.connections = connections
        self.largest_packet = _SMALLEST_PACKET
        self.errors = errors_of(driver)
        self._timeout = timeout
        self._cursor = driver.cursors.Cursor

    async def transact(
        self, work: Callable[["Transaction"], Awaitable[T]], *, repeatable: bool = True
    ) -> T:
        """Give what `work` gives. It may be called several times; what it did not `finish` is
        rolled back."""
        failures: Counter[Failure] = Counter()
        while True:
            transaction = await self.open()
            try:
                return await work(transaction)
            except self.errors as error:
                failure = failure_of(error)
                failures[failure] += 1
                is_safe = repeatable or was_not_sent(error) or not transaction.is_committing
                if failures[failure] > _TRIES[failure] or (failure == "away" and not is_safe):
                    raise translated(error, self.connections.where) from error
            finally:
                await transaction.end()

    async def run(self, *statements: Statement, repeatable: bool = True) -> Sequence[Result]:
        """Give what the statements give, which are committed together."""
        return await self.transact(
            lambda transaction: transaction.finish(*statements), repeatable=repeatable
        )

    async def run_alone(self, statement: Statement, *, repeatable: bool = True) -> Result:
        """Give what one statement gives, which is committed, without a word more than it needs."""
        return await self.transact(
            lambda transaction: transaction.alone(statement), repeatable=repeatable
        )

    async def open(self) -> "Transaction":
        """Give a transaction that has yet to begin; at last, `end` is to be called."""
        connection = await self.connections.take()
        return Transaction(self, connection, self._cursor, self._timeout)

    @contextmanager
    def speaking(self) -> Generator[None]:
        """Translate the driver's errors in this block."""
        try:
            yield
        except self.errors as error:
            raise translated(error, self.connections.where) from error


class Transaction:
    """Statements of one connection that are committed together.

    Those of one call go out together and cost one round trip.
    """

    def __init__(self, database: Database, connection: Any, cursor: Any, timeout: float) -> None:
        self.connection = connection
        self.errors = database.errors
        self.is_committing = False
        self._database = database
        self._cursor = cursor
        self._timeout = timeout
        self._is_open = False
        self._is_sound = True

    async def run(self, *statements: Statement) -> Sequence[Result]:
        """Give what the statements give; the first call begins the transaction."""
        return await self._run(statements, ends=False)

    async def finish(self, *statements: Statement) -> Sequence[Result]:
        """Give what the statements give, and commit."""
        return await self._run(statements, ends=True)

    async def alone(self, statement: Statement) -> Result:
        """Give what one statement gives, committed by itself; only outside a transaction."""
        self._is_open = not self._database.connections.autocommit
        self.is_committing = True
        [result, *_] = await self._send([self._text(statement)])
        if self.connection.get_transaction_status():
            await self._commit()
        self._is_open = False
        return result

    async def end(self) -> None:
        """Roll back what was not finished, and give the connection back."""
        try:
            if self._is_open and self._is_sound:
                await self._ask(self.connection.rollback())
        except self.errors:
            pass  # the server rolls back when it finds the connection closed
        finally:
            await self._database.connections.give_back(self.connection, sound=self._is_sound)

    @asynccontextmanager
    async def lent(self) -> AsyncGenerator[Any]:
        """Lend the connection to the user's code; its exceptions come out as they are, or as
        `StoreUnavailable` when the connection was lost."""
        try:
            yield self.connection
        except Exception as error:
            self._is_open = False
            try:
                await self._ask(self.connection.rollback())
            except self.errors as lost:
                words = f"{translated(lost, self._database.connections.where)}"
                raise StoreUnavailable(f"{words}, in a transaction: {error}") from error
            raise

    def check_open(self) -> None:
        """Raise when something ended the transaction in between."""
        if not self.connection.get_transaction_status():
            self._is_open = False
            raise StoreError(
                "the transaction was ended inside it: by commit() or rollback(), or by a statement "
                "that commits, as CREATE TABLE does; only the store may end it"
            )

    async def _run(self, statements: Sequence[Statement], *, ends: bool) -> Sequence[Result]:
        texts = [self._text(statement) for statement in statements]
        # The opening may be two statements, and their results are nobody's business.
        before = 0 if self._is_open else 1 + self._database.connections.begin.count(b";")
        if not self._is_open:
            texts.insert(0, self._database.connections.begin)
            self._is_open = True
        commits = ends and self.connection.get_autocommit()
        if commits:
            texts.append(b"COMMIT")
        results: list[Result] = []
        packets = list(_packets(texts, self._database.largest_packet))
        for number, packet in enumerate(packets, 1):
            self.is_committing = commits and number == len(packets)
            results += await self._send(packet)
        if commits:
            self._is_open = False
        elif ends:
            await self._commit()
        return results[before : before + len(statements)]

    async def _commit(self) -> None:
        # In a session that does not commit by itself, the driver learns only from its own commit
        # that the transaction is over; else its pool would throw the connection away.
        self.is_committing = True
        await self._ask(self.connection.commit())
        self._is_open = False

    def _text(self, statement: Statement) -> bytes:
        mode = self.connection.server_status
        return statement.text(backslashes=not mode & NO_BACKSLASH_ESCAPES)

    async def _send(self, texts: Sequence[bytes]) -> list[Result]:
        packet, largest = b";".join(texts), self._database.largest_packet
        try:
            if len(packet) < largest:
                return await self._ask(self._exchange(packet))
        except self.errors as error:
            if code_of(error) != TOO_LARGE:
                raise
        what = "a statement for MySQL (max_allowed_packet is its limit)"
        raise ValueTooLarge(what, len(packet), largest)

    async def _exchange(self, packet: bytes) -> list[Result]:
        # Closing the cursor would only read what is read to its end here.
        cursor = self.connection.cursor(self._cursor)
        await cursor.execute(packet)
        results = [await _result(cursor)]
        while await cursor.nextset():
            results.append(await _result(cursor))
        return results

    async def _ask(self, question: Awaitable[T]) -> T:
        """Give the server's answer, and remember whether the connection is still good."""
        # When this is cancelled, an answer is on its way to nobody.
        self._is_sound = False
        try:
            # The driver's own time-out makes a task for every read.
            async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                answer = await question
        except self.errors as error:
            self._is_sound = is_sound(error)
            raise
        self._is_sound = True
        return answer


async def _result(cursor: Any) -> Result:
    return Result(await cursor.fetchall(), cursor.rowcount, cursor.lastrowid)


def _packets(texts: Iterable[bytes], largest: int) -> Iterator[Sequence[bytes]]:
    """Give the statements in as few packets as the server takes them in."""
    packet: list[bytes] = []
    size = 0
    for text in texts:
        if packet and size + len(text) + 1 >= largest:
            yield packet
            packet, size = [], 0
        packet.append(text)
        size += len(text) + 1
    yield packet
