"""Frozen records that the store and the engine exchange, as arguments and results.

Ids are non-empty strings of up to 512 characters without NUL; those that begin with `~` belong to
the engine. Times are aware UTC datetimes by the store's own clock: the database server's, if there
is one.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import Literal

import msgspec

from perdure.snapshot import RunStatus, Snapshot
from perdure.validation import check_int

MAX_VALUE_SIZE = 16 * 1024 * 1024

MAX_SUMMARY_SIZE = 1024
"""The maximum size of a summary in bytes."""

INBOX_PAGE = 1000
"""The maximum number of messages in a grant; `InboxStore.inbox` reads the others."""


class Capabilities(msgspec.Struct, frozen=True):
    """What a store can do. The engine relies on it, and the conformance kit checks it."""

    journal: bool = False
    lease: Literal["none", "best_effort", "atomic"] = "none"
    schedule: bool = False
    queues: bool = False
    inbox: bool = False
    handoff: bool = False
    transaction: bool = False
    transactional_enqueue: bool = False
    notify: bool = False
    maintenance: bool = False
    search: bool = False
    shared: Literal["process", "machine", "network"] = "process"
    survives: Literal["nothing", "process_crash", "power_loss"] = "nothing"
    max_value_size: int = MAX_VALUE_SIZE

    def __post_init__(self) -> None:
        check_int(self.max_value_size, "max_value_size")


class RunSummary(msgspec.Struct, frozen=True):
    """A run in the result of a list or search, without its snapshot.

    `wake_at` is when the run is due or, while it has an owner, when the owner's lease expires
    (possibly in the past). `summary` is the engine's summary of the run (`perdure.snapshot.summary`
    reads it). `cursor` continues a list after this run. `revision` is set only by `summaries`: it
    changes with every grant, release, entry, rest and message.
    """

    id: str
    updated_at: datetime
    status: RunStatus = "running"
    workflow: str | None = None
    cursor: str = ""
    owner: str | None = None
    version: int = 0
    queue: str = ""
    tags: tuple[str, ...] = ()
    summary: bytes = b""
    created_at: datetime | None = None
    wake_at: datetime | None = None
    awaits: tuple[str, ...] = ()
    takeovers: int = 0
    revision: str = ""


class Query(msgspec.Struct, frozen=True):
    """A search for runs; a run must match every field that is set.

    A run must have one of the `statuses`, one of the `workflows` and all of the `tags`. `since`
    (inclusive) and `until` (exclusive) refer to the last update. Ids that begin with `~` are found
    only with a prefix that begins with `~`.
    """

    prefix: str = ""
    statuses: tuple[RunStatus, ...] = ()
    workflows: tuple[str, ...] = ()
    queue: str | None = None
    tags: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    oldest_first: bool = False


class Page(msgspec.Struct, frozen=True):
    """One page of a search.

    `cursor` continues the search; `None` means that the search is complete. A page can have few
    runs or none before the search is complete; `searched_until` is then the time (of update, or of
    creation in a search by tag) up to which runs were examined.
    """

    runs: tuple[RunSummary, ...]
    cursor: str | None = None
    searched_until: datetime | None = None


class Count(msgspec.Struct, frozen=True):
    """How many runs have this workflow and status; if `capped`, there may be more."""

    workflow: str | None
    status: RunStatus
    count: int
    capped: bool = False


class Lease(msgspec.Struct, frozen=True):
    """The right to write a run, until `expires_at` or until another owner takes the run over.

    `epoch` is the fencing token of its writes; the next owner's is higher. `has_messages` says that
    the run's inbox had unconsumed messages when the lease was granted or renewed.
    """

    id: str
    owner: str
    epoch: int
    expires_at: datetime
    has_messages: bool = False


class Message(msgspec.Struct, frozen=True):
    """An unconsumed event in a run's inbox. `payload` is JSON."""

    id: str
    name: str
    payload: bytes
    sent_at: datetime


class NewMessage(msgspec.Struct, frozen=True):
    """An event for the run `to`. A `dedup_id` that was used before for this run is a duplicate."""

    to: str
    name: str
    payload: bytes
    dedup_id: str | None = None


class Delivery(Enum):
    """The outcome of a message: in the inbox, a duplicate, no such run, or the run is over."""

    DELIVERED = "delivered"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    OVER = "over"


class Receipt(msgspec.Struct, frozen=True):
    """The outcome of a message, and how many unconsumed messages the inbox had afterwards.

    The number is 0 if the run is unknown or over.
    """

    delivery: Delivery
    unconsumed: int = 0


