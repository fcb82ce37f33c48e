"""A run whose lease this process holds, on a store with a journal.

Every write carries the lease's epoch and a number. The first refused write ends the run in this
process, because another process owns it. A finished step is one entry. The last entry of an
activation replaces all others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from perdure.durable.asks import CLOSED, conclude, unseen_act
from perdure.durable.host import RunHost
from perdure.durable.session import Session
from perdure.durable.watchers import notify_watchers
from perdure.engine.call import StepCall
from perdure.engine.history import History
from perdure.engine.records import EncodedRecord
from perdure.engine.tasks import Args, Interrupted, detached, finish
from perdure.errors import LeaseLost
from perdure.snapshot import ExecutionBlock, OutboxItem, PendingWait, tags_of, version_of
from perdure.snapshot.asks import ask_tags
from perdure.snapshot.merge import plain_step_delta, step_delta, waits_delta
from perdure.store import Entry, Grant, Rest, Verdict, require_transaction

_NO_ITEMS: Mapping[str, OutboxItem | None] = MappingProxyType({})


def _was_deleted(entry: Entry, verdict: Verdict) -> bool:
    """Return whether a write had already deleted the run, but its first reply was lost."""
    return entry.rest is not None and entry.rest.delete and verdict is Verdict.UNKNOWN


class JournaledRun(RunHost):
    """A run whose lease this process holds, on a store with a journal."""

    def __init__(
        self, session: Session, history: History, grant: Grant, now: datetime | None = None
    ) -> None:
        super().__init__(session, grant.lease.id, history, grant, now)
        self._epoch = grant.lease.epoch
        self._n = 0
        self._undelivered: dict[int, Mapping[str, OutboxItem | None]] = {}
        self._closed_message_ids: tuple[str, ...] = ()
        self._queue = session.committer.queue_of(self.id)

    def record(self, call: StepCall, record: EncodedRecord, /) -> Coroutine[Any, Any, None]:
        """Append the step's record to the journal."""
        return self._write(self._data(call, record), call.consumes, None, call.id)

    async def _write(
        self,
        data: bytes,
        consumes: tuple[str, ...] = (),
        rest: Rest | None = None,
        step: str = "",
    ) -> None:
        """Write the next entry."""
        interruption: Interrupted | None = None
        # Nothing is awaited after the entry got its number, so entries are queued in order.
        self._n += 1
        entry = Entry(self.id, self._epoch, self._n, data, consumes, rest, step)
        reply = self._queue.submit(entry)
        try:
            verdict = await reply
        except asyncio.CancelledError as error:
            interruption = await self._queue.outlast(reply, error)
            verdict = interruption.answer
        if verdict is not Verdict.ACCEPTED and not _was_deleted(entry, verdict):
            raise self._lose_lease()
        self.entries += 1
        if self._undelivered:
            self._deliver(entry)
        # Raised only now, because a cancelled caller must know whether the write was accepted.
        if interruption is not None:
            raise interruption

    def _data(self, call: StepCall, record: EncodedRecord) -> bytes:
        """Return the data of the entry for a record."""
        history = self.history
        has_changes = history.waits.changes or history.metadata.changes or history.outbox.changes
        if has_changes or record.warnings or call.replaces:
            return self._delta(call, record)
        return plain_step_delta(record.key, record.json, record.at)

    def _delta(self, call: StepCall, record: EncodedRecord) -> bytes:
        """Return the data of an entry: the step's record, and everything else that has changed."""
        history = self.history
        return step_delta(
            record.key,
            record.json,
            record.at,
            replaces=call.replaces,
            waits=history.waits.take_changes(),
            metadata=history.metadata.take_changes(),
            outbox=self._take_items() if history.outbox.changes else _NO_ITEMS,
            warnings=record.warnings,
        )

    def _take_items(self) -> Mapping[str, OutboxItem | None]:
        """Return the outbox changes for the next entry, and remember them for delivery."""
        # Keyed by the number of the next entry: they must not be delivered before it is accepted.
        items = self._undelivered[self._n + 1] = self.history.outbox.take_changes()
        return items

    def _deliver(self, entry: Entry) -> None:
        items = self._undelivered.pop(entry.n, None)
        if items is not None and self.outbox is not None:
            self.outbox.deliver(items)

    def _lose_lease(self) -> LeaseLost:
        self.lose()
        return LeaseLost(self.id)

    @property
    def is_saved(self) -> bool:
        """Whether there is nothing to append, and nothing to deliver for the previous owner."""
        return not (
            self.history.waits.changes or self.history.outbox or self.history.outbox.changes
        )

    async def persist(self) -> None:
        """Append waits that began or ended, and actions on other runs."""
        if self.history.waits.changes or self.history.outbox.changes:
            await self._write_delta(self.block())

    async def append_outcome(self, block: ExecutionBlock) -> None:
        """Append the outcome of the run; the lease is kept."""
        cancelled_with = await self._close_asks(()) if self.history.asks else None
        # Otherwise open waits would remain in the snapshot beside the outcome.
        await self._write_delta({**block, "pending": []})
        if cancelled_with is not None:
            raise asyncio.CancelledError(*cancelled_with)

    async def _close_asks(self, kept_waits: Iterable[PendingWait]) -> Args | None:
        """Close the tokens of waits that the run is about to drop, for whatever reason.

        This comes before the write that drops the waits, so that no answer is accepted and then
        lost. An answer that was accepted earlier is recorded as an act. If the caller was cancelled
        in the meantime, return the arguments of that.
        """
        history = self.history
        kept_events = {wait.get("event") for wait in kept_waits}
        dropped_waits = [wait for event, wait in history.asks.items() if event not in kept_events]
        if not dropped_waits:
            return None
        cancelled_with: Args | None = None
        try:
            first = await finish(detached(conclude(self.session, self.id, dropped_waits, CLOSED)))
        except Interrupted as interruption:
            first, cancelled_with = interruption.answer, interruption.args
        for wait, answer in zip(dropped_waits, first, strict=True):
            del history.asks[wait.get("event", "")]
            if answer is not None:
                self._closed_message_ids += (answer.message_id,)
                if (act := unseen_act(wait, answer)) is not None:
                    history.add_act(act)
        return cancelled_with

    async def _write_delta(self, block: ExecutionBlock) -> None:
        history = self.history
        waits, metadata = history.waits.take_changes(), history.metadata.take_changes()
        await self._write(waits_delta(block, waits, metadata, self._take_items()))

    async def transact(
        self, call: StepCall, work: Callable[[Any], Awaitable[EncodedRecord]], /
    ) -> EncodedRecord:
        """Commit the step's record together with the writes of `work`.

        The transaction runs in a separate task: a cancellation reaches the user's function, which
        is rolled back, but never a commit, whose outcome would then be unknown.
        """
        store = require_transaction(self.session.store, f"step.transaction({call.id!r})")
        records: list[EncodedRecord] = []
        entries: list[Entry] = []

        async def entry(connection: Any) -> Entry:
            records.append(await work(connection))
            data = self._data(call, records[0])
            self._n += 1
            entries.append(Entry(self.id, self._epoch, self._n, data, call.consumes, None, call.id))
            return entries[0]

        task = detached(store.transact(self.id, self._epoch, entry))
        interruption: Interrupted | None = None
        try:
            # Once `work` has returned a record, the commit is in progress, and must not be
            # cancelled.
            verdict = await finish(task, cancel_while=lambda: not records)
        except Interrupted as error:
            interruption, verdict = error, error.answer
        if verdict is not Verdict.ACCEPTED:
            raise self._lose_lease()
        self.entries += 1
        if self._undelivered:
            self._deliver(entries[0])
        if interruption is not None:
            raise Interrupted(records[0], interruption.args)
        return records[0]

    async def settle(
        self, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
    ) -> bytes:
        """Replace snapshot and journal with the whole snapshot, and release the lease.

        This and the wake time are one fenced write.
        """
        data = b""
        asks, waits = self.history.asks, block.get("pending", ())
        cancelled_with = await self._close_asks(waits) if asks else None
        if not rest.delete:
            if self._outbox is not None:
                # Before the snapshot is encoded, so that it does not contain delivered items.
                await self._outbox.drain()
            if self.history.outbox and rest.status != "paused":
                # No process delivers items while the run is at rest, so wake the next owner at
                # once.
                rest = replace(rest, wake_at=self.clock.now())
            data = self.history.encode(block)
            rest = self._describe_rest(rest, block, len(data))
        try:
            await self._write(data, (*consumes, *self._closed_message_ids), rest)
        except Interrupted as interruption:
            raise interruption.plain() from None
        finally:
            # Whatever the outcome of the write, this process no longer works on the run.
            self.session.leases.drop(self)
            notify_watchers(self.session.store, self.id)
        if cancelled_with is not None:
            raise asyncio.CancelledError(*cancelled_with)
        return data

    def _describe_rest(self, rest: Rest, block: ExecutionBlock, size: int) -> Rest:
        """Add the version, tags and summary of the run to a rest."""
        metadata, waits = self.history.metadata, block.get("pending")
        return replace(
            rest,
            version=version_of(metadata),
            tags=tags_of(metadata, ask_tags(waits) if waits else ()),
            summary=self.history.summarize(block, size),
        )
