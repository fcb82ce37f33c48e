"""Connections to a SQLite file: opening them, running operations, waiting for locks, errors."""

import sqlite3
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeAlias, TypeVar

from perdure.clock import SystemClock
from perdure.errors import StoreCorrupted, StoreError, StoreNotOpened, StoreUnavailable
from perdure.stores._durability import Durability
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement

T = TypeVar("T")
RunRound: TypeAlias = Callable[[sqlite3.Connection, Sequence[Statement]], Sequence[Outcome]]

MINIMUM_VERSION = (3, 35, 0)

_PAUSE_SECONDS = 0.01
_CODE_MASK = 0xFF


def open_connection(
    path: str, durability: Durability, busy_timeout: timedelta
) -> sqlite3.Connection:
    """Return a connection in WAL mode that waits up to `busy_timeout` for locks."""
    if sqlite3.sqlite_version_info < MINIMUM_VERSION:
        minimum = ".".join(map(str, MINIMUM_VERSION))
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old; {minimum} is required")
    connection = sqlite3.connect(
        path,
        timeout=busy_timeout.total_seconds(),
        isolation_level=None,
        cached_statements=256,
        check_same_thread=False,
    )
    try:
        # The switch to WAL needs an exclusive lock, for which SQLite does not wait by itself.
        switch = partial(connection.execute, "PRAGMA journal_mode = WAL")
        retry_while_busy(switch, path, busy_timeout)
        connection.execute(f"PRAGMA synchronous = {durability}")
        # SQLite keeps rows to update, and pages before a trigger, in a temporary store; a file for
        # that costs more than the statement itself.
        connection.execute("PRAGMA temp_store = MEMORY")
    except BaseException:
        connection.close()
        raise
    return connection


def retry_while_busy(call: Callable[[], T], path: str, busy_timeout: timedelta) -> T:
    """Return what `call` returns, retrying while another process has locked the file."""
    clock = SystemClock()
    start = clock.monotonic()
    while True:
        try:
            return call()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            elapsed = clock.monotonic() - start
            if elapsed >= busy_timeout.total_seconds():
                raise StoreUnavailable(
                    f"{path}: another process kept the database locked for {elapsed:.1f}s; "
                    "look for a long transaction there, or increase busy_timeout"
                ) from error
        # SQLite waits by itself for some locks only.
        Event().wait(_PAUSE_SECONDS)


def execute(connection: sqlite3.Connection, statement: Statement) -> Outcome:
    """Run one statement and return its outcome."""
    cursor = connection.execute(statement.sql, statement.values)
    rows = cursor.fetchall() if cursor.description else ()
    return Outcome(rows, cursor.rowcount)


def execute_round(
    connection: sqlite3.Connection, statements: Sequence[Statement]
) -> Sequence[Outcome]:
    """Run one round of an operation, in a transaction that the caller has begun."""
    return [execute(connection, one) for one in statements]


def commit_round(
    connection: sqlite3.Connection, statements: Sequence[Statement]
) -> Sequence[Outcome]:
    """Run one round of an operation, and commit it."""
    if len(statements) == 1:
        # SQLite makes it a transaction, and Python gives up its lock once instead of three times:
        # while the event loop is busy, a thread waits for that lock after each call of SQLite.
        return execute_round(connection, statements)
    # In WAL mode, a transaction that only reads waits for no lock. What follows a granted lease
    # must not fail because another process has locked the file.
    only_reads = all(map(Statement.only_reads, statements))
    connection.execute("BEGIN" if only_reads else "BEGIN IMMEDIATE")
    try:
        outcomes = execute_round(connection, statements)
        connection.execute("COMMIT")
    except BaseException:
        rollback(connection)
        raise
    return outcomes


def drive(connection: sqlite3.Connection, verb: Verb[T], run_round: RunRound = execute_round) -> T:
    """Run all rounds of an operation on this connection and return its result."""
    try:
        statements = next(verb)
        while True:
            try:
                outcomes = run_round(connection, statements)
            except StoreUnavailable as error:
                # The operation may end with what earlier rounds have committed.
                statements = verb.throw(error)
            else:
                statements = verb.send(outcomes)
    except StopIteration as done:
        result: T = done.value
        return result


def begin(connection: sqlite3.Connection, path: str, busy_timeout: timedelta) -> None:
    """Begin a transaction that may write."""
    # IMMEDIATE, because a transaction that starts by reading cannot wait for the write lock later.
    retry_while_busy(partial(connection.execute, "BEGIN IMMEDIATE"), path, busy_timeout)


def rollback(connection: sqlite3.Connection) -> bool:
    """Roll the transaction back, if one is open; return whether the connection is still open."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        # After some disk failures, only closing the connection ends a transaction.
        connection.close()
        return False
    return True


def translate_error(error: BaseException, path: str) -> BaseException:
    """Translate a driver's error to a `StoreError`; return any other error unchanged."""
    if isinstance(error, UnicodeEncodeError | OverflowError):
        store_error = StoreError(f"{path}: a value cannot be stored: {error}")
    elif isinstance(error, sqlite3.Error):
        store_error = _as_store_error(error, path)
    else:
        return error
    store_error.__cause__ = error
    return store_error


def _as_store_error(error: sqlite3.Error, path: str) -> StoreError:
    match _code(error):
        case sqlite3.SQLITE_CANTOPEN:
            return _cannot_open(error, path)
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return StoreUnavailable(
                f"{path}: cannot be written ({error}); the file and its folder must be writable"
            )
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return StoreUnavailable(
                f"{path}: the disk failed ({error}); check its space and errors"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreUnavailable(f"{path}: locked by another process ({error}); try again")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StoreCorrupted(f"{path}: not a valid SQLite database ({error})")
        case _:
            return StoreError(f"{path}: {error}")


def _cannot_open(error: sqlite3.Error, path: str) -> StoreError:
    folder = Path(path).parent
    if not folder.exists():
        return StoreNotOpened(f"{path}: cannot be opened: there is no folder {str(folder)!r}")
    return StoreUnavailable(f"{path}: cannot be opened ({error}); its folder must be writable")


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another process has locked the file."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: sqlite3.Error) -> int:
    # The upper bits are the extended code. Errors of the sqlite3 module itself have no code.
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & _CODE_MASK
