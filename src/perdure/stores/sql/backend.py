"""The backend of `SqlStore`: every verb as a sequence of statements."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Any

from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Delivery, Message, Rest, Stats
from perdure.stores._shell import Query, Row
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import SqlClient
from perdure.stores.sql.dialects import Statements
from perdure.stores.sql.executor import (
    chunks,
    digest,
    digest_list,
    micros_or_none,
    read_run,
    to_micros,
)
from perdure.stores.sql.journal import Journal
from perdure.stores.sql.keyvalue import KeyValueTable
from perdure.stores.sql.leases import Leases
from perdure.stores.sql.schema import set_up


class SqlBackend(Journal, Leases):
    """The verbs of one store. The order of their statements is explained in `statements`."""

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
        """Do nothing: the client is the caller's."""

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        key, awaits = self._key(id), digest_list(rest.awaits)
        await self._run(
            sql.SAVE,
            *(key, data.decode(), workflow, rest.status),
            *(int(awaits is not None), micros_or_none(rest.wake_at), awaits),
        )
        await self._clean_up(key)
        if awaits is not None:
            await self._schedule_wake(key, rest, -1)

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
        deleted = await self._run(sql.DELETE, key)
        await self._delete_orphans([key])
        return deleted.affected > 0

    async def list(self, query: Query) -> Sequence[Row]:
        filters = ""
        values: list[object] = [self._prefix + query.prefix]
        if query.status is not None:
            filters += f" {sql.OF_STATUS}"
            values.append(query.status)
        if query.workflow is not None:
            filters += f" {sql.OF_WORKFLOW}"
            values.append(query.workflow)
        if query.after is not None:
            filters += f" {sql.AFTER}"
            updated_at = to_microseconds(query.after[0])
            values += updated_at, updated_at, self._prefix + query.after[1]
        page = await self._run(sql.LIST % filters, *values, query.limit)
        return [
            Row(self._id(key), from_microseconds(updated_at), status, workflow, owner)
            for key, updated_at, status, workflow, owner in page.rows
        ]

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery:
        key, name_digest = self._key(id), digest(name)
        dedup = None if dedup_id is None else digest(dedup_id)
        sent = await self._run(sql.SEND, name, name_digest, payload.decode(), dedup, key)
        delivery = Delivery.DELIVERED if sent.affected else await self._explain_send(key, dedup)
        if delivery in (Delivery.DELIVERED, Delivery.DUPLICATE):
            # Also for a duplicate: the first sender may have crashed before it woke the run.
            values = (f",{name_digest},", key, name_digest, key)
            await self._run(sql.WAKE_IF_MESSAGE, *values)
        return delivery

    async def inbox(self, id: str) -> Sequence[Message]:
        key = self._key(id)
        return (await self._inboxes([key])).get(key, [])

    async def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> int:
        values = (*statuses, to_micros(older_than), self._prefix, limit)
        old = await self._run_many(sql.OLD_RUNS, len(statuses), *values)
        keys = [key for (key,) in old.rows]
        return sum([await self._prune(chunk, older_than) for chunk in chunks(keys)])

    async def stats(self) -> Stats:
        counts = await self._run(sql.COUNT, self._prefix)
        oldest = await self._run(sql.OLDEST_DUE, self._prefix)
        [(wake_at,)] = oldest.rows
        by_status: Any = dict(counts.rows)
        return Stats(by_status, None if wake_at is None else from_microseconds(wake_at))

    async def _explain_send(self, key: str, dedup: str | None) -> Delivery:
        reason = await self._run(sql.EXPLAIN_SEND, dedup, key)
        if not reason.rows:
            return Delivery.UNKNOWN
        [(duplicates,)] = reason.rows
        return Delivery.DUPLICATE if duplicates else Delivery.OVER

    async def _prune(self, keys: Sequence[str], older_than: timedelta) -> int:
        await self._run_many(sql.RAISE_EPOCH_FLOOR, len(keys), *keys)
        deleted = await self._run_many(sql.DELETE_OLD, len(keys), *keys, to_micros(older_than))
        await self._delete_orphans(keys)
        return deleted.affected
