"""Runs in a SQLite file: without a server, safe for many processes of one machine."""

import os
import weakref

from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._durability import Durability, check_durability, survives
from perdure.stores.sqlite.keyvalue import SqliteKeyValue
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.statements import Statements
from perdure.stores.sqlite.store import FileBackend, SqliteFileStore, SqliteStore
from perdure.stores.sqlite.threads import MEMORY, Database
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

    With `durability="full"` a completed write survives a power loss; with `"normal"` a power loss
    may lose the most recent writes. `busy_timeout` is how long to wait for another process's
    transaction. Workers notice changes by other processes within about 40 ms.

        store = sqlite("workflow.db", prefix="orders:")
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgument("path", path, 'a path, or ":memory:"')
    check_clock(clock)
    check_durability(durability)
    name = os.fspath(path)
    in_memory = name == MEMORY
    database = Database(
        name,
        Schema("migrations", table),
        durability=durability,
        busy_timeout=parse_duration(busy_timeout, "busy_timeout"),
    )
    capabilities = _capabilities(in_memory, durability, max_value_size)
    backend = FileBackend(database, Statements(table), prefix, clock)
    kind = SqliteStore if in_memory else SqliteFileStore
    store = kind(backend, f"SQLite ({name})", capabilities, any_loop=True)
    # The threads of a store that was never closed end with it.
    weakref.finalize(store, backend.stop)
    return store


def _capabilities(in_memory: bool, durability: Durability, max_value_size: int) -> Capabilities:
    return Capabilities(
        journal=True,
        lease="atomic",
        schedule=True,
        queues=True,
        inbox=True,
        transaction=True,
        transactional_enqueue=not in_memory,
        handoff=True,
        notify=not in_memory,
        maintenance=True,
        search=True,
        shared="process" if in_memory else "machine",
        survives="nothing" if in_memory else survives(durability),
        max_value_size=max_value_size,
    )
