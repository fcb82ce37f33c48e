"""Giving runs to owners: their rows locked, leased and read in one transaction."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from perdure import codec
from perdure.errors import CodecError, SnapshotFormatError, StoreCorrupted
from perdure.snapshot import Snapshot, merge_snapshots
from perdure.store import Grant, Lease, Message, Want
from perdure.stores import _mysql_sql as sql
from perdure.stores._mysql_append import chunks
from perdure.stores._mysql_database import Database, Result, Transaction
from perdure.stores._mysql_literals import Statement, read_moment
from perdure.stores._mysql_sql import Conditions, Statements
from perdure.stores._times import micros

logger = logging.getLogger(__name__)

_NEW = -1


class Held(NamedTuple):
    """A locked run as it was before."""

    key: str
    epoch: int
    owner: str | None
    wake_at: datetime | None
    takeovers: int

    def is_orphaned(self, now: datetime) -> bool:
        """Tell whether its owner let the lease expire."""
        return self.owner is not None and self.wake_at is not None and self.wake_at <= now

    def is_free_for(self, owner: str, now: datetime) -> bool:
        """Tell whether this owner may have it."""
        return self.owner in (None, owner) or self.is_orphaned(now)


class Leased(NamedTuple):
    """A run as it is given to an owner at a moment."""

    held: Held
    owner: str
    ttl: timedelta
    now: datetime
    is_new: bool

    @property
    def epoch(self) -> int:
        """The epoch that the statement writes."""
        return max(self.held.epoch + 1, micros(self.now))

    @property
    def takeovers(self) -> int:
        """How often in a row the run was taken from an owner that let its lease expire."""
        return self.held.takeovers + self.held.is_orphaned(self.now)


class Leases:
    """Leases of the runs whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._database = database
        self._statements = statements
        self._prefix = prefix

    async def acquire(self, wants: Sequence[Want]) -> list[Grant | None]:
        """Give each want its grant or None, in order."""
        grants: list[Grant | None] = [None] * len(wants)
        places = list(range(len(wants)))
        while places:
            # Of two wants for one run the first is served first, in a transaction of its own.
            turn = {wants[place].id: place for place in reversed(places)}
            granted = await self._acquire_distinct([wants[place] for place in turn.values()])
            for id, place in turn.items():
                grants[place] = granted.get(self._prefix + id)
            places = [place for place in places if turn[wants[place].id] != place]
        return grants

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> list[Grant]:
        """Give up to `limit` grants of runs that are due, earliest first."""
        due = Conditions()
        due.add(sql.IS_DUE_NOW)
        due.add_prefix(self._prefix)
        if workflows is not None:
            due.add(sql.IN_WORKFLOWS, list(workflows))
        statement = self._statements.where(sql.CLAIM, due, limit)

        async def work(transaction: Transaction) -> list[Grant]:
            found, now = await transaction.run(statement, self._statements(sql.NOW))
            moment = read_moment(now.rows[0][0])
            leased = [Leased(_held(row), owner, ttl, moment, is_new=False) for row in found.rows]
            snapshots = {row[0]: row[5] for row in found.rows}
            grants = await self._grant(transaction, leased, snapshots, skips_unreadable=True)
            return list(grants.values())

        return await self._database.transact(work, repeatable=False)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        if not leases:
            return []

        async def work(transaction: Transaction) -> list[Lease | None]:
            kept, now = await self._kept(transaction, leases)
            if not kept:
                return [None] * len(leases)
            moved = self._statements(sql.RENEW, now + ttl, [*kept])
            _, mailed = await transaction.finish(moved, self._statements(sql.MAILED, [*kept]))
            mail = {key for (key,) in mailed.rows}
            keys = [self._prefix + lease.id for lease in leases]
            return [
                Lease(lease.id, lease.owner, lease.epoch, now + ttl, key in mail)
                if kept.get(key) == (lease.epoch, lease.owner)
                else None
                for key, lease in zip(keys, leases, strict=True)
            ]

        return await self._database.transact(work)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Give the leases up, so that the runs can be claimed at `wake_at`, or at once."""
        if not leases:
            return

        async def work(transaction: Transaction) -> None:
            kept, now = await self._kept(transaction, leases)
            if kept:
                await transaction.finish(self._statements(sql.RELEASE, wake_at or now, [*kept]))

        await self._database.transact(work)

    async def _kept(
        self, transaction: Transaction, leases: Sequence[Lease]
    ) -> tuple[dict[str, tuple[int, str | None]], datetime]:
        """Lock the runs; give the epoch and owner of those that are still leased so, and the
        time."""
        asked = {(self._prefix + lease.id, lease.epoch, lease.owner) for lease in leases}
        found, now = await transaction.run(
            self._statements(sql.LOCK_LEASES, sorted({key for key, _, _ in asked})),
            self._statements(sql.NOW),
        )
        held = map(_held, found.rows)
        kept = {
            each.key: (each.epoch, each.owner)
            for each in held
            if (each.key, each.epoch, each.owner) in asked
        }
        return kept, read_moment(now.rows[0][0])

    async def _acquire_distinct(self, wants: Sequence[Want]) -> dict[str, Grant]:
        asked = {self._prefix + want.id: want for want in wants}
        snapshots = {key: want.create for key, want in asked.items() if want.create is not None}
        rows = [(key, snapshots[key], asked[key].workflow, None, _NEW) for key in sorted(snapshots)]
        questions = [
            *(self._statements(sql.CREATE, chunk) for chunk in chunks(rows)),
            self._statements(sql.LOCK_LEASES, sorted(asked)),
            self._statements(sql.NOW),
        ]
        # What an attempt wrote whose answer was lost.
        earlier: dict[str, Leased] = {}

        async def work(transaction: Transaction) -> dict[str, Grant]:
            *_, found, now = await transaction.run(*questions)
            moment = read_moment(now.rows[0][0])
            leased = [
                each
                for held in map(_held, found.rows)
                if (each := _granted(held, asked[held.key], moment, earlier.get(held.key)))
            ]
            earlier.update({each.held.key: each for each in leased})
            first = {each.held.key: snapshots[each.held.key] for each in leased if each.is_new}
            return await self._grant(transaction, leased, first)

        return await self._database.transact(work)

    async def _grant(
        self,
        transaction: Transaction,
        leased: Sequence[Leased],
        snapshots: dict[str, bytes],
        *,
        skips_unreadable: bool = False,
    ) -> dict[str, Grant]:
        """Write the leases, read what is missing of the runs, and commit."""
        if not leased:
            return {}
        old = [each.held.key for each in leased if not each.is_new]
        unread = [key for key in old if key not in snapshots]
        reading = [self._statements(sql.SNAPSHOTS, unread)] if unread else []
        if old:
            reading += [self._statements(sql.JOURNALS, old), self._statements(sql.INBOXES, old)]
        writing = self._lease(leased)
        results = (await transaction.finish(*writing, *reading))[len(writing) :]
        if unread:
            snapshots |= dict(results[0].rows)
        journals, inboxes = results[-2:] if old else (Result((), 0), Result((), 0))
        reader = Reader(self._prefix, snapshots, journals, inboxes)
        return reader.grants(leased, skips_unreadable=skips_unreadable)

    def _lease(self, leased: Sequence[Leased]) -> Sequence[Statement]:
        alike: dict[tuple[str, timedelta], list[str]] = defaultdict(list)
        for each in leased:
            alike[each.owner, each.ttl].append(each.held.key)
        now = leased[0].now
        return [
            self._statements(sql.LEASE, now, now, micros(now), owner, now + ttl, keys)
            for (owner, ttl), keys in alike.items()
        ]


class Reader:
    """Makes grants of leases and of what was read under them."""

    def __init__(
        self, prefix: str, snapshots: dict[str, bytes], journals: Result, inboxes: Result
    ) -> None:
        self._prefix = prefix
        self._snapshots = snapshots
        self._entries: dict[str, list[bytes]] = defaultdict(list)
        self._messages: dict[str, list[Message]] = defaultdict(list)
        for key, data in journals.rows:
            self._entries[key].append(data)
        for key, *message in inboxes.rows:
            self._messages[key].append(read_message(message))

    def grants(self, leased: Sequence[Leased], *, skips_unreadable: bool) -> dict[str, Grant]:
        """Give the grants in order, by the runs' stored ids.

        A run that cannot be read is an error, or is left out and logged: it is tried again when
        its lease ends.
        """
        grants = {}
        for each in leased:
            try:
                grants[each.held.key] = self._grant(each)
            except StoreCorrupted:
                if not skips_unreadable:
                    raise
                logger.exception("a run was claimed that cannot be read")
        return grants

    def _grant(self, leased: Leased) -> Grant:
        key = leased.held.key
        id, inbox = key.removeprefix(self._prefix), tuple(self._messages[key])
        lease = Lease(id, leased.owner, leased.epoch, leased.now + leased.ttl, bool(inbox))
        snapshot = read_run(id, self._snapshots[key], self._entries[key])
        return Grant(lease, snapshot, leased.now, inbox, leased.takeovers, leased.is_new)


def _held(row: Sequence[Any]) -> Held:
    key, epoch, owner, wake_at, takeovers = row[:5]
    return Held(key, epoch, owner, None if wake_at is None else read_moment(wake_at), takeovers)


def _granted(held: Held, want: Want, now: datetime, earlier: Leased | None) -> Leased | None:
    is_ours = earlier is not None and (held.epoch, held.owner) == (earlier.epoch, earlier.owner)
    is_new = held.epoch == _NEW or (is_ours and earlier.is_new)
    if is_new or (want.existing and held.is_free_for(want.owner, now)):
        return Leased(held, want.owner, want.ttl, now, is_new)
    return None


def read_run(id: str, snapshot: bytes, journal: Sequence[bytes]) -> Snapshot:
    """Give a run's snapshot merged with its journal."""
    try:
        base: Snapshot = codec.loads(snapshot)
        if not journal:
            return base
        return merge_snapshots(base, *codec.loads(b"[%s]" % b",".join(journal)))
    except (CodecError, SnapshotFormatError) as error:
        raise StoreCorrupted(f"run {id!r} cannot be read: {error}") from error


def read_message(row: Sequence[Any]) -> Message:
    """Give a row of the inbox as the message it is."""
    seq, name, payload, sent_at = row
    return Message(str(seq), name, payload, read_moment(sent_at))
