"""Translate the errors of MongoDB and its driver."""

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

DUPLICATE_KEY = 11000
UNAUTHORIZED = 13
NAMESPACE_NOT_FOUND = 26
INDEX_NOT_FOUND = 27
WRITE_CONFLICT = 112
_AUTHENTICATION_FAILED = 18
_UNAVAILABLE = {
    64,  # not confirmed by enough members in time
    91,  # shutting down
    189,  # the primary stepped down
    10107,  # no longer the primary
    11600,  # interrupted by a shutdown
    11602,  # interrupted by an election
    13435,  # not the primary, and the client does not read from secondaries
    13436,  # recovering
}


def is_unavailable(error: BaseException) -> bool:
    """Return whether the server is currently unavailable, rather than refusing the request."""
    if isinstance(error, ConnectionFailure | ExecutionTimeout | WriteConcernError):
        return True
    if not isinstance(error, PyMongoError):
        return False
    code = error.code if isinstance(error, OperationFailure) else None
    return code in _UNAVAILABLE or error.has_error_label("TransientTransactionError")


def is_connection_lost(error: BaseException) -> bool:
    """Return whether a connection was lost, while the server may answer on a new one."""
    return isinstance(error, AutoReconnect) and not isinstance(error, ServerSelectionTimeoutError)


def translate(error: PyMongoError, location: str, database: str, seconds: float) -> StoreError:
    """Return the driver's error as a `StoreError` that says what to do next."""
    at = f"MongoDB at {location}"
    if isinstance(error, ServerSelectionTimeoutError):
        # Without the driver's settings and its view of the cluster, which follow.
        reason = str(error).partition(" (configured timeouts")[0].partition(", Timeout:")[0]
        return StoreUnavailable(f"{at} is unavailable, tried for {seconds:.1f}s: {reason}")
    if is_unavailable(error):
        return StoreUnavailable(f"{at} became unavailable after {seconds:.1f}s: {error}")
    if isinstance(error, InvalidOperation) and "close" in str(error):
        return StoreClosed(f"the client for {at} was closed: {error}")
    if isinstance(error, DocumentTooLarge | ConfigurationError):
        return StoreError(f"{at} cannot do this: {error}")
    code = error.code if isinstance(error, OperationFailure) else None
    if code == _AUTHENTICATION_FAILED:
        return StoreError(f"{at} does not accept this user and password: {error}")
    if code == UNAUTHORIZED:
        return StoreError(
            f"{at} denies permission: {error}. As an administrator, run for perdure's user: "
            f'db.grantRolesToUser("…", [{{role: "readWrite", db: "{database}"}}])'
        )
    return StoreError(f"{at} failed: {error}")
