"""How a runtime continues a run whose lease it holds, until the run ends or is suspended."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from perdure import codec
from perdure.durable.host import REPLAY, RunHost
from perdure.durable.lifecycle import Program, log_failure, open_host, rewrite, run_to_rest
from perdure.durable.outbox import Outbox
from perdure.durable.outcome import describe_outcome, failed_block, failures_to_retry
from perdure.durable.rollback import Failures, end_or_undo, roll_back, rolled_back
from perdure.durable.session import Session
from perdure.engine.arguments import Arguments
from perdure.engine.history import History
from perdure.engine.middleware import Middleware
from perdure.engine.tasks import detached
from perdure.errors import (
    Cancelled,
    ContinuedAsNew,
    LeaseLost,
    ManualValueError,
    MissingAbility,
    PerdureError,
    PermitLost,
    RollbackFailed,
    RunFailed,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
    VersionMismatch,
)
from perdure.events import Bus
from perdure.result import Err, Ok, Result
from perdure.retention import Keep
from perdure.runtime.acts import copy_acts
from perdure.runtime.changes import ChangeCheck
from perdure.runtime.children import Children
from perdure.runtime.deadlines import fix_deadline
from perdure.runtime.definition import Definition
from perdure.runtime.delivery import Deliveries, open_runs
from perdure.runtime.deps import Dependencies
from perdure.runtime.edits import (
    RunEdit,
    at_rest,
    cancelled,
    due_at_of,
    leased_edit,
    settle,
)
from perdure.runtime.ends import is_called_again, leftovers_in, report_end, watchers_in
from perdure.runtime.loud import log_failed_rollback, log_failed_run
from perdure.runtime.registry import Registry
from perdure.runtime.requests import WATCH, Requested, cancel_in, requests_in
from perdure.runtime.system_workflow import SystemWorkflow
from perdure.runtime.transitions import lease_request, old_requests
from perdure.runtime.verbs import apply_all, cancel_children, continue_over, refuse_all
from perdure.snapshot import (
    ExecutionBlock,
    PendingWait,
    RunStatus,
    Snapshot,
    is_over,
    reply_to_of,
    rest_status,
    version_of,
)
from perdure.snapshot.record import encode_failure, outcome_of
from perdure.snapshot.tags import parent_tag
from perdure.store import Grant, LeaseRequest, Refusal, Rest, Store, require_lease

logger = logging.getLogger(__name__)


_CONTINUED = ("running", "queued")
"""The statuses of a run that was written and given up, to be continued at once."""


class Rested(NamedTuple):
    """A run that was given up: its snapshot as JSON, its status, and how often steps of it were
    retried since it was leased.
    """

    data: bytes
    status: RunStatus
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Driver:
    """Continues leased runs until they end or are suspended."""

    store: Store
    registry: Registry
    random: Random
    bus: Bus
    lease_ttl: timedelta
    suspend_after: timedelta
    always_replay: bool
    arguments: Arguments
    changes: ChangeCheck
    deps: Dependencies
    around: tuple[Middleware, ...] = ()
    keep: Keep | None = None
    callback_url: str = ""

    def request(self, run_id: str, new: Snapshot | None = None) -> LeaseRequest:
        """Return a request for a run's lease: of a new run with `new`, else of a stored one."""
        return lease_request(run_id, self.random, self.lease_ttl, new)

    async def continue_run(
        self, session: Session, grant: Grant, *, not_before: datetime | None = None
    ) -> Rested | None:
        """Run until the run ends or is suspended; return `None` if another owner took it over.

        A run that is over stays as it is.
        """
        try:
            while True:
                rested = await self._continue_once(session, grant, not_before)
                if rested is None or rested.status not in _CONTINUED:
                    return rested
                # Written and given up, to be continued: a worker may have been faster to claim it.
                answer = await session.acquire(self.request(grant.lease.id))
                if isinstance(answer, Refusal):
                    return None
                grant = answer
        except LeaseLost:
            return None

    async def _continue_once(
        self, session: Session, grant: Grant, not_before: datetime | None
    ) -> Rested | None:
        """Run until the run ends, is suspended, or is to be continued under another lease."""
        if is_over(rest_status(grant.snapshot)):
            return await self._close(session, grant)
        if asked := requests_in(grant.inbox):
            edit, host = leased_edit(session, grant)
            self._open_outbox(host)
            return await _apply_requests(edit, host, asked)
        # Before anything is written: a run of an unknown workflow or version stays as it is, for a
        # process that knows it.
        definition, payload, history = await self._load(session, grant)
        host = open_host(session, grant.lease.id, history, grant, not_before)
        self._open_outbox(host)
        host.leftovers = leftovers_in(grant.inbox, history.waits.values())
        if version_of(grant.snapshot.get("metadata")) not in (0, definition.version):
            await rewrite(host, wake_at=host.clock.now())
            return Rested(b"", "running")
        requests: list[Requested] = []
        host.on_message = lambda: self._look_for_requests(host, requests)
        rested: Rested | None = None
        try:
            with self.deps.in_use() as deps:
                due_at = due_at_of(grant.snapshot, grant.now)
                program = self._program(host, definition, payload, deps, due_at)
                drive = run_to_rest if history.rollback is None else roll_back
                result = await drive(host, program)
            rested = await self._leave(host, result, definition, requests)
            return rested
        finally:
            if host.around is not None:
                host.around.after(None if rested is None else rested.status)

    def _program(
        self,
        host: RunHost,
        definition: Definition[Any, Any],
        payload: object,
        deps: Any,
        due_at: datetime | None,
    ) -> Program:
        # Listeners and middleware are told of the user's runs.
        is_system = isinstance(definition, SystemWorkflow)
        return Program(
            body=lambda step: definition(step, payload),
            random=self.random,
            bus=Bus() if is_system else self.bus,
            around=() if is_system else self.around,
            due_at=due_at,
            errors=definition.scope,
            types=definition.types,
            payload=payload,
            deps=deps,
            encode_input=definition.encode_payload,
            children=self._children(host),
            deadline=fix_deadline(host.history, host.clock, definition.deadline),
            suspend_after=self.suspend_after,
            always_replay=self.always_replay,
            arguments=self.arguments,
            callback_url=self.callback_url,
        )

    def _children(self, host: RunHost) -> Children:
        random, clock = self.random, host.clock
        return Children(
            host.id, host.history, self.store, self.registry, random, clock, self.around
        )

    def _open_outbox(self, host: RunHost) -> Deliveries:
        deliveries = Deliveries(host.session, host.id, host.history, self.random, self.lease_ttl)
        host.outbox = Outbox(host.history, deliveries, host.break_off)
        return deliveries

    async def _close(self, session: Session, grant: Grant) -> Rested | None:
        """Let other runs know of the end of this one: its owner died before it could, or a run
        asked too late for it. Or it ended between the caller's look at it and the lease.
        """
        edit, host = leased_edit(session, grant)
        self._open_outbox(host)
        watchers = watchers_in(grant.inbox)
        if is_called_again(grant.snapshot, watchers):
            continue_over(edit)
            data = await settle(host, *edit.rest(host), old_requests(grant))
            return None if data is None else Rested(data, edit.status)
        try:
            await host.deliver_rest()
            await report_end(session, host.id, grant.snapshot, watchers)
        except BaseException:
            await log_failure(host.release())
            raise
        block, rest = edit.rest(host)
        rest = replace(rest, wake_at=None)
        data = await settle(host, block, rest, [message.id for message in watchers])
        return None if data is None else Rested(data, rest.status)

    async def _leave_to_others(self, session: Session, grant: Grant, error: PerdureError) -> None:
        """Release a run that cannot be driven here.

        One of a newer version is due at once, for processes that know it. It is written, since the
        index may not contain the version yet to which its owner has bound it.
        """
        if isinstance(error, VersionMismatch) and error.stored > error.requested:
            _, host = leased_edit(session, grant)
            await log_failure(rewrite(host, wake_at=host.clock.now()))
        else:
            later = grant.now + self.lease_ttl
            await require_lease(self.store).release([grant.lease], wake_at=later)

    async def _load(
        self, session: Session, grant: Grant
    ) -> tuple[Definition[Any, Any], Any, History]:
        """Return what runs and its history; release a run that no definition here can run."""
        try:
            definition, snapshot = self.registry.for_run(grant.lease.id, grant.snapshot)
            self.changes.check(grant.lease.id, snapshot.get("metadata"), definition)
            payload = definition.receive(snapshot)
        except PerdureError as error:
            await self._leave_to_others(session, grant, error)
            raise
        history = History(definition.name, snapshot)
        if not version_of(grant.snapshot.get("metadata")):
            # With the first entry: if this process dies, an older one must not continue the run.
            history.changed_metadata.update(definition.identity)
        if history.rollback is None:
            history.drop(failures_to_retry(snapshot))
        return definition, payload, history

    async def _leave(
        self,
        host: RunHost,
        result: Result[Any, Any] | None,
        definition: Definition[Any, Any],
        requests: Sequence[Requested],
    ) -> Rested:
        """Write how the run ended or what it waits for, and give it up."""
        broken, suspended = host.execution.broken, host.suspension.suspended
        try:
            if isinstance(broken, ContinuedAsNew):
                return await self._begin_again(host, broken.data, definition)
            if requests and (suspended is not None or isinstance(broken, Cancelled)):
                return await _apply_requests(_edit(host, suspended), host, requests)
            if suspended is not None:
                return await _settle(host, *at_rest(host, suspended))
            if isinstance(broken, Cancelled):
                return await _end(host, *cancelled(host, broken.reason))
            if isinstance(broken, ManualValueError):
                return await _pause(host, str(broken))
            if isinstance(broken, StoreError | LeaseLost):
                raise broken
            if result is None:
                assert broken is not None, "a run without a result was broken off"
                result = outcome_of(broken)
            if isinstance(definition, SystemWorkflow) and isinstance(result, Ok):
                return await _sleep_until_next(host, definition, result.value)
            if requests:
                _refuse_late(host, requests)
            if host.history.rollback is not None:
                return await _end_rollback(host, result)
            outcome, block, status = describe_outcome(host, result, definition.fn, definition.types)
            if isinstance(outcome, Ok):
                host.keeps_result = self._keeps_result(definition)
            rested = await _end(host, block, Rest(status))
            if isinstance(outcome, Err):
                log_failed_run(host, outcome)
            return rested
        except StoreError as error:
            if isinstance(error, ValueTooLarge | MissingAbility):
                # Retrying cannot help: the run itself caused the error.
                with suppress(StoreError):
                    return await self._end_failed(host, error)
            # An error of this run alone must not keep the workers busy.
            is_outage = isinstance(error, StoreUnavailable | PermitLost)
            await log_failure(
                host.release(None if is_outage else host.clock.now() + self.lease_ttl)
            )
            raise

    def _keeps_result(self, definition: Definition[Any, Any]) -> bool:
        keep = definition.keep or self.keep
        return keep is not None and keep.what == "result"

    async def _begin_again(
        self, host: RunHost, data: object, definition: Definition[Any, Any]
    ) -> Rested:
        """Replace the run by its next generation, due at once, in one fenced write."""
        history, children = host.history, host.history.open_children()
        host.history = following = history.next_generation(data)
        following.metadata.update(definition.identity)
        if children := [*history.metadata.get("children", ()), *children]:
            # Some may have ended: a loop that starts a run in each generation must stay small.
            store = host.session.store
            tag = parent_tag(host.id)
            following.metadata["children"] = await open_runs(store, tag, children)
        return await _settle(host, host.block(state="queued"), Rest("queued", host.clock.now()))

    async def _end_failed(self, host: RunHost, error: StoreError) -> Rested:
        """End a run that the store does not accept as it is; without its records if need be."""
        try:
            return await self._write_failed(host, error)
        except ValueTooLarge:
            failed: PerdureError = RunFailed(
                f"{error}. Its {len(host.history)} records together are more than the store takes "
                "and were dropped, so the run cannot be retried"
            )
            if lost := host.history.owed():
                reasons = dict.fromkeys(lost, "its record was dropped")
                failed = RollbackFailed(f"run {host.id!r}", str(failed), reasons)
            host.history = host.history.without_records()
            return await self._write_failed(host, failed, truncated=True)

    async def _write_failed(self, host: RunHost, error: PerdureError, **facts: Any) -> Rested:
        record = encode_failure(error, host.id).record
        rested = await _end(host, failed_block(host, record, **facts), Rest("failed"))
        log_failed_run(host, Err(error))
        return rested

    def _look_for_requests(self, host: RunHost, requests: list[Requested]) -> None:
        async def look() -> None:
            try:
                messages = await host.read_inbox()
            except StoreUnavailable as error:
                # The message stays: the next renewal of the lease finds it.
                logger.warning("the inbox of run %r cannot be read (%s)", host.id, error)
                return
            requests[:] = requests_in(messages)
            host.has_requests = bool(requests)
            if (cancel := cancel_in(requests, host.history.rollback)) is not None:
                host.execution.break_off(Cancelled(host.id, cancel.why))
            elif requests:
                host.suspension.pause()

        self.bus.track(detached(look()))