class Rest(msgspec.Struct, frozen=True):
    """The state of a run that no process owns.

    `wake_at` is when the run should be claimed (`None`: never by time). `awaits` are the names of
    the events that wake it sooner. A paused run has no `wake_at`: only an awaited event wakes it,
    or an owner that acquires it. With `delete`, the run is deleted in the same fenced write.
    `version`, `tags` and `summary` replace the stored ones; `None` leaves them as they are.
    """

    status: RunStatus
    wake_at: datetime | None = None
    awaits: tuple[str, ...] = ()
    delete: bool = False
    version: int | None = None
    tags: tuple[str, ...] | None = None
    summary: bytes | None = None


class LeaseRequest(msgspec.Struct, frozen=True):
    """A request for the lease of a run.

    `create` is the JSON of a first snapshot: a missing run is created with it. Without it, a
    missing run is not granted. With `existing=False` only a new run is granted, and an existing one
    stays unchanged. `workflow`, `version`, `tags` and `summary` apply to a new run, which is in no
    queue. `instead_of` is an owner whose process is known to be gone: its lease is taken over
    before it expires.
    """

    id: str
    owner: str
    ttl: timedelta
    create: bytes | None = None
    workflow: str | None = None
    existing: bool = True
    instead_of: str | None = None
    version: int = 0
    tags: tuple[str, ...] = ()
    summary: bytes = b""


class Refusal(msgspec.Struct, frozen=True):
    """Why a lease was not granted: another owner has it, or the run is missing, already exists, or
    cannot be read.

    `owner` and `expires_at` describe the unexpired lease, if it still exists. `error` says why the
    run cannot be read.
    """

    id: str
    reason: Literal["owned", "missing", "exists", "unreadable"]
    owner: str | None = None
    expires_at: datetime | None = None
    error: str = ""


class NewRun(msgspec.Struct, frozen=True):
    """A run to be created without an owner. `snapshot` is JSON.

    Without `wake_at` the run is due at once. Such runs are claimed in the order they were enqueued
    (calls within a few milliseconds have no order); with a `head_start`, as if enqueued that much
    earlier. `queue` is empty, a name ("emails"), or a name and a key ("emails/customer-42").
    `version` is the version of the workflow's definition, starting at 1; with 0, the first owner
    determines it. `tags` are sorted strings "name=value". With `rest` the run is created in that
    state instead of queued.
    """

    id: str
    workflow: str
    snapshot: bytes
    wake_at: datetime | None = None
    head_start: timedelta = timedelta(0)
    queue: str = ""
    version: int = 0
    tags: tuple[str, ...] = ()
    summary: bytes = b""
    rest: Rest | None = None


class SupportedVersions(msgspec.Struct, frozen=True):
    """The versions of a workflow that a worker can execute, both ends included."""

    workflow: str
    first: int
    last: int


class Grant(msgspec.Struct, frozen=True):
    """A lease, with everything that its owner needs to continue the run, read under that lease.

    `now` is the store's time of the grant. `inbox` has at most the first `INBOX_PAGE` messages.
    `takeovers` counts consecutive owners whose lease expired or was taken over before they wrote an
    entry. An accepted entry or rest resets it to zero; a release without an entry leaves it
    unchanged.
    """

    lease: Lease
    snapshot: Snapshot
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False
    queue: str = ""
    version: int = 0


class Handoff(msgspec.Struct, frozen=True):
    """The receipts of messages, in order, and the grants of runs that they made due."""

    receipts: tuple[Receipt, ...]
    grants: tuple[Grant, ...] = ()


class Entry(msgspec.Struct, frozen=True):
    """A write by a run's owner, fenced by its epoch.

    Without `rest`, `data` is a snapshot delta that is added to the journal as entry `n` of the
    epoch. With `rest`, `data` is the whole snapshot: it replaces snapshot and journal in one atomic
    write, the run gets the state in `rest`, the lease is released and the epoch is closed.
    `consumes` are the ids of inbox messages that this write consumes; others are ignored.
    """

    id: str
    epoch: int
    n: int
    data: bytes
    consumes: tuple[str, ...] = ()
    rest: Rest | None = None
    step: str = ""


class Verdict(Enum):
    """The outcome of an entry: written, refused because its epoch is stale, or no such run."""

    ACCEPTED = "accepted"
    FENCED = "fenced"
    UNKNOWN = "unknown"


class Due(msgspec.Struct, frozen=True):
    """A run whose wake time has passed."""

    id: str
    wake_at: datetime


class QueueStats(msgspec.Struct, frozen=True):
    """The number of due and owned runs of a queue, over all its keys, and the oldest due wake time.

    A head start makes a wake time earlier.
    """

    due: int = 0
    leased: int = 0
    oldest_due: datetime | None = None


class Stats(msgspec.Struct, frozen=True):
    """The number of runs by status, the oldest wake time among runs that are due, and the queues
    that have due or owned runs, by name ("" for runs in no queue).
    """

    by_status: Mapping[str, int] = msgspec.field(default_factory=dict)
    oldest_due: datetime | None = None
    by_queue: Mapping[str, QueueStats] = msgspec.field(default_factory=dict)
