"""Transactions in few round trips, with the driver's errors translated and conflicts retried."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from perdure.errors import StoreError, ValueTooLarge
from perdure.stores._mysql_connections import Connections
from perdure.stores._mysql_errors import (
    TOO_LARGE,
    code_of,
    errors_of,
    is_away,
    is_conflict,
    is_sound,
    load_driver,
    translated,
    was_not_sent,
)
from perdure.stores._mysql_literals import NO_BACKSLASH_ESCAPES, Statement

T = TypeVar("T")

_CONFLICTS = 10
_LOSSES = 2
_COMMIT = b"COMMIT"
_ROLLBACK = b"ROLLBACK"
# What every server takes; the real limit is asked for when the store is set up.
_SMALLEST_PACKET = 1024 * 1024


class Result(NamedTuple):
    """What one statement gave: its rows, and how many it wrote.

    The count is to be trusted for INSERT and DELETE only. How many rows an UPDATE counts depends
    on a flag of the connection.
    """

    rows: Sequence[Any]
    count: int


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
        conflicts = losses = 0
        while True:
            transaction = await self.open()
            try:
                return await work(transaction)
            except self.errors as error:
                conflicts += is_conflict(error)
                losses += is_away(error)
                safe = repeatable or was_not_sent(error) or not transaction.is_committing
                again = is_conflict(error) or (is_away(error) and safe)
                if not again or conflicts > _CONFLICTS or losses > _LOSSES:
                    raise translated(error, self.connections.where) from error
            finally:
                await transaction.end()

    async def run(self, *statements: Statement, repeatable: bool = True) -> Sequence[Result]:
        """Give what the statements give, which are committed together."""
        return await self.transact(
            lambda transaction: transaction.finish(*statements), repeatable=repeatable
        )

    async def run_alone(self, statement: Statement) -> Result:
        """Give what one statement gives, which is committed, without a word more than it needs."""
        return await self.transact(lambda transaction: transaction.alone(statement))

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
        return await self._run(statements)

    async def finish(self, *statements: Statement) -> Sequence[Result]:
        """Give what the statements give, and commit."""
        return await self._run(statements, _COMMIT)

    async def alone(self, statement: Statement) -> Result:
        """Give what one statement gives, committed by itself; only outside a transaction."""
        if not self._database.connections.autocommit:
            [result] = await self.finish(statement)
            return result
        self.is_committing = True
        return (await self._send([self._text(statement)]))[-1]

    async def end(self) -> None:
        """Roll back what was not finished, and give the connection back."""
        try:
            if self._is_open and self._is_sound:
                self._is_sound = False
                await self._send([_ROLLBACK])
                self._is_sound = True
        except self.errors:
            pass  # the server rolls back when it finds the connection closed
        finally:
            await self._database.connections.give_back(self.connection, sound=self._is_sound)

    def check_open(self) -> None:
        """Raise when something ended the transaction in between."""
        if not self.connection.get_transaction_status():
            self._is_open = False
            raise StoreError(
                "the transaction was ended inside it: by commit() or rollback(), or by a statement "
                "that commits, as CREATE TABLE does; only the store may end it"
            )

    async def _run(
        self, statements: Sequence[Statement], last: bytes | None = None
    ) -> Sequence[Result]:
        texts = [self._text(statement) for statement in statements]
        # The opening may be two statements, and their results are nobody's business.
        before = 0 if self._is_open else 1 + self._database.connections.begin.count(b";")
        if not self._is_open:
            texts.insert(0, self._database.connections.begin)
            self._is_open = True
        if last is not None:
            texts.append(last)
        results = await self._send_in_packets(texts, ends=last is not None)
        if last is not None:
            self._is_open = False
        return results[before : before + len(statements)]

    async def _send_in_packets(self, texts: Sequence[bytes], *, ends: bool) -> list[Result]:
        results: list[Result] = []
        packets = list(_packets(texts, self._database.largest_packet))
        for number, packet in enumerate(packets, 1):
            self.is_committing = ends and number == len(packets)
            results += await self._send(packet)
        return results

    def _text(self, statement: Statement) -> bytes:
        mode = self.connection.server_status
        return statement.text(backslashes=not mode & NO_BACKSLASH_ESCAPES)

    async def _send(self, texts: Sequence[bytes]) -> list[Result]:
        packet = b";".join(texts)
        if len(packet) >= self._database.largest_packet:
            raise _too_large(packet, self._database.largest_packet)
        sound, self._is_sound = self._is_sound, False
        try:
            # The driver's own time-out makes a task for every read.
            async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                results = await self._exchange(packet)
        except self.errors as error:
            self._is_sound = sound and is_sound(error)
            if code_of(error) == TOO_LARGE:
                raise _too_large(packet, self._database.largest_packet) from error
            raise
        self._is_sound = sound
        return results

    async def _exchange(self, packet: bytes) -> list[Result]:
        async with self.connection.cursor(self._cursor) as cursor:
            await cursor.execute(packet)
            results = [Result(await cursor.fetchall(), cursor.rowcount)]
            while await cursor.nextset():
                results.append(Result(await cursor.fetchall(), cursor.rowcount))
        return results


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


def _too_large(packet: bytes, limit: int) -> ValueTooLarge:
    what = "a statement for MySQL (max_allowed_packet is its limit)"
    return ValueTooLarge(what, len(packet), limit)
