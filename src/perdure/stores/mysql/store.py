"""The MySQL store: what MySQL does for each verb of the contract."""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

from perdure import codec
from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus, Snapshot, is_over
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
from perdure.stores._shell import Ownership, Query, Row, TransactionShell
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.append import Writer
from perdure.stores.mysql.database import Database, Transaction
from perdure.stores.mysql.errors import ConstraintViolation
from perdure.stores.mysql.keyvalue import KeyValueTable
from perdure.stores.mysql.leases import Leases
from perdure.stores.mysql.literals import Rows, Statement, Value, read_datetime
from perdure.stores.mysql.rows import chunks, names_as_json, read_inboxes, read_run
from perdure.stores.mysql.schema import Schema, Tables, dialect_of
from perdure.stores.mysql.statements import Conditions, Statements
from perdure.validation import check_prefix

logger = logging.getLogger(__name__)

_MAX_KEY_LENGTH = 760
_MICROSECOND = timedelta(microseconds=1)
# A statement's size besides its one large value.
_PACKET_OVERHEAD = 16 * 1024
_NEW_EPOCH = -1

SERVER_SETTINGS = Statement(
    b"SELECT VERSION(), @@max_allowed_packet, @@innodb_flush_log_at_trx_commit, "
    b"@@log_bin, @@sync_binlog"
)


