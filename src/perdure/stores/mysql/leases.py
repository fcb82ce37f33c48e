"""Leases: lock, lease and read the rows of runs in one transaction."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from perdure.snapshot import RunStatus
from perdure.store import INBOX_PAGE, Grant, Lease, LeaseRequest, Message, SupportedVersions
from perdure.stores._backend import Ownership
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.due import DueRuns
from perdure.stores.mysql.errors import ConstraintViolation
from perdure.stores.mysql.literals import Rows, Statement, Value, read_datetime
from perdure.stores.mysql.rows import chunks, read_inboxes, read_journals, read_run, tags_as_json
from perdure.stores.mysql.statements import Statements
from perdure.stores.mysql.tags import add_tags

_MAX_RACES = 10
_MICROSECOND = timedelta(microseconds=1)

_READ_CLOCK = Statement(b"SELECT UTC_TIMESTAMP(6)")


class LockedRun(NamedTuple):
    """A locked run as of `now`; its snapshot is missing if the run is not free."""

    key: str
    epoch: int
    owner: str | None
    wake_at: datetime | None
    takeovers: int
    snapshot: bytes | None
    queue: str
    version: int
    messages: int
    status: RunStatus
    now: datetime

    @property
    def may_have_journal(self) -> bool:
        """Whether there may be entries: the write that ends the status running deletes them."""
        return self.status == "running"

    @property
    def is_orphaned(self) -> bool:
        """Whether the owner's lease has expired."""
        return self.owner is not None and self.wake_at is not None and self.wake_at <= self.now

    def is_free_for(self, request: LeaseRequest) -> bool:
        """Return whether this request may be granted."""
        return self.owner in (None, request.owner, request.instead_of) or self.is_orphaned


class NewLease(NamedTuple):
    """A locked run, its new lease, and how many messages are sent to it at the same time."""

    run: LockedRun
    owner: str
    ttl: timedelta
    instead_of: str | None = None
    sent: int = 0

    @property
    def is_replacement(self) -> bool:
        """Whether the lease replaces that of an owner whose lease may not have expired."""
        return self.run.owner is not None and self.run.owner == self.instead_of


class Creation(NamedTuple):
    """A statement that creates runs with their leases, and the keys of these runs."""

    statement: Statement
    keys: set[str]


