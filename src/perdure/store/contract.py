"""The store contract: what a store of runs must do, in small protocols.

A *run* is a snapshot plus the journal of what happened since; `load` returns
`merge_snapshots(snapshot, *journal)`. Five methods make a store (`Store`). Each further ability is
a protocol of its own, and a store declares which of them it has in one `Capabilities` value. The
engine reads the declaration and never guesses. The docstrings here are the law; each sentence has a
check in `perdure.testing.conformance`.

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
    Drivable,
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
    Verdict,
)


class Store(Protocol):
    """The five methods of every store.

    A store with more abilities also has an attribute `capabilities`; one without it is assumed to
    have these five and nothing else.
    """

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`: its previous state, journal included, is gone.

        On a store with a journal the run's lease ends and its epoch increases, so that the previous
        owner is fenced out.
        """
        ...

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the merged snapshot, its steps in the order they were recorded, or `None`."""
        ...

    async def delete(self, id: str, /) -> object:
        """Delete the run with its journal, lease and inbox; a missing run is not an error.

        The stores of this package return whether the run existed. An epoch of a deleted run stays
        stale forever, even when the id is used again.
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
        begins with it. `after` is the `cursor` of the last run of the previous page: no run that
        stays unchanged is skipped or repeated.
        """
        ...

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open.

        A second call does nothing.
        """
        ...


class JournalStore(Store, Protocol):
    """A store that accepts small fenced writes of many runs at once."""

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one transaction or pipeline; return a verdict on each, in order.

        An entry is accepted when its epoch is the run's newest and is open, fenced when its epoch
        is older or closed, unknown when there is no such run; a refused entry does not affect the
        others. A rest closes its epoch, and so does the release of its lease. An expired lease
        closes nothing until another owner takes over the run. Accepted means durable as
        `capabilities.survives` says. While its epoch is the newest, open or closed, an entry sent
        again (same id, epoch and n) is accepted and changes nothing, and so is one whose `n` is not
        above that of the rest. Afterwards, `load` returns the merge of everything appended, in
        order.
        """
        ...


class LeaseStore(Store, Protocol):
    """A store that grants a run to one owner at a time."""

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        """Return for each request its lease and the run read under it, or the reason why not.

        A request is not granted when another owner's lease is unexpired, or when the run is missing
        and the request has no `create`. A lease that the same owner already holds is granted again,
        so that a request can be repeated after its answer was lost. A refusal names the owner of an
        unexpired lease and its expiry.

        The epoch increases with each acquisition and is never used twice for one id, even after
        `delete`. An unexpired lease is never stolen, unless the request names exactly its owner in
        `instead_of`; an expired one can be taken over. From the moment of the grant every entry of
        an older epoch is refused or ignored. A granted run has the status running until its next
        rest. A run that cannot be read is refused, is not leased, and affects no other request.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; return `None` for each that was lost.

        All are renewed in one statement. An expired lease is renewed until another owner takes over
        the run; a lease that was taken over never is.
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

    A store without the capability `queues` has no runs in queues, and accepts only `queues=None`.
    """

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim, all in one write, with the status queued.

        Return `False` for each id that existed already; that run stays unchanged. Runs of one call
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
        drives: Sequence[Drivable] | None = None,
        queues: Mapping[str, int] | None = None,
    ) -> Sequence[Due]:
        """Return up to `limit` runs whose wake time is at or before `now`, earliest first.

        A run with an unexpired lease is not due. `drives` and `queues` restrict the result as those
        of `claim` do.
        """
        ...

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        drives: Sequence[Drivable] | None = None,
        queues: Mapping[str, int] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due, runnable or orphaned, earliest first.

        Each run goes to one claimant only. A run is orphaned when its owner's lease has expired.
        `drives` restricts the claim to runs of these workflows whose version is 0 or in the range;
        a range that is not drivable is skipped inside the index. `queues` maps each queue to the
        most runs to claim from it, "" being the runs in no queue; without it, only those are
        claimed. A run that cannot be read is logged once and left out: another takes its place, and
        it is not claimed again until a delay has passed that grows to an hour.
        """
        ...


class QueueStore(ScheduleStore, Protocol):
    """A store whose runs can be in queues."""

    async def queues(
        self, now: datetime, limit: int, /, *, prefix: str = "", after: str = ""
    ) -> Sequence[str]:
        """Return up to `limit` queues that have runs due at `now`, by name, after the name `after`.

        Each costs one seek in an index, however many runs it has. Queues that begin with `~` are
        left out, unless `prefix` begins with it.
        """
        ...


