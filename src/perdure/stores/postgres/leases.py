"""Giving runs to owners: leased in one statement, and read under the lease."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from perdure import codec
from perdure.store import Grant, Lease, Want
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import moment_of
from perdure.stores.postgres.append import Fetch
from perdure.stores.postgres.rows import read_message, read_run
from perdure.stores.postgres.statements import (
    CLAIM,
    CREATE,
    CREATE_ONE,
    LEASE,
    READ_LEASED,
    Statements,
)


class Leases:
    """Leases of the runs whose stored ids begin with `prefix`."""

    def __init__(self, fetch: Fetch, statements: Statements, prefix: str) -> None:
        self._fetch = fetch
        self._statements = statements
        self._prefix = prefix

    async def acquire(self, wants: Sequence[Want]) -> list[Granted | None]:
        """Give each want its grant or None, in order."""
        if len(wants) == 1:
            return [await self._acquire_one(wants[0])]
        grants: list[Granted | None] = [None] * len(wants)
        places = list(range(len(wants)))
        while places:
            # Of two wants for one run the first is served first, by a statement of its own.
            turn = {wants[place].id: place for place in reversed(places)}
            granted = await self._acquire_distinct([wants[place] for place in turn.values()])
            for id, place in turn.items():
                grants[place] = granted.get(id)
            places = [place for place in places if turn[wants[place].id] != place]
        return grants

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> list[Granted]:
        """Give up to `limit` grants of runs that are due, earliest first."""
        values: list[object] = [owner, ttl, limit, self._prefix]
        statement = self._statements[CLAIM]
        if workflows is not None:
            statement = self._statements.extended(CLAIM, "AND run.workflow = ANY ($5::text[])")
            values.append(list(workflows))
        return list((await self._read(await self._fetch(statement, *values))).values())

    async def _acquire_one(self, want: Want) -> Granted | None:
        granted: dict[str, Granted] = {}
        while not granted:
            if want.create is not None:
                values = (self._prefix + want.id, want.owner, want.ttl, want.create, want.workflow)
                for _, epoch in await self._fetch(self._statements[CREATE_ONE], *values):
                    return _created(want, epoch)
            if not want.existing:
                return None
            found = await self._lease([want], granted)
            # One that was neither created nor found was deleted in between.
            if found or want.create is None:
                break
        return granted.get(want.id)

    async def _acquire_distinct(self, wants: Sequence[Want]) -> dict[str, Granted]:
        wants = sorted(wants, key=lambda want: want.id)
        granted: dict[str, Granted] = {}
        while wants:
            granted |= await self._create([want for want in wants if want.create is not None])
            known = [want for want in wants if want.existing and want.id not in granted]
            found = await self._lease(known, granted)
            # One that was neither created nor found was deleted in between.
            wants = [want for want in known if want.create is not None and want.id not in found]
        return granted

    async def _create(self, wants: Sequence[Want]) -> dict[str, Granted]:
        if not wants:
            return {}
        values: list[list[Any]] = [
            [self._prefix + want.id for want in wants],
            [want.owner for want in wants],
            [want.ttl for want in wants],
            [want.create for want in wants],
            [want.workflow for want in wants],
        ]
        created = dict(await self._fetch(self._statements[CREATE], *values))
        keyed = zip(values[0], wants, strict=True)
        return {want.id: _created(want, created[key]) for key, want in keyed if key in created}

    async def _lease(self, wants: Sequence[Want], granted: dict[str, Granted]) -> Collection[str]:
        """Add the grants of the runs that are free; give the ids of all that are there."""
        if not wants:
            return ()
        rows = await self._fetch(
            self._statements[LEASE],
            [self._prefix + want.id for want in wants],
            [want.owner for want in wants],
            [want.ttl for want in wants],
        )
        granted |= await self._read([row for row in rows if row["epoch"] is not None])
        return {row["held"].removeprefix(self._prefix) for row in rows}

    async def _read(self, rows: Sequence[Any]) -> dict[str, Granted]:
        """Give the grants of leased rows, in order, by the runs' ids.

        The statement that leased them could not see what was committed while it waited. Where
        something may lie in the journal, or the inbox may have changed, both are read now. A run
        that was lost or put to rest in between is left out: its snapshot is not the one that came
        with the lease any more.
        """
        latest = {row["id"]: row for row in rows if row["clean"] and not row["stale"]}
        if unread := [row["id"] for row in rows if row["id"] not in latest]:
            found = await self._fetch(self._statements[READ_LEASED], unread)
            latest |= {row["id"]: row for row in found}
        kept = [row for row in rows if row["id"] in latest and _is_held(row, latest[row["id"]])]
        grants = (self._granted(row, latest[row["id"]]) for row in kept)
        return {grant.lease.id: grant for grant in grants}

    def _granted(self, row: Any, latest: Any) -> Granted:
        id = row["id"].removeprefix(self._prefix)
        inbox = tuple(read_message(*message) for message in latest["inbox"] or ())
        lease = Lease(id, row["owner"], row["epoch"], row["wake_at"], bool(inbox))
        read = partial(read_run, id, row["snapshot"], row["updated_at"], latest["journal"])
        return read_grant(lease, read, row["now"], inbox, row["takeovers"])


def _is_held(leased: Any, latest: Any) -> bool:
    # By the owner and not by the epoch: one that asks twice at once would overtake itself.
    return bool(latest["owner"] == leased["owner"] and latest["folded_epoch"] < leased["epoch"])


def _created(want: Want, epoch: int) -> Grant:
    assert want.create is not None
    # The first epoch of a run is the moment of its creation.
    now = moment_of(epoch)
    snapshot: Any = codec.loads(want.create)
    return Grant(Lease(want.id, want.owner, epoch, now + want.ttl), snapshot, now, created=True)
