"""A run in this process: how its records become durable, and how the run is left.

A `JournaledRun` is a run whose lease this process holds, on a store with a journal: every write
carries the lease's epoch, and the first refused one ends the run here. A `SnapshotRun` is a run on
a store without a journal: each record saves the whole snapshot.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from msgspec.structs import replace

from perdure import codec
from perdure.clock import SyncedClock, isoformat, parse_iso
from perdure.durable.asks import CLOSED, conclude, unseen_act
from perdure.durable.in_flight import StepInFlight, steps_in_flight
from perdure.durable.inbox import Inbox
from perdure.durable.outbox import Outbox
from perdure.durable.reports import ReportWriter
from perdure.durable.session import Session, notify_watchers, store_errors
from perdure.durable.suspension import Answer, Suspension
from perdure.engine import call as calls
from perdure.engine.attempts import LONG_DELAY
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.history import EncodedRecord, History
from perdure.engine.middleware import Around
from perdure.engine.tasks import Interrupted, call_in, detached, finish, outside_runs
from perdure.engine.waiting import UNCLAIMED
from perdure.errors import LeaseLost, PermitLost
from perdure.limits import Cost
from perdure.snapshot import ExecutionBlock, OutboxItem, PendingWait, tags_of, version_of
from perdure.snapshot.asks import ask_tags
from perdure.snapshot.merge import step_delta, waits_delta
from perdure.store import (
    Entry,
    Grant,
    Lease,
    Message,
    Rest,
    Verdict,
    can_search,
    require_inbox,
    require_lease,
    require_queues,
    require_transaction,
)

_NO_ITEMS: Mapping[str, OutboxItem | None] = MappingProxyType({})

REPLAY = "~replay:"
"""Begins the ids of waits that only let `always_replay` suspend the run."""


class RunHost(calls.RunHost, ABC):
    """One run in this process: its history, its lease, and the execution once that has started.

    `leftovers` are messages that no wait will receive: they are consumed when the run is left.
    `keeps_result` says that the records are dropped when the run has ended, `has_requests` that the
    inbox has requests of operators.
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
        self.clock = session.clock
        self._inbox: list[Message] = []
        if grant is not None:
            # The run uses the store's time, from the grant or from `now` if that is later.
            self.clock = SyncedClock(session.clock, max(grant.now, now or grant.now))
            self._inbox = list(grant.inbox)
        self._inbox_read_at = self.clock.now() if grant is None else grant.now
        self.entries = 0
        self.always_replay = False
        self.suspend_after = LONG_DELAY
        self.on_message: Callable[[], None] | None = None
        self.outbox: Outbox | None = None
        self.around: Around | None = None
        self.leftovers: Sequence[str] = ()
        self.keeps_result = self.has_requests = False
        self._execution: Execution | None = None
        self._reports: ReportWriter | None = None

    @abstractmethod
    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Write the whole run as it will be stored, and give it up; return what was written."""

    @abstractmethod
    async def persist(self) -> None:
        """Make waits and items of the outbox durable."""

    @abstractmethod
    async def append_outcome(self, block: ExecutionBlock) -> None:
        """Make the end of the run durable, with what it does to other runs; keep the lease."""

    def start(
        self, execution: Execution, suspend_after: timedelta | None, always_replay: bool
    ) -> None:
        """Accept records and waits of an execution; see `Suspension` for the options."""
        self._execution = execution
        self.always_replay = always_replay
        if suspend_after is not None:
            self.suspend_after = suspend_after
        self.suspension = Suspension(
            execution,
            Inbox(self.read_inbox, self.clock, self._inbox, self._inbox_read_at),
            self.persist,
            suspend_after=suspend_after,
            always_replay=always_replay,
        )
        for key in self.history.unclaimed:
            self.give_back(key)

    @property
    def execution(self) -> Execution:
        """The execution that was started."""
        assert self._execution is not None, "the run was not started"
        return self._execution

    @property
    def retries(self) -> int:
        """How often steps were retried since the run was started here."""
        return 0 if self._execution is None else self._execution.retries

    async def read_inbox(self) -> list[Message]:
        """Return the run's unconsumed messages."""
        return await self.session.read_inbox(self.id)

    async def read_log(self, run_id: str) -> list[tuple[str, Any]]:
        """Return the names and payloads of the messages of a log."""
        # Tasks that the store starts for it are not branches: a replay does not read the log again.
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
            require_inbox(self.session.store, "step.wait_for_event")
        return await self.suspension.wait(wait)

    async def conclude(self, wait: PendingWait, outcome: Mapping[str, Any]) -> Answer:
        """Answer a wait of this run itself, unless it has been answered; return what counts."""
        try:
            (first,) = await finish(detached(conclude(self.session, self.id, [wait], outcome)))
        except Interrupted as interrupted:
            (first,) = interrupted.answer
            raise Interrupted(first) from None
        return first

    async def permit(self, cost: Cost, /) -> Callable[[], None]:
        """Wait until a limit permits an attempt; return what ends its use of the limit."""
        store = require_queues(self.session.store, "the limit of a step")
        assert self.lease is not None, "a store with queues grants leases"
        limits = self.session.limits(store, self.lease.owner)
        hold = await limits.wait(cost, partial(self._lose_permit, cost))
        return hold.end

    def _lose_permit(self, cost: Cost) -> None:
        """Stop: another process may use the permit by now. The run can be claimed at once."""
        self.execution.break_off(PermitLost(self.id, cost.limit.name))

    async def halt(self, key: str) -> None:
        """Stop the calling branch until it is resumed, or the run was suspended and resumed."""
        await self.suspension.halt(REPLAY + key)

    def resume_branch(self, key: str) -> None:
        """Let the branch continue that was stopped under this key, if there is one."""
        self.suspension.resume(REPLAY + key)

    def report(self, report: Mapping[str, Any], /) -> None:
        """Set the run's report, and show it in a document if the store has documents."""
        # A step's function may run in a thread: it ends after the loop has done this.
        call_in(self.session.loop, lambda: self._report(report))

    def _report(self, report: Mapping[str, Any]) -> None:
        if not self.execution.live:
            return
        self.history.set_metadata("report", report)
        store = self.session.store
        if self._reports is None and can_search(store):
            self._reports = ReportWriter(self.id, store, self.clock)
        if self._reports is not None:
            self._reports.write(report)

    async def close(self) -> None:
        """End what runs beside the function: it has ended."""
        try:
            await self.suspension.close()
        finally:
            if self._reports is not None:
                await self._reports.close()

    def renewed(self, lease: Lease) -> None:
        """Continue with the lease's new expiry, and look at messages that have arrived."""
        self.lease = lease
        if lease.has_messages:
            self.message_came()

    def message_came(self) -> None:
        """Look into the inbox."""
        if self._execution is not None:
            self.suspension.look()
            if self.on_message is not None:
                self.on_message()

    def steps_in_flight(self) -> list[StepInFlight]:
        """Return the steps that are being executed."""
        return [] if self._execution is None else steps_in_flight(self._execution)

    def break_off(self, error: Exception) -> None:
        """Make `error` the answer of every step from now on."""
        if self._execution is not None:
            self._execution.break_off(error)

    async def deliver_rest(self) -> None:
        """Deliver everything that is in the outbox of the stored run."""
        if self.outbox is not None and self.history.outbox:
            self.outbox.deliver(self.history.outbox)
            await self.outbox.drain()

    def lose(self) -> None:
        """Stop: another process owns the run now."""
        self.session.drop(self)
        self.break_off(LeaseLost(self.id))

    async def release(self, wake_at: datetime | None = None) -> None:
        """Release the lease; the run can be claimed at once, or from `wake_at` on."""
        self.session.drop(self)
        if self.lease is not None:
            with store_errors(self.session.store, f"release run {self.id!r}"):
                store = require_lease(self.session.store)
                await store.release([self.lease], wake_at=wake_at)

    def block(self, status: str = "running", **extra: Any) -> ExecutionBlock:
        """Return the snapshot's `execution` as of now."""
        now = isoformat(self.clock.now())
        block: dict[str, Any] = {"status": status, "lastUpdated": now, **extra}
        if status == "running" and self.history.last_key is not None:
            block["currentStepId"] = self.history.last_key
        if self.history.rollback is not None:
            block["rollback"] = self.history.rollback
        return cast(ExecutionBlock, block)

    def _described(self, rest: Rest, block: ExecutionBlock, size: int) -> Rest:
        """Return a rest with what lists show of the run."""
        metadata = self.history.metadata
        return replace(
            rest,
            version=version_of(metadata),
            tags=tags_of(metadata, ask_tags(block.get("pending", ()))),
            summary=self.history.summarize(block, size),
        )

    def running(self) -> ExecutionBlock:
        """Return the `execution` of a run that continues, with what it waits for."""
        waits = list(self.history.waits.values())
        return self.block(pending=waits) if waits else self.block()


