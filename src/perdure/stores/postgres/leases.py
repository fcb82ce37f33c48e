"""Leases, granted by one statement, with the runs read under them."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from perdure import codec
from perdure.store import Due, Grant, Lease, LeaseRequest, SupportedVersions
from perdure.stores._backend import Ownership
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import from_microseconds
from perdure.stores.postgres.append import Fetch
from perdure.stores.postgres.batch import as_json
from perdure.stores.postgres.due import (
    CLAIM,
    CLAIM_ONE,
    DUE,
    QUEUES,
    WORKFLOWS_OF_QUEUES,
    DueRange,
    every_range,
    ranges_of,
)
from perdure.stores.postgres.rows import read_message, read_run
from perdure.stores.postgres.statements import (
    CREATE,
    CREATE_ONE,
    LEASE,
    OWNERS,
    READ_LEASED,
    RELEASE,
    RENEW,
    Statements,
    tags_added,
)


class Leases:
    """Leases of the runs whose stored ids begin with `prefix`."""

    def __init__(self, fetch: Fetch, statements: Statements, prefix: str) -> None:
        self._fetch = fetch
        self._statements = statements
        self._prefix = prefix

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        """Return a grant or `None` for each request, in order."""
        if len(requests) == 1:
            return [await self._acquire_one(requests[0])]
        grants: list[Granted | None] = [None] * len(requests)
        remaining = list(range(len(requests)))
        while remaining:
            # Of two requests for the same run, the first is served first, by its own statement.
            first = {requests[index].id: index for index in reversed(remaining)}
            new_grants = await self._acquire_distinct([requests[index] for index in first.values()])
            for id, index in first.items():
                grants[index] = new_grants.get(id)
            remaining = [index for index in remaining if first[requests[index].id] != index]
        return grants

    async def owners(self, ids: Sequence[str]) -> list[Ownership | None]:
        """Return the owner of each run and the end of its lease, in order."""
        keys = [self._prefix + id for id in ids]
        rows = await self._fetch(self._statements.sql(OWNERS), keys)
        owners = {key: Ownership(owner, expires_at) for key, owner, expires_at in rows}
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
        ranges = await self._ranges(supports, queues)
        if not ranges:
            return []
        template, values = CLAIM_ONE, [*ranges[0]]
        if len(ranges) > 1:
            template, values = CLAIM, [*zip(*ranges, strict=True), limit]
        statement = self._statements.sql(template)
        rows = await self._fetch(statement, owner, ttl, self._prefix, *values)
        return list((await self.read(rows)).values())

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Due]:
        """Return up to `limit` runs that are due, earliest first."""
        ranges = await self._ranges(supports, queues)
        if not ranges:
            return []
        columns = zip(*ranges, strict=True)
        statement = self._statements.sql(DUE)
        rows = await self._fetch(statement, now, limit, self._prefix, *columns)
        return [Due(key.removeprefix(self._prefix), wake_at) for key, wake_at in rows]

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> list[str]:
        """Return the names of queues with due runs, in order."""
        values: list[object] = [now, limit, low, self._prefix]
        condition = ""
        if high is not None:
            values.append(high)
            condition = "AND run.queue < $5"
        rows = await self._fetch(self._statements.sql(QUEUES, condition), *values)
        return [queue for (queue,) in rows]

    async def _ranges(
        self, supports: Sequence[SupportedVersions] | None, queues: Mapping[str, int]
    ) -> list[DueRange]:
        if supports is not None:
            return ranges_of(supports, queues)
        pairs = await self._fetch(self._statements.sql(WORKFLOWS_OF_QUEUES), list(queues))
        return every_range([(queue, workflow) for queue, workflow in pairs], queues)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        """Extend the leases to `ttl` from now; return `None` for each that was lost."""
        rows = await self._fetch(self._statements.sql(RENEW), *self._columns(leases), ttl)
        renewed_rows = {(row["id"].removeprefix(self._prefix), row["epoch"]): row for row in rows}
        return [
            _renewed_lease(lease, renewed_rows.get((lease.id, lease.epoch))) for lease in leases
        ]

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases; the runs can be claimed at `wake_at`, or at once."""
        await self._fetch(self._statements.sql(RELEASE), *self._columns(leases), wake_at)

    def _columns(
        self, leases: Sequence[Lease]
    ) -> tuple[Sequence[str], Sequence[str], Sequence[int]]:
        sorted_leases = sorted(leases, key=lambda lease: lease.id)
        ids = [self._prefix + lease.id for lease in sorted_leases]
        return (
            ids,
            [lease.owner for lease in sorted_leases],
            [lease.epoch for lease in sorted_leases],
        )

    async def _acquire_one(self, request: LeaseRequest) -> Granted | None:
        grants: dict[str, Granted] = {}
        while not grants:
            if request.create is not None:
                grants = await self._create([request])
                if grants:
                    break
            if not request.existing:
                return None
            existing = await self._lease([request], grants)
            # A run that was neither created nor found was deleted in the meantime.
            if existing or request.create is None:
                break
        return grants.get(request.id)

    async def _acquire_distinct(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        requests = sorted(requests, key=lambda request: request.id)
        grants: dict[str, Granted] = {}
        while requests:
            grants |= await self._create(
                [request for request in requests if request.create is not None]
            )
            remaining = [
                request for request in requests if request.existing and request.id not in grants
            ]
            existing = await self._lease(remaining, grants)
            # A run that was neither created nor found was deleted in the meantime.
            requests = [
                request
                for request in remaining
                if request.create is not None and request.id not in existing
            ]
        return grants

    async def _create(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        if not requests:
            return {}
        rows = await self._insert([self._header(request) for request in requests])
        epochs = {key.removeprefix(self._prefix): epoch for key, epoch in rows}
        new_requests = [request for request in requests if request.id in epochs]
        return {request.id: _created_grant(request, epochs[request.id]) for request in new_requests}

    async def _insert(self, headers: Sequence[tuple[object, ...]]) -> Sequence[Any]:
        [*values, tags, summary] = headers[0]
        if len(headers) == 1 and tags == "[]":
            return await self._fetch(self._statements.sql(CREATE_ONE), *values, summary)
        *columns, tags, summaries = zip(*headers, strict=True)
        statement = self._statements.sql(CREATE, tags_added(tags))
        return await self._fetch(statement, *columns, tags, summaries)

    def _header(self, request: LeaseRequest) -> tuple[object, ...]:
        """Return the columns of a new run."""
        return (
            self._prefix + request.id,
            request.owner,
            request.ttl,
            request.create,
            request.workflow,
            request.version,
            as_json(request.tags),
            request.summary,
        )

    async def _lease(
        self, requests: Sequence[LeaseRequest], grants: dict[str, Granted]
    ) -> Collection[str]:
        """Add the grants of the runs that are free; return the ids of all runs that exist."""
        if not requests:
            return ()
        rows = await self._fetch(
            self._statements.sql(LEASE),
            [self._prefix + request.id for request in requests],
            [request.owner for request in requests],
            [request.ttl for request in requests],
            [request.instead_of for request in requests],
        )
        grants |= await self.read([row for row in rows if row["epoch"] is not None])
        return {row["existing"].removeprefix(self._prefix) for row in rows}

    async def read(self, rows: Sequence[Any]) -> dict[str, Granted]:
        """Return the grants of leased rows by the runs' ids, in order.

        The statement that leased them could not see what was committed while it waited for locks.
        If there may be journal entries, or the inbox may have changed, both are read now. A run
        that was lost or suspended in the meantime is left out, because the snapshot that came with
        the lease is outdated.
        """
        latest = {row["id"]: row for row in rows if row["clean"] and not row["stale"]}
        if outdated_ids := [row["id"] for row in rows if row["id"] not in latest]:
            reread = await self._fetch(self._statements.sql(READ_LEASED), outdated_ids)
            latest |= {row["id"]: row for row in reread}
        current = [row for row in rows if row["id"] in latest and _is_owned(row, latest[row["id"]])]
        grants = (self._grant(row, latest[row["id"]]) for row in current)
        return {grant.lease.id: grant for grant in grants}

    def _grant(self, row: Any, latest: Any) -> Granted:
        id = row["id"].removeprefix(self._prefix)
        inbox = tuple(read_message(*message) for message in latest["inbox"] or ())
        lease = Lease(id, row["owner"], row["epoch"], row["wake_at"], bool(inbox))
        read = partial(read_run, id, row["snapshot"], row["updated_at"], latest["journal"])
        return read_grant(
            lease,
            read,
            row["now"],
            inbox,
            row["takeovers"],
            queue=row["queue"],
            version=row["version"],
        )


def _is_owned(row: Any, latest: Any) -> bool:
    # Compares the owner rather than the epoch: of two concurrent requests of one owner, the second
    # would otherwise make the first lose its grant.
    return bool(latest["owner"] == row["owner"] and latest["folded_epoch"] < row["epoch"])


def _created_grant(request: LeaseRequest, epoch: int) -> Grant:
    assert request.create is not None
    # The first epoch of a run is the time of its creation.
    now = from_microseconds(epoch)
    snapshot: Any = codec.loads(request.create)
    lease = Lease(request.id, request.owner, epoch, now + request.ttl)
    return Grant(lease, snapshot, now, created=True, version=request.version)


def _renewed_lease(lease: Lease, row: Any) -> Lease | None:
    if row is None:
        return None
    return Lease(lease.id, lease.owner, lease.epoch, row["wake_at"], row["has_messages"])
