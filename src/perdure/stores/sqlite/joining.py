"""Run operations in the caller's transaction, on the caller's own connection to the file."""

import os
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from perdure.errors import StoreError
from perdure.stores._joining import no_transaction, unsuitable_connection
from perdure.stores.sqlite.connection import translate_error
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement
from perdure.stores.sqlite.threads import Database
from perdure.stores.sqlite.transaction import Transaction

T = TypeVar("T")
Execute: TypeAlias = Callable[[Statement], Awaitable[Outcome]]

_EXPECTED = (
    "a connection of sqlite3 or aiosqlite, or one of SQLAlchemy on aiosqlite, or what "
    "step.transaction passes"
)
_FILES = Statement("PRAGMA database_list", ())
_TABLE = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = :table"


async def join(connection: Any, database: Database, table: str, *, in_transaction: bool) -> Execute:
    """Return a function that executes statements in the open transaction of a connection."""
    if isinstance(connection, Transaction):
        return await _join_own(connection, database)
    execute = _executor(connection)
    if not connection.in_transaction:
        # Python's sqlite3 begins transactions itself before a write. We begin this one, because
        # nothing has been written in SQLAlchemy's transaction yet.
        if not in_transaction or connection.isolation_level is None:
            raise no_transaction(connection)
        # IMMEDIATE, because a transaction that starts by reading cannot wait for the write lock
        # later.
        await execute(Statement("BEGIN IMMEDIATE", ()))
    main = next(row[2] for row in (await execute(_FILES)).rows if row[1] == "main")
    if not _is_same_file(main, database.path):
        raise unsuitable_connection(connection, f"a connection to the store's file {database.path}")
    if not database.is_ready:
        await _check_tables(execute, database.path, table)
    return execute


async def _check_tables(execute: Execute, path: str, table: str) -> None:
    """Raise if the store has not been used yet: the caller may already have locked the file."""
    [(tables,)] = (await execute(Statement(_TABLE, {"table": table}))).rows
    if not tables:
        raise StoreError(
            f"{path} has no table {table!r} yet; use the store once before the transaction begins, "
            "for example await client.list_runs(limit=1)"
        )


async def drive_in(execute: Execute, verb: Verb[T], path: str) -> T:
    """Run all rounds of an operation and return its result."""
    try:
        statements = next(verb)
        while True:
            statements = verb.send([await execute(one) for one in statements])
    except StopIteration as done:
        result: T = done.value
        return result
    except sqlite3.Error as error:
        raise translate_error(error, path) from error


async def _join_own(transaction: Transaction, database: Database) -> Execute:
    session = transaction._session
    if session.target is not database:
        raise unsuitable_connection(transaction, "a transaction of the same store")

    async def execute(statement: Statement) -> Outcome:
        return await session.execute(statement.sql, statement.values)

    return execute


def _is_same_file(file: str, path: str) -> bool:
    return bool(file) and os.path.realpath(file) == os.path.realpath(path)


def _executor(connection: Any) -> Execute:
    if isinstance(connection, sqlite3.Connection):
        return _plain(connection)
    aiosqlite = sys.modules.get("aiosqlite")
    if aiosqlite is None or not isinstance(connection, aiosqlite.Connection):
        raise unsuitable_connection(connection, _EXPECTED)
    return _run_in_thread(connection)


def _plain(connection: sqlite3.Connection) -> Execute:
    async def execute(statement: Statement) -> Outcome:
        cursor = connection.cursor()
        # The user's row factory may return anything.
        cursor.row_factory = None
        cursor.execute(statement.sql, statement.values)
        rows = cursor.fetchall() if cursor.description else ()
        return Outcome(rows, cursor.rowcount)

    return execute


def _run_in_thread(connection: Any) -> Execute:
    async def execute(statement: Statement) -> Outcome:
        async with connection.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(statement.sql, statement.values)
            rows = await cursor.fetchall() if cursor.description else ()
            return Outcome(list(rows), cursor.rowcount)

    return execute
