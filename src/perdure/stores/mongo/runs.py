"""Runs as wholes: saved, loaded, deleted, listed, pruned and counted."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from bson.objectid import ObjectId
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError, PyMongoError

from perdure.clock import isoformat, parse_iso
from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Rest, RunSummary, Stats
from perdure.stores.mongo.cleanup import Sweeper
from perdure.stores.mongo.documents import body_of, read_run
from perdure.stores.mongo.inbox import awaited, status_of, taken_in, untaken
from perdure.stores.mongo.journal import read_logs, seal_logs
from perdure.stores.mongo.leases import Epochs, merged_data, sleeping_workflows
from perdure.stores.mongo.schema import Collections, together
from perdure.stores.mongo.updates import (
    HEADER,
    OVER,
    Document,
    begins_with,
    is_due,
    life_of,
    lying,
    milliseconds,
    saving,
    status_is,
)

_LINE = {
    "updatedAt": 1,
    "status": 1,
    "workflow": 1,
    "snapshot.workflowName": 1,
    "snapshot.execution.status": 1,
    "snapshot.execution.state": 1,
}
_FOLDS = {"rested": 1, "epochs": 1}
_FINER = {"$ifNull": ["$snapshot.execution.state", "$snapshot.execution.status"]}


class Finder:
    """Finds runs by `_id`: all that are asked for at the same moment in one round trip."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, db: Collections, key: str) -> Any:
        """Give a run's document, or None."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Whoever asked in a loop that has ended is not there any more.
            self._loop, self._asked = loop, {}
        answer = self._asked.get(key)
        if answer is None:
            if not self._asked:
                loop.call_soon(self._begin, db)
            answer = self._asked[key] = loop.create_future()
        # One who gives up must not take the others' answer away.
        return await asyncio.shield(answer)

    def _begin(self, db: Collections) -> None:
        asked, self._asked = self._asked, {}
        task = asyncio.create_task(_answer(db, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(db: Collections, asked: Mapping[str, "asyncio.Future[Any]"]) -> None:
    try:
        found = db.runs.find({"_id": {"$in": [*asked]}}, batch_size=len(asked) + 1)
        runs = {run["_id"]: run async for run in found}
        for key, answer in asked.items():
            answer.set_result(runs.get(key))
    except PyMongoError as error:
        for answer in asked.values():
            answer.set_exception(error)
    finally:
        # Nobody waits for ever, whatever else went wrong; what was answered stays so.
        for answer in asked.values():
            answer.cancel()


class Runs:
    """The verbs on whole runs whose ids begin with `prefix`."""

    def __init__(self, prefix: str, epochs: Epochs, sweeper: Sweeper) -> None:
        self._prefix = prefix
        self._epochs = epochs
        self._sweeper = sweeper
        self._finder = Finder()

    async def save(
        self, db: Collections, id: str, data: bytes, workflow: str | None, rest: Rest
    ) -> None:
        """Replace a run; owners of before are shut out of its journal."""
        key = self._prefix + id
        document = {**lying(rest), **body_of(data, f"the snapshot of run {id!r}")}
        if workflow is not None:
            document["workflow"] = workflow
        before = await self._replace(db, key, document)
        if before is None:
            return
        await self._end_logs(db, key, before)
        if rest.awaits and before.get("letters"):
            await self._wake_on_mail(db, key, before, rest)

    async def _replace(self, db: Collections, key: str, document: Document) -> Any:
        pipeline = saving(document, self._epochs.next(), ObjectId())
        while True:
            try:
                return await db.runs.find_one_and_update(
                    {"_id": key},
                    pipeline,
                    projection=HEADER,
                    upsert=True,
                    return_document=ReturnDocument.BEFORE,
                )
            except DuplicateKeyError:
                # Somebody else made the run at the same moment: now there is one to replace.
                continue

    async def _end_logs(self, db: Collections, key: str, before: Mapping[str, Any]) -> None:
        """Shut out the owners of before, and remove what they wrote."""
        if epochs := before.get("epochs"):
            await seal_logs(db, {key: epochs})
            self._sweeper.logs(key, epochs[-1])

    async def _wake_on_mail(
        self, db: Collections, key: str, before: Mapping[str, Any], rest: Rest
    ) -> None:
        letters = (await untaken(db, {key: life_of(before)}))[key]
        mail = {letter.id: letter.name for letter in letters}
        if awaited(mail, taken_in(before), rest.awaits):
            resting = {"_id": key, "owner": None, "awaits": [*rest.awaits]}
            await db.runs.update_one(resting, [{"$set": {"wakeAt": "$$NOW"}}])

    async def load(self, db: Collections, id: str) -> Snapshot | None:
        """Give a run with its journal merged into it, or None."""
        key = self._prefix + id
        while True:
            run = await self._finder.find(db, key)
            if run is None:
                return None
            epochs = run.get("epochs", ())
            logs = (await read_logs(db, {key: epochs}))[key]
            # Entries are removed after they were folded into a new snapshot. If the snapshot is
            # still the same after the entries were read, they belong to it.
            if not epochs or await self._is_still(db, run):
                return read_run(id, run, merged_data(run, logs))

    async def _is_still(self, db: Collections, run: Mapping[str, Any]) -> bool:
        now = await db.runs.find_one({"_id": run["_id"]}, _FOLDS)
        if now is None:
            return False
        count = len(run["epochs"])
        same_base = now.get("rested") == run.get("rested")
        return same_base and bool(now.get("epochs", [])[:count] == run["epochs"])

    async def delete(self, db: Collections, id: str) -> bool:
        """Remove a run and all that belongs to it; tell whether there was one."""
        key = self._prefix + id
        run = await db.runs.find_one_and_delete({"_id": key}, projection=HEADER)
        if run is None:
            return False
        self._epochs.ended(run.get("epoch", 0))
        await self._end_logs(db, key, run)
        if run.get("letters"):
            self._sweeper.mail(key, life_of(run))
        return True

    async def page(
        self,
        db: Collections,
        prefix: str,
        limit: int,
        status: RunStatus | None,
        workflow: str | None,
        after: str | None,
    ) -> list[RunSummary]:
        """Give a page of runs, newest first."""
        if not limit:
            return []
        conditions = [begins_with(self._prefix + prefix)]
        if status is not None:
            conditions.append(status_is([status]))
        if workflow is not None:
            foreign = {"workflow": None, "snapshot.workflowName": workflow}
            conditions.append({"$or": [{"workflow": workflow}, foreign]})
        if after is not None:
            moment, key = self._mark(after)
            conditions.append(
                {
                    "updatedAt": {"$lte": moment},
                    "$or": [{"updatedAt": {"$lt": moment}}, {"_id": {"$lt": key}}],
                }
            )
        chosen = [condition for condition in conditions if condition]
        found = db.runs.find({"$and": chosen} if chosen else {}, _LINE)
        page = found.sort([("updatedAt", -1), ("_id", -1)]).limit(limit)
        return [self._listed(run) async for run in page]

    def _mark(self, cursor: str) -> tuple[datetime, str]:
        moment, space, id = cursor.partition(" ")
        if not space:
            raise InvalidArgument("after", cursor, "the cursor of a line that list() gave")
        return parse_iso(moment, "after"), self._prefix + id

    def _listed(self, run: Any) -> RunSummary:
        id = run["_id"][len(self._prefix) :]
        moment = run.get("updatedAt") or datetime(1970, 1, 1, tzinfo=UTC)
        updated_at = isoformat(moment)
        workflow = run.get("workflow") or run.get("snapshot", {}).get("workflowName")
        return RunSummary(id, updated_at, status_of(run), workflow, f"{updated_at} {id}")

    async def prune(
        self, db: Collections, older_than: timedelta, status: RunStatus | None, limit: int
    ) -> int:
        """Delete runs that are over and old; give how many."""
        statuses = [name for name in OVER if status in (None, name)]
        if not statuses or not limit:
            return 0
        cutoff = {"$subtract": ["$$NOW", milliseconds(older_than)]}
        old = {
            **status_is(statuses),
            "updatedAt": {"$type": "date"},
            "$expr": {"$lt": ["$updatedAt", cutoff]},
        }
        found = db.runs.find({**begins_with(self._prefix), **old}, HEADER).limit(limit)
        runs = {run["_id"]: run async for run in found}
        pruned = await db.runs.delete_many({"_id": {"$in": [*runs]}, **old})
        if pruned.deleted_count:
            await self._forget(db, runs)
        return pruned.deleted_count

    async def _forget(self, db: Collections, runs: Mapping[str, Any]) -> None:
        left = {run["_id"] async for run in db.runs.find({"_id": {"$in": [*runs]}}, {"_id": 1})}
        for key, run in runs.items():
            if key in left:
                continue
            epoch = run.get("epoch", 0)
            self._epochs.ended(epoch)
            self._sweeper.logs(key, epoch)
            if run.get("letters"):
                self._sweeper.mail(key, life_of(run))

    async def stats(self, db: Collections) -> Stats:
        """Count the runs by status and find the oldest due one."""
        mine = begins_with(self._prefix)
        # Those with a header are counted in the index alone; those without are looked at.
        counted, foreign = await together(
            [
                self._count(db, {**mine, "status": {"$type": "string"}}, "$status"),
                self._count(db, {**mine, "status": None}, _FINER),
            ]
        )
        by_status = Counter(counted) + Counter(foreign)
        named = {"workflow": {"$in": await sleeping_workflows(db)}}
        due = db.runs.find({**mine, **named, **is_due()}, {"wakeAt": 1}).sort("wakeAt").limit(1)
        oldest = [run["wakeAt"] async for run in due]
        return Stats(by_status, oldest[0] if oldest else None)

    async def _count(self, db: Collections, chosen: Document, by: object) -> dict[str, int]:
        counting = {"$group": {"_id": by, "count": {"$sum": 1}}}
        groups = await db.runs.aggregate([{"$match": chosen}, counting])
        return {group["_id"] or "running": group["count"] async for group in groups}
