"""The verbs of the store on MySQL."""

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

from perdure import codec
from perdure.clock import as_utc, isoformat, parse_iso
from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, is_over, workflow_of
from perdure.store import (
    AsyncCloseable,
    Capabilities,
    Delivery,
    Due,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewRun,
    RunSummary,
    Stats,
    Verdict,
    check_entries,
    rest_of,
)
from perdure.stores._lifecycle import Lifecycle
from perdure.stores._reading import acquire_readable, claim_readable
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.append import Writer
from perdure.stores.mysql.database import Database, Transaction
from perdure.stores.mysql.errors import Refused
from perdure.stores.mysql.leases import Leases
from perdure.stores.mysql.literals import Rows, Statement, read_moment
from perdure.stores.mysql.rows import chunks, names_as_json, read_inboxes, read_run
from perdure.stores.mysql.schema import Names, Schema, dialect_of
from perdure.stores.mysql.statements import Conditions, Statements
from perdure.validation import check_id, check_limit, check_prefix

logger = logging.getLogger(__name__)

_LONGEST_KEY = 760
_OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")
_MICROSECOND = timedelta(microseconds=1)
# What a statement has besides its one large value.
_PACKET_OVERHEAD = 16 * 1024
_NEW = -1

_LOOK_AROUND = Statement(
    b"SELECT VERSION(), @@max_allowed_packet, @@innodb_flush_log_at_trx_commit, "
    b"@@log_bin, @@sync_binlog"
)


