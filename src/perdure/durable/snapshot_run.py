"""A run on a store without a journal."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from perdure import codec
from perdure.durable.host import RunHost
from perdure.durable.session import Session
from perdure.durable.store_errors import store_errors
from perdure.engine.call import StepCall
from perdure.engine.history import History
from perdure.engine.records import EncodedRecord
from perdure.engine.tasks import detached, finish
from perdure.snapshot import ExecutionBlock
from perdure.store import Grant, Rest, require_transaction


class SnapshotRun(RunHost):
    """A run on a store without a journal: each record saves the whole snapshot.

    Saves never overtake each other: records that arrive during a save are saved together by the
    next one. A record is part of the saved snapshot before it is published in the history.
    """

    def __init__(
        self, session: Session, id: str, history: History, grant: Grant | None = None
    ) -> None:
        super().__init__(session, id, history, grant)
        self._save_lock = asyncio.Lock()
        self._staged_records: dict[str, EncodedRecord] = {}
        self._saved_changes = 0
        self._changes = 0

    async def record(self, call: StepCall, record: EncodedRecord, /) -> None:
        """Save the snapshot with this record in it."""
        self._staged_records[record.key] = record
        try:
            await self.persist()
        finally:
            del self._staged_records[record.key]

    @property
    def is_saved(self) -> bool:
        """Whether the snapshot was saved: never at first, since a lease does not store it."""
        return False

    async def persist(self) -> None:
        """Save the snapshot as it is now, unless another call has saved it in the meantime."""
        # In a separate task, because a cancelled save may or may not have been written.
        await finish(detached(self._save_changes()))

    async def _save_changes(self) -> None:
        self._changes += 1
        own_change = self._changes
        async with self._save_lock:
            if self._saved_changes >= own_change:
                return
            # Not `own_change`: this save includes everything that changed during the previous one.
            included_changes = self._changes
            await self._save(self.running_block())
            self._saved_changes = included_changes
            self.entries += 1

    async def _save(self, block: ExecutionBlock) -> bytes:
        data = self.history.encode(block, staged_records=tuple(self._staged_records.values()))
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
        """Save the whole snapshot, or delete it, and release the lease."""
        data = b""
        if rest.delete:
            with store_errors(self.session.store, f"delete run {self.id!r}"):
                await self.session.store.delete(self.id)
        else:
            data = await self._save(block)
        # After the save: if this process dies in between, the lease expires, and the next owner
        # finds the saved state.
        await self.release()
        return data
