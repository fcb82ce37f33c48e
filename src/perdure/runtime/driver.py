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
from perdure.durable.host import JournaledRun
from perdure.durable.lifecycle import Body, drive, log_failure, new_owner
from perdure.durable.outcome import ending, failures_to_retry
from perdure.durable.session import Session
from perdure.engine.execution import Execution
from perdure.engine.history import History
from perdure.engine.tasks import detached
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
from perdure.result import Err, Result
from perdure.runtime.definition import Definition
from perdure.runtime.registry import Registry
from perdure.snapshot import PendingWait, RunStatus, awaits_of, is_over, rest_status, wake_at_of
from perdure.snapshot.record import encode_failure, outcome_of
from perdure.store import Grant, LeaseRequest, Rest, Store, require_lease

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
    suspend_after: timedelta
    always_replay: bool

    def request(
        self, run_id: str, create: bytes | None = None, workflow: str | None = None
    ) -> LeaseRequest:
        """Give the request for a run's lease: of a new run with `create`, else of one that is
        there.
        """
        return LeaseRequest(
            run_id,
            new_owner(self.random),
            self.lease_ttl,
            create=create,
            workflow=workflow,
            existing=create is None,
        )

    async def continue_run(
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
            return await self._continue_run(session, grant, not_before, again)
        except LeaseLost:
            return None

    async def _continue_run(
        self, session: Session, grant: Grant, not_before: datetime | None, again: bool
    ) -> bytes | None:
        run_id = grant.lease.id
        status = rest_status(grant.snapshot)
        again = again and status == "failed"
        if is_over(status) and not again:
            # It ended elsewhere between somebody's look at it and the lease.
            host = self._host(session, grant, History("", grant.snapshot), None)
            return await host.settle(grant.snapshot["execution"], Rest(status))
        version = (grant.snapshot.get("metadata") or {}).get("version", 1)
        try:
            definition, snapshot = self.registry.for_run(run_id, grant.snapshot)
            payload = definition.decode_payload((snapshot.get("metadata") or {}).get("input"))
        except PerdureError:
            later = grant.now + self.lease_ttl
            await require_lease(self.store).release([grant.lease], wake_at=later)
            raise
        history = History(definition.name, snapshot)
        history.drop(failures_to_retry(snapshot))
        if again or definition.version != version:
            fresh = await self._rewrite(session, grant, history)
            return (
                None
                if fresh is None
                else await self._continue_run(session, fresh, not_before, False)
            )
        host = self._host(session, grant, history, definition, payload, not_before)
        if any(message.name == CANCEL for message in grant.inbox):
            return await self._end_cancelled(host, _cancel_reason(grant))
        host.on_message = lambda: self._look_for_cancel(host)
        try:
            result = await drive(host, _body(definition, payload))
        except asyncio.CancelledError:
            await log_failure(host.release())
            raise
        return await self._leave(host, result, definition)

    async def _rewrite(self, session: Session, grant: Grant, history: History) -> Grant | None:
        """Store a run as it is to be gone on with, and lease it anew; None: another took it up.

        A journal only adds: what a retry or a migration took away would be back after a crash.
        """
        host = self._host(session, grant, history, None)
        # A request to cancel that came before does not end what is begun again after it.
        old = [message.id for message in grant.inbox if message.name == CANCEL]
        await host.settle(host.running(), Rest("running", host.execution.clock.now()), old)
        return await session.acquire(self.request(host.id))

    async def cancel(self, session: Session, grant: Grant, reason: str) -> bytes | None:
        """End a leased run as cancelled; None when another owner took it meanwhile."""
        host = self._host(session, grant, History("", grant.snapshot), None)
        try:
            return await self._end_cancelled(host, reason)
        except LeaseLost:
            return None

    async def pause(self, session: Session, grant: Grant, reason: str) -> bytes:
        """Set a leased run aside, with what it waits for, until it is resumed."""
        host = self._host(session, grant, History("", grant.snapshot), None)
        waits = list(host.history.waits.values())
        block = host.block(state="paused", reason=reason, pending=waits)
        return await host.settle(block, Rest("paused", None, (CANCEL,)))

    async def _end_failed(self, host: JournaledRun, error: StoreError) -> bytes:
        """End a run that the store never takes as it is; without its records if need be."""
        try:
            return await self._write_failed(host, error)
        except ValueTooLarge:
            text = (
                f"{error}. Its {len(host.history)} records together are more than the store takes "
                "and were dropped, so the run cannot be retried"
            )
            host.history = host.history.without_records()
            return await self._write_failed(host, RunFailed(text), truncated=True)

    async def _write_failed(self, host: JournaledRun, error: PerdureError, **facts: Any) -> bytes:
        record = encode_failure(error, host.id, (RunFailed,)).record
        now = host.block()["lastUpdated"]
        block = host.block("failed", completedAt=now, error=record, failed=[], **facts)
        data = await host.settle(block, Rest("failed"))
        _log_failure(host, error)
        return data

    async def _end_cancelled(self, host: JournaledRun, reason: str) -> bytes:
        error = encode_failure(Cancelled(host.id, reason), host.id, (Cancelled,)).record
        now = host.block()["lastUpdated"]
        block = host.block("failed", state="cancelled", completedAt=now, error=error)
        return await host.settle(block, Rest("cancelled"))

    async def _leave(
        self, host: JournaledRun, result: Result[Any, Any] | None, definition: Definition[Any, Any]
    ) -> bytes:
        broken = host.execution.broken
        try:
            if host.suspended is not None:
                return await host.settle(*_at_rest(host, host.suspended))
            if isinstance(broken, Cancelled):
                return await self._end_cancelled(host, broken.reason)
            if isinstance(broken, StoreError | LeaseLost):
                raise broken
            if result is None:
                assert broken is not None, "a run without a result was broken off"
                result = outcome_of(broken)
            outcome, block, status = ending(host, result, definition.fn)
            data = await host.settle(block, Rest(status))
            if isinstance(outcome, Err):
                _log_failure(host, outcome.error)
            return data
        except StoreError as error:
            if isinstance(error, ValueTooLarge | MissingAbility):
                # Retrying cannot help: the run itself caused the error.
                with suppress(StoreError):
                    return await self._end_failed(host, error)
            await log_failure(host.release(self._when_to_try_again(host, error)))
            raise

    def _when_to_try_again(self, host: JournaledRun, error: StoreError) -> datetime | None:
        if isinstance(error, StoreUnavailable):
            return None
        # What the store refuses for one run must not keep everybody busy.
        return host.execution.clock.now() + self.lease_ttl

    def _look_for_cancel(self, host: JournaledRun) -> None:
        async def look() -> None:
            try:
                messages = await host.read_inbox()
            except StoreUnavailable as error:
                # The message stays: the next renewal of the lease finds it.
                logger.warning("the inbox of run %r cannot be read (%s)", host.id, error)
                return
            for message in messages:
                if message.name == CANCEL:
                    host.stop(Cancelled(host.id, codec.loads(message.payload)))

        self.bus.track(detached(look()))

    def _host(
        self,
        session: Session,
        grant: Grant,
        history: History,
        definition: Definition[Any, Any] | None,
        payload: object = None,
        not_before: datetime | None = None,
    ) -> JournaledRun:
        now = grant.now if not_before is None else max(grant.now, not_before)
        execution = Execution(
            workflow=history.name,
            run_id=grant.lease.id,
            history=history,
            clock=SyncedClock(self.clock, now),
            random=self.random,
            emit=self.bus.publish if self.bus else None,
            errors=() if definition is None else definition.errors,
            payload=payload,
        )
        return JournaledRun(
            session,
            grant,
            execution,
            suspend_after=self.suspend_after,
            always_replay=self.always_replay,
        )


def _at_rest(host: JournaledRun, waits: list[PendingWait]) -> tuple[Any, Rest]:
    replays = any(wait["id"].startswith("replay:") for wait in waits)
    waits = [wait for wait in waits if not wait["id"].startswith("replay:")]
    listens = any(wait["kind"] == "event" for wait in waits)
    state: RunStatus = "waiting" if listens else "suspended"
    block = host.block(state=state, pending=waits)
    snapshot: Any = {"execution": block}
    wake_at = host.execution.clock.now() if replays else wake_at_of(snapshot)
    # A request to cancel that comes while the run is put to rest must not lie there unseen.
    return block, Rest(state, wake_at, (*awaits_of(snapshot), CANCEL))


def _log_failure(host: JournaledRun, error: object) -> None:
    """Say once, loudly, that a run has failed: nobody may be waiting for its result."""
    steps = ", ".join(repr(key) for key in host.execution.failures_that_ended_it())
    logger.error(
        "run %r of workflow %r failed%s: %s",
        host.id,
        host.history.name,
        f" at step {steps}" if steps else "",
        error if isinstance(error, str) else repr(error),
        exc_info=error if isinstance(error, BaseException) else None,
    )


def _cancel_reason(grant: Grant) -> str:
    return next(str(codec.loads(m.payload)) for m in grant.inbox if m.name == CANCEL)


def _body(definition: Definition[Any, Any], payload: object) -> Body:
    return lambda step: definition(step, payload)
