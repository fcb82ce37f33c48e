"""Where engine and store meet: load, lease, run, append, rest.

    result = await durable.run(deps, checkout, id="checkout-123", store=store)

Every step is recorded in the store before the function goes on. After a crash the same call goes on
where the record ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random, SystemRandom
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from perdure import codec
from perdure.arguments import check_flag, check_whole
from perdure.clock import Clock, Duration, SyncedClock, SystemClock, check_clock, parse_duration
from perdure.errors import (
    AlreadyRunning,
    Cancelled,
    CodecError,
    IdempotencyConflict,
    InvalidArgument,
    LeaseLost,
    PerdureError,
    SnapshotFormatError,
    StoreError,
    VersionMismatch,
)
from perdure.events import Bus, Listener, check_listener
from perdure.execution import Execution
from perdure.ledger import Ledger
from perdure.ownership import Home, KeptRun, OwnedRun, Session, telling
from perdure.record import failure_record, outcome_of, result_of
from perdure.result import Err, Ok, Result
from perdure.snapshot import Execution as ExecutionBlock
from perdure.snapshot import Snapshot, assert_valid_snapshot, new_snapshot, rest_status
from perdure.step import Step, check_errors
from perdure.store import (
    Grant,
    Listed,
    Rest,
    Store,
    Want,
    can_journal,
    can_lease,
    check_id,
    check_limit,
    check_store,
    require_lease,
)
from perdure.workflow import WorkflowFunction, as_deps, body_of, conduct, encode_metadata

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_TTL = timedelta(seconds=30)


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
Body: TypeAlias = Callable[[Step], Awaitable[Any]]

_sessions: dict[tuple[int, int, timedelta], Session] = {}
_active: set[tuple[int, str]] = set()
_keys: dict[tuple[int, int, str], asyncio.Event] = {}
_random = SystemRandom()


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
    lease_ttl: Duration = LEASE_TTL,
    allow_concurrent: bool = False,
    on_version_mismatch: OnVersionMismatch = "error",
    replay_errors: bool = False,
    idempotency_key: str | None = None,
    clock: Clock = SystemClock(),
) -> Result[T, Any]:
    """Run a function so that it survives crashes, and give `Ok(value)` or `Err(error, cause)`.

    On success the run is deleted; with `keep` it stays, and a second call with the same id gives
    the recorded result without running anything. On failure it stays for the next call, which runs
    the failed step again; with `replay_errors` the recorded failure answers. Errors of the engine
    come as `Err` too: `VersionMismatch`, `AlreadyRunning`, `LeaseLost`, `StoreError`, `DriftError`.

    `on_version_mismatch` is `"error"`, `"clear"` (start afresh), or a function of a `VersionGap`
    that gives one of these or a migrated snapshot. With `allow_concurrent` a second call takes the
    run over from the first, which ends with `LeaseLost`. `idempotency_key` gives all calls with one
    key one result, whatever their ids. Cancelling the task keeps the state and releases the lease.
    """
    request = Request(
        id=check_id(id),
        store=default_store() if store is None else check_store(store),
        body=body_of(fn, as_deps(deps)),
        fn=fn,
        version=check_whole(version, "version", least=0),
        keep=check_flag(keep, "keep"),
        metadata=_first_metadata(version, metadata, input),
        bus=_bus(on_event),
        errors=check_errors(errors),
        lease_ttl=check_lease_ttl(lease_ttl),
        shared=check_flag(allow_concurrent, "allow_concurrent"),
        on_version_mismatch=_check_mending(on_version_mismatch),
        replay_errors=check_flag(replay_errors, "replay_errors"),
        clock=check_clock(clock),
    )
    key = None if idempotency_key is None else _check_key(idempotency_key)
    try:
        result = await (_run(request) if key is None else _once(request, key))
    except (
        StoreError,
        AlreadyRunning,
        LeaseLost,
        VersionMismatch,
        IdempotencyConflict,
        SnapshotFormatError,
    ) as error:
        result = outcome_of(error)
    await request.bus.flush()
    return result


def run_sync(deps: object, fn: WorkflowFunction[T, Any], /, **options: Any) -> Result[T, Any]:
    """Do as `run` does, for code without an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run(deps, fn, **options))
    raise PerdureError(
        "durable.run_sync was called inside an event loop; write: await durable.run(…)"
    )


@dataclass(frozen=True, slots=True)
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


