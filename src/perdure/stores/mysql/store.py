"""The MySQL store: the implementation of each method of the contract."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from perdure.errors import InvalidArgument
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
from perdure.stores._shell import TransactionShell
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.append import Writer
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.due import lane_of
from perdure.stores.mysql.enqueue import Creator
from perdure.stores.mysql.handoff import Handoffs
from perdure.stores.mysql.inbox import Inboxes
from perdure.stores.mysql.joining import DATABASE, JoinedTransaction, join
from perdure.stores.mysql.keyvalue import KeyValueTable
from perdure.stores.mysql.leases import Leases
from perdure.stores.mysql.literals import Statement, Value
from perdure.stores.mysql.maintenance import Maintenance
from perdure.stores.mysql.rows import names_as_json, read_run, tags_as_json
from perdure.stores.mysql.schema import Schema, Tables, dialect_of
from perdure.stores.mysql.search import Searches
from perdure.stores.mysql.statements import Statements
from perdure.stores.mysql.tags import DELETE_TAGS, replace_tags
from perdure.validation import check_prefix

logger = logging.getLogger(__name__)

_MAX_KEY_LENGTH = 760
# The size of a statement without its one large value.
_PACKET_OVERHEAD = 16 * 1024

SERVER_SETTINGS = Statement(
    b"SELECT VERSION(), @@max_allowed_packet, @@innodb_flush_log_at_trx_commit, "
    b"@@log_bin, @@sync_binlog"
)


class MysqlBackend:
    """One table of runs in a MySQL or MariaDB database; see `perdure.stores._shell.Backend`."""

    _schema: str | None = None
    _statements: Statements
    _writer: Writer
    _leases: Leases
    _creator: Creator
    _inboxes: Inboxes
    _handoffs: Handoffs
    _searches: Searches
    _maintenance: Maintenance

    def __init__(self, database: Database, tables: Tables, *, prefix: str) -> None:
        self._prefix = check_prefix(prefix)
        self._database = database
        self._tables = tables
        documents = Tables(tables.table, "_documents")
        self.documents = KeyValueTable(database, documents, scope_of(prefix))

    @property
    def max_value_size(self) -> int:
        """The largest value that fits in a packet to the server; known once the store is open."""
        return self._database.max_packet_size - _PACKET_OVERHEAD

    async def open(self) -> None:
        """Check the server's version and settings, and create the tables."""
        [row] = (await self._database.run_alone(SERVER_SETTINGS)).rows
        version, max_packet_size, flush, has_binlog, sync_binlog = row
        dialect = dialect_of(version)
        self._database.max_packet_size = max_packet_size
        if flush != 1 or (has_binlog and sync_binlog != 1):
            logger.warning(
                "%s confirms commits before they are on disk (innodb_flush_log_at_trx_commit=%s, "
                "sync_binlog=%s): a power failure may lose the latest records",
                version,
                flush,
                sync_binlog,
            )
        await Schema(self._tables, dialect).set_up(self._database)
        self._prepare(Statements(self._tables, dialect))
        if "." not in self._tables.table:
            self._schema = (await self._database.run_alone(DATABASE)).rows[0][0]

    def _prepare(self, statements: Statements) -> None:
        database, prefix = self._database, self._prefix
        self._statements = statements
        self._writer = Writer(database, statements, self._key)
        self._creator = Creator(database, statements, self._key)
        self._leases = Leases(database, statements, prefix)
        self._inboxes = Inboxes(database, statements, prefix)
        self._handoffs = Handoffs(database, statements, self._inboxes, self._leases, prefix)
        self._searches = Searches(database, statements, prefix)
        self._maintenance = Maintenance(
            database, statements, self._searches, prefix, self._delete_runs
        )

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""
        self._database.pool.forget_loop()

    async def close(self) -> None:
        """Close the connections that the store opened."""
        await self._database.pool.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        """Replace the run, its journal and its lease."""
        key = self._key(id)
        tags = tags_as_json(rest.tags)
        header = (rest.version, tags, rest.summary)
        lock = (
            self._bind(sql.INSERT_OR_LOCK, key),
            self._bind(sql.MESSAGES, [key]),
            self._bind(sql.STORED_TAGS, key),
        )

        async def work(transaction: Transaction) -> None:
            _, messages, old_tags = await transaction.run(*lock)
            has_message = any(name in rest.awaits for _, _, name, _ in messages.rows)
            state = (rest.status, has_message, rest.wake_at, names_as_json(rest.awaits))
            has_new_tags = rest.tags is not None and tags != old_tags.rows[0][0].encode()
            new_tags = {key: rest.tags} if rest.tags is not None and has_new_tags else {}
            await transaction.finish(
                self._bind(sql.SAVE, data, workflow, lane_of(workflow), *state, *header, key),
                self._bind(sql.DELETE_JOURNALS, [key]),
                *replace_tags(self._statements, new_tags),
            )

        await self._database.transact(work)

    async def load(self, id: str) -> Snapshot | None:
        """Return the merged snapshot."""
        key = self._key(id)
        return _read(id, await self._database.run_alone(self._bind(sql.LOAD, key, key)))

    async def load_in(self, connection: Any, id: str) -> Snapshot | None:
        """Return the merged snapshot as the caller's transaction sees it."""
        key = self._key(id)
        transaction = self._database.adopt(connection, JoinedTransaction)
        with self._database.translate_errors():
            [result] = await transaction.run(self._bind(sql.LOAD, key, key))
        return _read(id, result)

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], *, in_transaction: bool
    ) -> Sequence[bool]:
        """Create the runs in the caller's transaction."""
        with self._database.translate_errors():
            transaction = await join(connection, self._database, self._schema)
            return await self._creator.enqueue_in(transaction, runs)

    async def delete(self, id: str) -> bool:
        """Delete the run, its journal and its inbox."""
        key = self._key(id)

        async def work(transaction: Transaction) -> bool:
            # Only what belonged to this run: another one with the same id may be created at any
            # time, but not before this transaction ends.
            delete, *others = self._delete_runs([key])
            [result] = await transaction.run(delete)
            if result.count:
                await transaction.finish(*others)
            return result.count > 0

        return await self._database.transact(work)

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Write the entries in one transaction."""
        return await self._writer.write(entries)

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict:
        """Call `work` with an asyncmy connection in an open transaction, at READ COMMITTED."""
        self._key(id)
        transaction = await self._database.open()
        try:
            # The row is not locked while `work` runs: renewing the lease would have to wait, and so
            # would all leases that are renewed with it. The write is fenced again.
            with self._database.translate_errors():
                verdict = await self._writer.fence(transaction, id, epoch)
            if verdict is not Verdict.ACCEPTED:
                return verdict
            async with transaction.lend() as connection:
                entry = await work(connection)
            transaction.check_open()
            with self._database.translate_errors():
                return await self._writer.finish(transaction, entry)
        finally:
            await transaction.end()

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        """Lease the runs in one transaction, if no two requests are for the same run."""
        for request in requests:
            self._key(request.id)
        return await self._leases.acquire(requests)

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Read the owners in one statement."""
        return await self._leases.owners(ids)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        """Extend the leases in one transaction."""
        return await self._leases.renew(leases, ttl)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases in one transaction."""
        await self._leases.release(leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create the runs in one transaction."""
        return await self._creator.enqueue(runs)

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]:
        """Return the due runs in the order of the index."""
        return await self._leases.due.due(now, limit, supports, queues)

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        """Lease due runs, skipping those that are locked if the server can."""
        return await self._leases.claim(owner, ttl, limit, supports, queues)

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        """Return queues in the order of the index."""
        return await self._leases.due.queues(now, limit, low, high)

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        """Insert the messages and wake the runs that await them, in one transaction."""
        for message in messages:
            self._key(message.to)
        return await self._inboxes.send(messages)

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        """Insert the messages, and lease or wake the runs that await them, in one transaction."""
        for message in messages:
            self._key(message.to)
        return await self._handoffs.hand_off(messages, claimant)

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        """Return the run's unconsumed messages."""
        self._key(id)
        return await self._inboxes.read(id, after, limit)

    async def prune(self, request: PruneRequest) -> int:
        """Delete old runs, skipping those that are locked if the server can."""
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

    def _delete_runs(self, keys: Sequence[str]) -> Sequence[Statement]:
        tables = (sql.DELETE_RUNS, sql.DELETE_JOURNALS, sql.DELETE_INBOXES, DELETE_TAGS)
        return [self._bind(statement, [*keys]) for statement in tables]

    def _bind(self, template: str, *values: Value) -> Statement:
        return self._statements.bind(template, *values)

    def _key(self, id: str) -> str:
        key = self._prefix + id
        if len(key) > _MAX_KEY_LENGTH:
            expected = f"at most {_MAX_KEY_LENGTH} characters including the prefix"
            raise InvalidArgument("id", id, expected)
        return key


def _read(id: str, result: Result) -> Snapshot | None:
    rows = sorted(result.rows)
    return read_run(id, rows[0][2], [row[2] for row in rows[1:]]) if rows else None


class MysqlStore(
    HandoffShell[MysqlBackend], TransactionShell[MysqlBackend], JoiningShell[MysqlBackend]
):
    """Stores runs in MySQL or MariaDB; see `mysql`."""

    @property
    def _max_value_size(self) -> int:
        return min(super()._max_value_size, self._backend.max_value_size)
