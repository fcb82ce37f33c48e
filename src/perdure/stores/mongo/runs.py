"""Save, load and delete whole runs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bson.objectid import ObjectId
from pymongo import ReturnDocument
from pymongo.errors import PyMongoError

from perdure.engine.tasks import detached
from perdure.snapshot import Snapshot
from perdure.store import Rest
from perdure.stores.mongo.cleanup import Cleanup
from perdure.stores.mongo.documents import encode_snapshot, read_run
from perdure.stores.mongo.inbox import (
    has_awaited_message,
    inbox_of,
    mark_consumed,
    message_keys,
    remove_embedded,
)
from perdure.stores.mongo.journal import (
    Log,
    consumed_by,
    consumed_messages,
    journal_data,
    read_logs,
    seal_logs,
)
from perdure.stores.mongo.leases import Epochs
from perdure.stores.mongo.schema import Collections, find_and_update
from perdure.stores.mongo.updates import (
    HEADER,
    incarnation_of,
    rest_header,
    save_run,
    without_null,
)

_BASE_FIELDS = {"settled": 1, "epochs": 1}


class Loader:
    """Finds runs by `_id`, batching the requests of one iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def forget_loop(self) -> None:
        """Drop the callers, which ended with their event loop."""
        self._waiting, self._tasks = {}, set()

    async def find(self, db: Collections, key: str) -> Any:
        """Return a run's document, or `None`."""
        answer = self._waiting.get(key)
        if answer is None:
            loop = asyncio.get_running_loop()
            if not self._waiting:
                loop.call_soon(self._start, db)
            answer = self._waiting[key] = loop.create_future()
        # A cancelled caller must not cancel the result of the others.
        return await asyncio.shield(answer)

    def _start(self, db: Collections) -> None:
        waiting, self._waiting = self._waiting, {}
        task = detached(_find_all(db, waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _find_all(db: Collections, waiting: Mapping[str, "asyncio.Future[Any]"]) -> None:
    try:
        cursor = db.runs.find({"_id": {"$in": [*waiting]}}, batch_size=len(waiting) + 1)
        runs = {run["_id"]: run async for run in cursor}
        for key, answer in waiting.items():
            answer.set_result(runs.get(key))
    except PyMongoError as error:
        for answer in waiting.values():
            answer.set_exception(error)
    finally:
        # Whatever failed, no caller may wait forever; futures that are done ignore this.
        for answer in waiting.values():
            answer.cancel()


class Runs:
    """The operations on whole runs whose `_id` starts with `prefix`."""

    def __init__(self, prefix: str, epochs: Epochs, cleanup: Cleanup) -> None:
        self._prefix = prefix
        self._epochs = epochs
        self._cleanup = cleanup
        self.loader = Loader()

    async def save(
        self, db: Collections, id: str, data: bytes, workflow: str | None, rest: Rest
    ) -> None:
        """Replace a run; its previous owners are fenced out."""
        key = self._prefix + id
        body = encode_snapshot(data, f"the snapshot of run {id!r}")
        header = {"queue": "", "version": 0, "workflow": workflow, **rest_header(rest)}
        document = without_null({**header, **body})
        previous = await find_and_update(
            db.runs,
            key,
            save_run(document, self._epochs.next(), ObjectId()),
            projection=HEADER,
            return_document=ReturnDocument.BEFORE,
        )
        if previous is not None:
            logs = await self._close_logs(db, key, previous)
            await self._wake_on_message(db, key, previous, logs, rest)

    async def _close_logs(self, db: Collections, key: str, run: Mapping[str, Any]) -> Sequence[Log]:
        """Fence out the previous owners of a run, and remove their entries; return these."""
        epochs = run.get("epochs")
        if not epochs:
            return ()
        logs = (await seal_logs(db, {key: epochs}))[key]
        # The entries that consumed these messages are no longer part of the run, and their writer
        # may not have marked the messages yet.
        if consumed_names := consumed_by(logs):
            await mark_consumed(db.inbox, message_keys(key, consumed_names))
            await remove_embedded(db.runs, key, consumed_names)
        self._cleanup.delete_logs(key, epochs[-1])
        return logs

    async def _wake_on_message(
        self,
        db: Collections,
        key: str,
        previous: Mapping[str, Any],
        logs: Sequence[Log],
        rest: Rest,
    ) -> None:
        if not (rest.awaits and previous.get("messageCount")):
            return
        consumed_names = consumed_messages(previous, logs)
        if await has_awaited_message(db, key, inbox_of(previous), consumed_names, rest.awaits):
            condition = {"_id": key, "owner": None, "awaits": [*rest.awaits]}
            await db.runs.update_one(condition, [{"$set": {"wakeAt": "$$NOW", "turn": 0}}])

    async def load(self, db: Collections, id: str) -> Snapshot | None:
        """Return a run with its journal merged, or `None`."""
        key = self._prefix + id
        while True:
            run = await self.loader.find(db, key)
            if run is None:
                return None
            epochs = run.get("epochs", ())
            logs = (await read_logs(db, {key: epochs}))[key]
            # Entries are deleted after they were merged into a new snapshot. If the snapshot is
            # unchanged after the entries were read, they belong to it.
            if not epochs or await self._has_same_base(db, run):
                return read_run(id, run, journal_data(logs))

    async def _has_same_base(self, db: Collections, run: Mapping[str, Any]) -> bool:
        current = await db.runs.find_one({"_id": run["_id"]}, _BASE_FIELDS)
        if current is None or current.get("settled") != run.get("settled"):
            return False
        return bool(current.get("epochs", [])[: len(run["epochs"])] == run["epochs"])

    async def delete(self, db: Collections, id: str) -> bool:
        """Delete a run and everything that belongs to it; return whether it existed."""
        key = self._prefix + id
        run = await db.runs.find_one_and_delete({"_id": key}, projection=HEADER)
        if run is None:
            return False
        self._epochs.end(run.get("epoch", 0))
        await self._close_logs(db, key, run)
        if run.get("messageCount"):
            self._cleanup.delete_messages(key, incarnation_of(run))
        return True
