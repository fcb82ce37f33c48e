"""Leases of `SqlStore`: a conditional update, and then a read of the rows it leased."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any

from perdure import codec
from perdure.store import Grant, Lease, LeaseRequest
from perdure.stores._backend import Ownership
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import from_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import SqlClient
from perdure.stores.sql.creation import Creation, leased_row
from perdure.stores.sql.dialects import Statements
from perdure.stores.sql.executor import chunks, micros_or_none, read_run, to_micros
from perdure.stores.sql.inbox import Inbox


class Leases(Creation, Inbox):
    """Grants, renews and ends leases."""

    def __init__(
        self, client: SqlClient, statements: Statements, *, prefix: str, random: Random
    ) -> None:
        super().__init__(client, statements, prefix=prefix, random=random)
        self._leasing = asyncio.Lock()

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        """Return a grant or `None` for each request, in order."""
        for request in requests:
            self._key(request.id)
        grants: list[Granted | None] = [None] * len(requests)
        remaining = list(range(len(requests)))
        while remaining:
            # One statement can lease runs only for one owner and one `instead_of`, and each run
            # once.
            batch_key = _batch_key(requests[remaining[0]])
            batch = {
                requests[index].id: index
                for index in reversed(remaining)
                if _batch_key(requests[index]) == batch_key
            }
            batch_grants = await self._acquire_batch([requests[index] for index in batch.values()])
            for id, index in batch.items():
                grants[index] = batch_grants.get(id)
            remaining = [index for index in remaining if batch.get(requests[index].id) != index]
        return grants

    async def owners(self, ids: Sequence[str]) -> list[Ownership | None]:
        """Return the owner of each run; `None` for a missing run."""
        keys = [self._key(id) for id in ids]
        ownerships: dict[str, Ownership] = {}
        for chunk in chunks(keys):
            ownerships |= await self._owners(chunk)
        return [ownerships.get(key) for key in keys]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        """Extend all leases; return `None` for each that was lost."""
        renewed_leases: dict[tuple[str, str, int], Lease] = {}
        for chunk in chunks(leases):
            values = self._lease_values(chunk)
            await self._run_many(sql.RENEW, len(chunk), to_micros(ttl), *values)
            result = await self._run_many(sql.RENEWED_LEASES, len(chunk), *values)
            for key, owner, epoch, wake_at, messages in result.rows:
                id, expires_at = self._id(key), from_microseconds(wake_at)
                renewed_leases[id, owner, epoch] = Lease(id, owner, epoch, expires_at, messages > 0)
        return [renewed_leases.get((lease.id, lease.owner, lease.epoch)) for lease in leases]

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release the leases."""
        for chunk in chunks(leases):
            values = (micros_or_none(wake_at), *self._lease_values(chunk))
            await self._run_many(sql.RELEASE, len(chunk), *values)

    async def _acquire_batch(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        grants: dict[str, Granted] = {}
        # Sorted, so that concurrent statements lock runs in the same order.
        for chunk in chunks(sorted(requests, key=lambda request: request.id)):
            remaining: Sequence[LeaseRequest] = chunk
            while remaining:
                grants |= await self._create([one for one in remaining if one.create is not None])
                remaining = [one for one in remaining if one.existing and one.id not in grants]
                remaining = await self._lease(remaining, grants) if remaining else ()
        return grants

    async def _create(self, requests: Sequence[LeaseRequest]) -> dict[str, Granted]:
        if not requests:
            return {}
        creator = self._new_ticket()
        by_key = {self._key(request.id): request for request in requests}
        rows = [leased_row(key, request) for key, request in by_key.items()]
        if not await self._insert(rows, creator):
            return {}
        result = await self._run_many(sql.LEASED_RUNS, len(by_key), *by_key, creator)
        grants: dict[str, Granted] = {}
        for key, epoch, wake_at, _, _, now, _, version in result.rows:
            request = by_key[key]
            lease = Lease(request.id, request.owner, epoch, from_microseconds(wake_at))
            snapshot: Any = codec.loads(request.create or b"")
            at = from_microseconds(now)
            grants[request.id] = Grant(lease, snapshot, at, created=True, version=version)
        return grants

    async def _lease(
        self, requests: Sequence[LeaseRequest], grants: dict[str, Granted]
    ) -> Sequence[LeaseRequest]:
        """Lease unowned runs and add their grants; return the requests that are worth retrying."""
        keys = [self._key(request.id) for request in requests]
        owner, ttl, instead_of = _batch_key(requests[0])
        ticket = self._new_ticket()
        values = (instead_of, owner, ticket, to_micros(ttl), *keys, owner, instead_of)
        # One call at a time: concurrent calls of one owner for the same run would keep replacing
        # each other's tickets.
        async with self._leasing:
            await self._run_many(sql.LEASE, len(keys), *values)
            grants |= await self._read_grants(keys, owner, ticket)
        if all(request.id in grants for request in requests):
            return ()
        owners = await self._owners(keys)
        return [
            request
            for request, key in zip(requests, keys, strict=True)
            if request.id not in grants and _may_retry(request, owners.get(key))
        ]

    async def _owners(self, keys: Sequence[str]) -> dict[str, Ownership]:
        """Return the owner of each existing run, by key."""
        result = await self._run_many(sql.OWNERS, len(keys), *keys)
        return {
            # The wake time of an unowned run is not the end of a lease.
            key: Ownership(owner, None if owner is None else from_microseconds(wake_at))
            for key, owner, wake_at in result.rows
        }

    async def _read_grants(
        self, keys: Sequence[str], owner: str, ticket: str
    ) -> dict[str, Granted]:
        result = await self._run_many(sql.LEASED_RUNS, len(keys), *keys, ticket)
        leased_keys = [row[0] for row in result.rows]
        if not leased_keys:
            return {}
        inboxes = await self._inboxes(leased_keys)
        # Read last: if the epoch is still the newest, everything was read under the lease.
        journals = await self._journals(leased_keys)
        grants: dict[str, Granted] = {}
        for key, epoch, wake_at, takeovers, snapshot, now, queue, version in result.rows:
            if (key, epoch) not in journals:
                continue
            id, inbox = self._id(key), tuple(inboxes.get(key, ()))
            lease = Lease(id, owner, epoch, from_microseconds(wake_at), bool(inbox))
            read = partial(read_run, id, snapshot, journals[key, epoch])
            at = from_microseconds(now)
            grants[id] = read_grant(lease, read, at, inbox, takeovers, queue=queue, version=version)
        return grants

    async def _journals(self, keys: Sequence[str]) -> dict[tuple[str, int], list[str]]:
        """Return the entries of runs in order, by key and newest epoch."""
        journals: dict[tuple[str, int], list[str]] = defaultdict(list)
        result = await self._run_many(sql.JOURNALS, len(keys), *keys)
        for key, epoch, data in result.rows:
            journals[key, epoch] += [] if data is None else [data]
        return journals

    def _lease_values(self, leases: Sequence[Lease]) -> list[object]:
        values: list[object] = []
        for lease in sorted(leases, key=lambda lease: lease.id):
            values += self._key(lease.id), lease.owner, lease.epoch
        return values


def _batch_key(request: LeaseRequest) -> tuple[str, timedelta, str | None]:
    return request.owner, request.ttl, request.instead_of


def _may_retry(request: LeaseRequest, current: Ownership | None) -> bool:
    if current is None:
        # Neither created nor found: the run was deleted in the meantime.
        return request.create is not None
    # Another call of the same owner replaced the ticket.
    return current.owner == request.owner
