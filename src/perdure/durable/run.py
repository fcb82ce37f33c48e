"""One call of `durable.run`, built from the parts in `lifecycle`."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from random import SystemRandom
from typing import Any, Literal, TypeAlias

import msgspec

from perdure import codec
from perdure.clock import Clock
from perdure.durable.host import RunHost
from perdure.durable.lifecycle import Program, log_failure, open_host, rewrite, run_to_rest
from perdure.durable.outcome import (
    Outcome,
    describe_outcome,
    failures_to_retry,
    recorded_result,
)
from perdure.durable.owners import describe_owner, new_owner
from perdure.durable.rollback import (
    drop_from,
    end_or_undo,
    first_to_repeat,
    repeat_undos,
    roll_back,
    rolled_back,
)
from perdure.durable.session import Session, borrow, is_running
from perdure.durable.store_errors import store_errors
from perdure.engine.history import History
from perdure.errors import AlreadyRunning, LeaseLost, StoreError, VersionMismatch
from perdure.result import Err, Ok, Result
from perdure.snapshot import (
    ExecutionBlock,
    Snapshot,
    assert_valid_snapshot,
    new_seed,
    new_snapshot,
    set_generation,
)
from perdure.snapshot.record import outcome_of, result_of
from perdure.store import Grant, LeaseRequest, Refusal, Rest, Store, can_lease, header_of

logger = logging.getLogger(__name__)

_random = SystemRandom()
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between attempts to lease a run that is owned."""


@dataclass(frozen=True, slots=True)
class VersionGap:
    """A stored run and a call with different versions."""

    id: str
    stored: int
    requested: int
    snapshot: Snapshot


_DELETED: ExecutionBlock = {"status": "completed", "lastUpdated": ""}
"""The `execution` of a run that is deleted, which is never written."""

Migration: TypeAlias = Literal["error", "clear"] | Snapshot
OnVersionMismatch: TypeAlias = (
    Literal["error", "clear"] | Callable[[VersionGap], Migration | Awaitable[Migration]]
)


class Request(msgspec.Struct, frozen=True):
    """One call of `run`."""

    id: str
    store: Store
    program: Program
    fn: Callable[..., Any]
    version: int
    keep: bool
    metadata: dict[str, Any]
    lease_ttl: timedelta
    shared: bool
    on_version_mismatch: OnVersionMismatch
    replay_errors: bool
    wait: timedelta
    clock: Clock
    seed: str = msgspec.field(default_factory=lambda: new_seed(_random))

    def session(self) -> Session:
        """Return the session of the call's store; enter it to use it."""
        return borrow(self.store, self.clock, self.lease_ttl)

    def result_in(self, snapshot: Snapshot) -> Result[Any, Any] | None:
        """Return the recorded result of a completed run, or `None` if it is not completed."""
        return recorded_result(snapshot, self.fn, self.program.types)


async def run_when_free(
    request: Request, run: Callable[[Request], Awaitable[Result[Any, Any]]]
) -> Result[Any, Any]:
    """Run; while another task or process owns the run, retry until `request.wait` has passed.

    If the run ended in the meantime, its result is returned if it was kept. A run that was deleted
    starts over, as in a later call.
    """
    clock = request.clock
    end = clock.monotonic() + request.wait.total_seconds()
    pause = FIRST_PAUSE
    while True:
        try:
            return await run(request)
        except AlreadyRunning as error:
            remaining = end - clock.monotonic()
            if remaining <= 0:
                raise
            if pause == FIRST_PAUSE:
                logger.info("waiting up to %s: %s", request.wait, error)
        await clock.sleep(min(pause, remaining))
        pause = min(pause * 1.5, LONGEST_PAUSE)


async def run_once(request: Request) -> Result[Any, Any]:
    """Run the function over the history of this id, unless this process is already running it."""
    async with request.session() as session:
        if is_running(request.store, request.id, session.loop) and not request.shared:
            raise AlreadyRunning(request.id, "here")
        session.running_ids[request.id] += 1
        try:
            host = await _open(session, request)
            if isinstance(host, Ok | Err):
                return host
            was_undone = host.history.rollback is not None
            result = await _continue(host, request)
            if was_undone or host.history.rollback is None:
                return result
            return await _undo(session, request, result)
        finally:
            session.running_ids[request.id] -= 1
            if not session.running_ids[request.id]:
                # A worker keeps its session as long as it runs, so no id may stay behind.
                del session.running_ids[request.id]


