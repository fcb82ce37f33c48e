"""The verbs of the store on PostgreSQL."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

from perdure import codec
from perdure.clock import as_utc, isoformat, parse_iso
from perdure.errors import InvalidArgument, StoreError, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, workflow_of
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
from perdure.stores.postgres.append import Writer, names_as_json
from perdure.stores.postgres.database import Database, Transaction
from perdure.stores.postgres.leases import Leases
from perdure.stores.postgres.rows import read_message, read_run
from perdure.stores.postgres.schema import Names, Schema
from perdure.stores.postgres.statements import (
    COUNT,
    DELETE,
    DUE,
    ENQUEUE,
    FENCE,
    HOLD,
    INBOXES,
    IS_KNOWN,
    LIST,
    LOAD,
    OLDEST_DUE,
    PRUNE,
    RELEASE,
    RENEW,
    SAVE,
    SEND,
    Statements,
)
from perdure.validation import check_id, check_limit, check_prefix

logger = logging.getLogger(__name__)

# An entry of an index has at most 2,704 bytes, and a stored id is a part of several.
_LONGEST_KEY = 2_500
_OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")

_ENDED_INSIDE = (
    "the transaction was ended inside it, by COMMIT or ROLLBACK; only the store may end it"
)

_LOOK_AROUND = """
    SELECT current_setting('server_encoding'), current_setting('fsync'),
        current_setting('synchronous_commit'), atttypid::regtype::text
    FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = 'snapshot'