class Leases:
    """Leases of the runs whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._database = database
        self._statements = statements
        self._bind = statements.bind
        self._prefix = prefix
        self.due = DueRuns(database, statements, prefix)

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        """Return a grant or `None` for each request, in order."""
        grants: list[Granted | None] = [None] * len(requests)
        remaining = list(range(len(requests)))
        while remaining:
            # Of two requests for the same run, the first is served first, in its own transaction.
            first = {requests[index].id: index for index in reversed(remaining)}
            new_grants = await self._acquire_distinct([requests[index] for index in first.values()])
            for id, index in first.items():
                grants[index] = new_grants.get(self._prefix + id)
            remaining = [index for index in remaining if first[requests[index].id] != index]
        return grants

    async def owners(self, ids: Sequence[str]) -> list[Ownership | None]:
        """Return the owner of each run and the end of its lease, in order."""
        keys = [self._prefix + id for id in ids]
        result = await self._database.run_alone(self._bind(sql.OWNERS, [*keys]))
        owners = {key: _ownership(*columns) for key, *columns in result.rows}
        return [owners.get(key) for key in keys]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Granted]:
        """Return up to `limit` grants of runs that are due, earliest first."""
        statements = await self.due.claims(limit, supports, queues)
        if not statements:
            return []

        async def work(transaction: Transaction) -> list[Granted]:
            # Each range is locked at a different time, but all leases begin at the same time.
            *ranges, clock = await transaction.run(*statements, _READ_CLOCK)
            now = read_datetime(clock.rows[0][0])
            runs = [_locked_run(row, now) for due in ranges for row in due.rows]
            if not runs:
                return []
            runs.sort(key=lambda run: run.wake_at or now)
            leases = [NewLease(run, owner, ttl) for run in runs]
            grants = self.lease(leases)
            results = await transaction.finish(*grants, *self.read(leases))
            return [*self.grants(leases, results[len(grants) :]).values()]

        return await self._database.transact(work, repeatable=False)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        """Extend the leases to `ttl` from now; return `None` for each that was lost."""

        async def work(transaction: Transaction) -> list[Lease | None]:
            runs = await self._lock_owned(transaction, leases)
            if not runs:
                return [None] * len(leases)
            end = next(iter(runs.values())).now + ttl
            _, inboxes = await transaction.finish(
                self._bind(sql.RENEW, end, [*runs]), self._bind(sql.RUNS_WITH_MESSAGES, [*runs])
            )
            with_messages = {key for (key,) in inboxes.rows}
            return [
                Lease(lease.id, lease.owner, lease.epoch, end, key in with_messages)
                if key in runs and (runs[key].epoch, runs[key].owner) == (lease.epoch, lease.owner)
                else None
                for key, lease in ((self._prefix + lease.id, lease) for lease in leases)
            ]

        return await self._database.transact(work)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases; the runs can be claimed at `wake_at`, or at once."""

        async def work(transaction: Transaction) -> None:
            runs = await self._lock_owned(transaction, leases)
            if runs:
                at = wake_at or next(iter(runs.values())).now
                await transaction.finish(self._bind(sql.RELEASE, at, [*runs]))

        await self._database.transact(work)

    def lease(self, leases: Sequence[NewLease]) -> Sequence[Statement]:
        """Return the statements that lease locked runs."""
        keys_by_lease: dict[tuple[str, timedelta, bool, int], list[Value]] = defaultdict(list)
        for lease in leases:
            terms = (lease.owner, lease.ttl, lease.is_replacement, lease.sent)
            keys_by_lease[terms].append(lease.run.key)
        now = leases[0].run.now if leases else from_microseconds(0)
        return [
            self._bind(sql.LEASE, replaces, now, to_microseconds(now), owner, now + ttl, sent, keys)
            for (owner, ttl, replaces, sent), keys in keys_by_lease.items()
        ]

    def read(self, leases: Sequence[NewLease]) -> Sequence[Statement]:
        """Return the statements that read the journals and inboxes of leased runs."""
        if not leases:
            return []
        statements = []
        if keys := _keys_with_journals(leases):
            statements.append(self._bind(sql.JOURNALS, keys))
        long = {lease.run.key for lease in leases if lease.run.messages + lease.sent > INBOX_PAGE}
        if short := [lease.run.key for lease in leases if lease.run.key not in long]:
            statements.append(self._bind(sql.INBOXES, short))
        return [*statements, *(self._bind(sql.INBOX, key, 0, INBOX_PAGE) for key in long)]

    def grants(self, leases: Sequence[NewLease], results: Sequence[Result]) -> dict[str, Granted]:
        """Return the grants by the runs' stored ids, in order, from the results of `read`."""
        first, *others = results
        has_journals = bool(_keys_with_journals(leases))
        journals, inboxes = (first.rows, others) if has_journals else ((), results)
        entries = read_journals(journals)
        messages = read_inboxes(row for inbox in inboxes for row in inbox.rows)
        written_epochs = {(key, epoch) for key, epoch, _ in journals}
        lowest_epoch = to_microseconds(leases[0].run.now)
        return {
            new.run.key: self._grant(
                new,
                entries[new.run.key],
                tuple(messages[new.run.key][:INBOX_PAGE]),
                epoch=max(new.run.epoch + 1, lowest_epoch),
                has_progressed=(new.run.key, new.run.epoch) in written_epochs,
            )
            for new in leases
        }

    async def _lock_owned(
        self, transaction: Transaction, leases: Sequence[Lease]
    ) -> dict[str, LockedRun]:
        """Lock the runs, and return those whose lease is still current."""
        current = {(self._prefix + lease.id, lease.epoch, lease.owner) for lease in leases}
        keys = sorted({key for key, _, _ in current})
        [result] = await transaction.run(self._bind(sql.LOCK_LEASED, keys))
        runs = map(timed_run, result.rows)
        return {run.key: run for run in runs if (run.key, run.epoch, run.owner) in current}

    async def _acquire_distinct(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        by_key = {
            self._prefix + request.id: request
            for request in sorted(requests, key=lambda request: request.id)
        }
        # If sent again, a request for a new run would find the run that it created itself.
        repeatable = all(request.existing for request in requests)
        creations = list(self._create(by_key))
        if len(creations) == 1 and creations[0].keys == by_key.keys():
            with suppress(ConstraintViolation):
                results = await self._insert(creations[0].statement, by_key, repeatable)
                return _created_grants(by_key, creations, results)
        for _ in range(_MAX_RACES):
            # Violated if another process creates a run between the lock and the insertion.
            with suppress(ConstraintViolation):
                return await self._database.transact(
                    lambda transaction: self._acquire_in(transaction, by_key),
                    repeatable=repeatable,
                )
        raise ConstraintViolation(f"other processes keep creating and deleting runs {[*by_key]}")

    async def _insert(
        self, create: Statement, by_key: dict[str, LeaseRequest], repeatable: bool
    ) -> Sequence[Result]:
        if tags := list(add_tags(self._statements, _tags(by_key))):
            return await self._database.run(create, *tags, repeatable=repeatable)
        return [await self._database.run_alone(create, repeatable=repeatable)]

    async def _acquire_in(
        self, transaction: Transaction, by_key: dict[str, LeaseRequest]
    ) -> dict[str, Granted]:
        pairs = ((request.owner, request.instead_of) for request in by_key.values())
        owners = sorted({owner for pair in pairs for owner in pair if owner is not None})
        [result] = await transaction.run(self._bind(sql.LOCK_REQUESTED, owners, [*by_key]))
        existing = {row[0]: timed_run(row) for row in result.rows}
        leases = [
            NewLease(run, request.owner, request.ttl, request.instead_of)
            for run, request in ((run, by_key[run.key]) for run in existing.values())
            if request.existing and run.is_free_for(request)
        ]
        missing = {key: by_key[key] for key in by_key if key not in existing}
        creations = list(self._create(missing))
        writes = [creation.statement for creation in creations]
        writes += [*add_tags(self._statements, _tags(missing)), *self.lease(leases)]
        if not writes:
            return {}
        results = await transaction.finish(*writes, *self.read(leases))
        grants = _created_grants(by_key, creations, results)
        return grants | self.grants(leases, results[len(writes) :]) if leases else grants

    def _create(self, by_key: dict[str, LeaseRequest]) -> Iterator[Creation]:
        """Yield as few statements as possible that create runs with their leases."""
        rows = [
            (
                key,
                request.create,
                request.workflow,
                request.owner,
                request.ttl // _MICROSECOND,
                request.version,
                tags_as_json(request.tags),
                request.summary,
            )
            for key, request in by_key.items()
            if request.create is not None
        ]
        for chunk in chunks(rows):
            statement = self._bind(sql.CREATE_LEASED, Rows(sql.CREATE_LEASED_ROW, chunk))
            yield Creation(statement, {row[0] for row in chunk})

    def _grant(
        self,
        new: NewLease,
        journal: Sequence[bytes],
        inbox: tuple[Message, ...],
        *,
        epoch: int,
        has_progressed: bool,
    ) -> Granted:
        run = new.run
        id = run.key.removeprefix(self._prefix)
        lease = Lease(id, new.owner, epoch, run.now + new.ttl, bool(inbox))
        is_takeover = run.is_orphaned or new.is_replacement
        takeovers = 0 if has_progressed else run.takeovers + is_takeover
        read = partial(read_run, id, run.snapshot, journal)
        return read_grant(
            lease, read, run.now, inbox, takeovers, queue=run.queue, version=run.version
        )


def _created_grants(
    by_key: dict[str, LeaseRequest], creations: Sequence[Creation], results: Sequence[Result]
) -> dict[str, Granted]:
    grants: dict[str, Granted] = {}
    for creation, result in zip(creations, results, strict=False):
        epoch, now = result.last_id, from_microseconds(result.last_id)
        for key in creation.keys:
            request = by_key[key]
            lease = Lease(request.id, request.owner, epoch, now + request.ttl)
            snapshot = read_run(request.id, request.create)
            grants[key] = Grant(lease, snapshot, now, created=True, version=request.version)
    return grants


def _keys_with_journals(leases: Sequence[NewLease]) -> list[str]:
    return [lease.run.key for lease in leases if lease.run.may_have_journal]


def _tags(by_key: Mapping[str, LeaseRequest]) -> dict[str, Sequence[str]]:
    """Return the tags of the runs to create that have any."""
    return {
        key: request.tags
        for key, request in by_key.items()
        if request.create is not None and request.tags
    }


def _ownership(owner: str | None, expires_at: datetime | None) -> Ownership:
    return Ownership(owner, None if expires_at is None else read_datetime(expires_at))


def timed_run(row: Sequence[Any]) -> LockedRun:
    """Return the run of a row that ends with the current time."""
    *columns, now = row
    return _locked_run(columns, read_datetime(now))


def _locked_run(columns: Sequence[Any], now: datetime) -> LockedRun:
    key, epoch, owner, wake_at, *others = columns
    wakes = None if wake_at is None else read_datetime(wake_at)
    return LockedRun._make([key, epoch, owner, wakes, *others, now])
