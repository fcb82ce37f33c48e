"""Connections to a SQLite file: opened, driven, waited for, and their errors in our words."""

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Literal, TypeAlias, TypeVar

from perdure.clock import SystemClock
from perdure.errors import InvalidArgument, StoreCorrupted, StoreError, StoreUnavailable
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement

Durability: TypeAlias = Literal["full", "normal"]

T = TypeVar("T")

MINIMUM = (3, 35, 0)

_PAUSE_SECONDS = 0.01
_CODE_MASK = 0xFF


def check_durability(durability: object) -> None:
    """Raise unless this is a durability."""
    if durability not in ("full", "normal"):
        raise InvalidArgument("durability", durability, '"full" or "normal"')


def open_connection(
    path: str, durability: Durability, connect_timeout: timedelta
) -> sqlite3.Connection:
    """Give a connection in WAL mode that waits as long as `connect_timeout` for others' locks."""
    if sqlite3.sqlite_version_info < MINIMUM:
        expected = ".".join(map(str, MINIMUM))
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old: {expected} or newer is needed"
        )
    connection = sqlite3.connect(
        path,
        timeout=connect_timeout.total_seconds(),
        isolation_level=None,
        cached_statements=256,
        check_same_thread=False,
    )
    try:
        # The switch to WAL wants the file for itself and does not wait for it by itself.
        patiently(lambda: connection.execute("PRAGMA journal_mode = WAL"), path, connect_timeout)
        connection.execute(f"PRAGMA synchronous = {durability}")
        # Rows to update, and pages before a trigger: laid aside in a file, they cost more than the
        # statement itself.
        connection.execute("PRAGMA temp_store = MEMORY")
    except BaseException:
        connection.close()
        raise
    return connection


def patiently(act: Callable[[], T], path: str, connect_timeout: timedelta) -> T:
    """Give what `act` gives, trying again while another process has the file locked."""
    clock = SystemClock()
    began = clock.monotonic()
    while True:
        try:
            return act()
        except sqlite3.OperationalError as error:
            if not _is_busy(error):
                raise
            waited = clock.monotonic() - began
            if waited >= connect_timeout.total_seconds():
                raise StoreUnavailable(
                    f"{path}: another process held the database locked for {waited:.1f}s; "
                    "look for a long transaction there, or raise busy_timeout"
                ) from error
        # Not every lock is waited for inside SQLite.
        Event().wait(_PAUSE_SECONDS)


def execute(connection: sqlite3.Connection, statement: Statement) -> Outcome:
    """Give what one statement gives."""
    cursor = connection.execute(statement.sql, statement.values)
    rows = cursor.fetchall() if cursor.description else ()
    return Outcome(rows, cursor.rowcount)


def drive(connection: sqlite3.Connection, verb: Verb[T]) -> T:
    """Give what a verb gives; all of its rounds go to this connection."""
    try:
        statements = next(verb)
        while True:
            statements = verb.send([execute(connection, one) for one in statements])
    except StopIteration as done:
        answer: T = done.value
        return answer


def begin(connection: sqlite3.Connection, path: str, connect_timeout: timedelta) -> None:
    """Begin a transaction at once with the right to write."""
    # One that begins by reading could not wait for the right to write later.
    patiently(lambda: connection.execute("BEGIN IMMEDIATE"), path, connect_timeout)


def rollback(connection: sqlite3.Connection) -> None:
    """End the transaction, if one is open, as if it had not been."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def translated(error: BaseException, path: str) -> BaseException:
    """Give a driver's error in our words, and any other as it is."""
    if isinstance(error, UnicodeEncodeError | OverflowError):
        ours = StoreError(f"{path}: a value cannot be stored: {error}")
    elif isinstance(error, sqlite3.Error):
        ours = _in_our_words(error, path)
    else:
        return error
    ours.__cause__ = error
    return ours


def _in_our_words(error: sqlite3.Error, path: str) -> StoreError:
    match _code(error):
        case sqlite3.SQLITE_CANTOPEN:
            return StoreUnavailable(
                f"{path}: cannot be opened ({error}); its folder must exist and be writable"
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return StoreUnavailable(
                f"{path}: cannot be written ({error}); the file and its folder must be writable"
            )
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return StoreUnavailable(f"{path}: the disk failed ({error}); look for space and errors")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreUnavailable(f"{path}: locked by another process ({error}); try again")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StoreCorrupted(f"{path}: is no sound SQLite database ({error})")
        case _:
            return StoreError(f"{path}: {error}")


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: sqlite3.Error) -> int:
    # The upper bits hold a finer code. Errors of the module itself have none at all.
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & _CODE_MASK