async def _run(request: Request) -> Result[Any, Any]:
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
        grant = await _lease(session, request)
        if grant is None:
            return await _of_another(request)
        stored = None if grant.created else grant.snapshot
    if stored is not None:
        if (kept := _kept(request, stored)) is not None:
            home = await _settle_in(session, request, grant, stored)
            await home.rest(stored["execution"], Rest("completed"))
            return kept
        grant, stored = await _at_version(session, request, grant, stored)
    home = await _settle_in(session, request, grant, stored)
    return await _carry_out(home, request)


async def _load(request: Request) -> Snapshot | None:
    with telling(request.store, f"load run {request.id!r}"):
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
            await quietly(require_lease(request.store).release([grant.lease]))
        raise
    if mended is stored:
        return grant, stored
    with telling(request.store, f"write run {request.id!r} for version {request.version}"):
        if mended is None:
            await request.store.delete(request.id)
        else:
            mended["metadata"] = {**(mended.get("metadata") or {}), "version": request.version}
            await request.store.save(request.id, mended)
    if grant is not None:
        # Both end the lease, so that a crash in between leaves either the old run or the new one.
        grant = await _lease(session, request)
        if grant is None:
            raise AlreadyRunning(request.id, "elsewhere")
    return grant, mended


async def _lease(session: Session, request: Request) -> Grant | None:
    first = new_snapshot(request.id, now=request.clock.now(), metadata=request.metadata)
    want = Want(request.id, request.owner(), request.lease_ttl, create=codec.dumps(first))
    return await session.acquire(want)


async def _settle_in(
    session: Session, request: Request, grant: Grant | None, stored: Snapshot | None
) -> Home:
    clock = request.clock if grant is None else SyncedClock(request.clock, grant.now)
    ledger = Ledger(request.id, stored)
    ledger.metadata.update(request.metadata)
    if stored is not None and not request.replay_errors:
        ledger.drop(failures_to_retry(stored))
    execution = Execution(
        workflow=request.id,
        run_id=request.id,
        ledger=ledger,
        clock=clock,
        random=_random,
        emit=request.bus.publish if request.bus else None,
        errors=request.errors,
    )
    home: Home
    if grant is not None and can_journal(request.store):
        home = OwnedRun(session, grant, execution)
    else:
        home = KeptRun(session, request.id, execution, grant)
        try:
            await home.persist_waits()
        except BaseException:
            await quietly(home.release())
            raise
    return home


async def _carry_out(home: Home, request: Request) -> Result[Any, Any]:
    try:
        result = await drive(home, request.body)
    except asyncio.CancelledError:
        await quietly(home.release())
        raise
    if (broken := home.execution.broken) is not None:
        # The record did not become durable, or the run is not ours: leave it as the store has it.
        if not isinstance(broken, LeaseLost):
            await quietly(home.release())
        return outcome_of(broken)
    assert result is not None, "a run of durable.run waits in memory"
    gone = result.ok and not request.keep
    over = Ending(result, home.block("completed"), "completed")
    if not gone:
        over = ending(home, result, request.fn)
    try:
        await home.rest(over.block, Rest(over.status, gone=gone))
    except StoreError:
        await quietly(home.release())
        if not gone:
            raise
        logger.warning(
            "run %r is done, but could not be deleted from the store", request.id, exc_info=True
        )
    except LeaseLost as error:
        return outcome_of(error)
    return over.result


async def drive(home: Home, body: Body) -> Result[Any, Any] | None:
    """Run the function in a task of its own until it ends; None when it was put to rest or lost."""
    execution = home.execution
    execution.home = home  # type: ignore[assignment]  # both homes record, wait and transact
    task = asyncio.Task(conduct(execution, body), loop=asyncio.get_running_loop())
    home.main = task
    try:
        await _ended(task)
    except asyncio.CancelledError:
        # What the function catches does not matter: it begins no further step.
        execution.break_off(Cancelled(home.id, "the task that ran it was cancelled"))
        await _unwind(task)
        raise
    finally:
        await home.parking.close()
        if execution.lineage.tasks:
            await _unwind(*execution.lineage.tasks)
    if execution.broken is not None:
        if not task.cancelled() and (error := task.exception()) is not None and not home.suspended:
            logger.debug("run %r unwound with %r", home.id, error)
        return None
    if task.cancelled():
        return Err(Cancelled(home.id, "the function cancelled itself"))
    return task.result()


