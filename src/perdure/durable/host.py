"""A run in this process: how its records become durable, and how it is settled.

This is the part common to all stores. `JournaledRun` writes to a store with a journal,
`SnapshotRun` to one without.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast

from perdure import codec
from perdure.clock import SyncedClock, parse_iso
from perdure.durable.asks import conclude
from perdure.durable.in_flight import StepInFlight, steps_in_flight
from perdure.durable.inbox import Inbox
from perdure.durable.outbox import Outbox
from perdure.durable.reports import ReportWriter
from perdure.durable.session import Session
from perdure.durable.store_errors import store_errors
from perdure.durable.suspension import Answer, Suspension
from perdure.engine.attempts import LONG_DELAY
from perdure.engine.execution import Execution
from perdure.engine.history import History
from perdure.engine.host import Host, Received, Undos
from perdure.engine.middleware import Around
from perdure.engine.tasks import call_in, complete, detached, finish, outside_runs
from perdure.engine.waiting import UNCLAIMED
from perdure.errors import LeaseLost, PermitLost
from perdure.limits import Cost
from perdure.snapshot import ExecutionBlock, PendingWait
from perdure.store import (
    Grant,
    Lease,
    Message,
    Rest,
    can_search,
    require_inbox,
    require_lease,
    require_queues,
)

REPLAY = "~replay:"
"""The prefix of the ids of waits that only let `always_replay` suspend the run."""


class RunHost(Host, ABC):
    """A run in this process: its history, its lease, and its execution once it has started.

    `open_outbox` creates the outbox of a run that may act on other runs. `leftovers` are messages
    that no wait will receive: they are consumed when the run is left. `replay` calls the function
    to learn how its steps are undone. Middleware is told `due_at`: when the run became due, if that
    is known.
    """

    def __init__(
        self,
        session: Session,
        id: str,
        history: History,
        grant: Grant | None,
        now: datetime | None = None,
    ) -> None:
        self.session = session
        self.id = id
        self.history = history
        self.lease = None if grant is None else grant.lease
        self.takeovers = 0 if grant is None else grant.takeovers
        if grant is None:
            read_at = set_to = session.clock.now()
        else:
            # The run uses the store's time, taken from the grant or from `now`, whichever is later.
            read_at, set_to = grant.now, max(grant.now, now or grant.now)
        self.clock = SyncedClock(session.clock, set_to)
        self._inbox: Sequence[Message] = () if grant is None else grant.inbox
        self._inbox_read_at = read_at
        self.entries = 0
        self.always_replay = False
        self.suspend_after = LONG_DELAY
        self._leaves_memory = False
        self.on_message: Callable[[], None] | None = None
        self.open_outbox: Callable[[RunHost], Outbox] | None = None
        self._outbox: Outbox | None = None
        self.around: Around | None = None
        self.due_at: datetime | None = None
        self.leftovers: Sequence[str] = ()
        self.replay: Callable[[], Awaitable[Undos]] | None = None
        self._undos: Undos | None = None
        self._execution: Execution | None = None
        self._suspension: Suspension | None = None
        self._reports: ReportWriter | None = None

    @abstractmethod
    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Write the whole run, and release it; return the snapshot that was written."""

    @abstractmethod
    async def persist(self) -> None:
        """Make waits and outbox items durable."""

    @abstractmethod
    async def append_outcome(self, block: ExecutionBlock) -> None:
        """Make the end of the run durable, with its actions on other runs; keep the lease."""

    def start(
        self, execution: Execution, suspend_after: timedelta | None, always_replay: bool
    ) -> None:
        """Accept records and waits of an execution; see `Suspension` for the options."""
        self._execution, self._suspension = execution, None
        self.always_replay = always_replay
        self._leaves_memory = suspend_after is not None
        if suspend_after is not None:
            self.suspend_after = suspend_after
        # An earlier activation consumed these events, so they are no longer in the inbox.
        for key in self.history.unclaimed:
            self.give_back(key)

    @property
    def suspension(self) -> Suspension:
        """The waits of the execution that was started."""
        # Created on first use, because most runs end without a wait.
        if self._suspension is None:
            self._suspension = Suspension(
                self.execution,
                Inbox(self.read_inbox, self.clock, self._inbox, self._inbox_read_at),
                self.persist,
                suspend_after=self.suspend_after if self._leaves_memory else None,
                always_replay=self.always_replay,
            )
        return self._suspension

    @property
    def outbox(self) -> Outbox | None:
        """The deliveries of the run, if it may act on other runs."""
        # Created on first use, because most runs do not.
        if self._outbox is None and self.open_outbox is not None:
            self._outbox = self.open_outbox(self)
        return self._outbox

    @property
    def suspended_waits(self) -> list[PendingWait] | None:
        """The waits with which the run was suspended, or `None` if it was not."""
        return None if self._suspension is None else self._suspension.suspended_waits

    @property
    @abstractmethod
    def is_saved(self) -> bool:
        """Whether the store has everything that it must have before the function begins."""

    @property
    def execution(self) -> Execution:
        """The execution that was started."""
        assert self._execution is not None, "the run was not started"
        return self._execution

    @property
    def retries(self) -> int:
        """How often steps were retried in this activation."""
        return 0 if self._execution is None else self._execution.retries

    async def read_inbox(self) -> list[Message]:
        """Return the run's unconsumed messages."""
        return await self.session.read_inbox(self.id)

    async def read_log(self, run_id: str) -> list[tuple[str, Any]]:
        """Return the names and payloads of the messages of a log."""
        # Tasks that the store starts must not become branches: a replay does not read the log
        # again.
        with outside_runs():
            messages = await self.session.read_inbox(run_id)
        return [(message.name, codec.loads(message.payload)) for message in messages]

    def give_back(self, key: str) -> None:
        """Make the event of an unclaimed record available to waits."""
        record: Any = self.history.unclaimed[key]
        payload, at = codec.dumps(record.get("value")), parse_iso(record["at"])
        self.suspension.add_message(Message(UNCLAIMED + key, record["unclaimed"], payload, at))

    async def wait(self, wait: PendingWait) -> Answer:
        """Wait in memory or suspended."""
        if wait["kind"] == "event":
            require_inbox(self.session.store, f"step.{wait.get('ask', 'wait_for_event')}")
        return await self.suspension.wait(wait)

    async def conclude(self, wait: PendingWait, outcome: Mapping[str, Any]) -> Received:
        """Answer a wait on behalf of the run, unless it was already answered; return the answer."""
        # In a separate task: a cancelled caller must know which message was first.
        return await finish(detached(self._conclude(wait, outcome)))

    async def _conclude(self, wait: PendingWait, outcome: Mapping[str, Any]) -> Received:
        (first,) = await conclude(self.session, self.id, [wait], outcome)
        if first is None:
            # Another owner has consumed the message: only a record of the wait does that.
            raise LeaseLost(self.id)
        return first

    async def permit(self, cost: Cost, /) -> Callable[[], None]:
        """Wait until a limit permits an attempt; return a function that releases the permit."""
        store = require_queues(self.session.store, "the limit of a step")
        assert self.lease is not None, "a store with queues grants leases"
        limits = self.session.limits(store, self.lease.owner)
        hold = await limits.wait(cost, partial(self._lose_permit, cost))
        return hold.end

    def _lose_permit(self, cost: Cost) -> None:
        """Stop the run, because another process may use the permit; it can be claimed at once."""
        self.stop(PermitLost(self.id, cost.limit.name))

    async def halt(self, key: str) -> None:
        """Stop the calling branch until the run has been suspended and resumed."""
        await self.suspension.halt(REPLAY + key)

    async def learn_undos(self) -> Undos:
        """Replay the function, once, and return how its steps are undone."""
        if self._undos is None:
            assert self.replay is not None, "a function that is run can be replayed"
            self._undos = await self.replay()
        return self._undos

    def report(self, report: Mapping[str, Any], /) -> None:
        """Set the run's report, and publish it in a document if the store has documents."""
        # A step's function may run in a thread; the step ends only after the loop has done this.
        call_in(self.session.loop, lambda: self._report(report))

    def _report(self, report: Mapping[str, Any]) -> None:
        # A thread may report after the run has ended here, when another process may own it.
        if self._execution is None or not self._execution.live:
            return
        self.history.set_metadata("report", report)
        store = self.session.store
        if self._reports is None and can_search(store):
            self._reports = ReportWriter(self.id, store, self.clock)
        if self._reports is not None:
            self._reports.write(report)

    async def close(self) -> None:
        """Stop everything that runs beside the function, which has ended."""
        try:
            if self._suspension is not None:
                await self._suspension.close()
        finally:
            if self._reports is not None:
                await self._reports.close()

    def free(self) -> None:
        """Drop what refers back to this host, once the run was left.

        Otherwise its records would stay in memory until the next garbage collection, which
        thousands of finished runs would make expensive.
        """
        self._execution = self._suspension = self._reports = None
        self.replay = self.on_message = self.around = None
        self._outbox = self.open_outbox = None

    def update_lease(self, lease: Lease) -> None:
        """Continue with the lease's new expiry, and check for messages that have arrived."""
        self.lease = lease
        if lease.has_messages:
            self.message_came()

    def message_came(self) -> None:
        """Check the inbox."""
        # A run that has not started yet will check the messages that came with its lease.
        if self._execution is not None:
            self.suspension.look()
            if self.on_message is not None:
                self.on_message()

    def steps_in_flight(self) -> list[StepInFlight]:
        """Return the steps that are being executed."""
        return [] if self._execution is None else steps_in_flight(self._execution)

    def pause(self) -> None:
        """Let no step begin, and suspend the run as soon as nothing is in flight."""
        if self._execution is not None:
            self.suspension.pause()

    def stop(self, error: Exception) -> None:
        """Make every step raise `error` from now on."""
        if self._execution is not None:
            self._execution.stop(error)

    async def deliver_rest(self) -> None:
        """Deliver everything in the outbox of the stored run."""
        if self.history.outbox and self.outbox is not None:
            self.outbox.deliver(self.history.outbox)
            await self.outbox.drain()

    def lose(self) -> None:
        """Stop the run, because another process owns it."""
        self.session.leases.drop(self)
        self.stop(LeaseLost(self.id))

    async def release(self, wake_at: datetime | None = None) -> None:
        """Release the lease, even if the caller is cancelled in the meantime.

        The run can be claimed at once, or at `wake_at`.
        """
        # Dropped first: a renewal that finds the lease released would report it as lost.
        self.session.leases.drop(self)
        if self.lease is not None:
            with store_errors(self.session.store, f"release run {self.id!r}"):
                store = require_lease(self.session.store)
                await complete(store.release([self.lease], wake_at=wake_at))

    def block(self, status: str = "running", **extra: Any) -> ExecutionBlock:
        """Return the snapshot's `execution` as of now."""
        now = self.clock.isoformat(self.clock.monotonic())
        block: dict[str, Any] = {"status": status, "lastUpdated": now, **extra}
        if status == "running" and self.history.last_key is not None:
            block["currentStepId"] = self.history.last_key
        if self.history.rollback is not None:
            block["rollback"] = self.history.rollback
        return cast(ExecutionBlock, block)

    def running_block(self) -> ExecutionBlock:
        """Return the `execution` of a run that continues, with its waits."""
        waits = list(self.history.waits.values())
        return self.block(pending=waits) if waits else self.block()
