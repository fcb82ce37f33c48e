"""Fenced writes of many runs at once: journal entries and rests.

The owner of a lease remembers its position. Its entries are one insert and its rests one update,
each in one round trip for the whole batch. If anything is in doubt (a lost reply, a filled slot, a
lease that another process acquired), it is resolved run by run from the state of the database.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from pymongo import DeleteOne, InsertOne, UpdateMany, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import BulkWriteError, PyMongoError

from perdure.engine.tasks import detached
from perdure.errors import StoreUnavailable
from perdure.store import Entry, Rest, Verdict
from perdure.stores.mongo import connection
from perdure.stores.mongo.batch import RunBatch, drop_unknown_messages
from perdure.stores.mongo.cleanup import Cleanup
from perdure.stores.mongo.documents import encode_snapshot
from perdure.stores.mongo.errors import DUPLICATE_KEY, is_connection_lost
from perdure.stores.mongo.inbox import (
    has_awaited_message,
    inbox_of,
    mark_consumed,
    message_keys,
)
from perdure.stores.mongo.journal import (
    Log,
    Positions,
    consumed_by,
    consumed_messages,
    entry_document,
    message_name,
    read_logs,
    seal_logs,
    slot_id,
)
from perdure.stores.mongo.schema import Collections, gather_all, insert
from perdure.stores.mongo.settle import delete, divide, settle
from perdure.stores.mongo.updates import (
    HEADER,
    Document,
    incarnation_of,
    is_owned,
    rest_fields,
    settle_runs,
)

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 20
_MAX_CONCURRENT = 16


class PendingWrite(NamedTuple):
    """A write of an entry that has not been made yet."""

    collection: connection.Collection
    write: "InsertOne[Any] | UpdateOne | DeleteOne"

    async def execute(self, session: AsyncClientSession | None = None) -> bool:
        """Make the write; return `False` if its slot was filled or its run had changed."""
        try:
            result = await self.collection.bulk_write([self.write], session=session)
        except BulkWriteError as error:
            if error.details["writeErrors"][0]["code"] != DUPLICATE_KEY:
                raise
            return False
        return result.inserted_count + result.matched_count + result.deleted_count == 1


class Appender:
    """Writes entries; one call at a time writes a run, so that its slots stay in order."""

    def __init__(self, prefix: str, positions: Positions, cleanup: Cleanup) -> None:
        self._prefix = prefix
        self._positions = positions
        self._cleanup = cleanup
        self.forget_loop()

    def forget_loop(self) -> None:
        """Drop the locks and tasks, which ended with their event loop."""
        self._locked_keys: set[str] = set()
        self._unlocked = asyncio.Event()
        self._marking: dict[asyncio.Task[None], set[str]] = {}

    async def finish(self, keys: Collection[str] | None = None) -> None:
        """Wait until consumed messages are marked, for these runs or for all."""
        if tasks := self.marking_tasks(keys):
            await asyncio.wait(tasks)

    def marking_tasks(self, keys: Collection[str] | None = None) -> list[asyncio.Task[None]]:
        """Return the tasks that mark consumed messages, for these runs or for all."""
        return [
            task
            for task, runs in self._marking.items()
            if keys is None or not runs.isdisjoint(keys)
        ]

    async def append(self, db: Collections, entries: Sequence[Entry]) -> list[Verdict]:
        """Write the entries and return a verdict on each."""
        batches = self._batches(entries)
        verdicts = [Verdict.ACCEPTED] * len(entries)
        async with self.lock(batches.keys()):
            doubtful = await self._write(db, batches.values())
            for start in range(0, len(doubtful), _MAX_CONCURRENT):
                some = doubtful[start : start + _MAX_CONCURRENT]
                verdict_lists = await gather_all([self._resolve(db, batch) for batch in some])
                for batch, answers in zip(some, verdict_lists, strict=True):
                    for index, verdict in zip(batch.indexes, answers, strict=True):
                        verdicts[index] = verdict
        return verdicts

    def _batches(self, entries: Sequence[Entry]) -> dict[str, RunBatch]:
        batches: dict[str, RunBatch] = {}
        for index, entry in enumerate(entries):
            key = self._prefix + entry.id
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = RunBatch(key)
            batch.entries.append(entry)
            batch.indexes.append(index)
        return batches

    @asynccontextmanager
    async def lock(self, keys: Iterable[str]) -> AsyncGenerator[None]:
        """Prevent other calls in this process from writing these runs."""
        mine = {*keys}
        while not self._locked_keys.isdisjoint(mine):
            self._unlocked.clear()
            await self._unlocked.wait()
        self._locked_keys |= mine
        try:
            yield
        finally:
            self._locked_keys -= mine
            self._unlocked.set()

    async def _write(self, db: Collections, batches: Iterable[RunBatch]) -> list[RunBatch]:
        """Write everything that can be written without reading; return the batches in doubt."""
        steps: list[RunBatch] = []
        rests: list[RunBatch] = []
        doubtful: list[RunBatch] = []
        for batch in batches:
            position = self._positions.get_certain(batch.key, batch.entries[0].epoch)
            if not batch.continues(position):
                doubtful.append(batch)
                continue
            batch.position = position
            (steps if batch.last.rest is None else rests).append(batch)
        writes = [
            _attempt(db, some, write)
            for some, write in ((steps, self._insert), (rests, self._settle))
            if some
        ]
        for batches_in_doubt in await gather_all(writes):
            doubtful += batches_in_doubt
        return doubtful

    async def _insert(self, db: Collections, batches: list[RunBatch]) -> list[RunBatch]:
        """Insert entries at the positions of their leases; return the batches in doubt."""
        documents: list[Document] = []
        owners: list[RunBatch] = []
        size = 0
        for batch in batches:
            assert batch.position is not None
            for slot, entry in enumerate(batch.entries, batch.position.slot):
                documents.append(entry_document(batch.key, entry, slot))
                owners.append(batch)
                size += len(entry.data)
        filled_slots = await insert(db.journal, documents, size)
        # A seal in the slot of one entry makes the entries after it void.
        doubtful = {owners[index].key for index in filled_slots}
        written_batches = [batch for batch in batches if batch.key not in doubtful]
        for batch in written_batches:
            self._advance(batch)
        self._mark_later(db, written_batches)
        return [batch for batch in batches if batch.key in doubtful]

    async def _settle(self, db: Collections, batches: list[RunBatch]) -> list[RunBatch]:
        """Write rests of leases whose positions are known; return the batches in doubt."""
        deletes = {batch.key: batch.last.epoch for batch in batches if batch.is_delete}
        count = await settle(db, [batch for batch in batches if not batch.is_delete])
        may_have_messages = False
        if deletes:
            deleted_count, may_have_messages = await delete(db, deletes)
            count += deleted_count
        if count < len(batches):
            return batches
        await self._finish_rests(db, batches, may_have_messages=may_have_messages)
        return []

    def _advance(self, batch: RunBatch) -> None:
        position = self._positions.confirm(batch.key, batch.last.epoch)
        if position is not None:
            position.slot += len(batch.entries)
            position.last_n = batch.last.n

    def _mark_later(self, db: Collections, batches: Iterable[RunBatch]) -> None:
        """Mark the messages that entries consumed, without making the caller wait.

        The entries are already written, and they are what consumes the messages. A rest that
        replaces them before the marks are written names the messages; another owner finds them in
        the journal.
        """
        if consuming := self._consumed_by(batches):
            task = detached(self._try_to_mark(db, consuming))
            self._marking[task] = {batch.key for batch in consuming}
            task.add_done_callback(self._marking.pop)

    def _consumed_by(self, batches: Iterable[RunBatch]) -> list[RunBatch]:
        """Note which messages were consumed; return the batches whose messages must be marked."""
        consuming = [batch for batch in batches if batch.consumes]
        for batch in consuming:
            self._positions.consume(batch.key, batch.last.epoch, batch.consumes)
        return consuming

    async def _try_to_mark(self, db: Collections, batches: Sequence[RunBatch]) -> None:
        try:
            await self._mark(db, batches)
        except PyMongoError as error:
            logger.warning("consumed messages are marked later: %s", error)

    async def _mark(self, db: Collections, batches: Sequence[RunBatch]) -> None:
        """Mark consumed messages, and write how many were consumed since the last rest."""
        keys = [key for batch in batches for key in message_keys(batch.key, batch.consumes)]
        works: list[Awaitable[object]] = [mark_consumed(db.inbox, keys)] if keys else []
        embedded, _ = divide(message_name(id) for batch in batches for id in batch.consumes)
        if counts := self._consumed_counts(batches, embedded):
            # A count may be lost, but not the removal of a message that the rest will not name.
            runs = db.runs if embedded else connection.relaxed(db.runs)
            works.append(runs.bulk_write(counts, ordered=False))
        await gather_all(works)
        for batch in batches:
            self._positions.mark_done(batch.key, batch.last.epoch, batch.consumes)

    def _consumed_counts(
        self, batches: Iterable[RunBatch], embedded: Sequence[str]
    ) -> list[UpdateMany]:
        """Return the updates that write how many messages were consumed since the last rest.

        They also remove the embedded ones, given by name.

        Most runs have consumed equally many, and one statement takes the server a third of the time
        of one for each run.
        """
        runs_by_count: dict[int, dict[str, int]] = {}
        for batch in batches:
            position = self._positions.get(batch.key, batch.last.epoch)
            if position is not None:
                runs = runs_by_count.setdefault(len(position.consumed), {})
                runs[batch.key] = position.epoch
        removal = {"$pull": {"newest": {"name": {"$in": embedded}}}} if embedded else {}
        return [
            UpdateMany(is_owned(epochs), {"$set": {"consumedSince": count}, **removal})
            for count, epochs in runs_by_count.items()
        ]

    async def _finish_rests(
        self, db: Collections, batches: Sequence[RunBatch], *, may_have_messages: bool = True
    ) -> None:
        """Mark the messages consumed by rests, and remove what settled runs left behind."""
        keys = [
            key
            for batch in batches
            if not batch.is_delete
            for key in message_keys(batch.key, batch.consumes)
        ]
        if keys:
            # The rest itself names these messages: the next owner marks those that are not marked.
            await mark_consumed(connection.relaxed(db.inbox), keys)
        # Positions last: while there is a position, a missing run is known to have been deleted by
        # us.
        for batch in batches:
            self._clean_up(batch, may_have_messages=may_have_messages)
            self._positions.remove(batch.key, batch.last.epoch)

    def _clean_up(self, batch: RunBatch, *, may_have_messages: bool) -> None:
        epoch = batch.last.epoch
        position = self._positions.get(batch.key, epoch)
        if position is None or position.has_older_logs:
            self._cleanup.delete_logs(batch.key, epoch)
        elif position.slot:
            slots = range(position.slot)
            self._cleanup.delete_slots(slot_id(batch.key, epoch, slot) for slot in slots)
        if batch.is_delete and may_have_messages:
            incarnation = batch.incarnation if position is None else position.incarnation
            self._cleanup.delete_messages(batch.key, incarnation)

    async def _resolve(self, db: Collections, batch: RunBatch) -> list[Verdict]:
        """Write a run's entries one by one, each based on the state of the database."""
        last_rest = batch.unconfirmed_rest
        return [
            await self._resolve_entry(db, RunBatch(batch.key, [entry], unconfirmed_rest=last_rest))
            for entry in batch.entries
        ]

    async def _resolve_entry(self, db: Collections, batch: RunBatch) -> Verdict:
        for _ in range(_MAX_ATTEMPTS):
            write = await self.plan_write(db, batch)
            if isinstance(write, Verdict):
                if write is Verdict.ACCEPTED:
                    await self._finish(db, batch)
                return write
            if await write.execute():
                await self.confirm(db, batch, write)
                return Verdict.ACCEPTED
        raise StoreUnavailable(
            f"run {batch.last.id!r} is written by too many processes at once; try again"
        )

    def next_write(self, db: Collections, batch: RunBatch) -> PendingWrite | None:
        """Return the write of an entry if it is the next one of a lease held here, or `None`."""
        position = self._positions.get_certain(batch.key, batch.last.epoch)
        if position is None or batch.last.rest is not None or not batch.continues(position):
            return None
        document = entry_document(batch.key, batch.last, position.slot)
        return PendingWrite(db.journal, InsertOne(document))

    async def plan_write(self, db: Collections, batch: RunBatch) -> PendingWrite | Verdict:
        """Read the run; return the write that one entry needs, or its verdict if it needs none."""
        entry = batch.last
        run: Any = await db.runs.find_one({"_id": batch.key}, HEADER)
        verdict = self._verdict(batch, run)
        if verdict is not None:
            return verdict
        batch.incarnation = incarnation_of(run)
        log = (await read_logs(db, {batch.key: [entry.epoch]}))[batch.key][0]
        was_released = run.get("owner") is None
        position = self._positions.confirm(batch.key, entry.epoch)
        if log.is_sealed or was_released:
            self._positions.remove(batch.key, entry.epoch)
        elif position is not None:
            position.slot, position.last_n, position.is_certain = log.next_slot, log.last_n, True
        if stored_entry := log.find(entry.n):
            batch.keep_messages({*map(message_name, stored_entry.consumes)})
            return Verdict.ACCEPTED
        if was_released or (log.is_sealed and entry.rest is None):
            return Verdict.FENCED
        await drop_unknown_messages(db, batch, run, position)
        if entry.rest is not None:
            return await self._plan_rest(db, batch, entry.rest, run, log)
        document = entry_document(batch.key, batch.last, log.next_slot)
        return PendingWrite(db.journal, InsertOne(document))

    def _verdict(self, batch: RunBatch, run: Any) -> Verdict | None:
        """Return the verdict on an entry if the run's document alone decides it."""
        entry, last_rest = batch.last, batch.unconfirmed_rest
        if run is None:
            # The owner wanted to delete the run, and it is gone: the reply to the write was lost.
            rest = (last_rest or entry).rest
            is_ours = self._positions.get(batch.key, entry.epoch) is not None
            is_expected = is_ours and rest is not None and rest.delete
            return Verdict.ACCEPTED if is_expected else Verdict.UNKNOWN
        settled_at = {**run.get("settled", {})}
        if last_rest and settled_at == {"epoch": last_rest.epoch, "n": last_rest.n}:
            return Verdict.ACCEPTED
        if run.get("epoch") != entry.epoch:
            self._positions.remove(batch.key, entry.epoch)
            return Verdict.FENCED
        if settled_at.get("epoch") != entry.epoch:
            return None
        return Verdict.ACCEPTED if entry.n <= settled_at["n"] else Verdict.FENCED

    async def _plan_rest(
        self, db: Collections, batch: RunBatch, rest: Rest, run: Any, log: Log
    ) -> PendingWrite:
        entry = batch.last
        if self._positions.get(batch.key, entry.epoch) is None:
            # Another process may write with this epoch from memory, which must not happen after the
            # rest.
            await seal_logs(db, {batch.key: [entry.epoch]})
        batch.unconfirmed_rest = entry
        epochs = {batch.key: entry.epoch}
        if rest.delete:
            return PendingWrite(db.runs, DeleteOne(is_owned(epochs)))
        logs, count = [log], run.get("messageCount")
        if count:
            logs = (await read_logs(db, {batch.key: run.get("epochs", ())}))[batch.key]
        consumed_since = consumed_by(logs) | {*map(message_name, batch.consumes)}
        consumed_names = consumed_messages(run) | consumed_since
        inbox = inbox_of(run)
        due = bool(count and rest.awaits) and await has_awaited_message(
            db, batch.key, inbox, consumed_names, rest.awaits
        )
        body = encode_snapshot(entry.data, f"the snapshot of run {entry.id!r}")
        _, others = divide(consumed_names)
        fields = rest_fields(entry, rest, body, others, due=due)
        if count:
            fields["consumedCount"] = run.get("consumedCount", 0) + len(consumed_since)
        embedded = consumed_names & inbox.embedded_names
        update = settle_runs({batch.key: fields}, [*embedded])
        return PendingWrite(db.runs, UpdateOne(is_owned(epochs, {batch.key: count}), update))

    async def confirm(self, db: Collections, batch: RunBatch, write: PendingWrite) -> None:
        """Note that a pending write was made."""
        if isinstance(write.write, InsertOne):
            self._advance(batch)
        await self._finish(db, batch)

    async def _finish(self, db: Collections, batch: RunBatch) -> None:
        if batch.last.rest is None:
            await self._mark(db, self._consumed_by([batch]))
        else:
            await self._finish_rests(db, [batch])


async def _attempt(
    db: Collections,
    batches: list[RunBatch],
    write: Callable[[Collections, list[RunBatch]], Awaitable[list[RunBatch]]],
) -> list[RunBatch]:
    """Write batches; return those that may or may not have been written.

    Until there is a reply, the positions are uncertain, even if the caller is cancelled.
    """
    for batch in batches:
        batch.unconfirmed_rest = batch.last if batch.last.rest is not None else None
        assert batch.position is not None
        batch.position.is_certain = False
    try:
        doubtful = await write(db, batches)
    except PyMongoError as error:
        if not is_connection_lost(error):
            raise
        return batches
    for batch in batches:
        assert batch.position is not None
        batch.position.is_certain = True
    return doubtful
