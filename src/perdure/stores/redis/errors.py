"""Translate the errors of Redis and its driver."""

from typing import Any

from perdure.errors import MissingDependency, StoreError, StoreUnavailable


class NotSent(Exception):
    """No connection was available: nothing was sent to the server."""


def load_driver() -> Any:
    """Return the module redis.asyncio, or raise `MissingDependency`."""
    try:
        import redis.asyncio
    except ImportError:
        raise MissingDependency("redis", "redis") from None
    return redis.asyncio


def load_exceptions() -> Any:
    """Return the module redis.exceptions, or raise `MissingDependency`."""
    load_driver()
    import redis.exceptions

    return redis.exceptions


def driver_errors() -> tuple[type[Exception], ...]:
    """Return all errors that the driver may raise."""
    redis = load_exceptions()
    return (redis.RedisError, redis.RedisClusterException, NotSent, OSError, TimeoutError)


def is_unavailable(error: BaseException) -> bool:
    """Return whether the server is currently unavailable, rather than refusing the request."""
    redis = load_exceptions()
    if isinstance(error, redis.AuthenticationError | redis.AuthorizationError):
        return False
    # A slot is moving to another node, and this run's keys are on both.
    is_moving = isinstance(error, redis.ResponseError) and "non local key" in str(error)
    return (
        is_moving
        or is_not_executed(error)
        or isinstance(
            error,
            redis.ConnectionError
            | redis.TimeoutError
            | redis.ReadOnlyError
            | redis.ClusterError
            | redis.TryAgainError
            | OSError
            | TimeoutError,
        )
    )


def is_not_executed(error: BaseException) -> bool:
    """Return whether the server is unavailable and certainly did not execute the command."""
    redis = load_exceptions()
    return isinstance(
        error,
        NotSent
        | redis.BusyLoadingError
        | redis.MaxConnectionsError
        | redis.ClusterDownError
        | redis.RedisClusterException,
    )


def translate(error: BaseException, location: str, seconds: float = 0.0) -> StoreError:
    """Return the driver's error as a `StoreError` that says what to do next."""
    redis = load_exceptions()
    at = f"Redis at {location}"
    message = str(error) or type(error).__name__
    if is_unavailable(error):
        return StoreUnavailable(f"{at} is unavailable, tried for {seconds:.1f}s: {message}")
    if isinstance(error, redis.AuthenticationError | redis.AuthorizationError):
        return StoreError(f"{at} does not accept this user and password: {message}")
    # A command inside a script is rejected with another error.
    if isinstance(error, redis.NoPermissionError) or "user executing the script can't" in message:
        return StoreError(
            f"{at} denies permission: {message}. As an administrator, run for perdure's user and "
            "namespace: ACL SETUSER … ~perdure:* &perdure:* +@read +@write +@scripting "
            "+@connection +@pubsub +time +info +config|get"
        )
    if isinstance(error, redis.AskError):
        hint = "this is a cluster: use a redis+cluster:// URL or pass cluster=True"
        return StoreError(f"{at} has this run on another node; {hint} ({message})")
    if isinstance(error, redis.OutOfMemoryError):
        hint = "prune() finished runs, or raise the server's maxmemory"
        return StoreError(f"{at} is out of memory; {hint} ({message})")
    return StoreError(f"{at} failed: {message}")
