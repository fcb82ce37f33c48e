"""Named workflows on a store: a run can stop here and continue in another process.

runtime = Runtime(store, workflows=[welcome])
run = await runtime.trigger(welcome, {"email": "a@b.c"})
await runtime.signal(run.run_id, "approved", {"by": "ana"})
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random, SystemRandom
from typing import Any, Self, TypeVar, get_args
from uuid import UUID

from msgspec.structs import replace

from perdure import codec
from perdure.clock import (
    Clock,
    Duration,
    SystemClock,
    as_utc,
    check_clock,
    isoformat,
    parse_duration,
)
from perdure.durable.run import already_running
from perdure.durable.session import (
    LEASE_TTL,
    Session,
    borrow,
    check_lease_ttl,
    default_store,
    wake_workers,
)
from perdure.errors import (
    Cancelled,
    CodecError,
    InvalidArgument,
    RunFailed,
    RunNotFound,
)
from perdure.events import Bus, Listener, check_listener
from perdure.runtime.definition import Definition
from perdure.runtime.deps import Dependencies
from perdure.runtime.driver import CANCEL, Driver
from perdure.runtime.registry import Registry
from perdure.runtime.run import Run, run_of
from perdure.snapshot import (
    RunStatus,
    Snapshot,
    is_over,
    new_seed,
    new_snapshot,
    rest_status,
    workflow_of,
)
from perdure.store import (
    Delivery,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Refusal,
    RunSummary,
    Store,
    can_search,
    check_store,
    header_of,
    require_inbox,
    require_journal,
    require_lease,
    require_schedule,
)
from perdure.validation import (
    check_event,
    check_flag,
    check_id,
    check_limit,
    check_prefix,
    check_random,
    check_user_id,
)

logger = logging.getLogger(__name__)

P = TypeVar("P")
T = TypeVar("T")

SUSPEND_AFTER = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class SignalResult:
    """The outcome of a signal, and the run afterwards.

    `run` is `None` if there is no such run, and with `wait=False`.
    """

    delivery: Delivery
    run: Run | None

    def __bool__(self) -> bool:
        return self.delivery in (Delivery.DELIVERED, Delivery.DUPLICATE)


class Runtime:
    """Workflows by name on one store.

    `deps` is what `step.deps` is: a value, an async context manager, or a function without
    arguments that returns one. It is entered while runs are driven: once for all runs inside
    `async with runtime` or beside a worker, and otherwise for each call that drives a run.
    `lease_ttl` is how long a run stays with a process that died. A wait shorter than
    `suspend_after` is spent in memory. `always_replay` suspends and replays a run after every step:
    a hard test of a workflow, and slow.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        workflows: Iterable[Definition[Any, Any]] = (),
        deps: object = None,
        lease_ttl: Duration = LEASE_TTL,
        suspend_after: Duration = SUSPEND_AFTER,
        on_event: Listener | None = None,
        clock: Clock = SystemClock(),
        random: Random | None = None,
        always_replay: bool = False,
    ) -> None:
        self.store = default_store() if store is None else check_store(store)
        for require in (require_journal, require_lease, require_schedule):
            require(self.store, "Runtime")
        self.registry = Registry(workflows)
        self.lease_ttl = check_lease_ttl(lease_ttl)
        self.clock = check_clock(clock)
        self.random = SystemRandom() if random is None else check_random(random)
        self._deps = Dependencies(deps)
        self._bus = Bus()
        if on_event is not None:
            self._bus.subscribe(check_listener(on_event))
        self.driver = Driver(
            store=self.store,
            registry=self.registry,
            random=self.random,
            bus=self._bus,
            lease_ttl=self.lease_ttl,
            suspend_after=parse_duration(suspend_after, "suspend_after"),
            always_replay=check_flag(always_replay, "always_replay"),
            deps=self._deps,
        )

    async def __aenter__(self) -> Self:
        await self._deps.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._deps.__aexit__()

    def register(self, definition: Definition[Any, Any]) -> None:
        """Register a workflow."""
        self.registry.add(definition)

    def session(self) -> Session:
        """Return the session through which this runtime writes; enter it to use it."""
        return borrow(self.store, self.clock, self.lease_ttl)

    @asynccontextmanager
    async def _driving(self) -> AsyncGenerator[Session]:
        # The dependencies come first: no lease expires while they are entered, and if that fails
        # the run is as it was.
        async with self._deps, self.session() as session:
            yield session

    async def trigger(
        self,
        workflow: Definition[P, T] | str,
        payload: P | Any = None,
        *,
        run_id: str | None = None,
        wait: bool = True,
    ) -> Run:
        """Start a run and drive it until it ends or is suspended; with `wait=False` only create it
        for a worker.

        The payload is checked before anything is written, and the run is durable before the first
        line of the function. If a run with this id exists, it is returned as it is.
        """
        definition = self._definition(workflow)
        data = definition.encode_payload(payload)
        check_flag(wait, "wait")
        if run_id is None:
            run_id = f"{definition.name}:{UUID(int=self.random.getrandbits(128), version=4)}"
        check_user_id(run_id, "run_id")
        snapshot = self._first_snapshot(definition, data)
        if not wait:
            await self._enqueue(run_id, snapshot)
            return await self._require(run_id)
        async with self._driving() as session:
            request = self.driver.request(run_id, snapshot)
            grant = await session.acquire(request)
            if isinstance(grant, Refusal):
                grant = await self._acquire_own(session, request, grant)
            if isinstance(grant, Refusal):
                return await self._require(run_id)
            return await self._driven(run_id, self.driver.continue_run(session, grant))

    async def _acquire_own(
        self, session: Session, request: LeaseRequest, refusal: Refusal
    ) -> Grant | Refusal:
        """Lease the run that this request itself created, if the answer to it was lost."""
        if await self._load(request.id) != codec.loads(request.create or b""):
            return refusal
        return await session.acquire(LeaseRequest(request.id, request.owner, request.ttl))

    async def resume(self, run_id: str) -> Run:
        """Continue a run as far as it can, also a paused one; one that is over, or owned by another
        process, is returned as it is.
        """
        return await self._continue(run_id, paused=True)

    async def _continue(self, run_id: str, *, paused: bool) -> Run:
        snapshot = await self._load(run_id)
        status = rest_status(snapshot)
        if is_over(status) or (status == "paused" and not paused):
            return self._run(run_id, snapshot)
        async with self._driving() as session:
            grant = await session.acquire(self.driver.request(run_id))
            if isinstance(grant, Refusal):
                return await self._require(run_id)
            return await self._driven(run_id, self.driver.continue_run(session, grant))

    async def signal(
        self,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        dedup_id: str | None = None,
        wait: bool = True,
    ) -> SignalResult:
        """Send an event to a run. It is neither lost nor doubled, whether or not the run waits for
        it yet.

        Then continue the run as `resume` does; with `wait=False` leave that to a worker, and do not
        load the run.
        """
        event = check_event(event, "event")
        store = require_inbox(self.store, "Runtime.signal")
        check_flag(wait, "wait")
        if dedup_id is not None:
            check_user_id(dedup_id, "dedup_id")
        data = codec.dumps(_encoded(payload))
        message = NewMessage(check_user_id(run_id, "run_id"), event, data, dedup_id)
        [receipt] = await store.send([message])
        delivery = receipt.delivery
        if delivery is Delivery.UNKNOWN:
            return SignalResult(delivery, None)
        if delivery is Delivery.OVER:
            return SignalResult(delivery, await self.get_run(run_id) if wait else None)
        if not wait:
            wake_workers(self.store)
        await self._poke(run_id)
        return SignalResult(delivery, await self._continue(run_id, paused=False) if wait else None)

    async def _poke(self, run_id: str) -> None:
        async with self.session() as session:
            session.poke(run_id)

    async def sweep(self, now: datetime | None = None, *, limit: int = 100) -> list[Run]:
        """Continue up to `limit` runs that are due at `now`, and return them.

        A run that cannot be driven is logged and harms no other.
        """
        if check_limit(limit) == 0:
            raise InvalidArgument("limit", limit, "an int >= 1")
        store = require_schedule(self.store, "Runtime.sweep")
        at = self.clock.now() if now is None else as_utc(now, "now")
        due = await store.due(at, limit, drives=self.registry.drives)
        if not due:
            return []
        async with self._driving() as session:
            runs = await asyncio.gather(*(self._sweep_one(session, run.id, at) for run in due))
        return [run for run in runs if run is not None]

    async def _sweep_one(self, session: Session, run_id: str, now: datetime) -> Run | None:
        try:
            grant = await session.acquire(self.driver.request(run_id))
            if isinstance(grant, Refusal):
                return None
            driving = self.driver.continue_run(session, grant, not_before=now)
            return await self._driven(run_id, driving)
        except Exception:
            logger.exception("run %r could not be driven", run_id)
            return None

    async def get_run(self, run_id: str) -> Run | None:
        """Return the run with its history, or `None` if there is no such run."""
        is_owned = await self._is_owned(check_id(run_id, "run_id"))
        snapshot = await self.store.load(run_id)
        if snapshot is None:
            return None
        run = self._run(run_id, snapshot)
        # The snapshot of a run that has just been claimed says what it was before.
        return replace(run, status="running") if is_owned and not run.over else run

    async def _is_owned(self, run_id: str) -> bool:
        if not can_search(self.store):
            return False
        (run,) = await self.store.summaries([run_id])
        return run is not None and run.owner is not None

    async def list_runs(
        self,
        *,
        workflow: str | None = None,
        status: RunStatus | None = None,
        prefix: str = "",
        limit: int = 100,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Return runs, newest first; `after` is the cursor of the previous page's last run."""
        check_prefix(prefix)
        check_limit(limit)
        if workflow is not None:
            check_id(workflow, "workflow")
        if status is not None and status not in get_args(RunStatus):
            raise InvalidArgument("status", status, f"one of {', '.join(get_args(RunStatus))}")
        if after is not None and not isinstance(after, str):
            raise InvalidArgument("after", after, "the cursor of a run that list_runs() returned")
        return await self.store.list(
            prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )

    async def cancel(self, run_id: str, *, reason: str = "") -> Run:
        """Cancel a run. If another process owns it, it is asked to stop, and does so soon."""
        if not isinstance(reason, str):
            raise InvalidArgument("reason", reason, "a string")
        snapshot = await self._load(run_id)
        if is_over(rest_status(snapshot)):
            return self._run(run_id, snapshot)
        if (run := await self._cancel_at_rest(run_id, reason)) is not None:
            return run
        inbox = require_inbox(self.store, "Runtime.cancel of a run that is owned elsewhere")
        await inbox.send([NewMessage(run_id, CANCEL, codec.dumps(reason))])
        await self._poke(run_id)
        # Its owner may have suspended it just before the message arrived.
        return await self._cancel_at_rest(run_id, reason) or await self._require(run_id)

    async def _cancel_at_rest(self, run_id: str, reason: str) -> Run | None:
        async with self.session() as session:
            grant = await session.acquire(self.driver.request(run_id))
            if isinstance(grant, Refusal):
                return None
            if is_over(rest_status(grant.snapshot)):
                return await self._driven(run_id, self.driver.continue_run(session, grant))
            data = await self.driver.cancel(session, grant, reason)
            return None if data is None else self._run(run_id, codec.loads(data))

    async def retry(self, run_id: str) -> Run:
        """Continue a failed run: the steps that ended it run again, finished ones do not."""
        snapshot = await self._load(run_id)
        if rest_status(snapshot) != "failed":
            return self._run(run_id, snapshot)
        if snapshot["execution"].get("truncated"):
            raise RunFailed(
                f"run {run_id!r} cannot be retried: its records were too large for the store and "
                "were dropped; trigger it again under another id"
            )
        async with self._driving() as session:
            grant = await session.acquire(self.driver.request(run_id))
            if isinstance(grant, Refusal):
                run = await self._require(run_id)
                if run.status == "failed":
                    raise already_running(grant)
                return run
            return await self._driven(run_id, self.driver.continue_run(session, grant, again=True))

    async def flush(self) -> None:
        """Wait until `on_event` has handled all events so far."""
        await self._bus.flush()

    async def delete(self, run_id: str) -> bool:
        """Delete a run and everything that belongs to it; return whether it existed."""
        existed = await self.store.load(check_id(run_id, "run_id")) is not None
        await self.store.delete(run_id)
        return existed

    async def _driven(self, run_id: str, driving: Awaitable[bytes | None]) -> Run:
        """Return a run as it was written, or as stored if another owner took it over."""
        data = await driving
        return await self._require(run_id) if data is None else self._run(run_id, codec.loads(data))

    def _definition(self, workflow: Definition[Any, Any] | str) -> Definition[Any, Any]:
        if isinstance(workflow, str):
            return self.registry.newest(workflow)
        self.registry.add(workflow)
        return workflow

    def _first_snapshot(self, definition: Definition[Any, Any], data: Any) -> Snapshot:
        metadata = {
            "version": definition.version,
            "createdAt": isoformat(self.clock.now()),
            "seed": new_seed(self.random),
        }
        if data is not None:
            metadata["input"] = data
        now = self.clock.now()
        return new_snapshot(definition.name, now=now, metadata=metadata)

    async def _enqueue(self, run_id: str, snapshot: Snapshot) -> None:
        store = require_schedule(self.store, "Runtime.trigger(wait=False)")
        snapshot["execution"]["state"] = "queued"
        name = workflow_of(snapshot) or ""
        data = codec.dumps(snapshot)
        await store.enqueue([NewRun(run_id, name, data, **header_of(snapshot))])
        wake_workers(self.store)

    async def _load(self, run_id: str) -> Snapshot:
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot

    async def _require(self, run_id: str) -> Run:
        run = await self.get_run(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    def _run(self, run_id: str, snapshot: Snapshot) -> Run:
        errors = (Cancelled, RunFailed)
        if (name := snapshot.get("workflowName")) not in self.registry.names:
            return run_of(run_id, snapshot, errors=errors)
        definition = self.registry.newest(name or "")
        return run_of(
            run_id,
            snapshot,
            returns=codec.return_type(definition.fn),
            fails_with=codec.error_type(definition.fn),
            errors=(*errors, *definition.errors),
        )


def _encoded(payload: object) -> Any:
    try:
        return codec.encode(payload, type(payload))
    except CodecError as error:
        expected = "a value that survives being stored as JSON"
        raise InvalidArgument("payload", payload, expected, str(error)) from error
