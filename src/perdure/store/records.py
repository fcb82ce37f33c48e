"""What a store and the engine exchange: frozen records, each one argument or answer of a verb.

Ids are non-empty strings of up to 512 characters without NUL; those that begin with `~` belong to
the engine. Times are aware UTC datetimes of the store's own clock: the database's, if there is one.
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
"""How many bytes a summary has at most."""

INBOX_PAGE = 1000
"""How many messages a grant contains at most; `InboxStore.inbox` reads the others."""


class Capabilities(msgspec.Struct, frozen=True):
    """What a store can do. Declared once, read by the engine, checked by the conformance kit."""

    journal: bool = False
    lease: Literal["none", "best_effort", "atomic"] = "none"
    schedule: bool = False
    queues: bool = False
    inbox: bool = False
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
    """One run as lists and searches return it, without its snapshot.

    `wake_at` is when the run is due; while it has an owner, when the owner's lease expires, which
    may have happened. `summary` is what the engine stored about the run (`perdure.snapshot.summary`
    reads it). `cursor` continues a list after this run. `revision` is set by `summaries` alone: it
    differs after every grant, release, entry, rest and message.
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
    """Which runs to find; a run must match every field that is set.

    `statuses` and `workflows` match any of their members, `tags` must all be on the run. `since`
    (inclusive) and `until` (exclusive) are about the last update. Ids that begin with `~` are found
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

    `cursor` continues the search; `None` means that there is nothing more. A page can have few runs
    or none although the search is not at its end: `searched_until` is then the time (of update, or
    of creation in a search by tag) up to which runs were examined.
    """

    runs: tuple[RunSummary, ...]
    cursor: str | None = None
    searched_until: datetime | None = None


class Count(msgspec.Struct, frozen=True):
    """How many runs have this workflow and status; if `capped`, there are at least so many."""

    workflow: str | None
    status: RunStatus
    count: int
    capped: bool = False


class Lease(msgspec.Struct, frozen=True):
    """The right to write a run, until `expires_at` or until another owner takes the run over.

    `epoch` is the fencing token of its writes; the next owner's is higher. `has_messages` is
    whether there were unconsumed messages in the run's inbox when the lease was granted or renewed.
    """

    id: str
    owner: str
    epoch: int
    expires_at: datetime
    has_messages: bool = False


class Message(msgspec.Struct, frozen=True):
    """One event in a run's inbox that was not consumed yet. `payload` is JSON."""

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
    """The outcome of one message: in the inbox, a duplicate, no such run, or the run is over."""

    DELIVERED = "delivered"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    OVER = "over"


class Receipt(msgspec.Struct, frozen=True):
    """The outcome of one message, and how many unconsumed messages the inbox then had.

    The number is 0 if the run is unknown or over.
    """

    delivery: Delivery
    unconsumed: int = 0


class Rest(msgspec.Struct, frozen=True):
    """The state of a run that no process owns.

    `wake_at` is when the run should be claimed (`None`: never by time). `awaits` are the names of
    the events that wake it sooner. A run with the status paused has no `wake_at`: only an event in
    its `awaits` wakes it, or an owner that acquires it. With `delete` nothing is left of the run:
    it is deleted, as by `delete`, in the same fenced write. `version`, `tags` and `summary` replace
    the stored ones; `None` leaves them as they are.
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
    stays unchanged. `workflow`, `version`, `tags` and `summary` are those of a new run, which is in
    no queue. `instead_of` is an owner whose process is known to be gone: its lease is taken over
    although it is unexpired.
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
    """Why a lease was not granted: another owner has it, or the run is missing, exists already, or
    cannot be read.

    `owner` and `expires_at` are those of the unexpired lease, as far as it still exists. `error`
    says why the run cannot be read.
    """

    id: str
    reason: Literal["owned", "missing", "exists", "unreadable"]
    owner: str | None = None
    expires_at: datetime | None = None
    error: str = ""


class NewRun(msgspec.Struct, frozen=True):
    """A run to be created unowned: `snapshot` is JSON.

    Without `wake_at` the run is due at once, in the order in which runs were enqueued (calls within
    a few milliseconds have no order); a `head_start` orders it as if it had been enqueued that much
    earlier. `queue` is empty, a name
    ("emails"), or a name and a key ("emails/customer-42"). `version` is that of the workflow's
    definition, from 1; with 0, the first owner determines it. `tags` are sorted strings
    "name=value". With `rest` the run is created in that state instead of queued.
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


class Drivable(msgspec.Struct, frozen=True):
    """The versions of a workflow that a worker can drive, both ends included."""

    workflow: str
    first: int
    last: int


class Grant(msgspec.Struct, frozen=True):
    """A lease together with everything its owner needs to continue, read under that lease.

    `now` is the store's time of the grant. `inbox` has the first messages, at most `INBOX_PAGE` of
    them. `takeovers` counts consecutive owners that lost their lease without writing an entry: it
    expired, or was taken over. Any accepted entry resets it to zero, and so does a rest; a release
    without an entry neither counts nor resets.
    """

    lease: Lease
    snapshot: Snapshot
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False
    queue: str = ""
    version: int = 0


class Entry(msgspec.Struct, frozen=True):
    """One write of a run's owner, fenced by its epoch.

    Without `rest`, `data` is a snapshot delta that is added to the journal as entry `n` of the
    epoch. With `rest`, `data` is the whole snapshot: it replaces snapshot and journal in one atomic
    write, the run is stored as `rest` says, the lease is given up and the epoch is closed.
    `consumes` are the ids of inbox messages that this write consumes.
    """

    id: str
    epoch: int
    n: int
    data: bytes
    consumes: tuple[str, ...] = ()
    rest: Rest | None = None
    step: str = ""


class Verdict(Enum):
    """The outcome of one entry: written, refused because its epoch is stale, or no such run."""

    ACCEPTED = "accepted"
    FENCED = "fenced"
    UNKNOWN = "unknown"


class Due(msgspec.Struct, frozen=True):
    """A run whose wake time has passed."""

    id: str
    wake_at: datetime


class QueueStats(msgspec.Struct, frozen=True):
    """The runs of one queue, all its keys together: due, owned, and the oldest due wake time.

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
