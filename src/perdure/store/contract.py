"""The store contract: what a store must do, as a set of small protocols.

A *run* is a snapshot plus a journal of the changes made since; `load` returns
`merge_snapshots(snapshot, *journal)`. A store needs five methods (`Store`). Every other ability is
a separate protocol; a store declares the ones it implements in a `Capabilities` value. The engine
reads that declaration and never guesses. The docstrings here are the law; each sentence has a check
in `perdure.testing.conformance`.

The *header* of a run is what a store keeps beside its snapshot: workflow, status, queue, version,
tags, summary and wake time. Queue, version, tags and summary are written when a run is created and
by rests, never by other entries.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from perdure.keyvalue import Documents
from perdure.snapshot import RunStatus, Snapshot
from perdure.store.records import (
    Count,
    Due,
    Entry,
    Grant,
    Handoff,
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
)


class Store(Protocol):
    """The five methods of every store.

    A store with more abilities also has an attribute `capabilities`. Without that attribute, a
    store is assumed to have only these five methods.
    """

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run with `snapshot`, including its journal.

        On a store with a journal the run's lease ends and its epoch increases, so that the previous
        owner is fenced out.
        """
        ...

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the merged snapshot, its steps in the order they were recorded, or `None`."""
        ...

    async def delete(self, id: str, /) -> object:
        """Delete the run with its journal, lease and inbox; a missing run is not an error.

        The built-in stores return whether the run existed. The epochs of a deleted run stay stale
        forever, even if the id is used again.
        """
        ...

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Return up to `limit` runs, the most recently updated first; 0 returns nothing.

        `prefix` is exact and case-sensitive. Ids that begin with `~` are left out, unless `prefix`
        begins with it. `after` is the `cursor` of the last run of the previous page. Runs that do
        not change between pages are neither skipped nor repeated.
        """
        ...

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open.

        A second call does nothing.
        """
        ...


class JournalStore(Store, Protocol):
    """A store that accepts small fenced writes for many runs at once."""

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one transaction or pipeline; return a verdict on each, in order.

        An entry is accepted if its epoch is the run's newest and is open, fenced if its epoch is
        older or closed, and unknown when the run does not exist. A refused entry does not affect
        the others. A rest closes its epoch, and so does releasing the lease. An expired lease does
        not close its epoch until another owner takes over the run. An accepted entry is as durable
        as `capabilities.survives` promises. While its epoch is the newest, open or closed, an entry
        that is sent again (same id, epoch and `n`) is accepted and changes nothing. The same holds
        for an entry whose `n` is not above that of the rest. Afterwards, `load` returns the merge
        of everything appended, in order.
        """
        ...


class LeaseStore(Store, Protocol):
    """A store that grants a run to one owner at a time."""

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        """Return a lease and the run read under it, or a refusal, for each request.

        A request is refused if another owner's lease has not expired, or if the run is missing and
        the request has no `create`. A lease that the same owner already holds is granted again, so
        a request can be repeated if its reply was lost. A refusal names the owner of an unexpired
        lease and its expiry.

        The epoch increases with each acquisition and is never used twice for one id, even after
        `delete`. An unexpired lease is never stolen, unless the request names exactly its owner in
        `instead_of`; an expired one can be taken over. Once the lease is granted, every entry of an
        older epoch is refused or ignored. A granted run has the status `running` until its next
        rest. A run that cannot be read is refused and not leased, and affects no other request.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; return `None` for each that was lost.

        All are renewed in one statement. An expired lease can still be renewed until another owner
        takes over the run, and never afterwards.
        """
        ...

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Release the leases without a rest, so that the runs can be claimed at `wake_at`.

        Without `wake_at` they can be claimed at once. The journal is kept, and the epoch is closed.
        Releasing a lease that is not the run's current one does nothing.
        """
        ...


class ScheduleStore(LeaseStore, Protocol):
    """A store that finds the runs that need a worker, by an index and never by a scan.

    A store without the capability `queues` accepts only `queues=None`.
    """

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim, all in one write, with the status queued.

        Return `False` for each id that already existed; that run stays unchanged. Runs of one call
        with the same wake time become due in the order of the call. A run with a `rest` is created
        in that state.
        """
        ...

    async def due(
        self,
        now: datetime,
        limit: int,
        /,
        *,
        supports: Sequence[SupportedVersions] | None = None,
        queues: Mapping[str, int] | None = None,
    ) -> Sequence[Due]:
        """Return up to `limit` runs whose wake time is at or before `now`, earliest first.

        A run with an unexpired lease is not due. `supports` and `queues` restrict the result as in
        `claim`.
        """
        ...

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
        """Lease and load up to `limit` runs that are due, runnable or orphaned, earliest first.

        Each run goes to one claimant only. A run is orphaned when its owner's lease has expired.
        `supports` restricts the claim to runs of these workflows whose version is 0 or within the
        range; other versions are skipped inside the index. `queues` maps each queue to the maximum
        number of runs to claim from it; "" stands for runs in no queue. Without `queues`, only runs
        in no queue are claimed. A run that cannot be read is logged once and skipped: another run
        takes its place, and it is not claimed again until a delay has passed, which grows to one
        hour.
        """
        ...


class QueueStore(ScheduleStore, Protocol):
    """A store whose runs can be in queues."""

    async def queues(
        self, now: datetime, limit: int, /, *, prefix: str = "", after: str = ""
    ) -> Sequence[str]:
        """Return up to `limit` queues that have runs due at `now`, by name, after the name `after`.

        Each queue costs one index seek, however many runs it has. Queues that begin with `~` are
        left out, unless `prefix` begins with it.
        """
        ...


