"""What MySQL, MariaDB and their driver say, in perdure's words."""

from typing import Any, Literal, TypeAlias

from perdure.errors import MissingDependency, StoreError, StoreUnavailable

Failure: TypeAlias = Literal["deadlock", "held", "away", "error"]

_NOT_SENT = {
    0,  # the driver: not connected
    2006,  # the driver found the connection closed before it wrote
}
_AWAY = _NOT_SENT | {
    1040,  # too many connections
    1047,  # a cluster's node that is not ready
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
    2002,  # these three: no server there
    2003,
    2005,
    2013,  # lost while waiting for the answer
    2055,
    3168,  # server not available
    3169,  # session killed
    4031,  # disconnected for being idle
}
_DEADLOCK = {
    1020,  # the row has changed since it was read
    1213,
}
_HELD = {
    1205,  # waited too long for a lock
}
_REFUSED = {
    1062,  # a row of this key is there already
    3819,  # a CHECK constraint: MySQL
    4025,  # a CHECK constraint: MariaDB
}
_DENIED = {1044, 1142, 1143, 1227, 1370}
_UNWELCOME = {1045, 1130, 1698}

NO_SUCH_TABLE = 1146
TOO_LARGE = 1153
_NO_SUCH_DATABASE = 1049
_ROWS_NOT_LOGGED = 1665
_SERVERS_OWN = range(1000, 2000)
_SERVERS_LATER = range(3000, 10_000)


class Refused(StoreError):
    """A constraint did not take a row, and nothing of the statement was written."""


def load_driver() -> Any:
    """Give the module asyncmy, or raise `MissingDependency`."""
    try:
        import asyncmy
    except ImportError:
        raise MissingDependency("asyncmy", "mysql") from None
    return asyncmy


def errors_of(driver: Any) -> tuple[type[Exception], ...]:
    """Give the exceptions in which the driver and the network speak."""
    return (driver.MySQLError, OSError, TimeoutError)


def code_of(error: BaseException) -> int | None:
    """Give the number of an error; None when the driver gives it none."""
    code = error.args[0] if error.args else None
    return code if isinstance(code, int) and not isinstance(error, OSError) else None


def failure_of(error: BaseException) -> Failure:
    """Tell what became of a statement: it met another one and would do well when sent again, it
    waited in vain for a row, the server cannot be reached just now, or it refuses."""
    code = code_of(error)
    if code is None or code in _AWAY:
        return "away"
    if code in _DEADLOCK:
        return "deadlock"
    return "held" if code in _HELD else "error"


def was_not_sent(error: BaseException) -> bool:
    """Tell whether the server cannot have heard of what was asked."""
    return code_of(error) in _NOT_SENT


def is_sound(error: BaseException) -> bool:
    """Tell whether the connection can go on being used after this error."""
    code = code_of(error)
    if code is None or code in _AWAY or code == TOO_LARGE:
        return False
    return code in _SERVERS_OWN or code in _SERVERS_LATER


def translated(error: BaseException, where: str) -> StoreError:
    """Give the driver's exception as one of ours, saying what to do next."""
    at, words, code = f"MySQL at {where}", _words(error), code_of(error)
    match failure_of(error):
        case "away":
            return StoreUnavailable(f"{at} went away: {words}")
        case "deadlock" | "held":
            return StoreUnavailable(f"{at} is held up by other transactions: {words}")
        case "error":
            kind = Refused if code in _REFUSED else StoreError
            return kind(f"{at} {_advice(code, words)}")


def _advice(code: int | None, words: str) -> str:
    if code in _DENIED:
        return (
            f"refuses: {words}. As an administrator run, for the database and the user in the URL: "
            "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, INDEX ON `database`.* TO 'user'"
        )
    if code in _UNWELCOME:
        return f"does not let this user in: {words}. Look at the user and password in the URL"
    if code == _NO_SUCH_DATABASE:
        return f"has no such database: {words}. Create it: CREATE DATABASE `…`"
    if code == _ROWS_NOT_LOGGED:
        return f"logs statements, not rows: {words}. Set binlog_format to ROW or MIXED"
    return f"did not do what it was asked: {words}"


def _words(error: BaseException) -> str:
    said = error.args[1] if len(error.args) > 1 else str(error)
    return str(said) or type(error).__name__
