"""Leases of `SqlStore`: a conditional update, and then a look at what it gave."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from perdure import codec
from perdure.store import Grant, Lease, LeaseRequest, Message, NewRun
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import Answer
from perdure.stores.sql.executor import Desk, chunks, marks, read_run, rows_of, span


class Leases:
    """Gives runs to owners."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._leasing = asyncio.Lock()

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        """Give each want its grant or None, in order."""
        grants: list[Granted | None] = [None] * len(requests)
        places = list(range(len(requests)))
        while places:
            # In one turn each run is wanted once, and by one owner.
            first = requests[places[0]]
            turn = {
                requests[place].id: place
                for place in reversed(places)
                if (requests[place].owner, requests[place].ttl) == (first.owner, first.ttl)
            }
            granted = await self._acquire_alike([requests[place] for place in turn.values()])
            for id, place in turn.items():
                grants[place] = granted.get(id)
            places = [place for place in places if turn.get(requests[place].id) != place]
        return grants

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> list[Granted]:
        """Give up to `limit` grants of runs that are due, earliest first."""
        granted: dict[str, Granted] = {}
        keys = [key for key, _ in (await self.due(None, limit, workflows)).rows]
        for chunk in chunks(keys):
            ticket = self._desk.ticket()
            values = (owner, ticket, span(ttl), *sorted(chunk))
            await self._desk.ask(sql.CLAIM, *values, marks=marks(chunk))
            granted |= await self._granted(chunk, owner, ticket)
        return [granted[id] for key in keys if (id := self._id(key)) in granted]

    async def due(
        self, now: datetime | None, limit: int, workflows: Sequence[str] | None
    ) -> Answer:
        """Give the stored ids and wake times of runs that are due at `now`, or at present."""
        names = list(workflows or ())
        if workflows is not None and not names:
            return Answer([], 0)
        more = sql.IN_WORKFLOWS.format(marks=marks(names)) if names else ""
        if now is None:
            return await self._desk.ask(sql.DUE_NOW, self._desk.prefix, *names, limit, more=more)
        values = (to_microseconds(now, "now"), self._desk.prefix, *names, limit)
        return await self._desk.ask(sql.DUE, *values, more=more)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        """Give each lease with its new end, or None when it was lost."""
        kept: dict[tuple[str, int], Lease] = {}
        for chunk in chunks(leases):
            values, words = self._values(chunk), _places(chunk)
            await self._desk.ask(sql.RENEW, span(ttl), *values, leases=words)
            for key, epoch, wake_at, mail in (
                await self._desk.ask(sql.RENEWED, *values, leases=words)
            ).rows:
                lease = next(lease for lease in chunk if self._desk.prefix + lease.id == key)
                end = from_microseconds(wake_at)
                kept[key, epoch] = Lease(lease.id, lease.owner, epoch, end, mail > 0)
        found = (kept.get((self._desk.prefix + lease.id, lease.epoch)) for lease in leases)
        return [
            lease if lease is not None and lease.owner == asked.owner else None
            for asked, lease in zip(leases, found, strict=True)
        ]

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Give the leases up."""
        at = None if wake_at is None else to_microseconds(wake_at, "wake_at")
        for chunk in chunks(leases):
            values = (at, *self._values(chunk))
            await self._desk.ask(sql.RELEASE, *values, leases=_places(chunk))

    async def enqueue(self, runs: Sequence[NewRun]) -> list[bool]:
        """Create runs; False for each id that was there already."""
        first: dict[str, NewRun] = {}
        for run in runs:
            first.setdefault(self._desk.prefix + run.id, run)
        made: set[str] = set()
        for chunk in chunks(sorted(first)):
            maker = self._desk.ticket()
            values: list[object] = []
            for key in chunk:
                run = first[key]
                wake_at = None if run.wake_at is None else to_microseconds(run.wake_at, "wake_at")
                values += key, run.snapshot.decode(), run.workflow, None, maker, None, wake_at
            made |= await self._make(chunk, values, maker)
        keys = [self._desk.prefix + run.id for run in runs]
        return [key in made and first[key] is run for key, run in zip(keys, runs, strict=True)]

    async def inboxes(self, keys: Sequence[str]) -> dict[str, list[Message]]:
        """Give the messages of runs that were not taken, in order, by stored id."""
        found: dict[str, list[Message]] = defaultdict(list)
        answer = await self._desk.ask(sql.INBOXES, *keys, marks=marks(keys))
        for key, seq, name, payload, sent_at in answer.rows:
            found[key].append(Message(str(seq), name, payload.encode(), from_microseconds(sent_at)))
        return found

    async def _acquire_alike(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        granted: dict[str, Granted] = {}
        for chunk in chunks(sorted(requests, key=lambda request: request.id)):
            left: Sequence[LeaseRequest] = chunk
            while left:
                granted |= await self._create(
                    [request for request in left if request.create is not None]
                )
                left = [
                    request for request in left if request.existing and request.id not in granted
                ]
                left = await self._lease(left, granted) if left else ()
        return granted

    async def _create(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        if not requests:
            return {}
        maker = self._desk.ticket()
        values: list[object] = []
        for request in requests:
            key, create = self._desk.prefix + request.id, (request.create or b"").decode()
            values += key, create, request.workflow, request.owner, maker, span(request.ttl), None
        keys = [self._desk.prefix + request.id for request in requests]
        made = await self._make(keys, values, maker)
        if not made:
            return {}
        answer = await self._desk.ask(sql.LEASED_RUNS, *keys, maker, marks=marks(keys))
        by_key = {self._desk.prefix + request.id: request for request in requests}
        grants: dict[str, Granted] = {}
        for key, epoch, wake_at, _, _, now in answer.rows:
            request = by_key[key]
            lease = Lease(request.id, request.owner, epoch, from_microseconds(wake_at))
            snapshot: Any = codec.loads(request.create or b"")
            grants[request.id] = Grant(lease, snapshot, from_microseconds(now), created=True)
        return grants

    async def _make(self, keys: Sequence[str], values: Sequence[object], maker: str) -> set[str]:
        rows = rows_of(sql.NEW, len(keys))
        await self._desk.ask(sql.CREATE, *values, rows=rows)
        answer = await self._desk.ask(sql.MADE, *keys, maker, marks=marks(keys))
        return {key for (key,) in answer.rows}

    async def _lease(
        self, requests: Sequence[LeaseRequest], granted: dict[str, Granted]
    ) -> Sequence[LeaseRequest]:
        """Add the grants of the runs that are free; give the wants that are worth another try."""
        keys = [self._desk.prefix + request.id for request in requests]
        owner, ttl, ticket = requests[0].owner, requests[0].ttl, self._desk.ticket()
        values = (owner, ticket, span(ttl), *keys, owner)
        # One at a time, or many of one owner that want the same run keep drawing the later ticket.
        async with self._leasing:
            await self._desk.ask(sql.LEASE, *values, marks=marks(keys))
            granted |= await self._granted(keys, owner, ticket)
        if all(request.id in granted for request in requests):
            return ()
        answer = await self._desk.ask(sql.OWNERS, *keys, marks=marks(keys))
        owners = {self._id(key): holder for key, holder in answer.rows}
        return [
            request
            for request in requests
            if request.id not in granted and _may_try_again(request, owners)
        ]

    async def _granted(self, keys: Sequence[str], owner: str, ticket: str) -> dict[str, Granted]:
        answer = await self._desk.ask(sql.LEASED_RUNS, *keys, ticket, marks=marks(keys))
        ours = [row[0] for row in answer.rows]
        if not ours:
            return {}
        inboxes = await self.inboxes(ours)
        # Read last: an epoch that is still the newest says that all was read under the lease.
        journals = await self._journals(ours)
        grants: dict[str, Granted] = {}
        for key, epoch, wake_at, takeovers, snapshot, now in answer.rows:
            if (key, epoch) not in journals:
                continue
            id, inbox = self._id(key), tuple(inboxes.get(key, ()))
            lease = Lease(id, owner, epoch, from_microseconds(wake_at), bool(inbox))
            read = partial(read_run, id, snapshot, journals[key, epoch])
            grants[id] = read_grant(lease, read, from_microseconds(now), inbox, takeovers)
        return grants

    async def _journals(self, keys: Sequence[str]) -> dict[tuple[str, int], list[str]]:
        """Return the entries of runs, by stored id and newest epoch."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        answer = await self._desk.ask(sql.JOURNALS, *keys, marks=marks(keys))
        for key, epoch, data in answer.rows:
            found[key, epoch] += [] if data is None else [data]
        return found

    def _values(self, leases: Sequence[Lease]) -> list[object]:
        values: list[object] = []
        for lease in sorted(leases, key=lambda lease: lease.id):
            values += self._desk.prefix + lease.id, lease.owner, lease.epoch
        return values

    def _id(self, key: str) -> str:
        return key[len(self._desk.prefix) :]


def _may_try_again(request: LeaseRequest, owners: Mapping[str, str | None]) -> bool:
    if request.id not in owners:
        # Neither created nor found: it was deleted in between.
        return request.create is not None
    # The same owner asked twice at once, and the other one drew the later ticket.
    return owners[request.id] == request.owner


def _places(leases: Sequence[Lease]) -> str:
    return " OR ".join([sql.LEASE_OF] * len(leases))
