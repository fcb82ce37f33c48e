"""The verbs on leases and the schedule: which statements they send, see `runs`."""

from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from perdure.store import Due, Lease, LeaseRequest, Message, NewRun
from perdure.stores import _shell as shell
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.runs import (
    MICROSECOND,
    Verb,
    Verbs,
    decode_text,
    json_text,
    micros_or_none,
    read_message,
)
from perdure.stores.sqlite.statements import Row, Value

# CREATE returns two columns after the id: the others are those the run was created with.
_CREATED_COLUMNS = 2


class Leased(NamedTuple):
    """A lease that was granted, with the run's snapshot and entries in order."""

    lease: Lease
    parts: Sequence[bytes]
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False
    listed_at: str | None = None


class LeaseVerbs(Verbs):
    """The verbs that grant, renew and end leases."""

    def acquire(self, requests: Sequence[LeaseRequest]) -> Verb[Sequence[Leased | None]]:
        """Return for each request its lease, or `None`."""
        leased: list[Leased | None] = []
        for distinct in _split_by_run(requests):
            leased += yield from self._acquire(distinct)
        return (yield from self._with_journals(leased))

    def owners(self, ids: Sequence[str]) -> Verb[Sequence[shell.Ownership | None]]:
        """Return who has the lease of each run; `None` for a missing run."""
        keys = [self._prefix + id for id in ids]
        [runs] = yield [self._statement(sql.LEASE_EXPIRIES, ids=json_text(keys))]
        found = {key: _ownership(owner, wake_at) for key, owner, wake_at in runs.rows}
        return [found.get(key) for key in keys]

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Verb[Sequence[Lease | None]]:
        """Extend all leases; return `None` for each that was lost."""
        outcomes = yield self._statements.many(
            sql.RENEW, self._lease_rows(leases, ttl // MICROSECOND)
        )
        renewed = {
            (key, epoch): (from_microseconds(wake_at), bool(has_messages))
            for outcome in outcomes
            for key, epoch, wake_at, has_messages in outcome.rows
        }
        changes = [renewed.get((self._prefix + lease.id, lease.epoch)) for lease in leases]
        return [
            None if change is None else Lease(lease.id, lease.owner, lease.epoch, *change)
            for lease, change in zip(leases, changes, strict=True)
        ]

    def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> Verb[None]:
        """Release the leases."""
        yield self._statements.many(sql.RELEASE, self._lease_rows(leases, micros_or_none(wake_at)))

    def enqueue(self, runs: Sequence[NewRun]) -> Verb[Sequence[bool]]:
        """Create runs that wait for a claim; return `False` for each id that existed."""
        time = self._now_and_stamp()
        rows: list[Row] = []
        for run in runs:
            key, wake_at = self._prefix + run.id, micros_or_none(run.wake_at)
            rows.append((key, decode_text(run.snapshot), run.workflow, wake_at, None, 0, *time))
        outcomes = yield self._statements.many(sql.CREATE, rows)
        # Of two requests with the same id, the first created the run.
        created = {row[0]: True for outcome in outcomes for row in outcome.rows}
        return [created.pop(row[0], False) for row in rows]

    def due(
        self, until: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Verb[Sequence[Due]]:
        """Return the unowned runs whose wake time is at or before `until`, earliest first."""
        values = self._due_values(limit, workflows)
        [runs] = yield [self._statement(sql.DUE, until=to_microseconds(until, "now"), **values)]
        return [Due(self._id(key), from_microseconds(wake_at)) for key, wake_at in runs.rows]

    def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Verb[Sequence[Leased]]:
        """Lease the runs that are due, earliest first."""
        values = self._due_values(limit, workflows)
        # RETURNING gives neither an order nor old values, so the order is read first.
        order, claimed = yield [
            self._statement(sql.CLAIMABLE, **values),
            self._statement(sql.CLAIM, owner=owner, ttl=ttl // MICROSECOND, **values),
        ]
        rows = {row[0]: row[1:] for row in claimed.rows}
        keys = dict.fromkeys([*(row[0] for row in order.rows if row[0] in rows), *rows])
        leased = [_leased(self._id(key), owner, ttl, *rows[key]) for key in keys]
        return [one for one in (yield from self._with_journals(leased)) if one is not None]

    def _lease_rows(self, leases: Iterable[Lease], value: int | None) -> list[Row]:
        now = self._now()
        return [(self._prefix + one.id, one.owner, one.epoch, value, now) for one in leases]

    def _due_values(self, limit: int, workflows: Sequence[str] | None) -> dict[str, Value]:
        return {
            "limit": limit,
            "workflows": json_text(workflows),
            "prefix": self._prefix,
            "now": self._now(),
        }

    def _acquire(self, requests: Sequence[LeaseRequest]) -> Verb[Sequence[Leased | None]]:
        """Return for each request its lease, or `None`; no two are for the same run."""
        existing: list[Row] = []
        new: list[Row] = []
        time = self._now_and_stamp()
        for request in requests:
            key, ttl = self._prefix + request.id, request.ttl // MICROSECOND
            if request.existing:
                existing.append((key, request.owner, ttl, time[0], request.instead_of))
            if request.create is not None:
                snapshot = decode_text(request.create)
                new.append((key, snapshot, request.workflow, None, request.owner, ttl, *time))
        many = self._statements.many
        outcomes = yield [*many(sql.ACQUIRE, existing), *many(sql.CREATE, new)]
        rows = {key: row for outcome in outcomes for key, *row in outcome.rows}
        return [_granted(request, rows.get(self._prefix + request.id)) for request in requests]

    def _with_journals(self, leased: Sequence[Leased | None]) -> Verb[Sequence[Leased | None]]:
        """Add the entries since the snapshot, and the messages.

        This may be a transaction of its own. A run that was lost or saved in the meantime is left
        out: its snapshot is no longer the one that came with the lease.
        """
        keys = [self._prefix + one.lease.id for one in leased if one and not one.created]
        if not keys:
            return leased
        ids = json_text(keys)
        owners, journals, inboxes = yield [
            self._statement(sql.OWNERS, ids=ids),
            self._statement(sql.JOURNALS, ids=ids),
            self._statement(sql.INBOXES, ids=ids),
        ]
        current = {*owners.rows}
        entries: dict[str, list[bytes]] = {key: [] for key in keys}
        messages: dict[str, list[Message]] = {key: [] for key in keys}
        for key, data in journals.rows:
            entries[key].append(data)
        for key, *columns in inboxes.rows:
            messages[key].append(read_message(*columns))
        return [one and self._with_journal(one, current, entries, messages) for one in leased]

    def _with_journal(
        self,
        leased: Leased,
        current: Container[Row],
        entries: dict[str, list[bytes]],
        messages: dict[str, list[Message]],
    ) -> Leased | None:
        if leased.created:
            return leased
        lease, key = leased.lease, self._prefix + leased.lease.id
        if (key, lease.owner, leased.listed_at) not in current:
            return None
        return leased._replace(
            lease=Lease(lease.id, lease.owner, lease.epoch, lease.expires_at, bool(messages[key])),
            parts=[*leased.parts, *entries[key]],
            inbox=tuple(messages[key]),
        )


def _split_by_run(requests: Sequence[LeaseRequest]) -> Iterator[Sequence[LeaseRequest]]:
    """Yield the requests in order, in parts: a statement leases each run once."""
    start, ids = 0, set[str]()
    for at, request in enumerate(requests):
        if request.id in ids:
            yield requests[start:at]
            start, ids = at, set()
        ids.add(request.id)
    yield requests[start:]


def _ownership(owner: str | None, wake_at: int | None) -> shell.Ownership:
    """Return the owner, and its lease's end; the wake time of an unowned run is something else."""
    expires_at = None if owner is None or wake_at is None else from_microseconds(wake_at)
    return shell.Ownership(owner, expires_at)


def _granted(request: LeaseRequest, row: Sequence[Any] | None) -> Leased | None:
    if row is None:
        return None
    if request.create is None or len(row) > _CREATED_COLUMNS:
        return _leased(request.id, request.owner, request.ttl, *row)
    epoch, wake_at = row
    return _leased(
        request.id, request.owner, request.ttl, epoch, wake_at, 0, request.create, created=True
    )


def _leased(
    id: str,
    owner: str,
    ttl: timedelta,
    epoch: int,
    wake_at: int,
    takeovers: int,
    snapshot: bytes,
    listed_at: str | None = None,
    *,
    created: bool = False,
) -> Leased:
    lease = Lease(id, owner, epoch, from_microseconds(wake_at))
    return Leased(lease, [snapshot], lease.expires_at - ttl, (), takeovers, created, listed_at)
