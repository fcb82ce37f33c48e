"""The public methods of a store, written once for all backends.

`StoreShell` checks arguments, measures sizes, sets the backend up on first use, reads and writes
cursors, and skips runs that cannot be read. A `Backend` contains what is specific to one database,
and may rely on checked arguments.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from perdure import codec
from perdure.clock import as_utc
from perdure.errors import InvalidArgument
from perdure.keyvalue import Documents
from perdure.snapshot import RunStatus, Snapshot, is_over, workflow_of
from perdure.store import (
    AsyncCloseable,
    Capabilities,
    Count,
    Due,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Page,
    Query,
    Receipt,
    Refusal,
    RunSummary,
    Stats,
    SupportedVersions,
    Verdict,
    check_entries,
    rest_of,
)
from perdure.stores._backend import (
    Backend,
    NotifyBackend,
    Ownership,
    PruneRequest,
    TransactionBackend,
)
from perdure.stores._checks import (
    check_messages,
    check_new_run,
    check_request,
    check_size,
    check_workflow,
)
from perdure.stores._keyvalue import StoreDocuments
from perdure.stores._lifecycle import Lifecycle
from perdure.stores._queueing import in_order, queue_limits
from perdure.stores._reading import Setbacks, Unreadable, claim_readable
from perdure.stores._searching import (
    MAX_EXAMINED,
    SearchResult,
    check_query,
    count,
    is_counted_by_index,
    page_of,
    queue_ranges,
    read_cursor,
    with_cursor,
)
from perdure.validation import check_flag, check_id, check_int, check_limit, check_prefix

OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")

B = TypeVar("B", bound=Backend)
TB = TypeVar("TB", bound=TransactionBackend)
NB = TypeVar("NB", bound=NotifyBackend)


class StoreShell(AsyncCloseable, Generic[B]):
    """A store: a backend, wrapped in what all stores have in common.

    `name` names the database in error messages. A store whose connections belong to an event loop
    cannot be used in a second one, unless `any_loop` is set.
    """

    def __init__(
        self, backend: B, name: str, capabilities: Capabilities, *, any_loop: bool = False
    ) -> None:
        self.capabilities = capabilities
        self._backend = backend
        self._setbacks = Setbacks()
        self._life = Lifecycle(name, backend.open, on_move=backend.forget_loop, any_loop=any_loop)
        self._documents_life = Lifecycle(name, backend.documents.set_up, any_loop=True)

    @property
    def documents(self) -> Documents:
        """Strings under keys in the same database, with compare-and-set and times to live.

        They open and close with the store, and are not visible to stores with another prefix. A key
        is a non-empty string of at most 512 characters; a value may be as large as a snapshot.
        Neither may contain NUL.
        """
        # Not cached: the reference cycle would delay the store's garbage collection.
        return StoreDocuments(self._backend.documents, self._documents_ready, self._check_size)

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run with `snapshot`; the run's previous owner is fenced out."""
        check_id(id)
        data = codec.dumps(snapshot)
        rest = rest_of(snapshot, len(data))
        workflow = check_workflow(workflow_of(snapshot))
        await self._life.ready()
        self._check_size(f"the snapshot of run {id!r}", data)
        await self._backend.save(id, data, workflow, rest)

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the merged snapshot, or `None` if there is no such run."""
        check_id(id)
        await self._life.ready()
        return await self._backend.load(id)

    async def delete(self, id: str, /) -> bool:
        """Delete the run with its journal, lease and inbox; return whether it existed."""
        check_id(id)
        await self._life.ready()
        return await self._backend.delete(id)

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Return up to `limit` runs, the most recently updated first."""
        statuses = () if status is None else (status,)
        workflows = () if workflow is None else (workflow,)
        query = check_query(Query(prefix=prefix, statuses=statuses, workflows=workflows))
        result = SearchResult((), read_cursor(after))
        runs: list[RunSummary] = []
        check_limit(limit)
        await self._life.ready()
        while len(runs) < limit:
            result = await self._backend.search(query, limit - len(runs), result.stopped_at)
            runs += (with_cursor(query, run) for run in result.runs)
            if result.stopped_at is None:
                break
        return runs

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open."""
        if self._life.close():
            await self._backend.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries together and return a verdict on each, in order."""
        # Called for every step: checking first avoids creating a coroutine.
        if not self._life.is_ready:
            await self._life.ready()
        check_entries(entries, self._max_value_size)
        return await self._backend.append(entries) if entries else []

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        """Return a lease and the run read under it, or a refusal, for each request."""
        if not self._life.is_ready:
            await self._life.ready()
        for request in requests:
            check_request(request, self._max_value_size)
        if not requests:
            return []
        answers = await self._backend.acquire(requests)
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        if len(grants) == len(answers):
            return grants
        unreadable = [answer for answer in answers if isinstance(answer, Unreadable)]
        if unreadable:
            await self._postpone(unreadable)
        refused_ids = [
            request.id
            for request, answer in zip(requests, answers, strict=True)
            if not isinstance(answer, Grant)
        ]
        # An extra query, but only after a refusal, which is rare. The owner may have changed in the
        # meantime; this is safe, because a takeover with `instead_of` compares the owner again.
        owners = await self._backend.owners(refused_ids) if refused_ids else ()
        ownerships = dict(zip(refused_ids, owners, strict=True))
        return [
            answer if isinstance(answer, Grant) else _refusal(request, answer, ownerships)
            for request, answer in zip(requests, answers, strict=True)
        ]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Extend all leases to `ttl` from now; return `None` for each that was lost."""
        await self._life.ready()
        return await self._backend.renew(leases, ttl) if leases else []

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Release the leases without a rest, so that the runs can be claimed at `wake_at`."""
        at = None if wake_at is None else as_utc(wake_at, "wake_at")
        await self._life.ready()
        if leases:
            await self._backend.release(leases, at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; return `False` for each id that already existed."""
        await self._life.ready()
        for run in runs:
            check_new_run(run, self._max_value_size)
        return await self._backend.enqueue(in_order(runs)) if runs else []

    async def due(
        self,
        now: datetime,
        limit: int,
        /,
        *,
        supports: Sequence[SupportedVersions] | None = None,
        queues: Mapping[str, int] | None = None,
    ) -> Sequence[Due]:
        """Return up to `limit` runs whose wake time is at or before `now`, earliest first."""
        at, limits = as_utc(now, "now"), queue_limits(queues, check_limit(limit))
        await self._life.ready()
        if not limits or _is_empty(supports):
            return []
        return await self._backend.due(at, limit, supports, limits)

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        supports: Sequence[SupportedVersions] | None = None,
        queues: Mapping[str, int] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due or orphaned, earliest first."""
        check_id(owner, "owner")
        limits = queue_limits(queues, check_limit(limit))
        await self._life.ready()
        if not limits or _is_empty(supports):
            return []
        return await claim_readable(
            lambda count, queues: self._backend.claim(owner, ttl, count, supports, queues),
            limit,
            limits,
            self._postpone,
        )

    async def queues(
        self, now: datetime, limit: int, /, *, prefix: str = "", after: str = ""
    ) -> Sequence[str]:
        """Return up to `limit` queues that have due runs, by name, after the name `after`."""
        at = as_utc(now, "now")
        check_prefix(after, "after")
        check_limit(limit)
        await self._life.ready()
        names: list[str] = []
        for low, high in queue_ranges(check_prefix(prefix), after):
            if len(names) < limit:
                names += await self._backend.queues(at, limit - len(names), low, high)
        return names

    async def send(self, messages: Sequence[NewMessage], /) -> Sequence[Receipt]:
        """Put messages in the inboxes of runs; unowned runs that await them become due."""
        await self._life.ready()
        check_messages(messages, self._max_value_size)
        return await self._backend.send(messages) if messages else []

    async def inbox(
        self, id: str, /, *, after: str | None = None, limit: int | None = None
    ) -> Sequence[Message]:
        """Return the run's unconsumed messages in the order they were sent."""
        check_id(id)
        if after is not None:
            check_id(after, "after")
        nothing = limit is not None and check_limit(limit) == 0
        await self._life.ready()
        return [] if nothing else await self._backend.inbox(id, after, limit)

    async def prune(
        self,
        older_than: timedelta,
        /,
        *,
        status: RunStatus | None = None,
        workflow: str | None = None,
        tags: Sequence[str] = (),
        limit: int = 1000,
        dry_run: bool = False,
    ) -> int:
        """Delete up to `limit` runs that are over and older than `older_than`; return how many."""
        statuses = OVER if status is None else (status,) if is_over(status) else ()
        check_workflow(workflow)
        check_flag(dry_run, "dry_run")
        for tag in tags:
            check_id(tag, "tags")
        check_limit(limit)
        await self._life.ready()
        if not limit or not statuses:
            return 0
        request = PruneRequest(older_than, statuses, workflow, tuple(tags), limit, dry_run)
        return await self._backend.prune(request)

    async def stats(self) -> Stats:
        """Count the runs by status and queue, and find the oldest due run."""
        await self._life.ready()
        return await self._backend.stats()

    async def search(self, query: Query, limit: int, /, *, after: str | None = None) -> Page:
        """Return up to `limit` runs that match, and how to continue."""
        query, position = check_query(query), read_cursor(after)
        check_limit(limit)
        await self._life.ready()
        if not limit:
            return Page((), after)
        return page_of(query, await self._backend.search(query, limit, position), limit)

    async def summaries(self, ids: Sequence[str], /) -> Sequence[RunSummary | None]:
        """Return the summary of each run, with its revision; `None` for a missing run."""
        for id in ids:
            check_id(id, "ids")
        await self._life.ready()
        return await self._backend.summaries(ids) if ids else []

    async def counts(self, query: Query, cap: int, /) -> Sequence[Count]:
        """Count the matching runs by workflow and status, up to `cap` in each group."""
        query = check_query(query)
        check_int(cap, "cap")
        await self._life.ready()
        if is_counted_by_index(query):
            return await self._backend.counts(query, cap)
        result = await self._backend.search(query, MAX_EXAMINED, None)
        is_partial = result.stopped_at is not None or len(result.runs) == MAX_EXAMINED
        counts = count(result.runs, query, cap)
        return [replace(each, capped=True) for each in counts] if is_partial else counts

    async def _documents_ready(self) -> None:
        await self._life.ready()
        await self._documents_life.ready()

    @property
    def _max_value_size(self) -> int:
        """The largest value that the backend accepts; known once it is set up."""
        return self.capabilities.max_value_size

    def _check_size(self, what: str, data: bytes) -> None:
        check_size(what, data, self._max_value_size)

    async def _postpone(self, unreadable: Sequence[Unreadable]) -> bool:
        return await self._setbacks.postpone(unreadable, self.release)


class TransactionShell(StoreShell[TB]):
    """A store with transactions."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Commit what `work` writes on the store's connection together with the entry it returns.

        If the epoch is old or closed, `work` is not called.
        """
        check_id(id)
        await self._life.ready()

        async def checked_work(connection: Any) -> Entry:
            entry = await work(connection)
            if (entry.id, entry.epoch) != (id, epoch):
                raise InvalidArgument("work", entry, f"an entry of run {id!r} and epoch {epoch}")
            check_entries([entry], self._max_value_size)
            return entry

        return await self._backend.transact(id, epoch, checked_work)


class NotifyShell(StoreShell[NB]):
    """A store that sends notifications."""

    async def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process; end when the store closes."""
        await self._life.ready()
        # Closed explicitly, not by the garbage collector, because it may hold a connection.
        async with aclosing(self._backend.notifications()) as notifications:
            async for notification in notifications:
                yield notification


def _is_empty(supports: Sequence[SupportedVersions] | None) -> bool:
    return supports is not None and not supports


def _refusal(
    request: LeaseRequest, answer: Unreadable | None, owners: Mapping[str, Ownership | None]
) -> Refusal:
    if answer is not None:
        return Refusal(request.id, "unreadable", error=str(answer.error))
    ownership = owners[request.id]
    if ownership is None:
        return Refusal(request.id, "missing")
    if not request.existing:
        return Refusal(request.id, "exists", *ownership)
    return Refusal(request.id, "owned", *ownership)
