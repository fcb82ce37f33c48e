"""The PostgreSQL store: the implementation of each method of the contract."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

from perdure.clock import Clock
from perdure.errors import InvalidArgument, StoreError
from perdure.snapshot import Snapshot
from perdure.store import (
    Count,
    Due,
    Entry,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Query,
    Receipt,
    Rest,
    RunSummary,
    Stats,
    SupportedVersions,
    Verdict,
)
from perdure.stores._backend import Ownership, PruneRequest
from perdure.stores._handoff import Claimant, HandoffShell
from perdure.stores._joining import JoiningShell
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult
from perdure.stores._shell import NotifyShell, TransactionShell
from perdure.stores.postgres.append import Writer
from perdure.stores.postgres.batch import as_json, rest_columns
from perdure.stores.postgres.database import Database, Transaction
from perdure.stores.postgres.handoff import Handoffs
from perdure.stores.postgres.inbox import Inboxes
from perdure.stores.postgres.joining import LOCATE_TABLE, Place, join
from perdure.stores.postgres.keyvalue import KeyValueTable
from perdure.stores.postgres.leases import Leases
from perdure.stores.postgres.maintenance import Maintenance
from perdure.stores.postgres.notify import Notifications
from perdure.stores.postgres.rows import read_run
from perdure.stores.postgres.schema import Schema, Tables
from perdure.stores.postgres.search import Searches
from perdure.stores.postgres.statements import (
    DELETE,
    ENQUEUE,
    ENQUEUE_JOINED,
    FENCE,
    FENCE_LOCKED,
    HAS_ENTRY,
    LOAD,
    SAVE,
    Statements,
    tags_added,
)
from perdure.validation import check_prefix

logger = logging.getLogger(__name__)

Fetch: TypeAlias = Callable[..., Awaitable[Sequence[Any]]]

# An index entry has at most 2,704 bytes. One index contains the stored id and the workflow, and one
# the queue and the workflow.
_MAX_KEY_BYTES = 2_500
_MAX_INDEXED_BYTES = 2_600

_ENDED_BY_USER = (
    "the transaction was ended inside `work`, by COMMIT or ROLLBACK; only the store may end it"
)

SERVER_SETTINGS = """
    SELECT current_setting('server_encoding'), current_setting('fsync'),
        current_setting('synchronous_commit'), snapshot.atttypid::regtype::text, (
            SELECT collname FROM pg_attribute AS id
            JOIN pg_collation AS id_order ON id_order.oid = id.attcollation
            WHERE id.attrelid = snapshot.attrelid AND id.attname = 'id'
        )::text
    FROM pg_attribute AS snapshot WHERE attrelid = to_regclass($1) AND attname = 'snapshot'
