"""Giving runs to owners: leased in one statement, and read under the lease."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from perdure import codec
from perdure.store import Grant, Lease, LeaseRequest
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import from_microseconds
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

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        """Give each want its grant or None, in order."""
        if len(requests) == 1:
            return [await self._acquire_one(requests[0])]
        grants: list[Granted | None] = [None] * len(requests)
        places = list(range(len(requests)))
        while places:
            # Of two wants for one run the first is served first, by a statement of its own.
            turn = {requests[place].id: place for place in reversed(places)}
            granted = await self._acquire_distinct([requests[place] for place in turn.values()])
            for id, place in turn.items():
                grants[place] = granted.get(id)
            places = [place for place in places if turn[requests[place].id] != place]
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

    async def _acquire_one(self, request: LeaseRequest) -> Granted | None:
        granted: dict[str, Granted] = {}
        while not granted:
            if request.create is not None:
                values = (
                    self._prefix + request.id,
                    request.owner,
                    request.ttl,
                    request.create,
                    request.workflow,
                )
                for _, epoch in await self._fetch(self._statements[CREATE_ONE], *values):
                    return _created(request, epoch)
            if not request.existing:
                return None
            found = await self._lease([request], granted)
            # One that was neither created nor found was deleted in between.
            if found or request.create is None:
                break
        return granted.get(request.id)

    async def _acquire_distinct(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        requests = sorted(requests, key=lambda request: request.id)
        granted: dict[str, Granted] = {}
        while requests:
            granted |= await self._create(
                [request for request in requests if request.create is not None]
            )
            known = [
                request for request in requests if request.existing and request.id not in granted
            ]
            found = await self._lease(known, granted)
            # One that was neither created nor found was deleted in between.
            requests = [
                request
                for request in known
                if request.create is not None and request.id not in found
            ]
        return granted

    async def _create(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        if not requests:
            return {}
        values: list[list[Any]] = [
            [self._prefix + request.id for request in requests],
            [request.owner for request in requests],
            [request.ttl for request in requests],
            [request.create for request in requests],
            [request.workflow for request in requests],
        ]
        created = dict(await self._fetch(self._statements[CREATE], *values))
        keyed = zip(values[0], requests, strict=True)
        return {
            request.id: _created(request, created[key]) for key, request in keyed if key in created
        }

    async def _lease(
        self, requests: Sequence[LeaseRequest], granted: dict[str, Granted]
    ) -> Collection[str]:
        """Add the grants of the runs that are free; give the ids of all that are there."""
        if not requests:
            return ()
        rows = await self._fetch(
            self._statements[LEASE],
            [self._prefix + request.id for request in requests],
            [request.owner for request in requests],
            [request.ttl for request in requests],
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


def _created(request: LeaseRequest, epoch: int) -> Grant:
    assert request.create is not None
    # The first epoch of a run is the moment of its creation.
    now = from_microseconds(epoch)
    snapshot: Any = codec.loads(request.create)
    return Grant(
        Lease(request.id, request.owner, epoch, now + request.ttl), snapshot, now, created=True
    )
