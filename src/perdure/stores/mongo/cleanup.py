"""Remove obsolete documents in the background."""

import asyncio
import logging
from collections.abc import Iterable
from typing import TypeVar

from perdure.engine.tasks import detached
from perdure.errors import StoreError
from perdure.stores.mongo.connection import Connection, relaxed
from perdure.stores.mongo.inbox import messages_of
from perdure.stores.mongo.journal import SEAL_TTL, slots_between
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.updates import from_now

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BATCH_SIZE = 2_000
_DELAY = 0.5


class Cleanup:
    """Deletes merged entries and the messages of deleted runs.

    If the process ends first, the server is unavailable or the task is cancelled, the remaining
    entries do no harm: they are ignored, and are deleted with their run.
    """

    def __init__(self, connection: Connection[Collections]) -> None:
        self._connection = connection
        self._slots: list[str] = []
        self._logs: list[tuple[str, int]] = []
        self._messages: list[tuple[str, str]] = []
        self._task: asyncio.Task[None] | None = None
        self._no_delay: asyncio.Future[None] | None = None

    def delete_slots(self, ids: Iterable[str]) -> None:
        """Delete these entries."""
        self._slots.extend(ids)
        self._start()

    def delete_logs(self, run: str, epoch: int) -> None:
        """Delete all entries of a run up to this epoch, and the seals among them after a day."""
        self._logs.append((run, epoch))
        self._start()

    def delete_messages(self, run: str, incarnation: str) -> None:
        """Delete all messages for a deleted run; a new run with the same id has its own."""
        self._messages.append((run, incarnation))
        self._start()

    def forget_loop(self) -> None:
        """Drop the task, which ended with its event loop."""
        self._task = None

    async def finish(self) -> None:
        """Perform the pending deletions now."""
        if tasks := self.start_now():
            await asyncio.wait(tasks)

    def start_now(self) -> list[asyncio.Task[None]]:
        """Start the pending deletions without a delay; return their task, if there are any."""
        if self._task is None or self._no_delay is None:
            return []
        if not self._no_delay.done():
            self._no_delay.set_result(None)
        return [self._task]

    def _start(self) -> None:
        if self._task is None:
            self._no_delay = asyncio.get_running_loop().create_future()
            self._task = detached(self._run(self._no_delay))

    async def _run(self, no_delay: asyncio.Future[None]) -> None:
        try:
            while self._pending():
                # The leftovers of many calls are deleted together, after the calls have returned.
                await asyncio.wait([no_delay], timeout=_DELAY)
                with self._connection.use() as db:
                    for _ in range(0, self._pending(), _BATCH_SIZE):
                        await self._delete_some(db)
        except StoreError as error:
            logger.warning("entries that no longer count were not deleted: %s", error)
        finally:
            self._task = None

    def _pending(self) -> int:
        return max(len(self._slots), len(self._logs), len(self._messages))

    async def _delete_some(self, db: Collections) -> None:
        journal, inbox = relaxed(db.journal), relaxed(db.inbox)
        if slots := _pop_some(self._slots):
            await journal.delete_many({"_id": {"$in": slots}})
        if logs := _pop_some(self._logs):
            ranges = {"$or": [{"_id": slots_between(run, 0, epoch)} for run, epoch in logs]}
            await journal.delete_many({**ranges, "seal": {"$exists": False}})
            expire = [{"$set": {"expireAt": from_now(SEAL_TTL)}}]
            await journal.update_many({**ranges, "expireAt": None}, expire)
        if runs := _pop_some(self._messages):
            await inbox.delete_many({"$or": [{"_id": messages_of(*run)} for run in runs]})


def _pop_some(items: list[T]) -> list[T]:
    some = items[:_BATCH_SIZE]
    del items[:_BATCH_SIZE]
    return some