async def _open(session: Session, request: Request) -> RunHost | Result[Any, Any]:
    """Return the run, ready to be continued, or its result if it is completed."""
    has_leases = can_lease(request.store)
    # A completed run that was kept is only read. Any other run is read with its lease.
    snapshot = await _load(request) if request.keep or not has_leases else None
    if snapshot is not None and (result := request.result_in(snapshot)) is not None:
        return result
    grant = None
    if has_leases:
        answer = await lease(session, request)
        if isinstance(answer, Refusal):
            return await _result_of_another(request, answer)
        grant = answer
        snapshot = None if grant.created else grant.snapshot
    if snapshot is not None and (result := request.result_in(snapshot)) is not None:
        # The run was completed between the read and the lease.
        host = open_host(session, request.id, History(request.id, snapshot), grant)
        await host.settle(snapshot["execution"], Rest("completed"))
        return result
    if snapshot is None:
        return _begin(session, request, grant)
    return await _resume(session, request, grant, snapshot)


async def _load(request: Request) -> Snapshot | None:
    with store_errors(request.store, f"load run {request.id!r}"):
        snapshot = await request.store.load(request.id)
    return None if snapshot is None else assert_valid_snapshot(snapshot)


async def _result_of_another(request: Request, refusal: Refusal) -> Result[Any, Any]:
    """Return the result of a run that another process owns, if it is completed."""
    snapshot = await _load(request)
    if snapshot is not None and (result := request.result_in(snapshot)) is not None:
        return result
    raise already_running(refusal)


def already_running(refusal: Refusal, id: str = "") -> AlreadyRunning:
    """Return the error for a run that another process owns."""
    owner = "another process" if refusal.owner is None else describe_owner(refusal.owner)
    return AlreadyRunning(id or refusal.id, "elsewhere", owner, refusal.expires_at)


async def lease(session: Session, request: Request) -> Grant | Refusal:
    """Lease the run, creating it if necessary."""
    metadata = {**request.metadata, "seed": request.seed}
    first = new_snapshot(request.id, now=request.clock.now(), metadata=metadata)
    # With one owner for all of them, each of several concurrent calls takes over the lease.
    owner = f"shared:{request.id}" if request.shared else new_owner(request.program.random)
    return await session.acquire(
        LeaseRequest(
            request.id,
            owner,
            request.lease_ttl,
            create=codec.dumps(first),
            **header_of(first),
        )
    )


async def _lease_again(session: Session, request: Request) -> Grant | None:
    """Lease a run that this call has settled in order to continue it, if the store has leases."""
    if not can_lease(request.store):
        return None
    answer = await lease(session, request)
    if isinstance(answer, Refusal):
        raise already_running(answer)
    return answer


def _begin(session: Session, request: Request, grant: Grant | None) -> RunHost:
    """Return the host of a new run."""
    history = History(request.id)
    history.metadata.update(request.metadata, seed=request.seed)
    return open_host(session, request.id, history, grant)


async def _resume(
    session: Session, request: Request, grant: Grant | None, snapshot: Snapshot
) -> RunHost:
    """Return the host of the run as this version continues it.

    Changes to the stored run are written before the function runs: a crash in between leaves either
    the old run or the new one.
    """
    host = open_host(session, request.id, History(request.id, snapshot), grant)
    try:
        generation = host.history.generation
        migrated_snapshot = await _at_version(request, snapshot)
    except BaseException:
        await log_failure(host.release())
        raise
    host.history = history = History(request.id, migrated_snapshot)
    history.metadata.update(request.metadata)
    if migrated_snapshot is None:
        history.metadata["seed"] = request.seed
    else:
        # Restored whatever a migration did, because steps must keep their idempotency keys.
        set_generation(history.metadata, generation)
    is_retried = migrated_snapshot is not None and _prepare_retry(
        request, history, migrated_snapshot
    )
    if migrated_snapshot is snapshot and not is_retried:
        return host
    # Written and leased again before the function runs: a journal can only add, so dropped records
    # would be back after a crash.
    if migrated_snapshot is None:
        await host.settle(host.block(), Rest("running", delete=True))
    else:
        await rewrite(host)
    return open_host(session, request.id, history, await _lease_again(session, request))