"""


class PostgresStore(AsyncCloseable):
    """Keeps runs in PostgreSQL; see `postgres`."""

    def __init__(
        self, database: Database, names: Names, *, prefix: str, capabilities: Capabilities
    ) -> None:
        self.capabilities = capabilities
        self._prefix = check_prefix(prefix)
        self._database = database
        self._names = names
        self._life = Lifecycle("PostgreSQL", self._set_up, on_move=database.connections.forget)
        self._learn("json")

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        key, data, rest = self._key(id), codec.dumps(snapshot), rest_of(snapshot)
        workflow = _checked_workflow(workflow_of(snapshot))
        self._check_size(data, "the snapshot of run {!r}", id)
        await self._life.ready()
        awaits = names_as_json(rest.awaits)
        values = (key, data, workflow, rest.status, rest.wake_at, awaits)
        await self._database.fetch(self._statements[SAVE], *values)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        key = self._key(id)
        await self._life.ready()
        rows = await self._database.fetch(self._statements[LOAD], key)
        return read_run(id, *rows[0]) if rows else None

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        key = self._key(id)
        await self._life.ready()
        [(count,)] = await self._database.fetch(self._statements[DELETE], key)
        return bool(count)

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
        values: list[object] = [self._prefix + check_prefix(prefix), check_limit(limit)]
        more = ""
        if status is not None:
            values.append(status)
            more += f" AND {{status}} = ${len(values)}"
        if workflow is not None:
            values.append(workflow)
            more += f" AND {{workflow}} = ${len(values)}"
        if after is not None:
            values += self._mark(after)
            more += f" AND (run.updated_at, run.id) < (${len(values) - 1}, ${len(values)})"
        await self._life.ready()
        rows = await self._database.fetch(self._statements.extended(LIST, more), *values)
        return [self._listed(row) for row in rows]

    async def close(self) -> None:
        """Close the connections that were opened here; a pool that was passed in stays open."""
        if self._life.close():
            await self._database.connections.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one statement and give a verdict for each, in order."""
        check_entries(entries, self.capabilities.max_value_size)
        await self._life.ready()
        return await self._writer.write(entries)

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Call `work` with an asyncpg connection in an open transaction, and commit what it wrote
        together with the entry it returns; all or nothing. An entry that is there already is
        accepted, and what `work` wrote this time is rolled back."""
        key = self._key(id)
        await self._life.ready()
        async with self._database.transaction() as transaction:
            # The row is not locked while `work` runs: renewing the lease would wait for it, and
            # so would all leases that are renewed with it. The write itself is fenced again.
            found = await transaction.fetch(self._statements[FENCE], key, epoch)
            verdict = _fenced(found)
            if verdict is not Verdict.ACCEPTED:
                return verdict
            if settings := self._database.connections.for_guests:
                await transaction.execute(settings)
            entry = await work(transaction.connection)
            self._check_entry_of(id, epoch, entry)
            held = await transaction.fetch(self._statements[HOLD], key, epoch)
            if held and held[0][1] != found[0][1]:
                raise StoreError(_ENDED_INSIDE)
            verdict = _fenced(held)
            if verdict is Verdict.ACCEPTED:
                verdict = await self._write_within(transaction, key, entry)
            if verdict is not Verdict.ACCEPTED:
                await transaction.roll_back()
        return verdict

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for request in requests:
            self._key(request.id)
            _checked_workflow(request.workflow)
            self._check_size(request.create or b"", "the snapshot of run {!r}", request.id)
        await self._life.ready()
        return await acquire_readable(await self._leases.acquire(requests), self.release)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        await self._life.ready()
        values = self._columns(leases)
        rows = await self._database.fetch(self._statements[RENEW], *values, ttl) if leases else ()
        found = {(row["id"].removeprefix(self._prefix), row["epoch"]): row for row in rows}
        return [_renewed(lease, found.get((lease.id, lease.epoch))) for lease in leases]

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        await self._life.ready()
        if leases:
            values = self._columns(leases)
            await self._database.fetch(self._statements[RELEASE], *values, wake_at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        first: dict[str, NewRun] = {}
        for run in runs:
            first.setdefault(self._key(run.id), run)
            _checked_workflow(run.workflow)
            self._check_size(run.snapshot, "the snapshot of run {!r}", run.id)
        await self._life.ready()
        created = await self._create(first) if first else set[str]()
        return [
            key in created and first[key] is run
            for run, key in ((run, self._prefix + run.id) for run in runs)
        ]

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose wake time has come at `now`, earliest first."""
        values: list[object] = [as_utc(now, "now"), check_limit(limit), self._prefix]
        more = ""
        if workflows is not None:
            values.append(list(workflows))
            more = "AND run.workflow = ANY ($4::text[])"
        await self._life.ready()
        rows = await self._database.fetch(self._statements.extended(DUE, more), *values)
        return [Due(row["id"].removeprefix(self._prefix), row["wake_at"]) for row in rows]

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
        check_limit(limit)
        await self._life.ready()
        return await claim_readable(
            lambda left: self._leases.claim(owner, ttl, left, workflows), limit, self.release
        )

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        key = self._key(id)
        self._check_size(payload, "the event {!r} for run {!r}", name, id)
        await self._life.ready()
        digest = None if dedup_id is None else blake2b(dedup_id.encode(), digest_size=16).digest()
        rows = await self._database.fetch(
            self._statements[SEND], key, name, payload, digest, repeatable=dedup_id is not None
        )
        if not rows:
            return Delivery.UNKNOWN
        over, sent, known = rows[0]
        if sent:
            return Delivery.DELIVERED
        return Delivery.OVER if over and not known else Delivery.DUPLICATE

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        key = self._key(id)
        await self._life.ready()
        rows = await self._database.fetch(self._statements[INBOXES], [key])
        return [read_message(*row[1:]) for row in rows]

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        statuses = [each for each in _OVER if status in (None, each)]
        check_limit(limit)
        await self._life.ready()
        values = (statuses, older_than, self._prefix, limit)
        [(count,)] = await self._database.fetch(self._statements[PRUNE], *values)
        return int(count)

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        await self._life.ready()
        # Without a prefix the index alone can count.
        mine, values = (
            ("WHERE starts_with(run.id, $1)", [self._prefix]) if self._prefix else ("", [])
        )
        counts = await self._database.fetch(self._statements.extended(COUNT, mine), *values)
        oldest = await self._database.fetch(self._statements[OLDEST_DUE], self._prefix)
        return Stats(dict(counts), oldest[0]["wake_at"] if oldest else None)

    async def _set_up(self) -> None:
        await Schema("migrations", self._names).set_up(self._database)
        rows = await self._database.fetch(_LOOK_AROUND, self._names.fields["runs"])
        [(encoding, fsync, commit, column)] = rows
        if encoding != "UTF8" or column not in ("json", "jsonb"):
            raise StoreError(
                f"table {self._names.table} has a snapshot of type {column} in a database of "
                f"encoding {encoding}; perdure wants json or jsonb, and UTF8"
            )
        if "off" in (fsync, commit):
            logger.warning(
                "PostgreSQL answers before its disk does (fsync=%s, synchronous_commit=%s): "
                "a power cut may cost what was recorded last",
                fsync,
                commit,
            )
        self._learn(column)

    def _learn(self, snapshot_type: str) -> None:
        fetch = self._database.fetch
        self._statements = Statements(self._names, snapshot_type)
        self._writer = Writer(fetch, self._statements, self._prefix)
        self._leases = Leases(fetch, self._statements, self._prefix)

    async def _write_within(self, transaction: Transaction, key: str, entry: Entry) -> Verdict:
        place = (key, entry.epoch, entry.n)
        [(is_known,)] = await transaction.fetch(self._statements[IS_KNOWN], *place)
        if is_known:
            await transaction.roll_back()
            return Verdict.ACCEPTED
        writer = Writer(transaction.fetch, self._statements, self._prefix)
        return (await writer.write([entry]))[0]

    async def _create(self, runs: dict[str, NewRun]) -> set[str]:
        chosen = sorted(runs.items())
        rows = await self._database.fetch(
            self._statements[ENQUEUE],
            [key for key, _ in chosen],
            [run.workflow for _, run in chosen],
            [run.snapshot for _, run in chosen],
            [run.wake_at for _, run in chosen],
            repeatable=False,
        )
        return {row["id"] for row in rows}

    def _columns(
        self, leases: Sequence[Lease]
    ) -> tuple[Sequence[str], Sequence[str], Sequence[int]]:
        ordered = sorted(leases, key=lambda lease: lease.id)
        ids = [self._prefix + lease.id for lease in ordered]
        return ids, [lease.owner for lease in ordered], [lease.epoch for lease in ordered]

    def _listed(self, row: Any) -> RunSummary:
        id = row["id"].removeprefix(self._prefix)
        cursor = f"{row['updated_at'].isoformat()} {id}"
        return RunSummary(id, isoformat(row["updated_at"]), row["status"], row["workflow"], cursor)

    def _mark(self, cursor: str) -> tuple[datetime, str]:
        time, _, id = cursor.partition(" ")
        return parse_iso(time, "after"), self._prefix + id

    def _key(self, id: str) -> str:
        key = self._prefix + check_id(id)
        if 4 * len(key) > _LONGEST_KEY and len(key.encode()) > _LONGEST_KEY:
            expected = f"an id of at most {_LONGEST_KEY:,} bytes, the prefix included"
            raise InvalidArgument("id", id, expected)
        return key

    def _check_size(self, data: bytes, what: str, *names: str) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what.format(*names), len(data), self.capabilities.max_value_size)

    def _check_entry_of(self, id: str, epoch: int, entry: Entry) -> None:
        if (entry.id, entry.epoch) != (id, epoch):
            raise InvalidArgument("work", entry, f"an entry of run {id!r} and epoch {epoch}")
        check_entries([entry], self.capabilities.max_value_size)


def _fenced(found: Sequence[Any]) -> Verdict:
    """Return the verdict on a new entry by what FENCE or HOLD found."""
    if not found:
        return Verdict.UNKNOWN
    return Verdict.ACCEPTED if found[0][0] else Verdict.FENCED


def _renewed(lease: Lease, row: Any) -> Lease | None:
    if row is None:
        return None
    return Lease(lease.id, lease.owner, lease.epoch, row["wake_at"], row["mail"])


def _checked_workflow(workflow: str | None) -> str | None:
    # An index holds it, whose entries are short.
    return None if workflow is None else check_id(workflow, "workflow")
