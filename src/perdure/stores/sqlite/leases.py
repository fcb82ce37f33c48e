"""The operations on leases; see `runs`."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import Any, NamedTuple

from perdure.store import INBOX_PAGE, Lease, LeaseRequest, Message
from perdure.stores._backend import Ownership
from perdure.stores._timestamps import from_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.inbox import read_message
from perdure.stores.sqlite.runs import (
    MICROSECOND,
    Verb,
    Verbs,
    decode_text,
    json_text,
    micros_or_none,
    tags_text,
)
from perdure.stores.sqlite.statements import Outcome, Row, Statement

# CREATE returns two columns after the id; the others are known from the request.
_CREATED_COLUMNS = 2


class LeasedRun(NamedTuple):
    """A lease that was granted, with the run's snapshot and entries in order."""

    lease: Lease
    parts: Sequence[bytes]
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False
    queue: str = ""
    version: int = 0
    listed_at: str | None = None


class Contents(NamedTuple):
    """The entries and messages of leased runs, by key."""

    entries: Mapping[str, Sequence[bytes]]
    messages: Mapping[str, Sequence[Message]]

    def added_to(self, run: LeasedRun, key: str) -> LeasedRun:
        """Return a leased run with its entries and messages."""
        lease = run.lease
        inbox = tuple(self.messages.get(key, ()))
        return run._replace(
            lease=Lease(lease.id, lease.owner, lease.epoch, lease.expires_at, bool(inbox)),
            parts=[*run.parts, *self.entries.get(key, ())],
            inbox=inbox,
        )


