"""What the verbs of leases and schedule say to a database with the SQLite schema."""

from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from perdure.store import Due, Lease, LeaseRequest, Message, NewRun
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.runs import (
    MICROSECOND,
    Verb,
    Verbs,
    json_text,
    message_of,
    micros_or_none,
    text_of,
)
from perdure.stores.sqlite.statements import Row, Value

# How many values tell of a run that was created: the others are those it was created with.
_CREATED = 2


class Leased(NamedTuple):
    """A lease as the database gave it, with the run's parts in the order they are merged."""

    lease: Lease
    parts: Sequence[bytes]
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False
    listed_at: str | None = None


class LeaseVerbs(Verbs):
    """The verbs that give leases, move them and take them back."""

    def acquire(self, requests: Sequence[LeaseRequest]) -> Verb[Sequence[Leased | None]]:
        """Give each want its lease, or None."""
        leased: list[Leased | None] = []
        for part in _apart(requests):
            leased += yield from self._acquire(part)
        return (yield from self._with_journals(leased))

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Verb[Sequence[Lease | None]]:
        """Move the expiry of all leases; None for each that was lost."""
        keys = self._keys(leases)
        [renewed] = yield [
            self._on(sql.RENEW, leases=keys, ttl=ttl // MICROSECOND, now=self._now())
        ]
        kept = {
            (key, epoch): (from_microseconds(wake_at), bool(mail))
            for key, epoch, wake_at, mail in renewed.rows
        }
        found = [kept.get((self._prefix + lease.id, lease.epoch)) for lease in leases]
        return [
            None if change is None else Lease(lease.id, lease.owner, lease.epoch, *change)
            for lease, change in zip(leases, found, strict=True)
        ]

    def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> Verb[None]:
        """Give the leases up."""
        keys, at = self._keys(leases), micros_or_none(wake_at)
        yield [self._on(sql.RELEASE, leases=keys, wake_at=at, now=self._now())]

    def enqueue(self, runs: Sequence[NewRun]) -> Verb[Sequence[bool]]:
        """Create runs that wait for a claim; False for each id that was there."""
        moment = self._moment()
        rows: list[Row] = []
        for run in runs:
            key, wake_at = self._prefix + run.id, micros_or_none(run.wake_at)
            rows.append((key, text_of(run.snapshot), run.workflow, wake_at, None, 0, *moment))
        outcomes = yield [*self._tables.over(sql.CREATE, rows)]
        # An id that comes twice was created once, by the first.
        created = {row[0]: True for outcome in outcomes for row in outcome.rows}
        return [created.pop(row[0], False) for row in rows]

    def due(
        self, until: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Verb[Sequence[Due]]:
        """Give the runs whose time has come by `until`, earliest first."""
        values = self._due(limit, workflows)
        [found] = yield [self._on(sql.DUE, until=to_microseconds(until, "now"), **values)]
        return [Due(self._id(key), from_microseconds(wake_at)) for key, wake_at in found.rows]

    def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Verb[Sequence[Leased]]:
        """Lease the runs that are due, earliest first."""
        values = self._due(limit, workflows)
        # An update gives neither an order nor old values: the order is asked for beforehand.
        order, claimed = yield [
            self._on(sql.CLAIMABLE, **values),
            self._on(sql.CLAIM, owner=owner, ttl=ttl // MICROSECOND, **values),
        ]
        rows = {row[0]: row[1:] for row in claimed.rows}
        keys = dict.fromkeys([*(row[0] for row in order.rows if row[0] in rows), *rows])
        leased = [_leased(self._id(key), owner, ttl, *rows[key]) for key in keys]
        return [one for one in (yield from self._with_journals(leased)) if one is not None]

    def _keys(self, leases: Iterable[Lease]) -> str | None:
        return json_text([(self._prefix + lease.id, lease.owner, lease.epoch) for lease in leases])

    def _due(self, limit: int, workflows: Sequence[str] | None) -> dict[str, Value]:
        return {
            "limit": limit,
            "workflows": json_text(workflows),
            "prefix": self._prefix,
            "now": self._now(),
        }

    def _acquire(self, requests: Sequence[LeaseRequest]) -> Verb[Sequence[Leased | None]]:
        """Give each want its lease, or None; no two want the same run."""
        existing: list[Row] = []
        new: list[Row] = []
        moment = self._moment()
        for request in requests:
            key, ttl = self._prefix + request.id, request.ttl // MICROSECOND
            if request.existing:
                existing.append((key, request.owner, ttl, moment[0]))
            if request.create is not None:
                snapshot = text_of(request.create)
                new.append((key, snapshot, request.workflow, None, request.owner, ttl, *moment))
        over = self._tables.over
        outcomes = yield [*over(sql.ACQUIRE, existing), *over(sql.CREATE, new)]
        rows = {key: row for outcome in outcomes for key, *row in outcome.rows}
        return [_granted(request, rows.get(self._prefix + request.id)) for request in requests]

    def _with_journals(self, leased: Sequence[Leased | None]) -> Verb[Sequence[Leased | None]]:
        """Add what was recorded since the snapshot, and the mail.

        This may be a transaction of its own. A run that was lost in between, or saved again, is
        left out: its snapshot is not the one that came with the lease any more.
        """
        keys = [self._prefix + one.lease.id for one in leased if one and not one.created]
        if not keys:
            return leased
        ids = json_text(keys)
        held, journals, inboxes = yield [
            self._on(sql.HELD, ids=ids),
            self._on(sql.JOURNALS, ids=ids),
            self._on(sql.INBOXES, ids=ids),
        ]
        kept = {*held.rows}
        parts: dict[str, list[bytes]] = {key: [] for key in keys}
        mail: dict[str, list[Message]] = {key: [] for key in keys}
        for key, data in journals.rows:
            parts[key].append(data)
        for key, *message in inboxes.rows:
            mail[key].append(message_of(*message))
        return [one and self._completed(one, kept, parts, mail) for one in leased]

    def _completed(
        self,
        leased: Leased,
        kept: Container[Row],
        parts: dict[str, list[bytes]],
        mail: dict[str, list[Message]],
    ) -> Leased | None:
        if leased.created:
            return leased
        lease, key = leased.lease, self._prefix + leased.lease.id
        if (key, lease.owner, leased.listed_at) not in kept:
            return None
        return leased._replace(
            lease=Lease(lease.id, lease.owner, lease.epoch, lease.expires_at, bool(mail[key])),
            parts=[*leased.parts, *parts[key]],
            inbox=tuple(mail[key]),
        )


def _apart(requests: Sequence[LeaseRequest]) -> Iterator[Sequence[LeaseRequest]]:
    """Give the wants in parts, in order: a statement leases a run once, to the first who asks."""
    start, ids = 0, set[str]()
    for at, request in enumerate(requests):
        if request.id in ids:
            yield requests[start:at]
            start, ids = at, set()
        ids.add(request.id)
    yield requests[start:]


def _granted(request: LeaseRequest, row: Sequence[Any] | None) -> Leased | None:
    if row is None:
        return None
    if request.create is None or len(row) > _CREATED:
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
