"""How a runtime goes on with a run whose lease it holds, until the run ends or rests."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any

from perdure import codec
from perdure.clock import Clock, SyncedClock
from perdure.driving import Body, drive, new_owner, quietly
from perdure.ending import ending, failures_to_retry
from perdure.errors import (
    Cancelled,
    LeaseLost,
    MissingAbility,
    PerdureError,
    RunFailed,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.events import Bus
from perdure.execution import Execution
from perdure.ledger import Ledger
from perdure.ownership import OwnedRun, Session
from perdure.record import failure_record, outcome_of
from perdure.registry import Definition, Registry
from perdure.result import Result
from perdure.snapshot import PendingWait, RunStatus, awaits_of, is_over, rest_status, wake_at_of
from perdure.store import Grant, Rest, Store, Want, require_lease

logger = logging.getLogger(__name__)

CANCEL = "~cancel"
"""The event that asks the owner of a run to end it; users' events may have any other name."""


@dataclass(frozen=True, slots=True)
class Driver:
    """Goes on with leased runs; each verb gives the run's snapshot as it was written, as JSON."""

    store: Store
    registry: Registry
    clock: Clock
    random: Random
    bus: Bus
    lease_ttl: timedelta
    linger: timedelta
    always_replay: bool

    def want(self, run_id: str, create: bytes | None = None, workflow: str | None = None) -> Want:
        """Give the request for a run's lease: of a new run with `create`, else of one that is
        there.
        """
        return Want(
            run_id,
            new_owner(self.random),
            self.lease_ttl,
            create=create,
            workflow=workflow,
            existing=create is None,
        )

    async def go_on(
        self,
        session: Session,
        grant: Grant,
        *,
        not_before: datetime | None = None,
        again: bool = False,
    ) -> bytes | None:
        """Drive a run until it ends or rests; None when another owner took it meanwhile.

        One that is over stays as it is, unless it failed and is to be tried `again`.
        """
        try:
            return await self._go_on(session, grant, not_before, again)
        except LeaseLost:
            return None

    async def _go_on(
        self, session: Session, grant: Grant, not_before: datetime | None, again: bool
    ) -> bytes | None:
        run_id = grant.lease.id
        status = rest_status(grant.snapshot)
        again = again and status == "failed"
        if is_over(status) and not again:
            # It ended elsewhere between somebody's look at it and the lease.
            home = self._home(session, grant, Ledger("", grant.snapshot), None)
            return await home.rest(grant.snapshot["execution"], Rest(status))
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
            return None if fresh is None else await self._go_on(session, fresh, not_before, False)
        home = self._home(session, grant, ledger, definition, payload, not_before)
        if any(message.name == CANCEL for message in grant.inbox):
            return await self._end_cancelled(home, _cancel_reason(grant))
        home.on_mail = lambda: self._look_for_cancel(home)
        try:
            result = await drive(home, _body(definition, payload))
        except asyncio.CancelledError:
            await quietly(home.release())
            raise
        return await self._leave(home, result, definition)

    async def _rewrite(self, session: Session, grant: Grant, ledger: Ledger) -> Grant | None:
        """Store a run as it is to be gone on with, and lease it anew; None: another took it up.

        A journal only adds: what a retry or a migration took away would be back after a crash.
        """
        home = self._home(session, grant, ledger, None)
        # A request to cancel that came before does not end what is begun again after it.
        old = [message.id for message in grant.inbox if message.name == CANCEL]
        await home.rest(home.running(), Rest("running", home.execution.clock.now()), old)
        return await session.acquire(self.want(home.id))

    async def cancel(self, session: Session, grant: Grant, reason: str) -> bytes | None:
        """End a leased run as cancelled; None when another owner took it meanwhile."""
        home = self._home(session, grant, Ledger("", grant.snapshot), None)
        try:
            return await self._end_cancelled(home, reason)
        except LeaseLost:
            return None

    async def fail(self, session: Session, grant: Grant, error: RunFailed) -> bytes:
        """End a leased run as failed without calling its function."""
        return await self._end_failed(
            self._home(session, grant, Ledger("", grant.snapshot), None), error
        )

    async def _end_failed(self, home: OwnedRun, error: PerdureError) -> bytes:
        """End a run for a reason that is not its function's."""
        told = failure_record(error, home.id, (RunFailed,)).record
        now = home.block()["lastUpdated"]
        block = home.block("failed", completedAt=now, error=told, failed=[])
        return await home.rest(block, Rest("failed"))

    async def _end_cancelled(self, home: OwnedRun, reason: str) -> bytes:
        error = failure_record(Cancelled(home.id, reason), home.id, (Cancelled,)).record
        now = home.block()["lastUpdated"]
        block = home.block("failed", state="cancelled", completedAt=now, error=error)
        return await home.rest(block, Rest("cancelled"))

    async def _leave(
        self, home: OwnedRun, result: Result[Any, Any] | None, definition: Definition[Any, Any]
    ) -> bytes:
        broken = home.execution.broken
        try:
            if home.suspended is not None:
                return await home.rest(*_at_rest(home, home.suspended))
            if isinstance(broken, Cancelled):
                return await self._end_cancelled(home, broken.reason)
            if isinstance(broken, StoreError | LeaseLost):
                raise broken
            if result is None:
                assert broken is not None, "a run without a result was broken off"
                result = outcome_of(broken)
            _, block, status = ending(home, result, definition.fn)
            return await home.rest(block, Rest(status))
        except StoreError as error:
            if isinstance(error, ValueTooLarge | MissingAbility):
                # Its own doing: tried again it would end here again.
                with suppress(StoreError):
                    return await self._end_failed(home, error)
            await quietly(home.release(self._when_to_try_again(home, error)))
            raise

    def _when_to_try_again(self, home: OwnedRun, error: StoreError) -> datetime | None:
        if isinstance(error, StoreUnavailable):
            return None
        # What the store refuses for one run must not keep everybody busy.
        return home.execution.clock.now() + self.lease_ttl

    def _look_for_cancel(self, home: OwnedRun) -> None:
        async def look() -> None:
            for message in await home.fetch_mail():
                if message.name == CANCEL:
                    home.stop(Cancelled(home.id, codec.loads(message.payload)))

        self.bus.track(asyncio.Task(look(), loop=asyncio.get_running_loop()))

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
            emit=self.bus.publish if self.bus else None,
            errors=() if definition is None else definition.errors,
            payload=payload,
        )
        return OwnedRun(
            session,
            grant,
            execution,
            linger=self.linger,
            replay_every_step=self.always_replay,
        )


def _at_rest(home: OwnedRun, waits: list[PendingWait]) -> tuple[Any, Rest]:
    replays = any(wait["id"].startswith("replay:") for wait in waits)
    waits = [wait for wait in waits if not wait["id"].startswith("replay:")]
    listens = any(wait["kind"] == "event" for wait in waits)
    state: RunStatus = "waiting" if listens else "suspended"
    block = home.block(state=state, pending=waits)
    snapshot: Any = {"execution": block}
    wake_at = home.execution.clock.now() if replays else wake_at_of(snapshot)
    # A request to cancel that comes while the run is put to rest must not lie there unseen.
    return block, Rest(state, wake_at, (*awaits_of(snapshot), CANCEL))


def _cancel_reason(grant: Grant) -> str:
    return next(str(codec.loads(m.payload)) for m in grant.inbox if m.name == CANCEL)


def _body(definition: Definition[Any, Any], payload: object) -> Body:
    return lambda step: definition(step, payload)