"""


class PostgresBackend:
    """One table of runs in a PostgreSQL database; see `perdure.stores._shell.Backend`."""

    _place: Place
    _statements: Statements
    _writer: Writer
    _leases: Leases
    _inboxes: Inboxes
    _handoffs: Handoffs
    _searches: Searches
    _maintenance: Maintenance

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
        [(encoding, fsync, synchronous_commit, snapshot_type, id_collation)] = rows
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
        self._prepare(Statements(self._tables, snapshot_type, id_collation))
        [place] = await self._database.fetch(LOCATE_TABLE, self._tables.names["runs"])
        self._place = Place(*place)

    def _prepare(self, statements: Statements) -> None:
        fetch, prefix = self._database.fetch, self._prefix
        self._statements = statements
        self._writer = Writer(fetch, statements, prefix)
        self._leases = Leases(fetch, statements, prefix)
        self._inboxes = Inboxes(self._database, statements, prefix)
        self._handoffs = Handoffs(self._database, statements, self._leases, prefix)
        self._searches = Searches(fetch, statements, prefix)
        self._maintenance = Maintenance(fetch, statements, self._searches, prefix)

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""
        self._notifications.forget_loop()
        self._database.pool.forget_loop()

    async def close(self) -> None:
        """Close the connections that the store opened."""
        await self._notifications.close()
        await self._database.pool.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        """Replace the run, its journal and its lease."""
        key = self._key(id, workflow or "")
        await self._fetch(SAVE, key, data, workflow, *rest_columns(rest))

    async def load(self, id: str) -> Snapshot | None:
        """Return the merged snapshot."""
        rows = await self._fetch(LOAD, self._key(id))
        return read_run(id, *rows[0]) if rows else None

    async def delete(self, id: str) -> bool:
        """Delete the run, its journal and its inbox."""
        [(count,)] = await self._fetch(DELETE, self._key(id))
        return bool(count)

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Write the entries in one statement."""
        return await self._writer.write(entries)

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict:
        """Call `work` with an asyncpg connection in an open transaction.

        If the entry already exists, it is accepted, and the writes of `work` are rolled back.
        """
        key = self._key(id)
        async with self._database.transaction() as transaction:
            # The row is not locked while `work` runs: renewing the lease would have to wait, and so
            # would all leases that are renewed with it. The write is fenced again.
            before = await transaction.fetch(self._statements.sql(FENCE), key, epoch)
            if (verdict := _verdict(before)) is not Verdict.ACCEPTED:
                return verdict
            if settings := self._database.pool.user_session_settings:
                await transaction.execute(settings)
            entry = await work(transaction.connection)
            fence_rows = await transaction.fetch(self._statements.sql(FENCE_LOCKED), key, epoch)
            if fence_rows and fence_rows[0][1] != before[0][1]:
                raise StoreError(_ENDED_BY_USER)
            if (verdict := _verdict(fence_rows)) is Verdict.ACCEPTED:
                verdict = await self._write_in(transaction, key, entry)
            if verdict is not Verdict.ACCEPTED:
                await transaction.roll_back()
        return verdict

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        """Lease the runs in as few statements as possible."""
        for request in requests:
            self._key(request.id, request.workflow or "")
        return await self._leases.acquire(requests)

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Read the owners in one statement."""
        return await self._leases.owners(ids)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        """Extend the leases in one statement."""
        return await self._leases.renew(leases, ttl)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases in one statement."""
        await self._leases.release(leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create the runs in one statement."""
        with self._notifications.announcing():
            fetch = partial(self._database.fetch, repeatable=False)
            return await self._create(fetch, ENQUEUE, runs)

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], *, in_transaction: bool
    ) -> Sequence[bool]:
        """Create the runs in one statement of the caller's transaction."""
        table = self._tables.names["runs"]
        transaction = await join(connection, self._database, table, self._place)
        return await self._create(transaction.fetch, ENQUEUE_JOINED, runs)

    async def load_in(self, connection: Any, id: str) -> Snapshot | None:
        """Return the merged snapshot as the caller's transaction sees it."""
        transaction = self._database.adopt(connection)
        rows = await transaction.fetch(self._statements.sql(LOAD), self._key(id))
        return read_run(id, *rows[0]) if rows else None

    async def _create(self, fetch: Fetch, template: str, runs: Sequence[NewRun]) -> Sequence[bool]:
        first: dict[str, int] = {}
        for index, run in enumerate(runs):
            first.setdefault(self._key(run.id, run.workflow, run.queue), index)
        new = [(key, *_columns_of(runs[first[key]])) for key in sorted(first)]
        *columns, tags, summaries = zip(*new, strict=True)
        statement = self._statements.sql(template, tags_added(tags))
        rows = await fetch(statement, *columns, tags, summaries)
        created_indexes = {first[key] for (key,) in rows}
        return [index in created_indexes for index in range(len(runs))]

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]:
        """Return the due runs in the order of the index."""
        return await self._leases.due(now, limit, supports, queues)

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        """Lease due runs, skipping those that are locked."""
        return await self._leases.claim(owner, ttl, limit, supports, queues)

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        """Return queues in the order of the index."""
        return await self._leases.queues(now, limit, low, high)

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        """Insert the messages and wake the runs that await them, in one statement."""
        with self._notifications.announcing():
            return await self._inboxes.send(messages)

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        """Insert the messages and lease the runs that await them, in one statement."""
        with self._notifications.announcing_failure():
            receipts, grants = await self._handoffs.hand_off(messages, claimant)
        if len(grants) < len({message.to for message in messages}):
            self._notifications.announce()
        return receipts, grants

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        """Return the run's unconsumed messages."""
        return await self._inboxes.read(id, after, limit)

    async def prune(self, request: PruneRequest) -> int:
        """Delete old runs, skipping those that are locked."""
        return await self._maintenance.prune(request)

    async def stats(self) -> Stats:
        """Count the runs by status and queue."""
        return await self._maintenance.stats()

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Find runs along the index that suits the query."""
        return await self._searches.search(query, limit, after)

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        """Read the headers of runs in one statement."""
        return await self._searches.summaries(ids)

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        """Count runs along the index by workflow and status."""
        return await self._searches.counts(query, cap)

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

    def _key(self, id: str, workflow: str = "", queue: str = "") -> str:
        key = self._prefix + id
        if _is_longer(key, _MAX_KEY_BYTES):
            expected = f"at most {_MAX_KEY_BYTES:,} bytes including the prefix"
            raise InvalidArgument("id", id, expected)
        if workflow and any(
            _is_longer(other + workflow, _MAX_INDEXED_BYTES) for other in (key, queue)
        ):
            expected = f"at most {_MAX_INDEXED_BYTES:,} bytes together with the id, or the queue"
            raise InvalidArgument("workflow", workflow, expected)
        return key


class PostgresStore(
    HandoffShell[PostgresBackend], TransactionShell[PostgresBackend], JoiningShell[PostgresBackend]
):
    """Stores runs in PostgreSQL; see `postgres`."""


class NotifyingPostgresStore(NotifyShell[PostgresBackend], PostgresStore):
    """Stores runs in PostgreSQL, with sessions that can LISTEN; see `postgres`."""


def _verdict(fence: Sequence[Any]) -> Verdict:
    """Return the verdict on a new entry from the row of FENCE."""
    if not fence:
        return Verdict.UNKNOWN
    return Verdict.ACCEPTED if fence[0][0] else Verdict.FENCED


def _columns_of(new: NewRun) -> tuple[object, ...]:
    """Return the columns of an unowned run, after its id."""
    if new.rest is None:
        head_start = new.head_start if new.wake_at is None else None
        state = ("queued", "[]", head_start, new.wake_at)
    else:
        state = (new.rest.status, as_json(new.rest.awaits), None, new.rest.wake_at)
    version, tags, summary = _header_of(new)
    return new.workflow, new.snapshot, *state, new.queue, version, as_json(tags), summary


def _header_of(new: NewRun) -> tuple[int, Sequence[str], bytes]:
    rest = new.rest
    if rest is None:
        return new.version, new.tags, new.summary
    return (
        new.version if rest.version is None else rest.version,
        new.tags if rest.tags is None else rest.tags,
        new.summary if rest.summary is None else rest.summary,
    )


def _is_longer(text: str, limit: int) -> bool:
    return 4 * len(text) > limit and len(text.encode()) > limit
