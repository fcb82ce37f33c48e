"""Continue a leased run until it ends or is suspended."""

import logging
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any

from msgspec.structs import replace

from perdure.durable.host import RunHost
from perdure.durable.lifecycle import Program, log_failure, open_host, rewrite, run_to_rest
from perdure.durable.outbox import Outbox
from perdure.durable.outcome import failures_to_retry
from perdure.durable.rollback import roll_back
from perdure.durable.session import Session
from perdure.engine.arguments import Arguments
from perdure.engine.history import History
from perdure.engine.middleware import Middleware
from perdure.engine.step import Step
from perdure.engine.tasks import detached
from perdure.errors import (
    Cancelled,
    LeaseLost,
    MissingAbility,
    PerdureError,
    PermitLost,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
    VersionMismatch,
)
from perdure.events import Bus
from perdure.result import Result
from perdure.retention import Keep
from perdure.runtime.changes import ChangeCheck
from perdure.runtime.children import Children
from perdure.runtime.deadlines import fix_deadline
from perdure.runtime.definition import Definition
from perdure.runtime.delivery import Deliveries
from perdure.runtime.deps import Dependencies
from perdure.runtime.edits import (
    due_at_of,
    leased_edit,
    settle,
)
from perdure.runtime.ends import is_called_again, leftovers_in, report_end, watchers_in
from perdure.runtime.registry import Registry
from perdure.runtime.requests import ReceivedRequest, cancel_in, requests_in
from perdure.runtime.settlement import (
    SettledRun,
    apply_requests,
    end_failed,
    keeps_only_result,
    leave,
)
from perdure.runtime.system_workflow import SystemWorkflow
from perdure.runtime.transitions import lease_request, old_requests
from perdure.runtime.verbs import continue_over
from perdure.snapshot import (
    Snapshot,
    is_over,
    rest_status,
    version_of,
)
from perdure.snapshot.asks import open_asks
from perdure.store import Grant, LeaseRequest, Refusal, Store, require_lease

logger = logging.getLogger(__name__)


_CONTINUED = ("running", "queued")
"""The statuses of a run that was settled in order to be continued at once."""


