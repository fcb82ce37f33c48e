"""The PostgreSQL store: what PostgreSQL does for each verb of the contract."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

from perdure.clock import Clock
from perdure.errors import InvalidArgument, StoreError
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import (
    Delivery,
    Due,
    Entry,
    Lease,
    LeaseRequest,
    Message,
    NewRun,
    Rest,
    Stats,
    Verdict,
)
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted
from perdure.stores._shell import NotifyShell, Ownership, Query, Row, TransactionShell
from perdure.stores.postgres.append import Writer, names_as_json
from perdure.stores.postgres.database import Database, Transaction
from perdure.stores.postgres.keyvalue import KeyValueTable
from perdure.stores.postgres.leases import Leases
from perdure.stores.postgres.notify import Notifications
from perdure.stores.postgres.rows import read_message, read_run
from perdure.stores.postgres.schema import Schema, Tables
from perdure.stores.postgres.statements import (
    COUNT,
    DELETE,
    DUE,
    ENQUEUE,
    FENCE,
    FENCE_LOCKED,
    HAS_ENTRY,
    INBOX,
    LIST,
    LOAD,
    OLDEST_DUE,
    PRUNE,
    SAVE,
    SEND,
    Statements,
)
from perdure.validation import check_prefix

logger = logging.getLogger(__name__)

# An index entry has at most 2,704 bytes, and several indexes contain more than the stored id.
_MAX_KEY_BYTES = 2_500

_ENDED_BY_USER = (
    "the transaction was ended inside `work`, by COMMIT or ROLLBACK; only the store may end it"
)

SERVER_SETTINGS = """
    SELECT current_setting('server_encoding'), current_setting('fsync'),
        current_setting('synchronous_commit'), atttypid::regtype::text
    FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = 'snapshot'