class LeaseVerbs(Verbs):
    """The operations that grant, renew and end leases."""

    def acquire(self, requests: Sequence[LeaseRequest]) -> Verb[Sequence[LeasedRun | None]]:
        """Return a lease or `None` for each request."""
        parts = [*_split_by_run(requests)]
        statements = [self._acquire_statements(part) for part in parts]
        # In one round: a lease that was granted is not lost because a later part fails.
        outcomes = iter((yield [*chain.from_iterable(statements)]))
        leases: list[LeasedRun | None] = []
        for part, own in zip(parts, statements, strict=True):
            rows = {key: row for each in islice(outcomes, len(own)) for key, *row in each.rows}
            leases += [_lease_of(one, rows.get(self._prefix + one.id)) for one in part]
        return (yield from self._with_journals(leases))

    def owners(self, ids: Sequence[str]) -> Verb[Sequence[Ownership | None]]:
        """Return the owner of each run; `None` for a missing run."""
        keys = [self._prefix + id for id in ids]
        [runs] = yield [self._statement(sql.LEASE_EXPIRIES, ids=json_text(keys))]
        owners = {key: _ownership(owner, wake_at) for key, owner, wake_at in runs.rows}
        return [owners.get(key) for key in keys]

    def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Verb[Sequence[Lease | None]]:
        """Extend all leases; return `None` for each that was lost."""
        outcomes = yield self._statements.many(
            sql.RENEW, self._lease_rows(leases, ttl // MICROSECOND)
        )
        new_leases = {
            (key, epoch): (from_microseconds(wake_at), bool(has_messages))
            for outcome in outcomes
            for key, epoch, wake_at, has_messages in outcome.rows
        }
        changes = [new_leases.get((self._prefix + lease.id, lease.epoch)) for lease in leases]
        return [
            None if change is None else Lease(lease.id, lease.owner, lease.epoch, *change)
            for lease, change in zip(leases, changes, strict=True)
        ]

    def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> Verb[None]:
        """Release the leases."""
        yield self._statements.many(sql.RELEASE, self._lease_rows(leases, micros_or_none(wake_at)))

    def _lease_rows(self, leases: Iterable[Lease], value: int | None) -> list[Row]:
        now = self._now()
        return [(self._prefix + one.id, one.owner, one.epoch, value, now) for one in leases]

    def _acquire_statements(self, requests: Sequence[LeaseRequest]) -> list[Statement]:
        """Return the statements that grant leases; no two requests are for the same run."""
        existing: list[Row] = []
        new: list[Row] = []
        time = self._now_and_stamp()
        for request in requests:
            key, ttl = self._prefix + request.id, request.ttl // MICROSECOND
            if request.existing:
                existing.append((key, request.owner, ttl, time[0], request.instead_of))
            if request.create is not None:
                new.append(self._new_owned_row(request, request.create, time))
        many = self._statements.many
        return [*many(sql.ACQUIRE, existing), *many(sql.CREATE, new)]

    def _new_owned_row(self, request: LeaseRequest, snapshot: bytes, time: Row) -> Row:
        key, ttl = self._prefix + request.id, request.ttl // MICROSECOND
        run = (key, decode_text(snapshot), request.workflow, None, request.owner, ttl, *time)
        header = (request.version, tags_text(request.tags), request.summary)
        return (*run, "running", None, "", *header)

    def _with_journals(
        self, leases: Sequence[LeasedRun | None]
    ) -> Verb[Sequence[LeasedRun | None]]:
        """Add the entries since the snapshot, and the messages.

        This may be a separate transaction. A run that was lost or saved in the meantime is left
        out, because the snapshot that came with the lease is outdated.
        """
        keys = [self._prefix + one.lease.id for one in leases if one and not one.created]
        if not keys:
            return leases
        ids = json_text(keys)
        owners, *outcomes = yield [self._statement(sql.OWNERS, ids=ids), *self._contents(ids)]
        current, contents = {*owners.rows}, self._read_contents(outcomes)
        return [
            one if one is None or one.created else self._complete(one, current, contents)
            for one in leases
        ]

    def _complete(
        self, lease: LeasedRun, current: Container[Row], contents: Contents
    ) -> LeasedRun | None:
        key = self._prefix + lease.lease.id
        if (key, lease.lease.owner, lease.listed_at) not in current:
            return None
        return contents.added_to(lease, key)

    def _contents(self, ids: str | None) -> list[Statement]:
        """Return the statements that read the entries and messages of leased runs."""
        return [
            self._statement(sql.JOURNALS, ids=ids),
            self._statement(sql.INBOXES, ids=ids, page=INBOX_PAGE),
        ]

    def _read_contents(self, outcomes: Sequence[Outcome]) -> Contents:
        journals, inboxes = outcomes
        entries: dict[str, list[bytes]] = {}
        messages: dict[str, list[Message]] = {}
        for key, data in journals.rows:
            entries.setdefault(key, []).append(data)
        for key, *columns in inboxes.rows:
            messages.setdefault(key, []).append(read_message(*columns))
        return Contents(entries, messages)


def _split_by_run(requests: Sequence[LeaseRequest]) -> Iterator[Sequence[LeaseRequest]]:
    """Yield the requests in order, in parts that contain each run only once."""
    start, ids = 0, set[str]()
    for at, request in enumerate(requests):
        if request.id in ids:
            yield requests[start:at]
            start, ids = at, set()
        ids.add(request.id)
    yield requests[start:]


def _ownership(owner: str | None, wake_at: int | None) -> Ownership:
    """Return the owner and the end of its lease; an unowned run's wake time has another meaning."""
    expires_at = None if owner is None or wake_at is None else from_microseconds(wake_at)
    return Ownership(owner, expires_at)


def _lease_of(request: LeaseRequest, row: Sequence[Any] | None) -> LeasedRun | None:
    if row is None:
        return None
    if request.create is None or len(row) > _CREATED_COLUMNS:
        return read_lease(request.id, request.owner, request.ttl, *row)
    epoch, wake_at = row
    columns = (epoch, wake_at, 0, "", request.version, request.create)
    new_lease = read_lease(request.id, request.owner, request.ttl, *columns)
    return new_lease._replace(created=True)


def read_lease(
    id: str,
    owner: str,
    ttl: timedelta,
    epoch: int,
    wake_at: int,
    takeovers: int,
    queue: str,
    version: int,
    snapshot: bytes,
    listed_at: str | None = None,
) -> LeasedRun:
    """Return the lease in a row that a statement has leased."""
    lease = Lease(id, owner, epoch, from_microseconds(wake_at))
    now = lease.expires_at - ttl
    return LeasedRun(lease, [snapshot], now, (), takeovers, False, queue, version, listed_at)