class InboxStore(LeaseStore, Protocol):
    """A store that keeps messages for runs until they are consumed."""

    async def send(self, messages: Sequence[NewMessage], /) -> Sequence[Receipt]:
        """Put messages in the inboxes of runs, all in one write; return a receipt for each.

        A `dedup_id` that was used before for this run is a duplicate, even after the first message
        was consumed. An unowned run that awaits a message's name becomes due at once; a run whose
        rest awaits the name of an unconsumed message in its inbox is due at once. Messages to one
        run are in one order, the same for every reader, and those of one call in the call's. That a
        run is over changes neither: a message that came while it ended makes it due.

        Receipts count: when n different messages are in an inbox from which nothing was consumed,
        at least one `send` of one of them, original or repeated, has answered n or more. Arguments
        are refused, as `InvalidArgument` or `ValueTooLarge`, before any message is written.
        """
        ...

    async def inbox(
        self, id: str, /, *, after: str | None = None, limit: int | None = None
    ) -> Sequence[Message]:
        """Return the run's unconsumed messages in the order they were sent.

        `after` is the id of the last message of the previous page: pages neither skip nor repeat
        a message. A message is consumed by the entry that names it in `consumes`, in the same
        write.
        """
        ...


class TransactionStore(JournalStore, Protocol):
    """A store whose own transaction can hold a user's writes beside a step's record."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Call `work` with the store's connection in a transaction that is fenced by the epoch.

        The entry that `work` returns is written in the same transaction: all is committed, or
        nothing. With an epoch that is older or closed, `work` is not called. An exception from
        `work` rolls back and is raised unchanged, unless the connection was lost while `work` used
        it: then `StoreUnavailable` is raised from it, whatever it is, because the work itself has
        not failed.
        """
        ...


class TransactionalEnqueueStore(ScheduleStore, Protocol):
    """A store that creates runs in a transaction of the caller."""

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], /
    ) -> Sequence[Snapshot | None]:
        """Create runs as `enqueue` does, in the transaction that is open on a user's connection.

        The runs exist if and only if that transaction is committed. It is neither committed nor
        rolled back here, and the connection stays open. Return `None` for each run that was
        created, and the snapshot of each that existed already, as far as the transaction sees it:
        that run stays unchanged, and the transaction can continue. `connection` is one of the
        driver that the store uses, or one of SQLAlchemy on top of it. Without an open transaction,
        or if it leads to another database, it is refused with `InvalidArgument`, and nothing is
        written.
        """
        ...


class NotifyStore(ScheduleStore, Protocol):
    """A store that sends notifications of due runs. Notifications may be lost or duplicated."""

    def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process."""
        ...


class MaintenanceStore(Store, Protocol):
    """A store that can delete old runs and count the others."""

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

        These are runs that are completed, failed or cancelled (or only those with `status`) and
        were last updated longer ago than `older_than`, of this `workflow` and with all these `tags`
        if given. A run that is not over, or whose id begins with `~`, is never pruned. With
        `dry_run` they are counted and nothing is deleted.
        """
        ...

    async def stats(self) -> Stats:
        """Count the runs by status and queue, and find the oldest due one.

        Runs and queues that begin with `~` are left out.
        """
        ...


class SearchStore(Store, Protocol):
    """A store that finds runs by what is in their headers.

    Its verbs take no lease, write nothing, and read no snapshot.
    """

    @property
    def documents(self) -> Documents:
        """Small documents in the same database, with time to live, `replace` and `get_many`.

        No run needs them to be correct.
        """
        ...

    async def search(self, query: Query, limit: int, /, *, after: str | None = None) -> Page:
        """Return up to `limit` runs that match, the most recently updated first.

        `after` is the cursor of the previous page or of its last run. Runs found by tag are ordered
        by their creation instead, newest first. The effort is bounded: at most 20,000 runs are
        examined, and a page that ends early says how far they were.
        """
        ...

    async def summaries(self, ids: Sequence[str], /) -> Sequence[RunSummary | None]:
        """Return the summary of each run, with its revision; `None` for a missing run."""
        ...

    async def counts(self, query: Query, cap: int, /) -> Sequence[Count]:
        """Count the matching runs by workflow and status, up to `cap` in each group.

        Groups without runs are left out. A query by more than statuses and workflows examines at
        most 20,000 runs: if it ends there, all its counts are capped.
        """
        ...