async def _ended(task: "asyncio.Task[Any]") -> None:
    """Wait for a task without cancelling it when the waiting is cancelled."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    await ended


async def _unwind(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class Ending(NamedTuple):
    """A run that is over: its result as it will be read, its execution block, its status."""

    result: Result[Any, Any]
    block: ExecutionBlock
    status: Literal["completed", "failed"]


def ending(home: Home, result: Result[Any, Any], fn: Callable[..., Any]) -> Ending:
    """Give how a run ends; one whose output cannot be recorded has failed."""
    if isinstance(result, Ok):
        try:
            return _completed(home, result.value, fn)
        except CodecError as error:
            result = Err(CodecError(f"the output of run {home.id!r} cannot be recorded: {error}"))
    now, ended_by = home.block()["lastUpdated"], home.execution.ended_by
    failure = ended_by if ended_by is not None and ended_by is result.error else result
    told = failure_record(failure, home.id, home.execution.errors, lambda: codec.error_type(fn))
    failed = home.execution.unhandled()
    block = home.block("failed", completedAt=now, error=told.record, failed=failed)
    return Ending(result, block, "failed")


def _completed(home: Home, value: object, fn: Callable[..., Any]) -> Ending:
    data, seen, typed, losses = codec.settle(value, lambda: codec.return_type(fn), "output")
    for loss in losses:
        logger.warning(
            "run %r: its %s cannot be kept as it is (%s)", home.id, loss.path, loss.reason
        )
    facts: dict[str, Any] = {"output": data, "completedAt": home.block()["lastUpdated"]}
    if typed:
        facts["outputTyped"] = True
    return Ending(Ok(seen), home.block("completed", **facts), "completed")


def recorded_result(
    snapshot: Snapshot, fn: Callable[..., Any], errors: Sequence[type[BaseException]]
) -> Result[Any, Any] | None:
    """Give the result of a completed run from its record; None when it is not completed."""
    block: Mapping[str, Any] = snapshot["execution"]
    if block["status"] != "completed":
        return None
    record: Any = {"ok": True, "value": block.get("output"), "at": block["lastUpdated"]}
    if block.get("outputTyped"):
        record["typed"] = True
    return result_of(record, "output", lambda: codec.return_type(fn), errors)[0]


def failures_to_retry(snapshot: Snapshot) -> list[str]:
    """Give the failed steps that a resumed run tries again.

    Of a failed run, those that ended it. A failure that the function dealt with stays: what it did
    next is recorded too. Another writer of the format does not tell them apart: all of its.
    """
    block: Mapping[str, Any] = snapshot["execution"]
    steps = snapshot["steps"]
    failed = [key for key, record in steps.items() if not record["ok"]]
    if block["status"] == "failed":
        ended = block.get("failed")
        return failed if ended is None else [key for key in failed if key in ended]
    return [key for key in failed if "at" not in steps[key]]


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


async def _once(request: Request, key: str) -> Result[Any, Any]:
    """Run under an idempotency key: its record is held while the run goes on, and keeps the result.

    Calls of this process wait for the one that has the key. A failure frees it; a crash leaves its
    lease to expire.
    """
    here = (id(request.store), id(asyncio.get_running_loop()), key)
    while (twin := _keys.get(here)) is not None:
        await twin.wait()
    done = _keys[here] = asyncio.Event()
    try:
        async with borrow(request.store, request.clock, request.lease_ttl) as session:
            return await _once_in(session, request, key)
    finally:
        del _keys[here]
        done.set()


async def _once_in(session: Session, request: Request, key: str) -> Result[Any, Any]:
    facts = {
        "workflowId": request.id,
        "idempotencyKey": key,
        "input": request.metadata.get("input"),
    }
    record = replace(request, id=f"idem:{key}", metadata=facts, bus=Bus(), shared=False)
    with telling(request.store, f"load the record of idempotency key {key!r}"):
        stored = await request.store.load(record.id)
    if stored is not None and (kept := _kept_for(record, key, stored)) is not None:
        return kept
    grant = None
    if can_lease(request.store):
        grant = await _lease(session, record)
        if grant is None:
            raise AlreadyRunning(request.id, "elsewhere")
        stored = None if grant.created else grant.snapshot
    home = await _settle_in(session, record, grant, stored)
    try:
        if stored is not None and (kept := _kept_for(record, key, stored)) is not None:
            await home.rest(stored["execution"], Rest("completed"))
            return kept
        # Kept until the key has the result: a crash in between must not run it all again.
        result = await _run(replace(request, keep=True))
    except IdempotencyConflict:
        await quietly(home.release())
        raise
    except BaseException:
        await quietly(home.rest(home.block(), Rest("running", gone=True)))
        raise
    if not result.ok:
        await quietly(home.rest(home.block(), Rest("running", gone=True)))
        return result
    try:
        await home.rest(ending(home, result, request.fn).block, Rest("completed"))
    except StoreError:
        await quietly(home.release())
        raise
    if not request.keep:
        await quietly(_delete(request))
    return result


def _kept_for(record: Request, key: str, stored: Snapshot) -> Result[Any, Any] | None:
    before = (stored.get("metadata") or {}).get("input")
    given = record.metadata["input"]
    if before is not None and given is not None and before != given:
        raise IdempotencyConflict(key)
    return recorded_result(stored, record.fn, record.errors)


async def _delete(request: Request) -> None:
    with telling(request.store, f"delete run {request.id!r}, which is done"):
        await request.store.delete(request.id)


def borrow(store: Store, clock: Clock, lease_ttl: timedelta) -> Session:
    """Give the session of this store and event loop; enter it to use it."""
    loop = asyncio.get_running_loop()
    key = (id(store), id(loop), lease_ttl)
    session = _sessions.get(key)
    # A loop that was closed in the middle of a run may have left its session, and its address.
    if session is None or session.idle or session.loop is not loop:
        session = _sessions[key] = Session(store, clock, lease_ttl)
        session.on_idle = lambda: _sessions.pop(key, None)
    return session


def new_owner(random: Random) -> str:
    """Give a name that no other owner has."""
    return f"{random.getrandbits(96):024x}"


async def quietly(work: Awaitable[None]) -> None:
    """Do what would be good but need not be: a failure is logged."""
    try:
        await work
    except PerdureError as error:
        logger.warning("%s; the lease ends by itself", error)


_default: list[Store] = []


def default_store() -> Store:
    """Give this process's own memory store, the one for calls that name none."""
    if not _default:
        from perdure.stores.memory import MemoryStore

        _default.append(MemoryStore())
    return _default[0]


