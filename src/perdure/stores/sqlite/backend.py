"""The backend of stores with the SQLite schema, for any transport: a file, or a libSQL server."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from perdure import codec
from perdure.snapshot import Snapshot
from perdure.store import (
    Count,
    Due,
    Entry,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Query,
    Receipt,
    Rest,
    RunSummary,
    Stats,
    SupportedVersions,
    Verdict,
)
from perdure.stores._awaitly import as_snapshot
from perdure.stores._backend import Ownership, PruneRequest
from perdure.stores._handoff import Claimant
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted, merge_journal, read_grant, reading
from perdure.stores._searching import Position, SearchResult
from perdure.stores.sqlite.handoff import HandoffVerbs, SentAndLeased
from perdure.stores.sqlite.inbox import InboxVerbs
from perdure.stores.sqlite.keyvalue import KeyValueTable
from perdure.stores.sqlite.leases import LeasedRun
from perdure.stores.sqlite.runs import RunVerbs, Verb
from perdure.stores.sqlite.schedule import ScheduleVerbs
from perdure.stores.sqlite.search import SearchVerbs
from perdure.stores.sqlite.statements import Statements
from perdure.stores.sqlite.transaction import Session, Transaction
from perdure.validation import check_prefix

T = TypeVar("T")

# A larger write is not committed on the event loop, however fast the disk is.
_SMALL = 64 * 1024


class SqliteSchemaBackend(ABC):
    """Runs operations, and turns their results into records."""

    def __init__(self, statements: Statements, prefix: str, now: Callable[[], int | None]) -> None:
        self._runs = RunVerbs(statements, check_prefix(prefix), now)
        self._leases = ScheduleVerbs(statements, prefix, now)
        self._inboxes = InboxVerbs(statements, prefix, now)
        self._handoffs = HandoffVerbs(statements, prefix, now)
        self._searches = SearchVerbs(statements, prefix, now)
        table = f"{statements.table}_documents"
        self.documents = KeyValueTable(self._read, self._write, table, now, scope_of(prefix))

    @abstractmethod
    async def _write(
        self,
        verb: Callable[[], Verb[T]],
        *,
        repeatable: bool = False,
        inline: bool = False,
    ) -> T:
        """Run an operation and return its result once it is committed.

        A `repeatable` operation may be run again if its reply is lost, because it is fenced or
        numbered. An `inline` operation is a single small write.
        """

    @abstractmethod
    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        """Run an operation that only reads, and return its result."""

    @abstractmethod
    async def _session(self) -> Session:
        """Return a transaction that has not begun yet."""

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        await self._write(partial(self._runs.save, id, data, workflow, rest))

    async def load(self, id: str) -> Snapshot | None:
        run = await self._read(partial(self._runs.load, id))
        return None if run is None else read_run(id, *run)

    async def delete(self, id: str) -> bool:
        return await self._write(partial(self._runs.delete, id))

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        verb = partial(self._runs.append, entries)
        inline = len(entries) == 1 and len(entries[0].data) < _SMALL
        return await self._write(verb, repeatable=True, inline=inline)

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        verb = partial(self._leases.acquire, requests)
        inline = len(requests) == 1 and len(requests[0].create or b"") < _SMALL
        runs = await self._write(verb, inline=inline)
        return [one and as_grant(one) for one in runs]

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        return await self._read(partial(self._leases.owners, ids))

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        return await self._write(partial(self._leases.renew, leases, ttl), repeatable=True)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        await self._write(partial(self._leases.release, leases, wake_at), repeatable=True)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        return await self._write(partial(self._leases.enqueue, runs))

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]:
        return await self._read(partial(self._leases.due, now, limit, supports, queues))

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        return await self._claim(partial(self._leases.claim, owner, ttl, limit, supports, queues))

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        return await self._read(partial(self._leases.queues, now, limit, low, high))

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        verb = partial(self._inboxes.send, messages)
        return await self._write(verb, inline=_is_small(messages))

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        return await self._hand_off(
            partial(self._handoffs.send_and_claim, messages, claimant),
            inline=_is_small(messages),
        )

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        return await self._read(partial(self._inboxes.inbox, id, after, limit))

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict:
        # Other writes of this store wait until it is over, so `work` must not call the store.
        session = await self._session()
        try:
            verdict = await session.begin(partial(self._runs.fence, id, epoch))
            if verdict is Verdict.ACCEPTED:
                entry = await session.enter(work, Transaction(session))
                # If the entry already existed, so did the user's writes, and these are rolled back.
                await session.finish(partial(self._runs.record, entry))
            return verdict
        finally:
            await session.end()

    async def prune(self, request: PruneRequest) -> int:
        verb = partial(self._searches.prune, request)
        return await (self._read(verb) if request.dry_run else self._write(verb))

    async def stats(self) -> Stats:
        return await self._read(self._searches.stats)

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await self._read(partial(self._searches.search, query, limit, after))

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        return await self._read(partial(self._searches.summaries, ids))

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        return await self._read(partial(self._searches.counts, query, cap))

    async def _claim(self, verb: Callable[..., Verb[Sequence[LeasedRun]]]) -> Sequence[Granted]:
        return [as_grant(one) for one in await self._write(verb)]

    async def _hand_off(
        self, verb: Callable[[], Verb[SentAndLeased]], *, inline: bool = False
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        receipts, runs = await self._write(verb, inline=inline)
        return receipts, [as_grant(one) for one in runs]


def _is_small(messages: Sequence[NewMessage]) -> bool:
    return len(messages) == 1 and len(messages[0].payload) < _SMALL


def read_run(id: str, parts: Sequence[bytes], updated_at: datetime) -> Snapshot:
    """Return a run's snapshot, merged with the entries after it."""
    with reading(id):
        deltas: Any = codec.loads(b"[%s]" % b",".join(parts[1:]))
        return merge_journal(as_snapshot(codec.loads(parts[0]), updated_at), *deltas)


def as_grant(run: LeasedRun) -> Granted:
    """Return the grant of a leased run, or `Unreadable` if it cannot be read."""
    lease, now = run.lease, run.now
    return read_grant(
        lease,
        partial(read_run, lease.id, run.parts, now),
        now,
        run.inbox,
        run.takeovers,
        run.created,
        queue=run.queue,
        version=run.version,
    )
