"""Runs in a SQLite file: without a server, safe for many processes of one machine."""

import os

from perdure.clock import Clock, Duration, SystemClock
from perdure.store import MAX_VALUE_SIZE
from perdure.stores._durability import Durability
from perdure.stores.sqlite.keyvalue import SqliteKeyValue
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.sqlite.transaction import Transaction

__all__ = ["SqliteKeyValue", "SqliteStore", "Transaction", "sqlite"]


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
