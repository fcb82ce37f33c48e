"""Translate the errors of MySQL, MariaDB and asyncmy."""

from typing import Any, Literal, TypeAlias

from perdure.errors import MissingDependency, StoreError, StoreUnavailable

Failure: TypeAlias = Literal["deadlock", "lock timeout", "unavailable", "error"]

_NOT_SENT = {
    0,  # the driver: not connected
    2006,  # the driver found the connection closed before it wrote
}
_UNAVAILABLE = _NOT_SENT | {
    1040,  # too many connections
    1047,  # a node of a cluster that is not ready
    1053,  # shutting down
    1152,  # connection aborted
    1158,  # these four: the network failed in the middle of a packet
    1159,
    1160,
    1161,
    1184,  # new connection aborted
    1203,  # too many connections of this user
    1290,  # read-only: this server is a replica now
    1836,  # read-only mode
    1927,  # connection killed
    2002,  # these three: no server at this address
    2003,
    2005,
    2013,  # lost while waiting for the reply
    2055,
    3168,  # server not available
    3169,  # session killed
    4031,  # disconnected because it was idle
}
_DEADLOCK = {
    1020,  # the row has changed since it was read
    1213,
}
_LOCK_TIMEOUT = {
    1205,
}
_CONSTRAINT = {
    1062,  # duplicate key
    3819,  # CHECK constraint: MySQL
    4025,  # CHECK constraint: MariaDB
}
_ACCESS_DENIED = {1044, 1142, 1143, 1227, 1370}
_LOGIN_REFUSED = {1045, 1130, 1698}

NO_SUCH_COLUMN = 1054
NO_SUCH_TABLE = 1146
PACKET_TOO_LARGE = 1153
_NO_SUCH_DATABASE = 1049
_BINLOG_FORMAT = 1665
_SERVER_ERRORS = (range(1000, 2000), range(3000, 10_000))


class ConstraintViolation(StoreError):
    """A constraint rejected a row, and the statement wrote nothing."""


def load_driver() -> Any:
    """Return the module asyncmy, or raise `MissingDependency`."""
    try:
        import asyncmy
    except ImportError:
        raise MissingDependency("asyncmy", "mysql") from None
    return asyncmy


def driver_errors() -> tuple[type[Exception], ...]:
    """Return the classes of all errors that the driver and the network raise."""
    return (load_driver().MySQLError, OSError, TimeoutError)


def code_of(error: BaseException) -> int | None:
    """Return the error code, or `None` if the driver sets none."""
    code = error.args[0] if error.args else None
    return code if isinstance(code, int) and not isinstance(error, OSError) else None


def failure_of(error: BaseException) -> Failure:
    """Return why a statement failed.

    It conflicted with another one and can be sent again, it waited too long for a lock, the server
    is currently unreachable, or the server rejected it.
    """
    code = code_of(error)
    if code is None or code in _UNAVAILABLE:
        return "unavailable"
    if code in _DEADLOCK:
        return "deadlock"
    return "lock timeout" if code in _LOCK_TIMEOUT else "error"


def was_not_sent(error: BaseException) -> bool:
    """Return whether the server cannot have received the request."""
    return code_of(error) in _NOT_SENT


def is_reusable_after(error: BaseException) -> bool:
    """Return whether the connection can still be used after this error."""
    code = code_of(error)
    if code is None or code in _UNAVAILABLE or code == PACKET_TOO_LARGE:
        return False
    return any(code in codes for codes in _SERVER_ERRORS)


def translate(error: BaseException, location: str) -> StoreError:
    """Return the driver's exception as a `StoreError` that says what to do next."""
    at, message, code = f"MySQL at {location}", _message(error), code_of(error)
    match failure_of(error):
        case "unavailable":
            return StoreUnavailable(f"{at} is unavailable: {message}")
        case "deadlock" | "lock timeout":
            return StoreUnavailable(f"{at} is blocked by other transactions: {message}")
        case "error":
            error_class = ConstraintViolation if code in _CONSTRAINT else StoreError
            return error_class(f"{at} {_advice(code, message)}")


def _advice(code: int | None, message: str) -> str:
    if code in _ACCESS_DENIED:
        return (
            f"denied permission: {message}. As an administrator run, for the database and the user "
            "in the URL: GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, INDEX "
            "ON `database`.* TO 'user'"
        )
    if code in _LOGIN_REFUSED:
        return f"refused the login: {message}. Check the user and password in the URL"
    if code == _NO_SUCH_DATABASE:
        return f"does not have this database: {message}. Create it: CREATE DATABASE `…`"
    if code == _BINLOG_FORMAT:
        return f"logs statements instead of rows: {message}. Set binlog_format to ROW or MIXED"
    return f"failed: {message}"


def _message(error: BaseException) -> str:
    message = error.args[1] if len(error.args) > 1 else str(error)
    return str(message) or type(error).__name__