class JournaledRun(RunHost):
    """A run whose lease this process holds, on a store with a journal."""

    def __init__(
        self, session: Session, history: History, grant: Grant, now: datetime | None = None
    ) -> None:
        super().__init__(session, grant.lease.id, history, grant, now)
        self._epoch = grant.lease.epoch
        self._n = 0
        self._undelivered: dict[int, Mapping[str, OutboxItem | None]] = {}
        self._closed: list[str] = []
        self._append = session.committer.append

    def record(self, call: StepCall, record: EncodedRecord, /) -> Coroutine[Any, Any, None]:
        """Append the step's record to the journal."""
        return self._write(self._entry(call, record))

    async def _write(self, entry: Entry) -> None:
        interrupted: Interrupted | None = None
        try:
            verdict = await self._append(entry)
        except Interrupted as error:
            interrupted, verdict = error, error.answer
        # If the run is unknown, this write deleted it, and its first answer was lost.
        was_deleted = entry.rest is not None and entry.rest.delete and verdict is Verdict.UNKNOWN
        if verdict is not Verdict.ACCEPTED and not was_deleted:
            raise self._lost()
        self.entries += 1
        if self._undelivered:
            self._deliver(entry)
        # Only now: a cancelled caller must know whether the write was accepted.
        if interrupted is not None:
            raise interrupted

    def _entry(self, call: StepCall, record: EncodedRecord) -> Entry:
        history = self.history
        data = step_delta(
            record.key,
            record.json,
            record.at,
            replaces=call.replaces,
            waits=history.take_changed_waits(),
            metadata=history.take_changed_metadata(),
            outbox=self._take_items() if history.changed_outbox else _NO_ITEMS,
            warnings=record.warnings,
        )
        self._n += 1
        return Entry(self.id, self._epoch, self._n, data, call.consumes, None, call.id)

    def _take_items(self) -> Mapping[str, OutboxItem | None]:
        """Return the changes of the outbox for the next entry, after which they are delivered."""
        items = self._undelivered[self._n + 1] = self.history.take_changed_outbox()
        return items

    def _deliver(self, entry: Entry) -> None:
        items = self._undelivered.pop(entry.n, None)
        if items is not None and self.outbox is not None:
            self.outbox.deliver(items)

    async def _drain(self) -> None:
        if self.outbox is not None:
            await self.outbox.drain()

    def _lost(self) -> LeaseLost:
        self.lose()
        return LeaseLost(self.id)

    async def persist(self) -> None:
        """Append the waits that began or ended, and what the run does to other runs."""
        if self.history.changed_waits or self.history.changed_outbox:
            await self._write_delta(self.block())

    async def append_outcome(self, block: ExecutionBlock) -> None:
        """Append how the run ended; the lease is kept."""
        cancelled = await self._close_asks(())
        # Without this, the waits that were open would stay beside the outcome.
        await self._write_delta({**block, "pending": []})
        if cancelled:
            raise asyncio.CancelledError

    async def _close_asks(self, kept: Iterable[PendingWait]) -> bool:
        """Close the tokens of waits that the run is about to drop, whatever drops them.

        First, so that no answer is accepted that would be lost. One that was accepted before stays
        on record as an act. Return whether the caller was cancelled in the meantime.
        """
        history, awaited = self.history, {wait.get("event") for wait in kept}
        dropped = [wait for event, wait in history.asks.items() if event not in awaited]
        if not dropped:
            return False
        cancelled = False
        try:
            first = await finish(detached(conclude(self.session, self.id, dropped, CLOSED)))
        except Interrupted as interrupted:
            first, cancelled = interrupted.answer, True
        for wait, answer in zip(dropped, first, strict=True):
            del history.asks[wait.get("event", "")]
            if answer is not None:
                self._closed.append(answer.message_id)
                if (act := unseen_act(wait, answer)) is not None:
                    history.add_act(act)
        return cancelled

    async def _write_delta(self, block: ExecutionBlock) -> None:
        history = self.history
        waits, metadata = history.take_changed_waits(), history.take_changed_metadata()
        data = waits_delta(block, waits, metadata, self._take_items())
        self._n += 1
        await self._write(Entry(self.id, self._epoch, self._n, data))

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Commit the step's record together with what `work` wrote.

        The transaction runs in a task of its own: a cancellation reaches the user's function, which
        is rolled back, but never a commit, whose outcome would then be unknown.
        """
        store = require_transaction(self.session.store, f"step.transaction({call.id!r})")
        records: list[EncodedRecord] = []
        entries: list[Entry] = []

        async def entry(connection: Any) -> Entry:
            records.append(await work(connection))
            entries.append(self._entry(call, records[0]))
            return entries[0]

        task = detached(store.transact(self.id, self._epoch, entry))
        interrupted = False
        try:
            # As soon as `work` has returned a record, the commit is under way.
            verdict = await finish(task, cancel_while=lambda: not records)
        except Interrupted as error:
            interrupted, verdict = True, error.answer
        if verdict is not Verdict.ACCEPTED:
            raise self._lost()
        self.entries += 1
        if self._undelivered:
            self._deliver(entries[0])
        if interrupted:
            raise Interrupted(records[0])
        return records[0]

    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Replace snapshot and journal by the whole snapshot, set the wake time, and give up the
        lease: one fenced write.
        """
        data = b""
        cancelled = await self._close_asks(block.get("pending", ()))
        if not rest.delete:
            await self._drain()
            if self.history.outbox and rest.status != "paused":
                # No process delivers while the run is at rest, so the next owner does it at once.
                rest = replace(rest, wake_at=self.clock.now())
            data = self.history.encode(block)
            rest = self._described(rest, block, len(data))
        self._n += 1
        try:
            consumed = (*consumes, *self._closed)
            await self._write(Entry(self.id, self._epoch, self._n, data, consumed, rest))
        except Interrupted:
            raise asyncio.CancelledError from None
        finally:
            # Whatever the outcome of the write, nothing works on the run here any more.
            self.session.drop(self)
            notify_watchers(self.session.store, self.id)
        if cancelled:
            raise asyncio.CancelledError
        return data


