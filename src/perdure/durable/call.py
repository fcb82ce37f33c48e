"""One call of `durable.run`: lease, run, append, rest."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from random import SystemRandom
from typing import Any, Literal, TypeAlias

from perdure import codec
from perdure.clock import Clock, SyncedClock
from perdure.durable.host import JournaledRun, RunHost, SnapshotRun
from perdure.durable.lifecycle import Body, borrow, drive, log_failure, new_owner
from perdure.durable.outcome import Outcome, ending, failures_to_retry, recorded_result
from perdure.durable.session import Session, store_errors
from perdure.engine.execution import Execution
from perdure.engine.history import History
from perdure.errors import AlreadyRunning, LeaseLost, StoreError, VersionMismatch
from perdure.events import Bus
from perdure.result import Result
from perdure.snapshot import Snapshot, assert_valid_snapshot, new_snapshot
from perdure.snapshot.record import outcome_of
from perdure.store import Grant, LeaseRequest, Rest, Store, can_journal, can_lease, require_lease

logger = logging.getLogger(__name__)

_active: set[tuple[int, str]] = set()
_random = SystemRandom()


@dataclass(frozen=True, slots=True)
class VersionGap:
    """A stored run and a call that do not agree on the version."""

    id: str
    stored: int
    requested: int
    snapshot: Snapshot


Mending: TypeAlias = Literal["error", "clear"] | Snapshot
OnVersionMismatch: TypeAlias = (
    Literal["error", "clear"] | Callable[[VersionGap], Mending | Awaitable[Mending]]
)


@dataclass(slots=True)
class Request:
    """One call of `run`."""

    id: str
    store: Store
    body: Body
    fn: Callable[..., Any]
    version: int
    keep: bool
    metadata: dict[str, Any]
    bus: Bus
    errors: tuple[type[BaseException], ...]
    lease_ttl: timedelta
    shared: bool
    on_version_mismatch: OnVersionMismatch
    replay_errors: bool
    clock: Clock

    def owner(self) -> str:
        """Give the name under which this call holds the run."""
        return f"shared:{self.id}" if self.shared else new_owner(_random)


async def run_once(request: Request) -> Result[Any, Any]:
    """Run over the record of this id, unless that is being done here already."""
    here = (id(request.store), request.id)
    if here in _active and not request.shared:
        raise AlreadyRunning(request.id, "here")
    _active.add(here)
    try:
        async with borrow(request.store, request.clock, request.lease_ttl) as session:
            return await _run_in(session, request)
    finally:
        _active.discard(here)


async def _run_in(session: Session, request: Request) -> Result[Any, Any]:
    leased = can_lease(request.store)
    # A kept run that is over is only read. Any other is read under its lease, by the same call.
    stored = await _load(request) if request.keep or not leased else None
    if stored is not None and (kept := _kept(request, stored)) is not None:
        return kept
    grant = None
    if leased:
        grant = await lease(session, request)
        if grant is None:
            return await _of_another(request)
        stored = None if grant.created else grant.snapshot
    if stored is not None:
        if (kept := _kept(request, stored)) is not None:
            host = await open_host(session, request, grant, stored)
            await host.settle(stored["execution"], Rest("completed"))
            return kept
        grant, stored = await _at_version(session, request, grant, stored)
    host = await open_host(session, request, grant, stored)
    return await _carry_out(host, request)


async def _load(request: Request) -> Snapshot | None:
    with store_errors(request.store, f"load run {request.id!r}"):
        stored = await request.store.load(request.id)
    return None if stored is None else assert_valid_snapshot(stored)


def _kept(request: Request, stored: Snapshot) -> Result[Any, Any] | None:
    return recorded_result(stored, request.fn, request.errors)


async def _of_another(request: Request) -> Result[Any, Any]:
    """Give the result of a run that somebody else holds: one that is over can be read."""
    stored = await _load(request)
    if stored is not None and (kept := _kept(request, stored)) is not None:
        return kept
    raise AlreadyRunning(request.id, "elsewhere")


async def _at_version(
    session: Session, request: Request, grant: Grant | None, stored: Snapshot
) -> tuple[Grant | None, Snapshot | None]:
    """Give the run as this version goes on from it; what was mended is stored so first."""
    try:
        mended = await _same_version(request, stored)
    except BaseException:
        if grant is not None:
            await log_failure(require_lease(request.store).release([grant.lease]))
        raise
    if mended is stored:
        return grant, stored
    with store_errors(request.store, f"write run {request.id!r} for version {request.version}"):
        if mended is None:
            await request.store.delete(request.id)
        else:
            mended["metadata"] = {**(mended.get("metadata") or {}), "version": request.version}
            await request.store.save(request.id, mended)
    if grant is not None:
        # Both end the lease, so that a crash in between leaves either the old run or the new one.
        grant = await lease(session, request)
        if grant is None:
            raise AlreadyRunning(request.id, "elsewhere")
    return grant, mended


async def lease(session: Session, request: Request) -> Grant | None:
    """Give the lease of the run, which is created when it is not there; None: another has it."""
    first = new_snapshot(request.id, now=request.clock.now(), metadata=request.metadata)
    create = codec.dumps(first)
    return await session.acquire(
        LeaseRequest(request.id, request.owner(), request.lease_ttl, create=create)
    )


async def open_host(
    session: Session, request: Request, grant: Grant | None, stored: Snapshot | None
) -> RunHost:
    """Return the host of a run, over what is stored of it."""
    clock = request.clock if grant is None else SyncedClock(request.clock, grant.now)
    history = History(request.id, stored)
    history.metadata.update(request.metadata)
    if stored is not None and not request.replay_errors:
        history.drop(failures_to_retry(stored))
    execution = Execution(
        workflow=request.id,
        run_id=request.id,
        history=history,
        clock=clock,
        random=_random,
        emit=request.bus.publish if request.bus else None,
        errors=request.errors,
    )
    host: RunHost
    if grant is not None and can_journal(request.store):
        host = JournaledRun(session, grant, execution)
    else:
        host = SnapshotRun(session, request.id, execution, grant)
        try:
            await host.persist_waits()
        except BaseException:
            await log_failure(host.release())
            raise
    return host


async def _carry_out(host: RunHost, request: Request) -> Result[Any, Any]:
    try:
        result = await drive(host, request.body)
    except asyncio.CancelledError:
        await log_failure(host.release())
        raise
    if (broken := host.execution.broken) is not None:
        # The record did not become durable, or the run is not ours: leave it as the store has it.
        if not isinstance(broken, LeaseLost):
            await log_failure(host.release())
        return outcome_of(broken)
    assert result is not None, "a run of durable.run waits in memory"
    delete = result.ok and not request.keep
    if delete:
        over = Outcome(result, host.block("completed"), "completed")
    else:
        over = ending(host, result, request.fn)
    try:
        await host.settle(over.block, Rest(over.status, delete=delete))
    except StoreError:
        await log_failure(host.release())
        if not delete:
            raise
        logger.warning(
            "run %r is done, but could not be deleted from the store", request.id, exc_info=True
        )
    except LeaseLost as error:
        return outcome_of(error)
    return over.result


async def _same_version(request: Request, stored: Snapshot) -> Snapshot | None:
    version = (stored.get("metadata") or {}).get("version")
    version = version if isinstance(version, int) and not isinstance(version, bool) else 1
    if version == request.version:
        return stored
    mending: Any = request.on_version_mismatch
    if callable(mending):
        mending = mending(VersionGap(request.id, version, request.version, stored))
        if isinstance(mending, Awaitable):
            mending = await mending
    if mending == "clear":
        return None
    if mending == "error":
        hint = "Finish it by that version, pass on_version_mismatch=, or durable.delete_state it"
        raise VersionMismatch(request.id, version, request.version, hint)
    return assert_valid_snapshot(mending)
