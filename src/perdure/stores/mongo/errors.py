"""What MongoDB and its driver say, in perdure's words."""

from pymongo.errors import (
    AutoReconnect,
    ConfigurationError,
    ConnectionFailure,
    DocumentTooLarge,
    ExecutionTimeout,
    InvalidOperation,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
)

from perdure.errors import StoreClosed, StoreError, StoreUnavailable

DUPLICATE = 11000
UNAUTHORIZED = 13
_LOGIN_FAILED = 18
_AWAY = {
    64,  # not confirmed by enough members in time
    91,  # shutting down
    189,  # the primary stepped down
    10107,  # no primary any more
    11600,  # interrupted by a shutdown
    11602,  # interrupted by an election
    13435,  # no primary, and secondaries were not asked for
    13436,  # recovering
}


def is_away(error: BaseException) -> bool:
    """Tell whether the server cannot be reached just now, rather than refuses what was asked."""
    if isinstance(error, ConnectionFailure | ExecutionTimeout | WriteConcernError):
        return True
    if not isinstance(error, PyMongoError):
        return False
    code = error.code if isinstance(error, OperationFailure) else None
    return code in _AWAY or error.has_error_label("TransientTransactionError")


def is_cut(error: BaseException) -> bool:
    """Tell whether a connection ended, while the server may well answer on a new one."""
    return isinstance(error, AutoReconnect) and not isinstance(error, ServerSelectionTimeoutError)


def translated(error: PyMongoError, where: str, database: str, seconds: float) -> StoreError:
    """Give the driver's exception as one of ours, saying what to do next."""
    at = f"MongoDB at {where}"
    if isinstance(error, ServerSelectionTimeoutError):
        return StoreUnavailable(f"{at} cannot be reached, tried for {seconds:.1f}s: {error}")
    if is_away(error):
        return StoreUnavailable(f"{at} went away after {seconds:.1f}s: {error}")
    if isinstance(error, InvalidOperation) and "close" in str(error):
        return StoreClosed(f"the client for {at} was closed: {error}")
    if isinstance(error, DocumentTooLarge | ConfigurationError):
        return StoreError(f"{at} cannot do this: {error}")
    code = error.code if isinstance(error, OperationFailure) else None
    if code == _LOGIN_FAILED:
        return StoreError(f"{at} does not accept this user and password: {error}")
    if code == UNAUTHORIZED:
        return StoreError(
            f"{at} refuses: {error}. As an administrator run, for the user perdure logs in as: "
            f'db.grantRolesToUser("…", [{{role: "readWrite", db: "{database}"}}])'
        )
    return StoreError(f"{at} did not do what it was asked: {error}")
