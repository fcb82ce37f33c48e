"""The backend of `SqlStore`: every operation as a sequence of statements."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any

from perdure.snapshot import Snapshot
from perdure.store import Query, QueueStats, Rest, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores._searching import SearchResult
from perdure.stores._timestamps import from_microseconds
from perdure.stores.sql import search_statements as search
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import SqlClient
from perdure.stores.sql.conditions import all_of, is_shown
from perdure.stores.sql.dialects import Statements
from perdure.stores.sql.executor import (
    awaits_values,
    chunks,
    header_values,
    micros_or_none,
    read_run,
    to_micros,
)
from perdure.stores.sql.journal import Journal
from perdure.stores.sql.keyvalue import KeyValueTable
from perdure.stores.sql.schedule import Schedule
from perdure.stores.sql.schema import set_up
from perdure.stores.sql.search import Search


class SqlBackend(Journal, Schedule, Search):
    """The operations of one store. `statements` explains the order of their statements."""

    def __init__(
        self,
        client: SqlClient,
        statements: Statements,
        documents: KeyValueTable,
        *,
        prefix: str,
        random: Random,
    ) -> None:
        super().__init__(client, statements, prefix=prefix, random=random)
        self.documents = documents

    async def open(self) -> None:
        await set_up(self._client, self._statements)

    def forget_loop(self) -> None:
        self._leasing = asyncio.Lock()

    async def close(self) -> None:
        """Do nothing: the client belongs to the caller."""

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        key, tags = self._key(id), rest.tags or ()
        created_at = await self._creation_of(key) if tags else None
        if created_at is not None:
            await self._add_tags(created_at, [(key, tag) for tag in tags])
        await self._save(key, data, workflow, rest, created_at)
        await self._clean_up(key)
        if rest.awaits:
            await self._schedule_wake(key, rest, -1)
        if created_at is not None:
            # Added again: the run's owner may have deleted all tags except those of its own rest.
            await self._add_tags(created_at, [(key, tag) for tag in tags])
            await self._delete_other_tags(key, tags)

    async def load(self, id: str) -> Snapshot | None:
        key = self._key(id)
        run = await self._run(sql.LOAD, key, key)
        if not run.rows:
            return None
        snapshot, *journal = [data for _, _, _, data in run.rows]
        return read_run(id, snapshot, journal)

    async def delete(self, id: str) -> bool:
        key = self._key(id)
        await self._run(sql.RAISE_EPOCH_FLOOR, key)
        result = await self._run(sql.DELETE, key)
        await self._delete_orphans([key])
        return result.rowcount > 0

    async def prune(self, request: PruneRequest) -> int:
        [(now,)] = (await self._run(search.NOW)).rows
        query = _old_runs(request, from_microseconds(now))
        result, pruned_count = SearchResult((), None), 0
        while pruned_count < request.limit:
            result = await self.search(query, request.limit - pruned_count, result.stopped_at)
            keys = [self._key(run.id) for run in result.runs]
            for chunk in chunks(keys):
                is_dry = request.dry_run
                pruned_count += (
                    len(chunk) if is_dry else await self._prune(chunk, request.older_than)
                )
            if result.stopped_at is None:
                break
        return pruned_count

    async def stats(self) -> Stats:
        ids = all_of(is_shown(self._prefix, Query()))
        counts = await self._run(search.COUNT_BY_STATUS % ids.sql, *ids.values)
        queues = await self._run(search.COUNT_BY_QUEUE % ids.sql, "\x7f", *ids.values)
        by_queue = {
            name: QueueStats(due, leased, None if oldest is None else from_microseconds(oldest))
            for name, due, leased, oldest in queues.rows
        }
        oldest = [queue.oldest_due for queue in by_queue.values() if queue.oldest_due is not None]
        by_status: Any = dict(counts.rows)
        return Stats(by_status, min(oldest, default=None), by_queue)

    async def _save(
        self, key: str, data: bytes, workflow: str | None, rest: Rest, created_at: int | None
    ) -> None:
        await self._run(
            sql.SAVE,
            *(key, data.decode(), workflow, rest.status, *awaits_values(rest)),
            *header_values(rest.version or 0, rest.tags or None, rest.summary or None),
            *(created_at, int(bool(rest.awaits)), micros_or_none(rest.wake_at)),
        )

    async def _creation_of(self, key: str) -> int:
        """Return when a run was created, or the current time."""
        run = await self._run(sql.CREATION_AND_TAGS, key)
        rows = run.rows or (await self._run(search.NOW)).rows
        return int(rows[0][0])

    async def _prune(self, keys: Sequence[str], older_than: timedelta) -> int:
        await self._run_many(sql.RAISE_EPOCH_FLOOR, len(keys), *keys)
        result = await self._run_many(sql.DELETE_OLD, len(keys), *keys, to_micros(older_than))
        await self._delete_orphans(keys)
        return result.rowcount


def _old_runs(request: PruneRequest, now: datetime) -> Query:
    return Query(
        statuses=tuple(request.statuses),
        workflows=() if request.workflow is None else (request.workflow,),
        tags=tuple(dict.fromkeys(request.tags)),
        until=now - request.older_than,
        oldest_first=True,
    )