@dataclass(slots=True)
class OpenedRun:
    """A leased run that is about to be continued, with its definition and payload.

    `requests` are those of operators that came in the meantime; `bus` keeps the tasks that read
    them.
    """

    host: RunHost
    definition: Definition[Any, Any]
    payload: Any
    bus: Bus
    requests: Sequence[ReceivedRequest] = ()

    def call(self, step: Step) -> Awaitable[Any]:
        """Call the run's function."""
        return self.definition(step, self.payload)

    def look_for_requests(self) -> None:
        """Read the requests of operators, because a message came."""
        self.bus.track(detached(self._read_requests()))

    async def _read_requests(self) -> None:
        """Read the requests of operators, and stop the run to apply them."""
        host = self.host
        try:
            messages = await host.read_inbox()
        except StoreUnavailable as error:
            # The message stays: the next renewal of the lease finds it.
            logger.warning("the inbox of run %r cannot be read (%s)", host.id, error)
            return
        self.requests = requests_in(messages)
        if (cancel := cancel_in(self.requests, host.history.rollback)) is not None:
            host.stop(Cancelled(host.id, cancel.why))
        elif self.requests:
            host.pause()


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
        """Return a request for the lease of a stored run, or of a new run with `new`."""
        return lease_request(run_id, self.random, self.lease_ttl, new)

    async def continue_run(
        self, session: Session, grant: Grant, *, not_before: datetime | None = None
    ) -> SettledRun | None:
        """Run until the run ends or is suspended; return `None` if another owner took it over.

        A run that is over stays as it is.
        """
        run_id = grant.lease.id
        try:
            while True:
                opened_run = await self._open(session, grant, not_before)
                # The history has what is still needed of the snapshot, which may be large.
                del grant
                if isinstance(opened_run, OpenedRun):
                    settled_run: SettledRun | None = await self._continue(opened_run)
                else:
                    settled_run = opened_run
                if settled_run is None or settled_run.status not in _CONTINUED:
                    return settled_run
                # The run was settled in order to be continued, but a worker may have claimed it
                # first.
                answer = await session.acquire(self.request(run_id))
                if isinstance(answer, Refusal):
                    return None
                grant = answer
        except LeaseLost:
            return None

    async def _open(
        self, session: Session, grant: Grant, not_before: datetime | None
    ) -> OpenedRun | SettledRun | None:
        """Return the run, ready to be continued, or its outcome if it was settled without that."""
        if is_over(rest_status(grant.snapshot)):
            return await self._close(session, grant)
        if grant.inbox and (pending_requests := requests_in(grant.inbox)):
            edit, host = leased_edit(session, grant)
            host.open_outbox = self._open_outbox
            return await apply_requests(edit, host, pending_requests)
        # Before anything is written, so that a run of an unknown workflow or version stays
        # unchanged for a process that knows it.
        definition, payload, history = await self._load(session, grant)
        host = open_host(session, grant.lease.id, history, grant, not_before)
        host.open_outbox = self._open_outbox
        if grant.inbox:
            host.leftovers = leftovers_in(grant.inbox, history.waits.values())
        if version_of(grant.snapshot.get("metadata")) not in (0, definition.version):
            await rewrite(host, wake_at=host.clock.now())
            return SettledRun(b"", "running")
        if self.around:
            host.due_at = due_at_of(grant.snapshot, grant.now)
        run = OpenedRun(host, definition, payload, self.bus)
        host.on_message = run.look_for_requests
        return run

    async def _continue(self, run: OpenedRun) -> SettledRun:
        """Run until the run ends, is suspended, or must continue under a new lease."""
        host = run.host
        settled_run: SettledRun | None = None
        try:
            with self.deps.in_use() as deps:
                program = self._program(run, deps)
                execute = run_to_rest if host.history.rollback is None else roll_back
                result = await execute(host, program)
            settled_run = await self._leave(run, result)
            return settled_run
        finally:
            if host.around is not None:
                host.around.after(None if settled_run is None else settled_run.status)
            host.free()

    def _program(self, run: OpenedRun, deps: Any) -> Program:
        host, definition = run.host, run.definition
        # Listeners and middleware see only the user's runs.
        is_system = isinstance(definition, SystemWorkflow)
        return Program(
            body=run.call,
            random=self.random,
            bus=None if is_system else self.bus,
            around=() if is_system else self.around,
            errors=definition.scope,
            types=definition.types,
            payload=run.payload,
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

    def _open_outbox(self, host: RunHost) -> Outbox:
        deliveries = Deliveries(host.session, host.id, host.history, self.random, self.lease_ttl)
        return Outbox(host.history, deliveries, host.stop)

    async def _close(self, session: Session, grant: Grant) -> SettledRun | None:
        """Report the end of this run to other runs.

        Its owner died before it could, or a run asked too late. Or the run ended between the
        caller's read and the lease.
        """
        edit, host = leased_edit(session, grant)
        host.open_outbox = self._open_outbox
        watchers = watchers_in(grant.inbox)
        if is_called_again(grant.snapshot, watchers):
            continue_over(edit)
            data = await settle(host, *edit.rest(host), old_requests(grant))
            return None if data is None else SettledRun(data, edit.status)
        try:
            await host.deliver_rest()
            await report_end(session, host.id, grant.snapshot, watchers)
        except BaseException:
            await log_failure(host.release())
            raise
        block, rest = edit.rest(host)
        rest = replace(rest, wake_at=None)
        if keeps_only_result(rest.status, self.registry.find(host.history.name), self.keep):
            # Its owner died before it could.
            host.history = host.history.without_records()
        data = await settle(host, block, rest, [message.id for message in watchers])
        return None if data is None else SettledRun(data, rest.status)

    async def _leave_to_others(self, session: Session, grant: Grant, error: PerdureError) -> None:
        """Release a run that cannot be executed here.

        A run of a newer version is due at once, for processes that know it. It is written, since
        the index may not contain the version yet that its owner has bound it to.
        """
        if isinstance(error, VersionMismatch) and error.stored > error.requested:
            _, host = leased_edit(session, grant)
            await log_failure(rewrite(host, wake_at=host.clock.now()))
        else:
            wake_at = grant.now + self.lease_ttl
            await require_lease(self.store).release([grant.lease], wake_at=wake_at)

    async def _load(
        self, session: Session, grant: Grant
    ) -> tuple[Definition[Any, Any], Any, History]:
        """Return the definition, payload and history of a run; release it if none fits."""
        try:
            definition, snapshot = self.registry.for_run(grant.lease.id, grant.snapshot)
            self.changes.check(grant.lease.id, snapshot.get("metadata"), definition)
            payload = definition.receive(snapshot)
        except PerdureError as error:
            await self._leave_to_others(session, grant, error)
            raise
        history = History(definition.name, snapshot)
        if not version_of(grant.snapshot.get("metadata")):
            # Written with the first entry: if this process dies, an older one must not continue the
            # run.
            history.metadata.put_all(definition.identity)
        elif snapshot is not grant.snapshot:
            # A migration may have dropped questions; their tokens are closed with the next rest.
            history.asks = {**open_asks(grant.snapshot), **history.asks}
        if history.rollback is None and (failures := failures_to_retry(snapshot)):
            history.drop(failures)
        return definition, payload, history

    async def _leave(self, run: OpenedRun, result: Result[Any, Any] | None) -> SettledRun:
        """Settle the run: write its outcome or its waits; release it if that fails."""
        host = run.host
        try:
            return await leave(host, result, run.definition, run.requests, self.keep)
        except StoreError as error:
            if isinstance(error, ValueTooLarge | MissingAbility):
                # Retrying cannot help: the run itself caused the error.
                with suppress(StoreError):
                    return await end_failed(host, error)
            # A persistent error of a single run must not keep the workers busy.
            is_outage = isinstance(error, StoreUnavailable | PermitLost)
            wake_at = None if is_outage else host.clock.now() + self.lease_ttl
            await log_failure(host.release(wake_at))
            raise
