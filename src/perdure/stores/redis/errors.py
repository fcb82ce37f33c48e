"""What Redis and its driver say, in perdure's words."""

from typing import Any

from perdure.errors import MissingDependency, StoreError, StoreUnavailable


class NotSent(Exception):
    """No connection was to be had: nothing was asked of the server."""


def load_driver() -> Any:
    """Give the module redis.asyncio, or raise `MissingDependency`."""
    try:
        import redis.asyncio
    except ImportError:
        raise MissingDependency("redis", "redis") from None
    return redis.asyncio


def load_exceptions() -> Any:
    """Give the module redis.exceptions, or raise `MissingDependency`."""
    try:
        import redis.exceptions
    except ImportError:
        raise MissingDependency("redis", "redis") from None
    return redis.exceptions


def driver_errors() -> tuple[type[Exception], ...]:
    """Give all that may come out of the driver."""
    redis = load_exceptions()
    return (redis.RedisError, redis.RedisClusterException, NotSent, OSError, TimeoutError)


def is_away(error: BaseException) -> bool:
    """Tell whether the server cannot be reached just now, rather than refuses what was asked."""
    redis = load_exceptions()
    if isinstance(error, redis.AuthenticationError | redis.AuthorizationError):
        return False
    # A slot is moving to another node, and this run's keys are on both.
    is_moving = isinstance(error, redis.ResponseError) and "non local key" in str(error)
    return (
        is_moving
        or is_idle(error)
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


def is_idle(error: BaseException) -> bool:
    """Tell whether the server is away and has certainly done nothing of what was asked."""
    redis = load_exceptions()
    return isinstance(
        error,
        NotSent
        | redis.BusyLoadingError
        | redis.MaxConnectionsError
        | redis.ClusterDownError
        | redis.RedisClusterException,
    )


def translated(error: BaseException, where: str, tried: float = 0.0) -> StoreError:
    """Give the driver's exception as one of ours, saying what to do next."""
    redis = load_exceptions()
    at = f"Redis at {where}"
    words = str(error) or type(error).__name__
    if is_away(error):
        return StoreUnavailable(f"{at} is away, tried for {tried:.1f}s: {words}")
    if isinstance(error, redis.AuthenticationError | redis.AuthorizationError):
        return StoreError(f"{at} does not let this user in: {words}")
    # A script's own commands are refused in other words.
    if isinstance(error, redis.NoPermissionError) or "user executing the script can't" in words:
        return StoreError(
            f"{at} refuses: {words}. As an administrator run, for the user perdure logs in as and "
            "its namespace: ACL SETUSER … ~perdure:* &perdure:* +@read +@write +@scripting "
            "+@connection +@pubsub +time +info +config|get"
        )
    if isinstance(error, redis.AskError):
        hint = "this is a cluster: begin the URL with redis+cluster:// or pass cluster=True"
        return StoreError(f"{at} keeps this run elsewhere, {hint} ({words})")
    if isinstance(error, redis.OutOfMemoryError):
        hint = "prune() runs that are over, or give the server more maxmemory"
        return StoreError(f"{at} is full, {hint} ({words})")
    return StoreError(f"{at} did not do what it was asked: {words}")
