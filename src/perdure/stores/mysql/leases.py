"""Giving runs to owners: their rows locked, leased and read in one transaction."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from perdure.store import Grant, Lease, LeaseRequest
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.errors import Refused
from perdure.stores.mysql.literals import Rows, Statement, Value, read_moment
from perdure.stores.mysql.rows import chunks, read_inboxes, read_journals, read_run
from perdure.stores.mysql.statements import Conditions, Statements

_RACES = 10
_MICROSECOND = timedelta(microseconds=1)


class Held(NamedTuple):
    """A locked run as it was at the moment `now`; without its snapshot when it is not free."""

    key: str
    epoch: int
    owner: str | None
    wake_at: datetime | None
    takeovers: int
    now: datetime
    snapshot: bytes | None

    @property
    def is_orphaned(self) -> bool:
        """Whether its owner let the lease expire."""
        return self.owner is not None and self.wake_at is not None and self.wake_at <= self.now

    def is_free_for(self, owner: str) -> bool:
        """Tell whether this owner may have it."""
        return self.owner in (None, owner) or self.is_orphaned


class Leased(NamedTuple):
    """A run as it is given to an owner."""

    held: Held
    owner: str
    ttl: timedelta


class Leases:
    """Leases of the runs whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._database = database
        self._on = statements
        self._prefix = prefix

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        """Give each want its grant or None, in order."""
        grants: list[Granted | None] = [None] * len(requests)
        places = list(range(len(requests)))
        while places:
            # Of two wants for one run the first is served first, in a transaction of its own.
            turn = {requests[place].id: place for place in reversed(places)}
            granted = await self._acquire_distinct([requests[place] for place in turn.values()])
            for id, place in turn.items():
                grants[place] = granted.get(self._prefix + id)
            places = [place for place in places if turn[requests[place].id] != place]
        return grants

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> list[Granted]:
        """Give up to `limit` grants of runs that are due, earliest first."""
        due = Conditions()
        due.add(sql.IS_DUE_NOW)
        due.add_prefix(self._prefix)
        if workflows is not None:
            due.add(sql.IN_WORKFLOWS, list(workflows))
        statement = self._on.where(sql.CLAIM, due, limit)

        async def work(transaction: Transaction) -> list[Granted]:
            [found] = await transaction.run(statement)
            leased = [Leased(held, owner, ttl) for held in map(_held, found.rows)]
            if not leased:
                return []
            results = await transaction.finish(*self._lease(leased), *self._questions(leased))
            return [*self._grants(leased, *results[-2:]).values()]

        return await self._database.transact(work, repeatable=False)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""

        async def work(transaction: Transaction) -> list[Lease | None]:
            kept = await self._lock_kept(transaction, leases)
            if not kept:
                return [None] * len(leases)
            end = next(iter(kept.values())).now + ttl
            _, mailed = await transaction.finish(
                self._on(sql.RENEW, end, [*kept]), self._on(sql.MAILED, [*kept])
            )
            mail = {key for (key,) in mailed.rows}
            return [
                Lease(lease.id, lease.owner, lease.epoch, end, key in mail)
                if key in kept and (kept[key].epoch, kept[key].owner) == (lease.epoch, lease.owner)
                else None
                for key, lease in ((self._prefix + lease.id, lease) for lease in leases)
            ]

        return await self._database.transact(work) if leases else []

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Give the leases up, so that the runs can be claimed at `wake_at`, or at once."""

        async def work(transaction: Transaction) -> None:
            kept = await self._lock_kept(transaction, leases)
            if kept:
                at = wake_at or next(iter(kept.values())).now
                await transaction.finish(self._on(sql.RELEASE, at, [*kept]))

        if leases:
            await self._database.transact(work)

    async def _lock_kept(
        self, transaction: Transaction, leases: Sequence[Lease]
    ) -> dict[str, Held]:
        """Lock the runs, and give those that are still leased so."""
        asked = {(self._prefix + lease.id, lease.epoch, lease.owner) for lease in leases}
        keys = sorted({key for key, _, _ in asked})
        [found] = await transaction.run(self._on(sql.LOCK_LEASED, keys))
        held = map(_held, found.rows)
        return {each.key: each for each in held if (each.key, each.epoch, each.owner) in asked}

    async def _acquire_distinct(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        asked = {
            self._prefix + request.id: request
            for request in sorted(requests, key=lambda request: request.id)
        }
        # Asked again, a run that is to be new would not be new any more.
        repeatable = all(request.existing for request in requests)
        starts = list(self._starts(asked))
        if len(starts) == 1 and starts[0].runs == asked.keys():
            with suppress(Refused):
                result = await self._database.run_alone(starts[0].statement, repeatable=repeatable)
                return _started(asked, starts, [result])
        for _ in range(_RACES):
            # Refused is what was not there, and then was made by somebody else.
            with suppress(Refused):
                return await self._database.transact(
                    lambda transaction: self._acquire_in(transaction, asked), repeatable=repeatable
                )
        raise Refused(f"the runs {[*asked]} are made and deleted all the time by somebody else")

    async def _acquire_in(
        self, transaction: Transaction, asked: dict[str, LeaseRequest]
    ) -> dict[str, Granted]:
        owners = sorted({request.owner for request in asked.values()})
        [found] = await transaction.run(self._on(sql.LOCK_WANTED, owners, [*asked]))
        there = {row[0]: _held(row) for row in found.rows}
        leased = [
            Leased(held, request.owner, request.ttl)
            for held, request in ((held, asked[held.key]) for held in there.values())
            if request.existing and held.is_free_for(request.owner)
        ]
        starts = list(self._starts({key: asked[key] for key in asked if key not in there}))
        written = [*(start.statement for start in starts), *self._lease(leased)]
        if not written:
            return {}
        results = await transaction.finish(*written, *self._questions(leased))
        grants = _started(asked, starts, results)
        return grants | self._grants(leased, *results[-2:]) if leased else grants

    def _starts(self, asked: dict[str, LeaseRequest]) -> Iterator["Start"]:
        """Give the statements that make the runs with their leases, in as few as they fit in."""
        rows = [
            (key, request.create, request.workflow, request.owner, request.ttl // _MICROSECOND)
            for key, request in asked.items()
            if request.create is not None
        ]
        for chunk in chunks(rows):
            statement = self._on(sql.START, Rows(sql.STARTED, chunk))
            yield Start(statement, {row[0] for row in chunk})

    def _lease(self, leased: Sequence[Leased]) -> Sequence[Statement]:
        alike: dict[tuple[str, timedelta], list[Value]] = defaultdict(list)
        for held, owner, ttl in leased:
            alike[owner, ttl].append(held.key)
        now = leased[0].held.now if leased else from_microseconds(0)
        return [
            self._on(sql.LEASE, now, to_microseconds(now), owner, now + ttl, keys)
            for (owner, ttl), keys in alike.items()
        ]

    def _questions(self, leased: Sequence[Leased]) -> Sequence[Statement]:
        keys = [each.held.key for each in leased]
        return [self._on(sql.JOURNALS, keys), self._on(sql.INBOXES, keys)] if keys else []

    def _grants(
        self, leased: Sequence[Leased], journals: Result, inboxes: Result
    ) -> dict[str, Granted]:
        """Return the grants in order, by the runs' stored ids."""
        entries, messages = read_journals(journals.rows), read_inboxes(inboxes.rows)
        written = {(key, epoch) for key, epoch, _ in journals.rows}
        grants = {}
        for held, owner, ttl in leased:
            id, inbox = held.key.removeprefix(self._prefix), tuple(messages[held.key])
            epoch = max(held.epoch + 1, to_microseconds(held.now))
            lease = Lease(id, owner, epoch, held.now + ttl, bool(inbox))
            read = partial(read_run, id, held.snapshot, entries[held.key])
            progressed = (held.key, held.epoch) in written
            takeovers = 0 if progressed else held.takeovers + held.is_orphaned
            grants[held.key] = read_grant(lease, read, held.now, inbox, takeovers)
        return grants


class Start(NamedTuple):
    """A statement that makes runs, and which."""

    statement: Statement
    runs: set[str]


def _started(
    asked: dict[str, LeaseRequest], starts: Sequence[Start], results: Sequence[Result]
) -> dict[str, Granted]:
    grants: dict[str, Granted] = {}
    for start, result in zip(starts, results, strict=False):
        epoch, now = result.last_id, from_microseconds(result.last_id)
        for key in start.runs:
            request = asked[key]
            lease = Lease(request.id, request.owner, epoch, now + request.ttl)
            grants[key] = Grant(lease, read_run(request.id, request.create), now, created=True)
    return grants


def _held(row: Sequence[Any]) -> Held:
    key, epoch, owner, wake_at, takeovers, now, snapshot = row
    wakes = None if wake_at is None else read_moment(wake_at)
    return Held(key, epoch, owner, wakes, takeovers, read_moment(now), snapshot)
