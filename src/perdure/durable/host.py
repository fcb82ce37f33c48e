"""The run that this process works on: how its records become durable, and how it is left behind.

A `JournaledRun` is a run whose lease we hold on a store with a journal: every write carries the
lease's epoch, and the first refusal ends the run here. A `SnapshotRun` is a run on a store without
a journal: the whole snapshot is saved.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

from perdure import codec
from perdure.clock import isoformat, parse_iso
from perdure.durable.inbox import Inbox
from perdure.durable.session import Session, store_errors
from perdure.durable.suspension import Answer, Suspension
from perdure.engine import call as calls
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.history import EncodedRecord
from perdure.engine.tasks import Interrupted, detached, finish
from perdure.engine.waiting import UNCLAIMED
from perdure.errors import LeaseLost, Suspended
from perdure.snapshot import ExecutionBlock, PendingWait
from perdure.store import (
    Entry,
    Grant,
    Lease,
    Message,
    Rest,
    Verdict,
    can_inbox,
    require_inbox,
    require_lease,
    require_transaction,
)

_RUNNING = b'{"status":"running","lastUpdated":"%b","currentStepId":%b}'
_DELTA = b'{"formatVersion":1,"steps":{%b},"execution":%b%b}'


class RunHost(calls.RunHost, ABC):
    """Where a durable run lives while this process works on it."""

    def __init__(
        self,
        session: Session,
        id: str,
        execution: Execution,
        *,
        grant: Grant | None,
        suspend_after: timedelta | None = None,
        always_replay: bool = False,
    ) -> None:
        self.session = session
        self.id = id
        self.execution = execution
        self.history = execution.history
        self.lease = None if grant is None else grant.lease
        self.entries = 0
        self.always_replay = always_replay
        self.suspended: list[PendingWait] | None = None
        self.main: asyncio.Task[Any] | None = None
        self._unwinding: asyncio.TimerHandle | None = None
        self.on_message: Callable[[], None] | None = None
        self.suspension = Suspension(
            self,
            execution.branches,
            execution.clock,
            Inbox(
                self.read_inbox,
                execution.clock,
                [] if grant is None else list(grant.inbox),
                execution.clock.now() if grant is None else grant.now,
            ),
            suspend_after=suspend_after,
            always_replay=always_replay,
        )
        for key in self.history.unclaimed:
            self.give_back(key)
        if grant is not None:
            session.hold(self)

    @abstractmethod
    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Write the whole run as it will be stored, and give it up; return what was written."""

    @abstractmethod
    async def persist_waits(self) -> None:
        """Make the deadlines of waits durable."""

    @property
    def live(self) -> bool:
        """Whether steps can still be recorded."""
        return self.execution.live

    async def read_inbox(self) -> list[Message]:
        """Return the run's unconsumed messages."""
        store = self.session.store
        return list(await store.inbox(self.id)) if can_inbox(store) else []

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

    async def halt(self, key: str) -> None:
        """Stop the calling branch until the run was suspended and resumed."""
        await self.suspension.halt(f"replay:{key}")

    def suspend(self, waits: list[PendingWait]) -> None:
        """Unwind the function: every branch waits for one of these."""
        if self.execution.live:
            self.suspended = waits
            self.stop(Suspended())

    def stop(self, reason: BaseException) -> None:
        """Unwind the function for this reason; no step begins any more."""
        self.execution.break_off(reason)

    def unwind(self) -> None:
        """Cancel the function and all its branches; again each second, if they swallow it.

        A `TaskGroup` that is already aborting does not pass a cancellation on to its tasks.
        """
        if self.main is None or self.main.done():
            return
        loop = self.main.get_loop()
        for task in {self.main, *self.execution.branches.tasks}:
            loop.call_soon(task.cancel)
        self._unwinding = loop.call_later(1, self.unwind)

    async def close(self) -> None:
        """Stop watching and unwinding: the function has ended."""
        if self._unwinding is not None:
            self._unwinding.cancel()
        await self.suspension.close()

    def renewed(self, lease: Lease) -> None:
        """Continue with the lease's new expiry, and look at messages that arrived meanwhile."""
        self.lease = lease
        if lease.has_messages:
            self.message_came()

    def message_came(self) -> None:
        """Look into the inbox."""
        self.suspension.look()
        if self.on_message is not None:
            self.on_message()

    def lose(self) -> None:
        """Stop: another process owns the run now."""
        self.session.drop(self)
        self.stop(LeaseLost(self.id))

    async def release(self, wake_at: datetime | None = None) -> None:
        """Release the run as it is, to be claimed now or not before `wake_at`."""
        self.session.drop(self)
        if self.lease is not None:
            with store_errors(self.session.store, f"release run {self.id!r}"):
                store = require_lease(self.session.store)
                await store.release([self.lease], wake_at=wake_at)

    def block(self, status: str = "running", **extra: Any) -> ExecutionBlock:
        """Return the execution block as of now."""
        now = isoformat(self.execution.clock.now())
        block: dict[str, Any] = {"status": status, "lastUpdated": now, **extra}
        if status == "running" and self.execution.last_key is not None:
            block["currentStepId"] = self.execution.last_key
        return cast(ExecutionBlock, block)

    def running(self) -> ExecutionBlock:
        """Return the execution block of a run that continues, with what it waits for."""
        waits = list(self.history.waits.values())
        return self.block(pending=waits) if waits else self.block()


