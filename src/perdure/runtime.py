"""Named workflows on a store: a run can stop here and go on in another process.

runtime = Runtime(store, workflows=[welcome])
run = await runtime.trigger(welcome, {"email": "a@b.c"})
await runtime.signal(run.run_id, "approved", {"by": "ana"})
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random, SystemRandom
from typing import Any, TypeVar, get_args
from uuid import UUID

from perdure import codec
from perdure.arguments import check_flag, check_random
from perdure.clock import (
    Clock,
    Duration,
    SyncedClock,
    SystemClock,
    as_utc,
    check_clock,
    isoformat,
    parse_duration,
)
from perdure.durable import (
    LEASE_TTL,
    Body,
    borrow,
    check_lease_ttl,
    default_store,
    drive,
    ending,
    failures_to_retry,
    new_owner,
    quietly,
)
from perdure.errors import (
    Cancelled,
    CodecError,
    InvalidArgument,
    LeaseLost,
    MissingAbility,
    PerdureError,
    RunFailed,
    RunNotFound,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.events import Bus, Event, Listener, check_listener
from perdure.execution import Execution
from perdure.ledger import Ledger
from perdure.ownership import OwnedRun, Session
from perdure.record import failure_record, outcome_of
from perdure.registry import Definition, Registry
from perdure.result import Result
from perdure.run import Run, run_of
from perdure.snapshot import (
    PendingWait,
    RunStatus,
    Snapshot,
    awaits_of,
    is_over,
    new_snapshot,
    rest_status,
    wake_at_of,
)
from perdure.store import (
    Delivery,
    Grant,
    Listed,
    NewRun,
    Rest,
    Store,
    Want,
    check_id,
    check_limit,
    check_prefix,
    check_store,
    require_inbox,
    require_journal,
    require_lease,
    require_schedule,
)

logger = logging.getLogger(__name__)

P = TypeVar("P")
T = TypeVar("T")

CANCEL = "~cancel"
"""The event that asks the owner of a run to end it; users' events may have any other name."""

LINGER = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Signalled:
    """What became of a signal, and the run as it is afterwards (None when there is no such run)."""

    delivery: Delivery
    run: Run | None

    def __bool__(self) -> bool:
        return self.delivery in (Delivery.DELIVERED, Delivery.DUPLICATE)


