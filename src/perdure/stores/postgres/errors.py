"""Translate the errors of PostgreSQL, PgBouncer and asyncpg."""

from typing import Any

from perdure.errors import MissingDependency, StoreError, StoreUnavailable

_UNAVAILABLE = {
    "25006",  # read-only: this server is a standby now
    "53300",  # too many connections
    "57P01",  # shut down by an administrator
    "57P02",  # shut down by a crash
    "57P03",  # starting up or shutting down
}
_CONFLICT = {
    "40001",  # could not serialize
    "40P01",  # deadlock
    "XX000",  # a catalog row changed while it was read, as when tables are being created
}
_NO_PREPARED_STATEMENTS = {
    "26000",  # the prepared statement does not exist
    "42P05",  # the prepared statement already exists
    "08P01",  # PgBouncer: unsupported startup parameter
}
_UNSTORABLE = {
    "22021",  # text contains NUL
    "22P02",  # jsonb: invalid JSON
    "22P05",  # jsonb: contains NUL or a lone surrogate
}
_ACCESS_DENIED = "42501"
_DUPLICATE = "23505"


class DuplicateRow(StoreError):
    """A row with this key already exists."""


def load_driver() -> Any:
    """Return the module asyncpg, or raise `MissingDependency`."""
    try:
        import asyncpg
    except ImportError:
        raise MissingDependency("asyncpg", "postgres") from None
    return asyncpg


def driver_errors() -> tuple[type[BaseException], ...]:
    """Return the classes of all errors that the driver and the network raise."""
    driver = load_driver()
    return (
        driver.PostgresError,
        driver.InterfaceError,
        driver.InternalClientError,
        OSError,
        TimeoutError,
    )


def is_unavailable(error: BaseException) -> bool:
    """Return whether the server is currently unreachable, rather than rejecting the request."""
    code = _code(error)
    if not code:
        return isinstance(error, OSError | TimeoutError) or _is_closed_connection(error)
    return code in _UNAVAILABLE or (code.startswith("08") and code not in _NO_PREPARED_STATEMENTS)


def is_conflict(error: BaseException) -> bool:
    """Return whether the statement conflicted with another one, and can be sent again."""
    return _code(error) in _CONFLICT


def translate(error: BaseException, location: str, table: str, role: str) -> StoreError:
    """Return the driver's exception as a `StoreError` that says what to do next."""
    at, message, code = f"PostgreSQL at {location}", describe(error), _code(error)
    if is_unavailable(error):
        return StoreUnavailable(f"{at} is unavailable: {message}")
    if code == _DUPLICATE:
        return DuplicateRow(f"{at}: {message}")
    if code in _NO_PREPARED_STATEMENTS:
        hint = "if it is behind a pooler, pass prepared_statements=False"
        return StoreError(f"{at} lost a prepared statement: {message}; {hint}")
    if code == _ACCESS_DENIED:
        schema = table.rpartition(".")[0] or "public"
        return StoreError(
            f"{at} denied permission: {message}. As an administrator run: "
            f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}; GRANT SELECT, INSERT, UPDATE, "
            f"DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};"
        )
    if code in _UNSTORABLE:
        hint = "jsonb and text cannot contain NUL or lone surrogates; perdure's own tables can"
        return StoreError(f"{at} cannot store this value: {message}; {hint}")
    return StoreError(f"{at} failed: {message}")


def _code(error: BaseException) -> str:
    code = getattr(error, "sqlstate", None)
    return code if isinstance(code, str) else ""


def _is_closed_connection(error: BaseException) -> bool:
    # The client's own errors have no code: only their class and message distinguish a lost
    # connection from a wrong call. InternalClientError is raised right after a server announced
    # that it is shutting down.
    name = type(error).__name__
    return name == "InternalClientError" or (name == "InterfaceError" and "closed" in str(error))


def describe(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