class MysqlStore(AsyncCloseable):
    """Keeps runs in MySQL or MariaDB; see `mysql`."""

    _on: Statements
    _writer: Writer
    _leases: Leases

    def __init__(
        self, database: Database, names: Names, *, prefix: str, capabilities: Capabilities
    ) -> None:
        self.capabilities = capabilities
        self._prefix = check_prefix(prefix)
        self._database = database
        self._names = names
        self._life = Lifecycle("MySQL", self._set_up)

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        key, data, rest = self._key(id), codec.dumps(snapshot), rest_of(snapshot)
        workflow = _checked_workflow(workflow_of(snapshot))
        await self._life.ready()
        self._check_size(data, "the snapshot of run {!r}", id)
        made = self._on(sql.MAKE, [(key, b"{}", None, None, _NEW)])

        async def work(transaction: Transaction) -> None:
            _, found = await transaction.run(made, self._on(sql.MAIL, [key]))
            is_awaited = any(name in rest.awaits for _, _, name, _ in found.rows)
            lying = (rest.status, is_awaited, rest.wake_at, names_as_json(rest.awaits))
            await transaction.finish(
                self._on(sql.SAVE, data, workflow, *lying, key),
                self._on(sql.FORGET_JOURNALS, [key]),
            )

        await self._database.transact(work)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        key = self._key(id)
        await self._life.ready()
        rows = sorted((await self._database.run_alone(self._on(sql.LOAD, key, key))).rows)
        return read_run(id, rows[0][2], [row[2] for row in rows[1:]]) if rows else None

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        key = self._key(id)
        await self._life.ready()

        async def work(transaction: Transaction) -> bool:
            # Only what belonged to the run: another may be made of the same id at any moment, but
            # not before this transaction ends.
            [deleted] = await transaction.run(self._on(sql.FORGET_RUNS, [key]))
            if deleted.count:
                await transaction.finish(*self._forgetting([key]))
            return deleted.count > 0

        return await self._database.transact(work)

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Give runs newest first, at most `limit`."""
        expected = Conditions()
        expected.add_prefix(self._prefix + check_prefix(prefix))
        check_limit(limit)
        if status is not None:
            expected.add(sql.WITH_STATUS, status)
        if workflow is not None:
            expected.add(sql.WITH_WORKFLOW, workflow)
        if after is not None:
            moment, key = self._mark(after)
            expected.add(sql.AFTER, moment, moment, key)
        await self._life.ready()
        found = await self._database.run_alone(self._on.where(sql.LIST, expected, limit))
        return [self._listed(*row) for row in found.rows]

    async def close(self) -> None:
        """Close the connections that were opened here; a pool that was passed in stays open."""
        if self._life.close():
            await self._database.connections.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one transaction and give a verdict for each, in order."""
        await self._life.ready()
        check_entries(entries, self._largest_value)
        return await self._writer.write(entries)

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Call `work` with an asyncmy connection in an open transaction, which reads what is
        committed, and commit what it wrote together with the entry it returns; all or nothing."""
        self._key(id)
        await self._life.ready()
        transaction = await self._database.open()
        try:
            # The row is not locked while `work` runs: renewing the lease would wait for it, and
            # so would all leases that are renewed with it. The write itself is fenced again.
            with self._database.speaking():
                verdict = await self._writer.fence(transaction, id, epoch)
            if verdict is not Verdict.ACCEPTED:
                return verdict
            async with transaction.lent() as connection:
                entry = await work(connection)
            self._check_entry_of(id, epoch, entry)
            transaction.check_open()
            with self._database.speaking():
                return await self._writer.finish(transaction, entry)
        finally:
            await transaction.end()

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        await self._life.ready()
        for request in requests:
            self._key(request.id)
            check_id(request.owner, "owner")
            _checked_workflow(request.workflow)
            self._check_size(request.create or b"", "the snapshot of run {!r}", request.id)
        return await acquire_readable(await self._leases.acquire(requests), self.release)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        await self._life.ready()
        return await self._leases.renew(leases, ttl)

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        await self._life.ready()
        await self._leases.release(leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        await self._life.ready()
        first: dict[str, NewRun] = {}
        for run in runs:
            first.setdefault(self._key(run.id), run)
            _checked_workflow(run.workflow)
            self._check_size(run.snapshot, "the snapshot of run {!r}", run.id)
        created = await self._create(first) if first else ()
        return [
            key in created and first[key] is run
            for run, key in ((run, self._prefix + run.id) for run in runs)
        ]

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose wake time has come at `now`, earliest first."""
        expected = Conditions()
        expected.add(sql.IS_DUE, as_utc(now, "now"))
        expected.add_prefix(self._prefix)
        check_limit(limit)
        await self._life.ready()
        if workflows is not None:
            if not workflows:
                return []
            expected.add(sql.IN_WORKFLOWS, [*workflows])
        found = await self._database.run_alone(self._on.where(sql.DUE, expected, limit))
        return [Due(self._id(key), read_moment(wake_at)) for key, wake_at in found.rows]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due, runnable or orphaned, earliest first."""
        check_id(owner, "owner")
        await self._life.ready()
        if check_limit(limit) == 0 or (workflows is not None and not workflows):
            return []
        return await claim_readable(
            lambda left: self._leases.claim(owner, ttl, left, workflows), limit, self.release
        )

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        key = self._key(id)
        await self._life.ready()
        self._check_size(payload, "the event {!r} for run {!r}", name, id)
        digest = None if dedup_id is None else blake2b(dedup_id.encode(), digest_size=16).digest()
        receiver, known = self._on(sql.LOCK_RECEIVER, key), self._on(sql.KNOWN, key, digest)

        async def work(transaction: Transaction) -> Delivery:
            found, earlier = await transaction.run(receiver, known)
            if not found.rows:
                return Delivery.UNKNOWN
            [(status, owner, awaits, wake_at, now)] = found.rows
            if earlier.rows:
                return Delivery.DUPLICATE
            if is_over(status):
                return Delivery.OVER
            moment = read_moment(now)
            written = [self._on(sql.SEND, key, name, payload, moment, digest)]
            is_awaited = owner is None and name in codec.loads(awaits or "[]")
            if is_awaited and (wake_at is None or wake_at > now):
                written.append(self._on(sql.WAKE, moment, key))
            await transaction.finish(*written)
            return Delivery.DELIVERED

        return await self._database.transact(work, repeatable=dedup_id is not None)

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        key = self._key(id)
        await self._life.ready()
        found = await self._database.run_alone(self._on(sql.INBOXES, [key]))
        return read_inboxes(found.rows)[key]

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        statuses = [each for each in _OVER if status in (None, each)]
        check_limit(limit)
        await self._life.ready()
        if not statuses:
            return 0
        old = Conditions()
        old.add(sql.IS_OLD, statuses, older_than // _MICROSECOND)
        old.add_prefix(self._prefix)
        statement = self._on.where(sql.OLD, old, limit)

        async def work(transaction: Transaction) -> int:
            [found] = await transaction.run(statement)
            keys = [key for (key,) in found.rows]
            if keys:
                forgotten = self._on(sql.FORGET_RUNS, [*keys])
                await transaction.finish(forgotten, *self._forgetting(keys))
            return len(keys)

        return await self._database.transact(work)

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        await self._life.ready()
        ours, due = Conditions(), Conditions()
        ours.add_prefix(self._prefix)
        due.add(sql.IS_DUE_NOW)
        due.add_prefix(self._prefix)
        counted, oldest = await self._database.run(
            self._on.where(sql.COUNT, ours), self._on.where(sql.OLDEST_DUE, due)
        )
        return Stats(dict(counted.rows), read_moment(oldest.rows[0][0]) if oldest.rows else None)

    async def _set_up(self) -> None:
        [row] = (await self._database.run_alone(_LOOK_AROUND)).rows
        version, largest_packet, flush, logs, log_sync = row
        dialect = dialect_of(version)
        self._database.largest_packet = largest_packet
        if flush != 1 or (logs and log_sync != 1):
            logger.warning(
                "%s answers before its disk does (innodb_flush_log_at_trx_commit=%s, "
                "sync_binlog=%s): a power cut may cost what was recorded last",
                version,
                flush,
                log_sync,
            )
        await Schema(self._names, dialect).set_up(self._database)
        self._on = Statements(self._names, dialect)
        self._writer = Writer(self._database, self._on, self._key)
        self._leases = Leases(self._database, self._on, self._prefix)

    async def _create(self, runs: dict[str, NewRun]) -> Collection[str]:
        rows = [(key, run.snapshot, run.workflow, run.wake_at) for key, run in sorted(runs.items())]
        if len(parts := chunks(rows)) == 1:
            with suppress(Refused):
                statement = self._on(sql.ENQUEUE, Rows(sql.ENQUEUED, rows))
                await self._database.run_alone(statement, repeatable=False)
                return runs.keys()
        keys = [key for key, *_ in rows]
        *_, made, _ = await self._database.run(
            *(self._on(sql.MAKE, [(*row, _NEW) for row in part]) for part in parts),
            self._on(sql.MADE, keys),
            self._on(sql.QUEUE_MADE, keys),
            repeatable=False,
        )
        return {key for (key,) in made.rows}

    def _forgetting(self, keys: Sequence[str]) -> Sequence[Statement]:
        return [self._on(part, [*keys]) for part in (sql.FORGET_JOURNALS, sql.FORGET_INBOXES)]

    def _listed(
        self, key: str, updated_at: datetime, status: RunStatus, workflow: str | None
    ) -> RunSummary:
        id, moment = self._id(key), read_moment(updated_at)
        return RunSummary(id, isoformat(moment), status, workflow, f"{moment.isoformat()} {id}")

    def _mark(self, cursor: str) -> tuple[datetime, str]:
        time, _, id = cursor.partition(" ")
        return parse_iso(time, "after"), self._prefix + id

    def _id(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _key(self, id: str) -> str:
        key = self._prefix + check_id(id)
        if len(key) > _LONGEST_KEY:
            expected = f"an id of at most {_LONGEST_KEY} characters, the prefix included"
            raise InvalidArgument("id", id, expected)
        return key

    @property
    def _largest_value(self) -> int:
        largest = self._database.largest_packet - _PACKET_OVERHEAD
        return min(self.capabilities.max_value_size, largest)

    def _check_size(self, data: bytes, what: str, *names: str) -> None:
        if len(data) > self._largest_value:
            raise ValueTooLarge(what.format(*names), len(data), self._largest_value)

    def _check_entry_of(self, id: str, epoch: int, entry: Entry) -> None:
        if (entry.id, entry.epoch) != (id, epoch):
            raise InvalidArgument("work", entry, f"an entry of run {id!r} and epoch {epoch}")
        check_entries([entry], self._largest_value)


def _checked_workflow(workflow: str | None) -> str | None:
    # An index holds it, whose entries are short.
    return None if workflow is None else check_id(workflow, "workflow")