async def _end(host: RunHost, block: ExecutionBlock, rest: Rest) -> Rested:
    """Store that a run has ended, or that its steps are undone first."""
    block, rest = end_or_undo(host, block, rest)
    if host.history.rollback is not None:
        cancel_children(host.history, host.clock.now())
    return await _settle(host, block, rest)


async def _end_rollback(host: RunHost, result: Result[Any, Any]) -> Rested:
    """Store the end of a run whose steps were undone."""
    failures: Failures = result.value if isinstance(result, Ok) else {}
    if isinstance(result, Err):
        failures = dict.fromkeys(host.history.owed(), cast(Exception, result.error))
    rested = await _settle(host, *rolled_back(host, failures))
    if failures:
        log_failed_rollback(host, failures)
    return rested


async def _settle(
    host: RunHost, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
) -> Rested:
    """Store how a run is left. If it has ended, other runs learn of it before it is given up."""
    if is_over(rest.status):
        await _tell_others(host, block)
        if host.keeps_result:
            # At no cost: the rest replaces all that was stored.
            host.history = host.history.without_records()
        # A request to be told of the end, which arrives only now, makes the run due.
        rest = replace(rest, wake_at=None, awaits=(WATCH,))
    data = await host.settle(block, rest, (*consumes, *host.leftovers))
    return Rested(data, rest.status, host.retries)