def _bus(listener: Listener | None) -> Bus:
    bus = Bus()
    if listener is not None:
        bus.subscribe(check_listener(listener))
    return bus


def check_lease_ttl(lease_ttl: Duration) -> timedelta:
    """Give how long a lease lasts, or raise: longer than nothing."""
    ttl = parse_duration(lease_ttl, "lease_ttl")
    if not ttl:
        raise InvalidArgument("lease_ttl", lease_ttl, "a duration longer than nothing")
    return ttl


def _check_mending(mending: OnVersionMismatch) -> OnVersionMismatch:
    if mending not in ("error", "clear") and not callable(mending):
        wanted = '"error", "clear", or a function of a VersionGap'
        raise InvalidArgument("on_version_mismatch", mending, wanted)
    return mending


def _check_key(key: str) -> str:
    check_id(key, "idempotency_key")
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


async def has_state(store: Store, id: str, /) -> bool:
    """Tell whether the store holds a run of this id."""
    return await check_store(store).load(check_id(id)) is not None


async def delete_state(store: Store, id: str, /) -> bool:
    """Delete a run; tell whether there was one."""
    there = await has_state(store, id)
    await store.delete(id)
    return there


async def delete_states(
    store: Store, ids: Sequence[str], /, *, concurrency: int = 10
) -> dict[str, Exception]:
    """Delete many runs, so many at once; give those that could not be, with their errors."""
    check_store(store)
    gate = asyncio.Semaphore(check_whole(concurrency, "concurrency"))
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InvalidArgument("ids", ids, "a list of run ids")
    failed: dict[str, Exception] = {}

    async def delete(id: str) -> None:
        async with gate:
            try:
                await store.delete(check_id(id))
            except Exception as error:  # noqa: BLE001  # told to the caller
                failed[id] = error

    await asyncio.gather(*(delete(id) for id in ids))
    return failed


async def list_pending(store: Store, /, *, prefix: str = "", limit: int = 100) -> list[Listed]:
    """Give runs that are not over, newest first; records of idempotency keys are left out."""
    check_store(store)
    pending: list[Listed] = []
    size = max(check_limit(limit), 100)
    # A store of five methods may know no more than these two options.
    page = await store.list(prefix=prefix, limit=size)
    while page:
        pending += [
            line
            for line in page
            if not line.id.startswith("idem:") and await _is_pending(store, line)
        ]
        if len(pending) >= limit or len(page) < size or not page[-1].cursor:
            break
        page = await store.list(prefix=prefix, limit=size, after=page[-1].cursor)
    return pending[:limit]


async def _is_pending(store: Store, line: Listed) -> bool:
    if line.status != "running":
        return line.status not in ("completed", "cancelled")
    snapshot = await store.load(line.id)
    return snapshot is not None and rest_status(snapshot) not in ("completed", "cancelled")


async def clear_state(store: Store, /) -> int:
    """Delete every run of the store (of its prefix); give how many."""
    check_store(store)
    count = 0
    while page := await store.list(limit=100):
        for line in page:
            await store.delete(line.id)
        count += len(page)
    return count
