"""What PostgreSQL and its driver say, in perdure's words."""

from typing import Any

from perdure.errors import MissingDependency, StoreError, StoreUnavailable

_AWAY = {
    "25006",  # read-only: this server is a standby now
    "53300",  # too many connections
    "57P01",  # shut down by an administrator
    "57P02",  # shut down by a crash
    "57P03",  # starting up or shutting down
}
_CONFLICT = {
    "40001",  # could not serialize
    "40P01",  # deadlock
    "XX000",  # a catalogue row changed while it was read, as while tables are being created
}
_UNPREPARED = {
    "26000",  # no such prepared statement
    "42P05",  # a prepared statement of this name is there
    "08P01",  # PgBouncer: a startup parameter it does not know
}
_UNSTORABLE = {
    "22021",  # text holds a NUL
    "22P02",  # jsonb: not JSON as it wants it
    "22P05",  # jsonb: a NUL or a lone surrogate
}
_DENIED = "42501"
_DOUBLE = "23505"


class Doubled(StoreError):
    """A row of this key is there already."""


def load_driver() -> Any:
    """Give the module asyncpg, or raise `MissingDependency`."""
    try:
        import asyncpg
    except ImportError:
        raise MissingDependency("asyncpg", "postgres") from None
    return asyncpg


def driver_errors() -> tuple[type[BaseException], ...]:
    """Give the classes of all that may go wrong on the way to the server and back."""
    driver = load_driver()
    return (
        driver.PostgresError,
        driver.InterfaceError,
        driver.InternalClientError,
        OSError,
        TimeoutError,
    )


def is_away(error: BaseException) -> bool:
    """Tell whether the server cannot be reached just now, rather than refuses what was asked."""
    code = _code(error)
    if not code:
        return isinstance(error, OSError | TimeoutError) or _is_closed_connection(error)
    return code in _AWAY or (code.startswith("08") and code not in _UNPREPARED)


def is_conflict(error: BaseException) -> bool:
    """Tell whether the statement met another one, and would do well when sent again."""
    return _code(error) in _CONFLICT


def translated(error: BaseException, where: str, table: str, role: str) -> StoreError:
    """Give the driver's exception as one of ours, saying what to do next."""
    at = f"PostgreSQL at {where}"
    code = _code(error)
    if is_away(error):
        return StoreUnavailable(f"{at} went away: {in_words(error)}")
    if code == _DOUBLE:
        return Doubled(f"{at}: {in_words(error)}")
    if code in _UNPREPARED:
        hint = "a pooler stands in between: pass prepared_statements=False"
        return StoreError(f"{at} forgot a prepared statement, {hint} ({in_words(error)})")
    if code == _DENIED:
        schema = table.rpartition(".")[0] or "public"
        return StoreError(
            f"{at} refuses: {in_words(error)}. As an administrator run: "
            f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}; GRANT SELECT, INSERT, UPDATE, "
            f"DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};"
        )
    if code in _UNSTORABLE:
        hint = "jsonb and text hold no NUL and no lone surrogate; perdure's own tables take both"
        return StoreError(f"{at} cannot keep this value: {in_words(error)}; {hint}")
    return StoreError(f"{at} did not do what it was asked: {in_words(error)}")


def _code(error: BaseException) -> str:
    code = getattr(error, "sqlstate", None)
    return code if isinstance(code, str) else ""


def _is_closed_connection(error: BaseException) -> bool:
    # A client's own error has no code: only its name and words tell a lost connection from a
    # wrong call. The internal one comes when a server that dies has just said so.
    name = type(error).__name__
    return name == "InternalClientError" or (name == "InterfaceError" and "closed" in str(error))


def in_words(error: BaseException) -> str:
    """Give the first line of what an exception says, or else its name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