class MysqlBackend:
    """One table of runs in a MySQL or MariaDB database; see `perdure.stores._shell.Backend`."""

    _statements: Statements
    _writer: Writer
    _leases: Leases

    def __init__(self, database: Database, tables: Tables, *, prefix: str) -> None:
        self._prefix = check_prefix(prefix)
        self._database = database
        self._tables = tables
        documents = Tables(tables.table, "_documents")
        self.documents = KeyValueTable(database, documents, scope_of(prefix))

    @property
    def max_value_size(self) -> int:
        """The largest value that fits in a packet to the server, known once it is open."""
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
        self._statements = Statements(self._tables, dialect)
        self._writer = Writer(self._database, self._statements, self._key)
        self._leases = Leases(self._database, self._statements, self._prefix)

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""
        self._database.pool.forget_loop()

    async def close(self) -> None:
        """Close the connections that were opened here."""
        await self._database.pool.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        """Replace the run, its journal and its lease."""
        key = self._key(id)
        insert = self._bind(sql.INSERT_OR_LOCK, [(key, b"{}", None, None, _NEW_EPOCH)])

        async def work(transaction: Transaction) -> None:
            _, messages = await transaction.run(insert, self._bind(sql.MESSAGES, [key]))
            has_message = any(name in rest.awaits for _, _, name, _ in messages.rows)
            columns = (rest.status, has_message, rest.wake_at, names_as_json(rest.awaits))
            await transaction.finish(
                self._bind(sql.SAVE, data, workflow, *columns, key),
                self._bind(sql.DELETE_JOURNALS, [key]),
            )

        await self._database.transact(work)

    async def load(self, id: str) -> Snapshot | None:
        """Return the merged snapshot."""
        key = self._key(id)
        rows = sorted((await self._database.run_alone(self._bind(sql.LOAD, key, key))).rows)
        return read_run(id, rows[0][2], [row[2] for row in rows[1:]]) if rows else None

    async def delete(self, id: str) -> bool:
        """Delete the run, its journal and its inbox."""
        key = self._key(id)

        async def work(transaction: Transaction) -> bool:
            # Only what belonged to the run: another one with the same id may be created at any
            # time, but not before this transaction ends.
            [deleted] = await transaction.run(self._bind(sql.DELETE_RUNS, [key]))
            if deleted.count:
                await transaction.finish(*self._delete_journals_and_inboxes([key]))
            return deleted.count > 0

        return await self._database.transact(work)

    async def list(self, query: Query) -> Sequence[Row]:
        """Return runs, the most recently updated first."""
        conditions = Conditions()
        conditions.add_prefix(self._prefix + query.prefix)
        if query.status is not None:
            conditions.add(sql.WITH_STATUS, query.status)
        if query.workflow is not None:
            conditions.add(sql.WITH_WORKFLOW, query.workflow)
        if query.after is not None:
            updated_at, id = query.after
            conditions.add(sql.AFTER, updated_at, updated_at, self._prefix + id)
        statement = self._statements.where(sql.LIST, conditions, query.limit)
        rows = (await self._database.run_alone(statement)).rows
        return [
            Row(self._id(key), read_datetime(updated_at), *columns)
            for key, updated_at, *columns in rows
        ]

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
            # The row is not locked while `work` runs: renewing the lease would wait for it, and so
            # would all leases that are renewed together with it. The write is fenced again.
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
        """Read who has the leases in one statement."""
        return await self._leases.owners(ids)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        """Extend the leases in one transaction."""
        return await self._leases.renew(leases, ttl)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases in one transaction."""
        await self._leases.release(leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create the runs in one transaction."""
        first: dict[str, int] = {}
        for index, run in enumerate(runs):
            first.setdefault(self._key(run.id), index)
        created = await self._create({key: runs[first[key]] for key in sorted(first)})
        indexes = {first[key] for key in created}
        return [index in indexes for index in range(len(runs))]

    async def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Due]:
        """Return the due runs in the order of the index."""
        conditions = Conditions()
        conditions.add(sql.IS_DUE, now)
        conditions.add_prefix(self._prefix)
        if workflows is not None:
            conditions.add(sql.IN_WORKFLOWS, [*workflows])
        result = await self._database.run_alone(self._statements.where(sql.DUE, conditions, limit))
        return [Due(self._id(key), read_datetime(wake_at)) for key, wake_at in result.rows]

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Granted]:
        """Lease due runs, skipping those that are locked if the server can."""
        return await self._leases.claim(owner, ttl, limit, workflows)

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery:
        """Insert a message and wake a run that waits for it, while the run is locked."""
        key = self._key(id)
        digest = None if dedup_id is None else blake2b(dedup_id.encode(), digest_size=16).digest()
        lock, find_duplicate = (
            self._bind(sql.LOCK_RECEIVER, key),
            self._bind(sql.FIND_DUPLICATE, key, digest),
        )

        async def work(transaction: Transaction) -> Delivery:
            receiver, duplicate = await transaction.run(lock, find_duplicate)
            if not receiver.rows:
                return Delivery.UNKNOWN
            [(status, owner, awaits, wake_at, now)] = receiver.rows
            if duplicate.rows:
                return Delivery.DUPLICATE
            if is_over(status):
                return Delivery.OVER
            sent_at = read_datetime(now)
            statements = [self._bind(sql.SEND, key, name, payload, sent_at, digest)]
            is_awaited = owner is None and name in codec.loads(awaits or "[]")
            if is_awaited and (wake_at is None or wake_at > now):
                statements.append(self._bind(sql.WAKE, sent_at, key))
            await transaction.finish(*statements)
            return Delivery.DELIVERED

        return await self._database.transact(work, repeatable=dedup_id is not None)

    async def inbox(self, id: str) -> Sequence[Message]:
        """Return the run's messages that were not consumed."""
        key = self._key(id)
        result = await self._database.run_alone(self._bind(sql.INBOXES, [key]))
        return read_inboxes(result.rows)[key]

    async def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> int:
        """Delete old runs, skipping those that are locked if the server can."""
        conditions = Conditions()
        conditions.add(sql.IS_OLD, [*statuses], older_than // _MICROSECOND)
        conditions.add_prefix(self._prefix)
        lock = self._statements.where(sql.LOCK_OLD, conditions, limit)

        async def work(transaction: Transaction) -> int:
            [old] = await transaction.run(lock)
            keys = [key for (key,) in old.rows]
            if keys:
                delete = self._bind(sql.DELETE_RUNS, [*keys])
                await transaction.finish(delete, *self._delete_journals_and_inboxes(keys))
            return len(keys)

        return await self._database.transact(work)

    async def stats(self) -> Stats:
        """Count the runs by status."""
        with_prefix, due = Conditions(), Conditions()
        with_prefix.add_prefix(self._prefix)
        due.add(sql.IS_DUE_NOW)
        due.add_prefix(self._prefix)
        counts, oldest = await self._database.run(
            self._statements.where(sql.COUNT, with_prefix),
            self._statements.where(sql.OLDEST_DUE, due),
        )
        return Stats(dict(counts.rows), read_datetime(oldest.rows[0][0]) if oldest.rows else None)

    async def _create(self, runs: Mapping[str, NewRun]) -> Collection[str]:
        rows = [(key, run.snapshot, run.workflow, run.wake_at) for key, run in runs.items()]
        if len(parts := chunks(rows)) == 1:
            with suppress(ConstraintViolation):
                statement = self._bind(sql.ENQUEUE, Rows(sql.ENQUEUE_ROW, rows))
                await self._database.run_alone(statement, repeatable=False)
                return runs.keys()
        keys = [*runs]
        *_, inserted, _ = await self._database.run(
            *(
                self._bind(sql.INSERT_OR_LOCK, [(*row, _NEW_EPOCH) for row in part])
                for part in parts
            ),
            self._bind(sql.INSERTED, keys),
            self._bind(sql.QUEUE_INSERTED, keys),
            repeatable=False,
        )
        return {key for (key,) in inserted.rows}

    def _delete_journals_and_inboxes(self, keys: Sequence[str]) -> Sequence[Statement]:
        return [self._bind(each, [*keys]) for each in (sql.DELETE_JOURNALS, sql.DELETE_INBOXES)]

    def _bind(self, template: str, *values: Value) -> Statement:
        return self._statements.bind(template, *values)

    def _id(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _key(self, id: str) -> str:
        key = self._prefix + id
        if len(key) > _MAX_KEY_LENGTH:
            expected = f"at most {_MAX_KEY_LENGTH} characters including the prefix"
            raise InvalidArgument("id", id, expected)
        return key


class MysqlStore(TransactionShell[MysqlBackend]):
    """Stores runs in MySQL or MariaDB; see `mysql`."""

    @property
    def _max_value_size(self) -> int:
        return min(super()._max_value_size, self._backend.max_value_size)
