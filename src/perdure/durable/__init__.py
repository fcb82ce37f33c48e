"""Durable functions on a store, without workers: where engine and store meet.

    result = await durable.run(deps, checkout, id="checkout-123", store=store)

Every step is recorded in the store before the function continues. After a crash the same call
continues after the last recorded step.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from random import SystemRandom
from typing import Any, TypeVar

from perdure import codec
from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.durable.idempotency import run_with_key
from perdure.durable.leases import LEASE_TTL, check_lease_ttl
from perdure.durable.lifecycle import Program
from perdure.durable.run import (
    OnVersionMismatch,
    Request,
    VersionGap,
    run_once,
    run_when_free,
)
from perdure.durable.session import default_store
from perdure.durable.states import (
    clear_state,
    delete_state,
    delete_states,
    has_state,
    list_pending,
)
from perdure.engine.current import require_current as current
from perdure.engine.decorator import step
from perdure.engine.function import WorkflowFunction, as_deps, body_of
from perdure.errors import (
    AlreadyRunning,
    IdempotencyConflict,
    InvalidArgument,
    LeaseLost,
    PerdureError,
    SnapshotFormatError,
    StoreError,
    VersionMismatch,
)
from perdure.events import Bus, Listener, check_listener
from perdure.result import Result
from perdure.snapshot.record import outcome_of
from perdure.store import Store, check_store
from perdure.validation import check_errors, check_flag, check_id, check_int, check_user_id
from perdure.workflow import encode_metadata

__all__ = [
    "OnVersionMismatch",
    "VersionGap",
    "clear_state",
    "current",
    "delete_state",
    "delete_states",
    "has_state",
    "list_pending",
    "run",
    "run_sync",
    "step",
]

T = TypeVar("T")

NO_WAIT = timedelta(0)
_random = SystemRandom()
_OUTCOMES = (
    StoreError,
    AlreadyRunning,
    LeaseLost,
    VersionMismatch,
    IdempotencyConflict,
    SnapshotFormatError,
)


async def run(
    deps: object,
    fn: WorkflowFunction[T, Any],
    /,
    *,
    id: str,
    store: Store | None = None,
    version: int = 1,
    keep: bool = False,
    input: object = None,
    metadata: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
    errors: Sequence[type[BaseException]] = (),
    types: Sequence[type] = (),
    lease_ttl: Duration = LEASE_TTL,
    allow_concurrent: bool = False,
    on_version_mismatch: OnVersionMismatch = "error",
    replay_errors: bool = False,
    idempotency_key: str | None = None,
    wait: Duration = NO_WAIT,
    clock: Clock = SystemClock(),
) -> Result[T, Any]:
    """Run a function so that it survives crashes; return `Ok(value)` or `Err(error, cause)`.

    On success the run is deleted; with `keep` it stays, and a second call with the same id returns
    the recorded result. On failure it stays for the next call, which runs the failed step again or,
    with `replay_errors`, returns the recorded failure. Errors of the engine are returned as `Err`.

    `errors` and `types` are classes that are restored even where no annotation names them.
    `on_version_mismatch` is `"error"`, `"clear"` (start from scratch), or a function of a
    `VersionGap` that returns one of these or a migrated snapshot. If another call owns the run,
    `wait` is how long to wait for it; `allow_concurrent` takes the run over, and the other call
    ends with `LeaseLost`. All calls with the same `idempotency_key` return the same result.
    """
    request = Request(
        id=check_user_id(id),
        store=default_store() if store is None else check_store(store),
        program=_program(deps, fn, on_event, errors, types),
        fn=fn,
        version=check_int(version, "version", minimum=0),
        keep=check_flag(keep, "keep"),
        metadata=_first_metadata(version, metadata, input),
        lease_ttl=check_lease_ttl(lease_ttl),
        shared=check_flag(allow_concurrent, "allow_concurrent"),
        on_version_mismatch=_check_migration(on_version_mismatch),
        replay_errors=check_flag(replay_errors, "replay_errors"),
        wait=parse_duration(wait, "wait"),
        clock=check_clock(clock),
    )
    return await _run(request, _check_key(idempotency_key))


async def _run(request: Request, key: str | None) -> Result[Any, Any]:
    run = run_once if key is None else partial(run_with_key, key=key)
    try:
        result = await (run_when_free(request, run) if request.wait else run(request))
    except _OUTCOMES as error:
        result = outcome_of(error)
    if request.program.bus is not None:
        await request.program.bus.flush()
    return result


def run_sync(deps: object, fn: WorkflowFunction[T, Any], /, **options: Any) -> Result[T, Any]:
    """Call `run` from code without an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run(deps, fn, **options))
    raise PerdureError(
        "durable.run_sync was called inside an event loop; write: await durable.run(…)"
    )


def _program(
    deps: object,
    fn: Callable[..., Any],
    on_event: Listener | None,
    errors: Sequence[type[BaseException]],
    types: Sequence[type],
) -> Program:
    deps = as_deps(deps)
    body = body_of(fn, deps)
    bus: Bus | None = None
    if on_event is not None:
        bus = Bus()
        bus.subscribe(check_listener(on_event))
    return Program(
        body=body,
        random=_random,
        bus=bus,
        errors=codec.ErrorScope(check_errors(errors), (fn,)),
        types=codec.DeclaredTypes(types, fn),
        deps=deps,
    )


def _check_migration(migration: OnVersionMismatch) -> OnVersionMismatch:
    if migration not in ("error", "clear") and not callable(migration):
        expected = '"error", "clear", or a function of a VersionGap'
        raise InvalidArgument("on_version_mismatch", migration, expected)
    return migration


def _check_key(key: str | None) -> str | None:
    if key is None:
        return None
    check_user_id(key, "idempotency_key")
    check_id(f"idem:{key}", "idempotency_key")
    return key


def _first_metadata(
    version: int, metadata: Mapping[str, Any] | None, input: object
) -> dict[str, Any]:
    first = {} if metadata is None else encode_metadata(metadata)
    first["version"] = version
    if input is not None:
        first["input"] = codec.encode(input)
    return first