def _prepare_retry(request: Request, history: History, snapshot: Snapshot) -> bool:
    """Let failed steps run again; return whether the stored run must change for that."""
    is_over = snapshot["execution"]["status"] == "failed"
    if is_over and history.rollback is not None and repeat_undos(history):
        return True
    was_undone = is_over and history.rollback is not None
    start = first_to_repeat(history, snapshot["execution"]) if is_over else None
    if start is not None:
        drop_from(history, start)
    if was_undone:
        history.rollback = None
    return _drop_failures(request, history, snapshot) or start is not None or was_undone


def _drop_failures(request: Request, history: History, snapshot: Snapshot) -> bool:
    failures = [] if request.replay_errors else failures_to_retry(snapshot)
    history.drop(failures)
    return bool(failures) and snapshot["execution"]["status"] == "failed"


async def _at_version(request: Request, snapshot: Snapshot) -> Snapshot | None:
    """Return the snapshot that this version continues from; `None` to start from scratch."""
    version = (snapshot.get("metadata") or {}).get("version")
    version = version if isinstance(version, int) and not isinstance(version, bool) else 1
    if version == request.version:
        return snapshot
    migration: Any = request.on_version_mismatch
    if callable(migration):
        migration = migration(VersionGap(request.id, version, request.version, snapshot))
        if isinstance(migration, Awaitable):
            migration = await migration
    if migration == "clear":
        return None
    if migration == "error":
        hint = "Finish it by that version, pass on_version_mismatch=, or durable.delete_state it"
        raise VersionMismatch(request.id, version, request.version, hint)
    return assert_valid_snapshot(migration)


async def _undo(session: Session, request: Request, result: Result[Any, Any]) -> Result[Any, Any]:
    """Undo the steps of a failed run, and return its failure, or that of the rollback."""
    grant = await _lease_again(session, request)
    snapshot = await _load(request) if grant is None else grant.snapshot
    host = open_host(session, request.id, History(request.id, snapshot), grant)
    return await _continue(host, request, result)


async def _continue(
    host: RunHost, request: Request, failure: Result[Any, Any] | None = None
) -> Result[Any, Any]:
    """Run the function, or undo its steps after a failure, and settle the run."""
    execute = run_to_rest if host.history.rollback is None else roll_back
    try:
        result = await execute(host, request.program)
        return await _settle(host, request, result, failure)
    finally:
        host.free()


async def _settle(
    host: RunHost,
    request: Request,
    result: Result[Any, Any] | None,
    failure: Result[Any, Any] | None,
) -> Result[Any, Any]:
    """Store the outcome of a run, or delete the run if it is completed and not kept."""
    if (reason := host.execution.stopped_by) is not None:
        # A record did not become durable, or the run is no longer ours: leave it as it is stored.
        if not isinstance(reason, LeaseLost):
            await log_failure(host.release())
        return outcome_of(reason)
    assert result is not None, "a run of durable.run waits in memory"
    is_undone = host.history.rollback is not None
    # A failed run stays, so that the next call can continue it.
    delete = result.ok and not request.keep and not is_undone
    if is_undone:
        outcome = _rolled_back(host, result, failure)
    elif delete:
        outcome = Outcome(result, _DELETED, "completed")
    else:
        outcome = describe_outcome(host, result, request.fn, request.program.types)
    rest = Rest(outcome.status, delete=delete)
    try:
        await host.settle(*end_or_undo(host, outcome.block, rest))
    except StoreError:
        await log_failure(host.release())
        if not delete:
            raise
        logger.warning(
            "run %r is completed, but could not be deleted from the store",
            request.id,
            exc_info=True,
        )
    except LeaseLost as error:
        return outcome_of(error)
    return outcome.result


def _rolled_back(
    host: RunHost, result: Result[Any, Any], failure: Result[Any, Any] | None
) -> Outcome:
    """Return the outcome of a run whose steps were undone after a failure."""
    failures = result.value if isinstance(result, Ok) else {}
    block, _ = rolled_back(host, failures)
    if failures or failure is None:
        record = codec.loads(codec.dumps(block.get("error")))
        failure, _ = result_of(record, "run", lambda: None, host.execution.errors)
    return Outcome(failure, block, "failed")
