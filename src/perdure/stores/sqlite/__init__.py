"""Runs in a SQLite file: without a server, safe for many processes of one machine."""

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.store import MAX_VALUE_SIZE
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sqlite.connection import Durability, check_durability
from perdure.stores.sqlite.keyvalue import SqliteSchemaKeyValue
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.sqlite.threads import Database
from perdure.stores.sqlite.transaction import Transaction

__all__ = ["SqliteKeyValue", "SqliteStore", "Transaction", "sqlite"]

T = TypeVar("T")


def sqlite(
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    table: str = "perdure_runs",
    durability: Durability = "full",
    busy_timeout: Duration = 60,
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
) -> SqliteStore:
    """Return a store on a SQLite file, created on first use; `":memory:"` is for tests.

    With `durability="full"` a write that returned survives a power cut; with `"normal"` a power
    cut may lose the most recent writes. `busy_timeout` is how long to wait for another process's
    transaction.

        store = sqlite("workflow.db", prefix="orders:")
    """
    return SqliteStore(
        path,
        prefix=prefix,
        table=table,
        durability=durability,
        busy_timeout=busy_timeout,
        clock=clock,
        max_value_size=max_value_size,
    )


class SqliteKeyValue(SqliteSchemaKeyValue):
    """Stores strings under keys in a SQLite file, for state, caches and `keyvalue`.

    persistence = StatePersistence(SqliteKeyValue("state.db"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        table: str = "perdure_keyvalue",
        durability: Durability = "full",
        busy_timeout: Duration = 60,
        clock: Clock = SystemClock(),
    ) -> None:
        check_durability(durability)
        super().__init__(table, lambda: to_microseconds(clock.now()))
        self._database = Database(
            os.fspath(path),
            Schema("migrations_keyvalue", table),
            durability=durability,
            busy_timeout=parse_duration(busy_timeout, "busy_timeout"),
        )
        weakref.finalize(self, self._database.stop)

    async def close(self) -> None:
        """Finish the calls in progress and close the file."""
        await self._database.close()

    async def _write(self, verb: Callable[[], Verb[T]]) -> T:
        return await self._database.write(verb)

    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        return await self._database.read(verb)
