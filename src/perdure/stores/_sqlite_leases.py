"""What the verbs of leases and schedule say to a database with the SQLite schema."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

from perdure.store import Due, Lease, Message, NewRun, Want
from perdure.stores import _sqlite_sql as sql
from perdure.stores._sqlite_sql import Outcome, Statement, Value
from perdure.stores._sqlite_verbs import (
    MICROSECOND,
    Verb,
    Verbs,
    json_text,
    message_of,
    micros_or_none,
)
from perdure.stores._times import micros, moment_of


class Leased(NamedTuple):
    """A lease as the database gave it, with the run's parts in the order they are merged."""

    lease: Lease
    parts: Sequence[bytes]
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False


class LeaseVerbs(Verbs):
    """The verbs that give leases, move them and take them back."""

    def acquire(self, wants: Sequence[Want]) -> Verb[Sequence[Leased | None]]:
        """Give each want its lease, or None."""
        asked = [self._want(want) for want in wants]
        outcomes = iter((yield [statement for want in asked for statement in want]))
        leased = [
            self._granted(want, [*islice(outcomes, len(statements))])
            for want, statements in zip(wants, asked, strict=True)
        ]
        return (yield from self._with_journals(leased))

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Verb[Sequence[Lease | None]]:
        """Move the expiry of all leases; None for each that was lost."""
        keys = self._keys(leases)
        [renewed] = yield [
            self._on(sql.RENEW, leases=keys, ttl=ttl // MICROSECOND, now=self._now())
        ]
        kept = {
            (key, epoch): (moment_of(wake_at), bool(mail))
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
        outcomes = yield [
            self._create(run.id, run.snapshot, run.workflow, wake_at=micros_or_none(run.wake_at))
            for run in runs
        ]
        return [bool(outcome.rows) for outcome in outcomes]

    def due(
        self, until: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Verb[Sequence[Due]]:
        """Give the runs whose time has come by `until`, earliest first."""
        values = self._due(limit, workflows)
        [found] = yield [self._on(sql.DUE, until=micros(until, "now"), **values)]
        return [Due(self._id(key), moment_of(wake_at)) for key, wake_at in found.rows]

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

    def _want(self, want: Want) -> list[Statement]:
        ttl = want.ttl // MICROSECOND
        statements: list[Statement] = []
        if want.existing:
            key = self._prefix + want.id
            statements.append(
                self._on(sql.ACQUIRE, id=key, owner=want.owner, ttl=ttl, now=self._now())
            )
        if want.create is not None:
            statements.append(
                self._create(want.id, want.create, want.workflow, owner=want.owner, ttl=ttl)
            )
        return statements

    def _create(
        self,
        id: str,
        snapshot: bytes,
        workflow: str | None,
        *,
        wake_at: int | None = None,
        owner: str | None = None,
        ttl: int = 0,
    ) -> Statement:
        return self._on(
            sql.CREATE,
            id=self._prefix + id,
            snapshot=snapshot,
            workflow=workflow,
            wake_at=wake_at,
            owner=owner,
            ttl=ttl,
            now=self._now(),
        )

    def _granted(self, want: Want, outcomes: Sequence[Outcome]) -> Leased | None:
        if want.existing and outcomes[0].rows:
            return _leased(want.id, want.owner, want.ttl, *outcomes[0].rows[0])
        if want.create is not None and outcomes[-1].rows:
            epoch, wake_at = outcomes[-1].rows[0]
            lease = Lease(want.id, want.owner, epoch, moment_of(wake_at))
            return Leased(lease, [want.create], lease.expires_at - want.ttl, created=True)
        return None

    def _with_journals(self, leased: Sequence[Leased | None]) -> Verb[Sequence[Leased | None]]:
        """Add what was recorded since the snapshot, and the mail.

        This may be a transaction of its own: since the grant only its owner can add to the journal.
        """
        keys = [self._prefix + one.lease.id for one in leased if one and not one.created]
        if not keys:
            return leased
        ids = json_text(keys)
        journals, inboxes = yield [self._on(sql.JOURNALS, ids=ids), self._on(sql.INBOXES, ids=ids)]
        parts: dict[str, list[bytes]] = {key: [] for key in keys}
        mail: dict[str, list[Message]] = {key: [] for key in keys}
        for key, data in journals.rows:
            parts[key].append(data)
        for key, *message in inboxes.rows:
            mail[key].append(message_of(*message))
        return [one and self._completed(one, parts, mail) for one in leased]

    def _completed(
        self, leased: Leased, parts: dict[str, list[bytes]], mail: dict[str, list[Message]]
    ) -> Leased:
        if leased.created:
            return leased
        lease, key = leased.lease, self._prefix + leased.lease.id
        return leased._replace(
            lease=Lease(lease.id, lease.owner, lease.epoch, lease.expires_at, bool(mail[key])),
            parts=[*leased.parts, *parts[key]],
            inbox=tuple(mail[key]),
        )


def _leased(
    id: str,
    owner: str,
    ttl: timedelta,
    epoch: int,
    wake_at: int,
    takeovers: int,
    snapshot: bytes,
) -> Leased:
    lease = Lease(id, owner, epoch, moment_of(wake_at))
    return Leased(lease, [snapshot], lease.expires_at - ttl, takeovers=takeovers)
