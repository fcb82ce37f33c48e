"""Runs in any SQL database, through any client that can run a statement."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from random import Random, SystemRandom
from typing import Any

from perdure import codec
from perdure.clock import isoformat, parse_iso
from perdure.errors import InvalidArgument, StoreError, StoreUnavailable, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, workflow_of
from perdure.store import (
    MAX_VALUE_SIZE,
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
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import SqlalchemyClient, SqlClient, sqlalchemy_client
from perdure.stores.sql.dialects import DialectName, Statements, find_dialect, paramstyle_of
from perdure.stores.sql.executor import (
    Desk,
    chunks,
    digest,
    marks,
    marks_of,
    moment,
    read_run,
    span,
)
from perdure.stores.sql.journal import Journal
from perdure.stores.sql.leases import Leases
from perdure.validation import check_id, check_limit, check_prefix, check_random

__all__ = ["SqlClient", "SqlStore", "SqlalchemyClient", "sqlalchemy_client"]

_LONGEST_KEY = 2_048
_ATTEMPTS = 5
_OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")


class SqlStore(AsyncCloseable):
    """Keeps runs in a SQL database that a client of yours reaches; the client is never closed here.

    A client is any object with `async query(sql, params)` that runs a statement, commits it, and
    gives the rows and how many rows were affected. `sqlalchemy_client` makes one of a SQLAlchemy
    engine. Where there is a store for the database itself, that one is quicker.

        store = SqlStore(client, dialect="postgres")
    """

    def __init__(
        self,
        client: SqlClient,
        *,
        dialect: DialectName,
        table: str = "workflow_runs",
        prefix: str = "",
        random: Random | None = None,
        max_value_size: int = MAX_VALUE_SIZE,
    ) -> None:
        if not callable(getattr(client, "query", None)):
            raise InvalidArgument("client", client, "an object with `async query(sql, params)`")
        words = find_dialect(dialect)
        local = dialect == "sqlite"
        self.capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            maintenance=True,
            shared="machine" if local else "network",
            survives="process_crash" if local else "power_loss",
            max_value_size=max_value_size,
        )
        self._prefix = check_prefix(prefix)
        self._folder = dialect
        self._statements = Statements(words, table, paramstyle_of(client, words))
        self._desk = Desk(
            client, self._statements, prefix=prefix, random=check_random(random or SystemRandom())
        )
        self._journal = Journal(self._desk)
        self._leases = Leases(self._desk)
        self._life = Lifecycle("SQL", self._set_up)

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        key, data, rest = self._key(id), codec.dumps(snapshot), rest_of(snapshot)
        self._check_size(f"the snapshot of run {id!r}", data)
        await self._life.ready()
        awaits = marks_of(rest.awaits)
        await self._desk.ask(
            sql.SAVE,
            *(key, data.decode(), workflow_of(snapshot), rest.status),
            *(int(awaits is not None), moment(rest), awaits),
        )
        await self._desk.tidy(key)
        if awaits is not None:
            await self._desk.lay_to_sleep(key, rest, -1)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        key = self._key(id)
        await self._life.ready()
        answer = await self._desk.ask(sql.LOAD, key, key)
        if not answer.rows:
            return None
        snapshot, *journal = [data for _, _, _, data in answer.rows]
        return read_run(id, snapshot, journal)

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        key = self._key(id)
        await self._life.ready()
        await self._desk.ask(sql.RAISE_FLOOR, key, marks="?")
        answer = await self._desk.ask(sql.DELETE, key)
        await self._desk.remove_leftovers([key])
        return answer.affected > 0

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
        values: list[object] = [self._prefix + check_prefix(prefix)]
        more = ""
        if status is not None:
            more += sql.OF_STATUS
            values.append(status)
        if workflow is not None:
            more += f" {sql.OF_WORKFLOW}"
            values.append(workflow)
        if after is not None:
            more += f" {sql.AFTER}"
            values += self._mark(after)
        await self._life.ready()
        answer = await self._desk.ask(sql.LIST, *values, check_limit(limit), more=more)
        return [self._listed(*row) for row in answer.rows]

    async def close(self) -> None:
        """Refuse further calls; the client stays open."""
        self._life.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries and give a verdict for each, in order."""
        check_entries(entries, self.capabilities.max_value_size)
        await self._life.ready()
        return await self._journal.append(entries)

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for request in requests:
            self._key(request.id)
            self._check_size(f"the snapshot of run {request.id!r}", request.create or b"")
        await self._life.ready()
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
        for run in runs:
            self._key(run.id)
            self._check_size(f"the snapshot of run {run.id!r}", run.snapshot)
        await self._life.ready()
        return await self._leases.enqueue(runs)

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose wake time has come at `now`, earliest first."""
        check_limit(limit)
        await self._life.ready()
        answer = await self._leases.due(now, limit, workflows)
        return [Due(self._id(key), from_microseconds(wake_at)) for key, wake_at in answer.rows]

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
        key, mark = self._key(id), digest(name)
        self._check_size(f"the event {name!r} for run {id!r}", payload)
        await self._life.ready()
        dedup = None if dedup_id is None else digest(dedup_id)
        answer = await self._desk.ask(sql.SEND, name, mark, payload.decode(), dedup, key)
        delivery = Delivery.DELIVERED if answer.affected else await self._why_not(key, dedup)
        if delivery in (Delivery.DELIVERED, Delivery.DUPLICATE):
            # A duplicate may be of one whose sender did not come so far.
            await self._desk.ask(sql.WAKE, f",{mark},", key, mark, key)
        return delivery

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        key = self._key(id)
        await self._life.ready()
        return (await self._leases.inboxes([key])).get(key, [])

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        statuses = [each for each in _OVER if status in (None, each)]
        check_limit(limit)
        await self._life.ready()
        if not statuses:
            return 0
        values = (*statuses, span(older_than), self._prefix, limit)
        old = await self._desk.ask(sql.OLD, *values, marks=marks(statuses))
        keys = [key for (key,) in old.rows]
        return sum([await self._prune(chunk, older_than) for chunk in chunks(keys)])

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        await self._life.ready()
        counts = await self._desk.ask(sql.COUNT, self._prefix)
        oldest = await self._desk.ask(sql.OLDEST_DUE, self._prefix)
        [(wake_at,)] = oldest.rows
        by_status: Any = dict(counts.rows)
        return Stats(by_status, None if wake_at is None else from_microseconds(wake_at))

    async def _set_up(self) -> None:
        # Each script may run twice, for nothing keeps two processes from beginning at once; what
        # one of them trips over, it finds done when it tries again.
        for attempt in range(_ATTEMPTS):
            try:
                return await self._migrate()
            except StoreError as error:
                if isinstance(error, StoreUnavailable) or attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _migrate(self) -> None:
        await self._desk.ask(sql.KEEP_COUNT)
        applied = {number for (number,) in (await self._desk.ask(sql.APPLIED)).rows}
        for number, scripts in self._statements.migrations(self._folder):
            if number not in applied:
                for script in scripts:
                    await self._desk.ask_as_it_is(script)
                await self._desk.ask(sql.COUNT_MIGRATION, number)

    async def _why_not(self, key: str, dedup: str | None) -> Delivery:
        answer = await self._desk.ask(sql.KNOWN, dedup, key)
        if not answer.rows:
            return Delivery.UNKNOWN
        [(known,)] = answer.rows
        return Delivery.DUPLICATE if known else Delivery.OVER

    async def _prune(self, keys: Sequence[str], older_than: timedelta) -> int:
        await self._desk.ask(sql.RAISE_FLOOR, *keys, marks=marks(keys))
        values = (*keys, span(older_than))
        answer = await self._desk.ask(sql.DELETE_OLD, *values, marks=marks(keys))
        await self._desk.remove_leftovers(keys)
        return answer.affected

    def _listed(
        self, key: str, updated_at: int, status: RunStatus, workflow: str | None
    ) -> RunSummary:
        id, moment = self._id(key), from_microseconds(updated_at)
        return RunSummary(id, isoformat(moment), status, workflow, f"{moment.isoformat()} {id}")

    def _mark(self, cursor: str) -> tuple[int, int, str]:
        time, _, id = cursor.partition(" ")
        updated_at = to_microseconds(parse_iso(time, "after"))
        return updated_at, updated_at, self._prefix + id

    def _key(self, id: str) -> str:
        key = self._prefix + check_id(id)
        if 4 * len(key) > _LONGEST_KEY and len(key.encode()) > _LONGEST_KEY:
            expected = f"an id of at most {_LONGEST_KEY:,} bytes, the prefix included"
            raise InvalidArgument("id", id, expected)
        return key

    def _id(self, key: str) -> str:
        return key[len(self._prefix) :]

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)