class InboxStore(LeaseStore, Protocol):
    """A store that keeps messages for runs until the runs consume them."""

    async def send(self, messages: Sequence[NewMessage], /) -> Sequence[Receipt]:
        """Put messages in the inboxes of runs, all in one write; return a receipt for each.

        A `dedup_id` that was used before for this run is a duplicate, even after the first message
        was consumed. An unowned run that awaits a message's name becomes due at once; a run that is
        settled while an unconsumed message with an awaited name is in its inbox is due at once.
        Every reader sees the messages of a run in the same order; messages of one call keep the
        order of the call. This also holds for runs that are over: a message that arrived while the
        run ended makes it due.

        Receipts count messages: if an inbox contains n different messages and none was consumed,
        then at least one `send` of one of them, first or repeated, returned a count of n or more.
        Arguments are refused, as `InvalidArgument` or `ValueTooLarge`, before any message is
        written.
        """
        ...

    async def inbox(
        self, id: str, /, *, after: str | None = None, limit: int | None = None
    ) -> Sequence[Message]:
        """Return the run's unconsumed messages in the order they were sent.

        `after` is the id of the last message of the previous page: pages neither skip nor repeat
        a message. Anything but the id of a message is an `InvalidArgument`. A message is consumed
        by the entry that names it in `consumes`, in the same write.
        """
        ...


class HandoffStore(ScheduleStore, InboxStore, Protocol):
    """A store that can lease a run to its worker with the message that makes the run due."""

    async def send_and_claim(
        self,
        messages: Sequence[NewMessage],
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        supports: Sequence[SupportedVersions],
    ) -> Handoff:
        """Send messages like `send`, and lease runs that they make due, all in one write.

        Up to `limit` runs that await a message of this call are granted to `owner`, as `claim`
        grants them: only runs in no queue, whose workflow and version `supports` includes. A grant
        contains the messages of the call, if they are in its first page. The store may leave runs
        due instead of granting them, except the run of a single small message without a `dedup_id`.
        A run that cannot be read is not granted, and treated as by `claim`; its messages are sent.
        """
        ...


class TransactionStore(JournalStore, Protocol):
    """A store that can commit a user's writes and a step's record in one transaction."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Call `work` with the store's connection, in a transaction fenced by the epoch.

        The entry that `work` returns is written in the same transaction: either everything is
        committed or nothing is. If the epoch is old or closed, `work` is not called. An exception
        from `work` rolls the transaction back and is raised unchanged. But if the connection was
        lost while `work` used it, `StoreUnavailable` is raised from that exception, because the
        work itself has not failed.
        """
        ...


class TransactionalEnqueueStore(ScheduleStore, Protocol):
    """A store that can create runs in the caller's transaction."""

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], /
    ) -> Sequence[Snapshot | None]:
        """Create runs like `enqueue`, in the transaction that is open on the user's connection.

        The runs exist if and only if that transaction is committed. It is neither committed nor
        rolled back here, and the connection stays open. Return `None` for each run that was
        created, and for each run that already existed its snapshot as the transaction sees it: that
        run stays unchanged, and the transaction can continue. `connection` is a connection of the
        store's driver, or a SQLAlchemy connection or session on top of it. If it has no open
        transaction, or is connected to another database, `InvalidArgument` is raised and nothing is
        written.
        """
        ...


class NotifyStore(ScheduleStore, Protocol):
    """A store that sends notifications of due runs. Notifications may be lost or duplicated."""

    def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process."""
        ...


class MaintenanceStore(Store, Protocol):
    """A store that can delete old runs and count runs."""

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
        """Delete up to `limit` runs that are over; return how many were deleted.

        A run is over if it is completed, failed or cancelled. Only runs that were last updated
        longer ago than `older_than` are deleted; `status`, `workflow` and `tags` (all of them must
        match) restrict this further. Runs that are not over, and runs whose ids begin with `~`, are
        never pruned. With `dry_run`, matching runs are counted and nothing is deleted.
        """
        ...

    async def stats(self) -> Stats:
        """Count the runs by status and queue, and find the oldest due run.

        Runs and queues that begin with `~` are left out.
        """
        ...


class SearchStore(Store, Protocol):
    """A store that finds runs by their headers.

    Its methods take no lease, write nothing, and read no snapshot.
    """

    @property
    def documents(self) -> Documents:
        """Small documents in the same database, with a time to live, `replace` and `get_many`.

        No run depends on them for correctness.
        """
        ...

    async def search(self, query: Query, limit: int, /, *, after: str | None = None) -> Page:
        """Return up to `limit` runs that match, the most recently updated first.

        `after` is the cursor of the previous page or of its last run. Runs found by tag are ordered
        by their creation instead, newest first. The effort is bounded: at most 20,000 runs are
        examined, and a page that ends early says up to which time.
        """
        ...

    async def summaries(self, ids: Sequence[str], /) -> Sequence[RunSummary | None]:
        """Return the summary of each run, with its revision; `None` for a missing run."""
        ...

    async def counts(self, query: Query, cap: int, /) -> Sequence[Count]:
        """Count the matching runs by workflow and status, up to `cap` in each group.

        Groups without runs are left out. A query that filters by more than status and workflow
        examines at most 20,000 runs; if it stops there, all its counts are capped.
        """
        ...