class Runtime:
    """Workflows by name on one store.

    `lease_ttl` is how long a run of a dead process stays with it. A wait shorter than `linger` is
    spent in memory. `always_replay` puts a run to rest and replays it after every step: a hard test
    of a workflow, and slow.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        workflows: Iterable[Definition[Any, Any]] = (),
        lease_ttl: Duration = LEASE_TTL,
        linger: Duration = LINGER,
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
        self._linger = parse_duration(linger, "linger")
        self._always_replay = check_flag(always_replay, "always_replay")
        self._bus = Bus()
        if on_event is not None:
            self._bus.subscribe(check_listener(on_event))

    def register(self, definition: Definition[Any, Any]) -> None:
        """Make a workflow known."""
        self.registry.add(definition)

    def session(self) -> Session:
        """Give the session through which this runtime's runs are written; enter it to use it."""
        return borrow(self.store, self.clock, self.lease_ttl)

    async def trigger(
        self,
        workflow: Definition[P, T] | str,
        payload: P | Any = None,
        *,
        run_id: str | None = None,
        wait: bool = True,
    ) -> Run:
        """Begin a run and drive it until it ends or rests; with `wait=False` only leave it for a
        worker.

        The payload is checked before anything is written, and the run is durable before the first
        line of the function. An id that is there already gives the run it belongs to.
        """
        definition = self._definition(workflow)
        data = definition.encode_payload(payload)
        check_flag(wait, "wait")
        if run_id is None:
            run_id = f"{definition.name}:{UUID(int=self.random.getrandbits(128), version=4)}"
        snapshot = self._first_snapshot(definition, data)
        if not wait:
            await self._enqueue(check_id(run_id, "run_id"), definition, snapshot)
            return await self._require(run_id)
        async with self.session() as session:
            want = self._want(check_id(run_id, "run_id"), snapshot, definition.name)
            grant = await session.acquire(want) or await self._acquire_own(session, want)
            if grant is None:
                return await self._require(run_id)
            return await self.drive(session, grant)

    async def _acquire_own(self, session: Session, want: Want) -> Grant | None:
        """Give the run that this want itself has created, when the answer to it was lost."""
        if await self._load(want.id) != codec.loads(want.create or b""):
            return None
        return await session.acquire(Want(want.id, want.owner, want.ttl))

    async def resume(self, run_id: str) -> Run:
        """Go on with a run as far as it can; one that is over, or owned elsewhere, is given as
        it is.
        """
        snapshot = await self._load(run_id)
        if is_over(rest_status(snapshot)):
            return self._run(run_id, snapshot)
        async with self.session() as session:
            grant = await session.acquire(self._want(run_id))
            if grant is None:
                return await self._require(run_id)
            return await self.drive(session, grant)

    async def signal(
        self,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        dedup_id: str | None = None,
        wait: bool = True,
    ) -> Signalled:
        """Send an event to a run; neither lost nor doubled, whether or not the run waits for it
        yet.

        Then go on with the run as `resume` does; with `wait=False` leave that to a worker.
        """
        if not isinstance(event, str) or not event or event == CANCEL:
            raise InvalidArgument("event", event, "the event's name, a non-empty text")
        store = require_inbox(self.store, "Runtime.signal")
        check_flag(wait, "wait")
        if dedup_id is not None:
            check_id(dedup_id, "dedup_id")
        data = codec.dumps(_encoded(payload))
        delivery = await store.send(check_id(run_id, "run_id"), event, data, dedup_id=dedup_id)
        if delivery is Delivery.UNKNOWN:
            return Signalled(delivery, None)
        if delivery is Delivery.OVER:
            return Signalled(delivery, await self.get_run(run_id))
        await self._poke(run_id)
        run = await (self.resume(run_id) if wait else self._require(run_id))
        return Signalled(delivery, run)

    async def _poke(self, run_id: str) -> None:
        async with self.session() as session:
            session.poke(run_id)

    async def sweep(self, now: datetime | None = None, *, limit: int = 100) -> list[Run]:
        """Go on with the runs that are due at `now`, at most `limit`, and give them as they are
        then.

        One that fails to be driven is logged and harms no other.
        """
        if check_limit(limit) == 0:
            raise InvalidArgument("limit", limit, "a whole number, 1 or more")
        store = require_schedule(self.store, "Runtime.sweep")
        moment = self.clock.now() if now is None else as_utc(now, "now")
        due = await store.due(moment, limit, workflows=self.registry.names)
        async with self.session() as session:
            runs = await asyncio.gather(
                *(self._sweep_one(session, line.id, moment) for line in due)
            )
        return [run for run in runs if run is not None]

    async def _sweep_one(self, session: Session, run_id: str, now: datetime) -> Run | None:
        try:
            grant = await session.acquire(self._want(run_id))
            return None if grant is None else await self.drive(session, grant, not_before=now)
        except Exception:
            logger.exception("run %r could not be driven", run_id)
            return None

    async def get_run(self, run_id: str) -> Run | None:
        """Give the run with its whole history, or None."""
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        return None if snapshot is None else self._run(run_id, snapshot)

    async def list_runs(
        self,
        *,
        workflow: str | None = None,
        status: RunStatus | None = None,
        prefix: str = "",
        limit: int = 100,
        after: str | None = None,
    ) -> Sequence[Listed]:
        """Give runs, newest first; `after` is the cursor of the last line of the page before."""
        check_prefix(prefix)
        check_limit(limit)
        if workflow is not None:
            check_id(workflow, "workflow")
        if status is not None and status not in get_args(RunStatus):
            raise InvalidArgument("status", status, f"one of {', '.join(get_args(RunStatus))}")
        if after is not None and not isinstance(after, str):
            raise InvalidArgument("after", after, "the cursor of a line that list_runs() gave")
        return await self.store.list(
            prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )

    async def cancel(self, run_id: str, *, reason: str = "") -> Run:
        """End a run as cancelled. One that is owned elsewhere is asked to end, and does so soon."""
        if not isinstance(reason, str):
            raise InvalidArgument("reason", reason, "text")
        snapshot = await self._load(run_id)
        if is_over(rest_status(snapshot)):
            return self._run(run_id, snapshot)
        if (run := await self._cancel_at_rest(run_id, reason)) is not None:
            return run
        inbox = require_inbox(self.store, "Runtime.cancel of a run that is owned elsewhere")
        await inbox.send(run_id, CANCEL, codec.dumps(reason))
        await self._poke(run_id)
        # Its owner may have put it to rest just before the message came.
        return await self._cancel_at_rest(run_id, reason) or await self._require(run_id)

    async def _cancel_at_rest(self, run_id: str, reason: str) -> Run | None:
        async with self.session() as session:
            grant = await session.acquire(self._want(run_id))
            if grant is None:
                return None
            if is_over(rest_status(grant.snapshot)):
                return await self.drive(session, grant)
            home = self._home(session, grant, Ledger("", grant.snapshot), None)
            try:
                return await self._end_cancelled(home, reason)
            except LeaseLost:
                return None

    async def retry(self, run_id: str) -> Run:
        """Go on with a failed run: the steps that ended it run again, finished ones do not."""
        snapshot = await self._load(run_id)
        if rest_status(snapshot) != "failed":
            return self._run(run_id, snapshot)
        async with self.session() as session:
            grant = await session.acquire(self._want(run_id))
            if grant is None:
                return await self._require(run_id)
            return await self.drive(session, grant, again=True)

    async def flush(self) -> None:
        """Wait until `on_event` has dealt with everything so far."""
        await self._bus.flush()

    async def delete(self, run_id: str) -> bool:
        """Delete a run with all that belongs to it; tell whether there was one."""
        there = await self.store.load(check_id(run_id, "run_id")) is not None
        await self.store.delete(run_id)
        return there

    async def drive(
        self,
        session: Session,
        grant: Grant,
        *,
        not_before: datetime | None = None,
        again: bool = False,
    ) -> Run:
        """Go on with a leased run until it ends or rests, and give it as it is then.

        One that is over stays as it is, unless it failed and is to be tried `again`.
        """
        try:
            return await self._drive(session, grant, not_before, again)
        except LeaseLost:
            return await self._require(grant.lease.id)

    async def _drive(
        self, session: Session, grant: Grant, not_before: datetime | None, again: bool
    ) -> Run:
        run_id = grant.lease.id
        status = rest_status(grant.snapshot)
        again = again and status == "failed"
        if is_over(status) and not again:
            # It ended elsewhere between somebody's look at it and the lease.
            return await self._put_back(session, grant)
        version = (grant.snapshot.get("metadata") or {}).get("version", 1)
        try:
            definition, snapshot = self.registry.for_run(run_id, grant.snapshot)
            payload = definition.decode_payload((snapshot.get("metadata") or {}).get("input"))
        except PerdureError:
            later = grant.now + self.lease_ttl
            await require_lease(self.store).release([grant.lease], wake_at=later)
            raise
        ledger = Ledger(definition.name, snapshot)
        ledger.drop(failures_to_retry(snapshot))
        if again or definition.version != version:
            fresh = await self._rewrite(session, grant, ledger)
            if fresh is None:
                return await self._require(run_id)
            return await self._drive(session, fresh, not_before, again=False)
        home = self._home(session, grant, ledger, definition, payload, not_before)
        if any(message.name == CANCEL for message in grant.inbox):
            return await self._end_cancelled(home, self._cancel_reason(grant))
        home.on_mail = lambda: self._look_for_cancel(home)
        try:
            result = await drive(home, _body(definition, payload))
        except asyncio.CancelledError:
            await quietly(home.release())
            raise
        return await self._leave(home, result, definition)

    async def _put_back(self, session: Session, grant: Grant) -> Run:
        """Leave a run that is over as it was."""
        home = self._home(session, grant, Ledger("", grant.snapshot), None)
        await home.rest(grant.snapshot["execution"], Rest(rest_status(grant.snapshot)))
        return self._run(home.id, grant.snapshot)

    async def _rewrite(self, session: Session, grant: Grant, ledger: Ledger) -> Grant | None:
        """Store a run as it is to be gone on with, and lease it anew; None: another took it up.

        A journal only adds: what a retry or a migration took away would be back after a crash.
        """
        home = self._home(session, grant, ledger, None)
        # A request to cancel that came before does not end what is begun again after it.
        old = [message.id for message in grant.inbox if message.name == CANCEL]
        await home.rest(home.running(), Rest("running", home.execution.clock.now()), old)
        return await session.acquire(self._want(home.id))

    async def fail(self, session: Session, grant: Grant, error: RunFailed) -> Run:
        """End a leased run as failed without calling its function."""
        return await self._end_failed(
            self._home(session, grant, Ledger("", grant.snapshot), None), error
        )

    async def _end_failed(self, home: OwnedRun, error: PerdureError) -> Run:
        """End a run for a reason that is not its function's."""
        told = failure_record(error, home.id, (RunFailed,)).record
        now = home.block()["lastUpdated"]
        block = home.block("failed", completedAt=now, error=told, failed=[])
        await home.rest(block, Rest("failed"))
        return self._run(home.id, codec.loads(home.ledger.encode(block)))

    async def _leave(
        self, home: OwnedRun, result: Result[Any, Any] | None, definition: Definition[Any, Any]
    ) -> Run:
        try:
            if home.suspended is not None:
                block, rest = self._at_rest(home, home.suspended)
                await home.rest(block, rest)
            elif isinstance(home.execution.broken, Cancelled):
                return await self._end_cancelled(home, home.execution.broken.reason)
            elif isinstance(home.execution.broken, StoreError | LeaseLost):
                raise home.execution.broken
            else:
                outcome = result if result is not None else _broken(home)
                _, block, status = ending(home, outcome, definition.fn)
                await home.rest(block, Rest(status))
        except StoreError as error:
            if isinstance(error, ValueTooLarge | MissingAbility):
                # Its own doing: tried again it would end here again.
                with suppress(StoreError):
                    return await self._end_failed(home, error)
            await quietly(home.release(self._when_to_try_again(home, error)))
            raise
        return self._run(home.id, codec.loads(home.ledger.encode(block)))

    def _when_to_try_again(self, home: OwnedRun, error: StoreError) -> datetime | None:
        if isinstance(error, StoreUnavailable):
            return None
        # What the store refuses for one run must not keep everybody busy.
        return home.execution.clock.now() + self.lease_ttl

    def _at_rest(self, home: OwnedRun, waits: list[PendingWait]) -> tuple[Any, Rest]:
        replays = any(wait["id"].startswith("replay:") for wait in waits)
        waits = [wait for wait in waits if not wait["id"].startswith("replay:")]
        listens = any(wait["kind"] == "event" for wait in waits)
        state: RunStatus = "waiting" if listens else "suspended"
        block = home.block(state=state, pending=waits)
        snapshot: Any = {"execution": block}
        wake_at = home.execution.clock.now() if replays else wake_at_of(snapshot)
        # A request to cancel that comes while the run is put to rest must not lie there unseen.
        return block, Rest(state, wake_at, (*awaits_of(snapshot), CANCEL))

    async def _end_cancelled(self, home: OwnedRun, reason: str) -> Run:
        error = failure_record(Cancelled(home.id, reason), home.id, (Cancelled,)).record
        now = home.block()["lastUpdated"]
        block = home.block("failed", state="cancelled", completedAt=now, error=error)
        await home.rest(block, Rest("cancelled"))
        return self._run(home.id, codec.loads(home.ledger.encode(block)))

    def _look_for_cancel(self, home: OwnedRun) -> None:
        async def look() -> None:
            for message in await home.fetch_mail():
                if message.name == CANCEL:
                    home.stop(Cancelled(home.id, codec.loads(message.payload)))

        task = asyncio.Task(look(), loop=asyncio.get_running_loop())
        self._bus.track(task)

    def _cancel_reason(self, grant: Grant) -> str:
        return next(str(codec.loads(m.payload)) for m in grant.inbox if m.name == CANCEL)

    def _home(
        self,
        session: Session,
        grant: Grant,
        ledger: Ledger,
        definition: Definition[Any, Any] | None,
        payload: object = None,
        not_before: datetime | None = None,
    ) -> OwnedRun:
        now = grant.now if not_before is None else max(grant.now, not_before)
        execution = Execution(
            workflow=ledger.name,
            run_id=grant.lease.id,
            ledger=ledger,
            clock=SyncedClock(self.clock, now),
            random=self.random,
            emit=self._emitter(),
            errors=() if definition is None else definition.errors,
            payload=payload,
        )
        return OwnedRun(
            session,
            grant,
            execution,
            linger=self._linger,
            replay_every_step=self._always_replay,
        )

    def _emitter(self) -> Callable[[Event], None] | None:
        return self._bus.publish if self._bus else None

    def _definition(self, workflow: Definition[Any, Any] | str) -> Definition[Any, Any]:
        if isinstance(workflow, str):
            return self.registry.newest(workflow)
        self.registry.add(workflow)
        return workflow

    def _first_snapshot(self, definition: Definition[Any, Any], data: Any) -> bytes:
        metadata = {"version": definition.version, "createdAt": isoformat(self.clock.now())}
        if data is not None:
            metadata["input"] = data
        now = self.clock.now()
        return codec.dumps(new_snapshot(definition.name, now=now, metadata=metadata))

    def _want(self, run_id: str, create: bytes | None = None, workflow: str | None = None) -> Want:
        return Want(
            run_id,
            new_owner(self.random),
            self.lease_ttl,
            create=create,
            workflow=workflow,
            existing=create is None,
        )

    async def _enqueue(self, run_id: str, definition: Definition[Any, Any], data: bytes) -> None:
        store = require_schedule(self.store, "Runtime.trigger(wait=False)")
        await store.enqueue([NewRun(run_id, definition.name, data)])

    async def _load(self, run_id: str) -> Snapshot:
        snapshot = await self.store.load(check_id(run_id, "run_id"))
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot

    async def _require(self, run_id: str) -> Run:
        return self._run(run_id, await self._load(run_id))

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
        wanted = "a value that comes back from JSON as it is"
        raise InvalidArgument("payload", payload, wanted, str(error)) from error


def _body(definition: Definition[Any, Any], payload: object) -> Body:
    return lambda step: definition(step, payload)


def _broken(home: OwnedRun) -> Any:
    assert home.execution.broken is not None
    return outcome_of(home.execution.broken)