"""


class PostgresBackend:
    """One table of runs in a PostgreSQL database; see `perdure.stores._shell.Backend`."""

    _statements: Statements
    _writer: Writer
    _leases: Leases

    def __init__(self, database: Database, tables: Tables, *, prefix: str, clock: Clock) -> None:
        self._prefix = check_prefix(prefix)
        self._database = database
        self._tables = tables
        documents = Tables(tables.table, "_documents")
        self.documents = KeyValueTable(database, documents, scope_of(prefix))
        self._notifications = Notifications(database, tables.channel, clock)

    async def open(self) -> None:
        """Create the tables and check the server's settings."""
        await Schema(self._tables).set_up(self._database)
        rows = await self._database.fetch(SERVER_SETTINGS, self._tables.names["runs"])
        [(encoding, fsync, synchronous_commit, snapshot_type)] = rows
        if encoding != "UTF8" or snapshot_type not in ("json", "jsonb"):
            raise StoreError(
                f"table {self._tables.table} has snapshots of type {snapshot_type} in a database "
                f"with encoding {encoding}; perdure needs json or jsonb, and UTF8"
            )
        if "off" in (fsync, synchronous_commit):
            logger.warning(
                "PostgreSQL confirms commits before they are on disk (fsync=%s, "
                "synchronous_commit=%s): a power failure may lose the latest records",
                fsync,
                synchronous_commit,
            )
        fetch = self._database.fetch
        self._statements = Statements(self._tables, snapshot_type)
        self._writer = Writer(fetch, self._statements, self._prefix)
        self._leases = Leases(fetch, self._statements, self._prefix)

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""
        self._notifications.forget_loop()
        self._database.pool.forget_loop()

    async def close(self) -> None:
        """Close the connections that were opened here."""
        await self._notifications.close()
        await self._database.pool.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        """Replace the run, its journal and its lease."""
        awaits = names_as_json(rest.awaits)
        values = (self._key(id), data, workflow, rest.status, rest.wake_at, awaits)
        await self._fetch(SAVE, *values)

    async def load(self, id: str) -> Snapshot | None:
        """Return the merged snapshot."""
        rows = await self._fetch(LOAD, self._key(id))
        return read_run(id, *rows[0]) if rows else None

    async def delete(self, id: str) -> bool:
        """Delete the run, its journal and its inbox."""
        [(count,)] = await self._fetch(DELETE, self._key(id))
        return bool(count)

    async def list(self, query: Query) -> Sequence[Row]:
        """Return runs, the most recently updated first."""
        values: list[object] = [self._prefix + query.prefix, query.limit]
        conditions = ""
        if query.status is not None:
            values.append(query.status)
            conditions += f" AND {{status}} = ${len(values)}"
        if query.workflow is not None:
            values.append(query.workflow)
            conditions += f" AND {{workflow}} = ${len(values)}"
        if query.after is not None:
            updated_at, id = query.after
            values += [updated_at, self._prefix + id]
            conditions += f" AND (run.updated_at, run.id) < (${len(values) - 1}, ${len(values)})"
        rows = await self._database.fetch(self._statements.sql(LIST, conditions), *values)
        return [Row(self._id(key), *columns) for key, *columns in rows]

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Write the entries in one statement."""
        return await self._writer.write(entries)

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict:
        """Call `work` with an asyncpg connection in an open transaction.

        If the entry exists already, it is accepted, and what `work` wrote is rolled back.
        """
        key = self._key(id)
        async with self._database.transaction() as transaction:
            # The row is not locked while `work` runs: renewing the lease would wait for it, and so
            # would all leases that are renewed together with it. The write is fenced again.
            before = await transaction.fetch(self._statements.sql(FENCE), key, epoch)
            if (verdict := _verdict(before)) is not Verdict.ACCEPTED:
                return verdict
            if settings := self._database.pool.user_session_settings:
                await transaction.execute(settings)
            entry = await work(transaction.connection)
            locked = await transaction.fetch(self._statements.sql(FENCE_LOCKED), key, epoch)
            if locked and locked[0][1] != before[0][1]:
                raise StoreError(_ENDED_BY_USER)
            if (verdict := _verdict(locked)) is Verdict.ACCEPTED:
                verdict = await self._write_in(transaction, key, entry)
            if verdict is not Verdict.ACCEPTED:
                await transaction.roll_back()
        return verdict

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        """Lease the runs in as few statements as possible."""
        for request in requests:
            self._key(request.id)
        return await self._leases.acquire(requests)

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Read who has the leases in one statement."""
        return await self._leases.owners(ids)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        """Extend the leases in one statement."""
        return await self._leases.renew(leases, ttl)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases in one statement."""
        await self._leases.release(leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create the runs in one statement."""
        first: dict[str, int] = {}
        for index, run in enumerate(runs):
            first.setdefault(self._key(run.id), index)
        keys = sorted(first)
        new = [runs[first[key]] for key in keys]
        rows = await self._fetch(
            ENQUEUE,
            keys,
            [run.workflow for run in new],
            [run.snapshot for run in new],
            [run.wake_at for run in new],
            repeatable=False,
        )
        created = {first[row["id"]] for row in rows}
        return [index in created for index in range(len(runs))]

    async def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Due]:
        """Return the due runs in the order of the index."""
        values: list[object] = [now, limit, self._prefix]
        condition = ""
        if workflows is not None:
            values.append(list(workflows))
            condition = "AND run.workflow = ANY ($4::text[])"
        rows = await self._database.fetch(self._statements.sql(DUE, condition), *values)
        return [Due(self._id(key), wake_at) for key, wake_at in rows]

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Granted]:
        """Lease due runs, skipping those that are locked."""
        return await self._leases.claim(owner, ttl, limit, workflows)

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery:
        """Insert a message and wake a run that waits for it, in one statement."""
        digest = None if dedup_id is None else blake2b(dedup_id.encode(), digest_size=16).digest()
        rows = await self._fetch(
            SEND, self._key(id), name, payload, digest, repeatable=dedup_id is not None
        )
        if not rows:
            return Delivery.UNKNOWN
        is_over, is_sent, is_duplicate = rows[0]
        if is_sent:
            return Delivery.DELIVERED
        return Delivery.OVER if is_over and not is_duplicate else Delivery.DUPLICATE

    async def inbox(self, id: str) -> Sequence[Message]:
        """Return the run's messages that were not consumed."""
        return [read_message(*row) for row in await self._fetch(INBOX, self._key(id))]

    async def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> int:
        """Delete old runs, skipping those that are locked."""
        values = (list(statuses), older_than, self._prefix, limit)
        [(count,)] = await self._fetch(PRUNE, *values)
        return int(count)

    async def stats(self) -> Stats:
        """Count the runs by status."""
        # Without a prefix, an index-only scan can count.
        condition, values = (
            ("WHERE starts_with(run.id, $1)", [self._prefix]) if self._prefix else ("", [])
        )
        counts = await self._database.fetch(self._statements.sql(COUNT, condition), *values)
        oldest = await self._fetch(OLDEST_DUE, self._prefix)
        return Stats(dict(counts), oldest[0]["wake_at"] if oldest else None)

    def notifications(self) -> AsyncGenerator[None]:
        """Yield when a run may have become due."""
        return self._notifications.listen()

    async def _fetch(
        self, template: str, *values: object, repeatable: bool = True
    ) -> Sequence[Any]:
        statement = self._statements.sql(template)
        return await self._database.fetch(statement, *values, repeatable=repeatable)

    async def _write_in(self, transaction: Transaction, key: str, entry: Entry) -> Verdict:
        has_entry = self._statements.sql(HAS_ENTRY)
        [(exists,)] = await transaction.fetch(has_entry, key, entry.epoch, entry.n)
        if exists:
            await transaction.roll_back()
            return Verdict.ACCEPTED
        writer = Writer(transaction.fetch, self._statements, self._prefix)
        [verdict] = await writer.write([entry])
        return verdict

    def _id(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _key(self, id: str) -> str:
        key = self._prefix + id
        if 4 * len(key) > _MAX_KEY_BYTES and len(key.encode()) > _MAX_KEY_BYTES:
            expected = f"at most {_MAX_KEY_BYTES:,} bytes including the prefix"
            raise InvalidArgument("id", id, expected)
        return key


class PostgresStore(TransactionShell[PostgresBackend]):
    """Stores runs in PostgreSQL; see `postgres`."""


class NotifyingPostgresStore(NotifyShell[PostgresBackend], PostgresStore):
    """Stores runs in PostgreSQL, with sessions that can LISTEN; see `postgres`."""


def _verdict(fence: Sequence[Any]) -> Verdict:
    """Return the verdict on a new entry from the row of FENCE."""
    if not fence:
        return Verdict.UNKNOWN
    return Verdict.ACCEPTED if fence[0][0] else Verdict.FENCED
