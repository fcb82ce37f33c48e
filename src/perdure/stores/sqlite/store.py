"""The store on a SQLite file."""

import os
import weakref
from collections.abc import Callable
from typing import Literal, TypeVar

from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sqlite.connection import Durability, check_durability
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.schema_store import SqliteSchemaStore
from perdure.stores.sqlite.session import FileSession
from perdure.stores.sqlite.statements import Tables
from perdure.stores.sqlite.threads import MEMORY, Database
from perdure.stores.sqlite.transaction import Session, check_outside

T = TypeVar("T")


class SqliteStore(SqliteSchemaStore):
    """Keeps runs in a SQLite file; see `sqlite`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str = "",
        table: str = "perdure_runs",
        durability: Durability = "full",
        busy_timeout: Duration = 60,
        clock: Clock = SystemClock(),
        max_value_size: int = MAX_VALUE_SIZE,
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidArgument("path", path, 'a path, or ":memory:"')
        check_clock(clock)
        check_durability(durability)
        name = os.fspath(path)
        in_memory = name == MEMORY
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            transaction=True,
            maintenance=True,
            shared="process" if in_memory else "machine",
            survives=_survives(durability, in_memory),
            max_value_size=max_value_size,
        )
        tables = Tables(table)
        super().__init__(tables, prefix, capabilities, lambda: to_microseconds(clock.now()))
        self._database = Database(
            name,
            Schema("migrations", tables.name),
            durability=durability,
            connect_timeout=parse_duration(busy_timeout, "busy_timeout"),
        )
        # A store that nobody closed lets its threads go with it.
        weakref.finalize(self, self._database.stop)

    async def close(self) -> None:
        """Finish what was asked, and close the file."""
        await self._database.close()

    async def _write(
        self, verb: Callable[[], Verb[T]], *, repeatable: bool = False, lone: bool = False
    ) -> T:
        check_outside(self._database)
        return await self._database.write(verb, lone=lone)

    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        check_outside(self._database)
        return await self._database.read(verb)

    async def _session(self) -> Session:
        check_outside(self._database)
        return FileSession(self._database)


def _survives(
    durability: Durability, in_memory: bool
) -> Literal["nothing", "process_crash", "power_loss"]:
    if in_memory:
        return "nothing"
    return "power_loss" if durability == "full" else "process_crash"
