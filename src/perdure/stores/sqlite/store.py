"""The store on a SQLite file."""

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._durability import Durability, check_durability, survives
from perdure.stores._shell import TransactionShell
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sqlite.backend import SqliteSchemaBackend
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.session import FileSession
from perdure.stores.sqlite.statements import Statements
from perdure.stores.sqlite.threads import MEMORY, Database
from perdure.stores.sqlite.transaction import Session, check_not_inside

T = TypeVar("T")


class FileBackend(SqliteSchemaBackend):
    """Runs verbs in the threads of a `Database`, which opens and migrates the file by itself."""

    def __init__(
        self, database: Database, statements: Statements, prefix: str, clock: Clock
    ) -> None:
        super().__init__(statements, prefix, lambda: to_microseconds(clock.now()))
        self._database = database

    async def open(self) -> None:
        """Do nothing: several event loops may use the store first at the same time."""

    def forget_loop(self) -> None:
        """Do nothing: the threads belong to no event loop."""

    async def close(self) -> None:
        await self._database.close()

    async def _write(
        self, verb: Callable[[], Verb[T]], *, repeatable: bool = False, inline: bool = False
    ) -> T:
        check_not_inside(self._database)
        return await self._database.write(verb, inline=inline)

    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        check_not_inside(self._database)
        return await self._database.read(verb)

    async def _session(self) -> Session:
        check_not_inside(self._database)
        return FileSession(self._database)


class SqliteStore(TransactionShell[FileBackend]):
    """Stores runs in a SQLite file; see `sqlite`."""

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
        name, statements = os.fspath(path), Statements(table)
        database = Database(
            name,
            Schema("migrations", table),
            durability=durability,
            busy_timeout=parse_duration(busy_timeout, "busy_timeout"),
        )
        in_memory = name == MEMORY
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            queues=True,
            inbox=True,
            transaction=True,
            maintenance=True,
            search=True,
            shared="process" if in_memory else "machine",
            survives="nothing" if in_memory else survives(durability),
            max_value_size=max_value_size,
        )
        backend = FileBackend(database, statements, prefix, clock)
        super().__init__(backend, f"SQLite ({name})", capabilities, any_loop=True)
        # The threads of a store that was never closed end with it.
        weakref.finalize(self, database.stop)