class JournaledRun(RunHost):
    """A run whose lease this process holds, on a store with a journal."""

    def __init__(
        self,
        session: Session,
        grant: Grant,
        execution: Execution,
        *,
        suspend_after: timedelta | None = None,
        always_replay: bool = False,
    ) -> None:
        super().__init__(
            session,
            grant.lease.id,
            execution,
            grant=grant,
            suspend_after=suspend_after,
            always_replay=always_replay,
        )
        self._epoch = grant.lease.epoch
        self._n = 0
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
        deleted = entry.rest is not None and entry.rest.delete
        # A run that is unknown was deleted by this very write, whose first answer was lost.
        if verdict is not Verdict.ACCEPTED and not (deleted and verdict is Verdict.UNKNOWN):
            raise self._lost()
        self.entries += 1
        if interrupted is not None:
            raise interrupted

    def _entry(self, call: StepCall, record: EncodedRecord) -> Entry:
        name = codec.dumps(record.key)
        steps = b"%b:%b" % (name, record.json)
        for key, json in call.replaces.items():
            steps += b",%b:%b" % (codec.dumps(key), json)
        more = self._changed_waits() if self.history.changed_waits else b""
        if record.warnings:
            more += b',"warnings":' + codec.dumps(list(record.warnings))
        data = _DELTA % (steps, _RUNNING % (record.at.encode(), name), more)
        self._n += 1
        return Entry(self.id, self._epoch, self._n, data, call.consumes, None, call.id)

    def _changed_waits(self) -> bytes:
        return b',"waits":' + codec.dumps(self.history.take_changed_waits())

    def _numbered(
        self, data: bytes, consumes: tuple[str, ...] = (), rest: Rest | None = None
    ) -> Entry:
        self._n += 1
        return Entry(self.id, self._epoch, self._n, data, consumes, rest)

    def _lost(self) -> LeaseLost:
        self.lose()
        return LeaseLost(self.id)

    async def persist_waits(self) -> None:
        """Append the waits that began or ended."""
        if self.history.changed_waits:
            block, waits = codec.dumps(self.block()), self._changed_waits()
            await self._write(self._numbered(_DELTA % (b"", block, waits)))

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Let the step's record commit with what `work` wrote.

        The transaction runs in a task of its own: a cancellation reaches the user's function, which
        is rolled back, but never a commit, whose outcome would then be unknown.
        """
        store = require_transaction(self.session.store, f"step.transaction({call.id!r})")
        records: list[EncodedRecord] = []

        async def entry(connection: Any) -> Entry:
            records.append(await work(connection))
            return self._entry(call, records[0])

        task = detached(store.transact(self.id, self._epoch, entry))
        try:
            verdict = await finish(task, cancel_while=lambda: not records)
        except Interrupted as interrupted:
            if interrupted.answer is not Verdict.ACCEPTED:
                raise self._lost() from None
            raise Interrupted(records[0]) from None
        if verdict is not Verdict.ACCEPTED:
            raise self._lost()
        self.entries += 1
        return records[0]

    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Replace snapshot and journal by the whole snapshot, set when the run wakes, and give the
        lease up.
        """
        data = b"" if rest.delete else self.history.encode(block)
        entry = self._numbered(data, tuple(consumes), rest)
        try:
            await self._write(entry)
        except Interrupted:
            raise asyncio.CancelledError from None
        finally:
            # Whatever became of the write: nothing works on the run here any more.
            self.session.drop(self)
        return data


class SnapshotRun(RunHost):
    """A run on a store without a journal: each record saves the whole snapshot.

    Saves never overtake each other: while one is under way, records gather for the next. A record
    is in the snapshot that is being saved before it is in the history.
    """

    def __init__(
        self, session: Session, id: str, execution: Execution, grant: Grant | None = None
    ) -> None:
        super().__init__(session, id, execution, grant=grant)
        self._saving = asyncio.Lock()
        self._staged: dict[str, EncodedRecord] = {}
        self._saved = 0
        self._changes = 0

    async def record(self, call: StepCall, record: EncodedRecord, /) -> None:
        """Save the snapshot with this record in it."""
        self._staged[record.key] = record
        try:
            await self.persist_waits()
        finally:
            del self._staged[record.key]

    async def persist_waits(self) -> None:
        """Save the snapshot as it is now, unless another call has just done so."""
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

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Refuse: the store has no transaction."""
        require_transaction(self.session.store, f"step.transaction({call.id!r})")
        raise AssertionError("a store with transactions has a journal")

    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Save the whole snapshot, or delete it, and give the lease up."""
        data = b""
        if rest.delete:
            with store_errors(self.session.store, f"delete run {self.id!r}"):
                await self.session.store.delete(self.id)
        else:
            data = await self._save(block)
        await self.release()
        return data