async def _tell_others(host: RunHost, block: ExecutionBlock) -> None:
    """Make the end durable, cancel children and answer the run that waits; or do nothing."""
    history = host.history
    if history.rollback is None:
        # Otherwise they were cancelled when that began.
        cancel_children(history, host.clock.now())
    if host.outbox is None or (reply_to_of(history.metadata) is None and not history.outbox):
        return
    ended: Any = {"metadata": history.metadata, "execution": block, "workflowName": history.name}
    try:
        await host.append_outcome(block)
        await host.outbox.drain()
        await report_end(host.session, host.id, codec.loads(codec.dumps(ended)))
    except asyncio.CancelledError:
        await log_failure(host.release())
        raise asyncio.CancelledError from None


async def _apply_requests(edit: RunEdit, host: RunHost, requests: Sequence[Requested]) -> Rested:
    """Apply what operators asked for, in one write."""
    apply_all(edit, [each.request for each in requests])
    consumes = [each.message_id for each in requests]
    rested = await _settle(host, *edit.rest(host), consumes)
    await copy_acts(host.session.store, host.id, edit.acts)
    return rested


def _edit(host: RunHost, waits: Sequence[PendingWait] | None) -> RunEdit:
    """Return the edit of a run whose function was unwound for a request."""
    # A branch that was halted has a step to run: the run is to be continued.
    is_halted = waits is None or any(wait["id"].startswith(REPLAY) for wait in waits)
    return _edit_of(host, "queued" if is_halted else "suspended")


def _edit_of(host: RunHost, status: RunStatus) -> RunEdit:
    return RunEdit(host.id, host.history, host.running(), status, host.clock.now())


def _refuse_late(host: RunHost, requests: Sequence[Requested]) -> None:
    """Record that requests came too late: the function has ended."""
    refuse_all(_edit_of(host, "queued"), [each.request for each in requests])


async def _pause(host: RunHost, reason: str) -> Rested:
    """Pause a run that cannot continue until an operator has changed it."""
    logger.error("run %r is paused: %s", host.id, reason)
    edit = _edit_of(host, "queued")
    edit.make("paused", reason=reason)
    return await _settle(host, *edit.rest(host))


async def _sleep_until_next(host: RunHost, definition: SystemWorkflow, outcome: Any) -> Rested:
    """Replace a run of the engine by its next generation, which begins at its next time."""
    rested = await _settle(host, *definition.rest(host, outcome))
    # It is queued, but not to be continued here and now.
    return rested._replace(status="suspended")