class SnapshotRun(RunHost):
    """A run on a store without a journal: each record saves the whole snapshot.

    Saves never overtake each other: records that arrive during one are saved together by the next.
    A record is in the snapshot that is being saved before it is in the history.
    """

    def __init__(
        self, session: Session, id: str, history: History, grant: Grant | None = None
    ) -> None:
        super().__init__(session, id, history, grant)
        self._saving = asyncio.Lock()
        self._staged: dict[str, EncodedRecord] = {}
        self._saved = 0
        self._changes = 0

    async def record(self, call: StepCall, record: EncodedRecord, /) -> None:
        """Save the snapshot with this record in it."""
        self._staged[record.key] = record
        try:
            await self.persist()
        finally:
            del self._staged[record.key]

    async def persist(self) -> None:
        """Save the snapshot as it is now, unless another call has saved it in the meantime."""
        await finish(detached(self._save_changes()))

    async def _save_changes(self) -> None:
        self._changes += 1
        mine = self._changes
        async with self._saving:
            if self._saved >= mine:
                return
            upto = self._changes
            await self._save(self.running())
            self._saved = upto
            self.entries += 1

    async def _save(self, block: ExecutionBlock) -> bytes:
        data = self.history.encode(block, staged=tuple(self._staged.values()))
        with store_errors(self.session.store, f"save run {self.id!r}"):
            await self.session.store.save(self.id, codec.loads(data))
        return data

    async def append_outcome(self, block: ExecutionBlock) -> None:
        """Save the snapshot with the outcome."""
        await self._save(block)

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Raise `MissingAbility`: a store with transactions has a journal."""
        require_transaction(self.session.store, f"step.transaction({call.id!r})")
        raise AssertionError("a store with transactions has a journal")

    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Save the whole snapshot, or delete it, and give up the lease."""
        data = b""
        if rest.delete:
            with store_errors(self.session.store, f"delete run {self.id!r}"):
                await self.session.store.delete(self.id)
        else:
            data = await self._save(block)
        await self.release()
        return data
