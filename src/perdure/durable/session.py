"""A process's use of a store: its committer, and the leases of all active runs."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from msgspec.structs import replace

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.durable.committer import Committer
from perdure.durable.in_flight import StepInFlight
from perdure.durable.owners import is_gone
from perdure.durable.permits import Permit, Permits
from perdure.durable.signals import Signals
from perdure.durable.step_limits import StepLimits
from perdure.engine.tasks import Interrupted, cancel_and_wait, detached, finish
from perdure.errors import InvalidArgument, PerdureError, StoreCorrupted, StoreError
from perdure.limits import PermitLimit
from perdure.store import (
    INBOX_PAGE,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    QueueStore,
    Refusal,
    Store,
    can_inbox,
    can_journal,
    require_inbox,
    require_lease,
)

logger = logging.getLogger(__name__)


LEASE_TTL = timedelta(seconds=30)

# Also by time to live, because one request renews all leases of a session for the same time.
_sessions: dict[tuple[int, int, timedelta], "Session"] = {}
_watchers: list[tuple[Store, asyncio.AbstractEventLoop, Callable[[str], None]]] = []
_default: list[Store] = []


class Leased(Protocol):
    """A run or a permit whose lease is renewed, if it has one."""

    @property
    def id(self) -> str: ...
    @property
    def lease(self) -> Lease | None: ...

    def update_lease(self, lease: Lease) -> None:
        """Continue with the lease's new expiry."""
        ...

    def lose(self) -> None:
        """Stop, because another process owns it."""
        ...


class LeasedRun(Leased, Protocol):
    """A run that is active in this process."""

    @property
    def entries(self) -> int: ...

    def message_came(self) -> None:
        """Check the inbox."""
        ...

    def steps_in_flight(self) -> Sequence[StepInFlight]:
        """Return the steps that are being executed."""
        ...


class Session:
    """What the runs of one store and event loop share.

    As a context manager, it counts its users; its tasks end with the last of them. `running_ids`
    counts the calls of `durable.run` by id, `keys` are the idempotency keys in use, `workers` are
    the functions that wake workers.
    """

    def __init__(self, store: Store, clock: Clock, lease_ttl: timedelta) -> None:
        self.store = store
        self.clock = clock
        self.lease_ttl = lease_ttl
        self.has_journal = can_journal(store)
        self.loop = asyncio.get_running_loop()
        self.running_ids: defaultdict[str, int] = defaultdict(int)
        self.keys: dict[str, asyncio.Event] = {}
        self.workers: set[Callable[[], None]] = set()
        self._runs: dict[str, LeasedRun] = {}
        self._permits: dict[str, Permit] = {}
        self._limits: StepLimits | None = None
        self._limit_numbers: Mapping[str, int] = {}
        self.on_idle: Callable[[], object] | None = None
        self.idle = False
        self._users = 0
        self._committer: Committer | None = None
        self._signals: Signals | None = None
        self._renewer: asyncio.Task[None] | None = None
        self._first_renewal: asyncio.TimerHandle | None = None
        self._renewal_lock = asyncio.Lock()
        self._renewed_at = 0.0

    async def __aenter__(self) -> "Session":
        self._users += 1
        if self._committer is None and can_journal(self.store):
            self._committer = Committer(self.store, require_lease(self.store))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if self._users:
            return
        # Set before anything is awaited, so that code that needs a session in the meantime gets
        # another one.
        self.idle = True
        if self.on_idle is not None:
            self.on_idle()
        renewer, self._renewer = self._renewer, None
        committer, self._committer = self._committer, None
        if self._first_renewal is not None:
            self._first_renewal.cancel()
        if self._limits is not None:
            await self._limits.close()
        if renewer is not None:
            await cancel_and_wait([renewer])
        if committer is not None:
            await committer.close()

    @property
    def committer(self) -> Committer:
        """The committer, through which every write goes."""
        assert self._committer is not None, (
            "the session is not entered, or its store has no journal"
        )
        return self._committer

    @property
    def signals(self) -> Signals:
        """Sends the signals of programs."""
        if self._signals is None:
            self._signals = Signals(require_inbox(self.store, "signal").send)
        return self._signals

    async def acquire(self, request: LeaseRequest) -> Grant | Refusal:
        """Return a lease or a refusal; a cancelled caller holds no lease.

        The lease of a process on this machine that no longer exists is taken over at once.
        """
        answer = await self._acquire(request)
        if isinstance(answer, Refusal) and answer.reason == "owned" and is_gone(answer.owner or ""):
            logger.info("run %r is taken over: its process no longer exists", request.id)
            # Only from this owner: another process may have taken the run over since.
            answer = await self._acquire(replace(request, instead_of=answer.owner))
        if isinstance(answer, Refusal) and answer.reason == "unreadable":
            raise StoreCorrupted(answer.error)
        return await self.with_inbox(answer) if isinstance(answer, Grant) else answer

    async def with_inbox(self, grant: Grant) -> Grant:
        """Return the grant with all messages; it came with only the first page.

        If they cannot be read, or the caller is cancelled, the lease is released.
        """
        if len(grant.inbox) < INBOX_PAGE:
            return grant
        try:
            messages = await self.read_inbox(grant.lease.id, grant.inbox)
        except BaseException:
            await self._release(grant.lease)
            raise
        return replace(grant, inbox=tuple(messages))

    async def read_inbox(
        self, run_id: str, known_messages: Sequence[Message] = ()
    ) -> list[Message]:
        """Read a run's unconsumed messages, page by page, after the known ones."""
        messages = list(known_messages)
        while can_inbox(self.store):
            last = messages[-1].id if messages else None
            page = await self.store.inbox(run_id, after=last, limit=INBOX_PAGE)
            messages += page
            # Only a short page is the last one: messages may arrive while pages are read.
            if len(page) < INBOX_PAGE:
                break
        return messages

    async def _acquire(self, request: LeaseRequest) -> Grant | Refusal:
        with store_errors(self.store, f"lease run {request.id!r}"):
            try:
                if self._committer is not None:
                    return await self._committer.acquire(request)
                return await finish(detached(self._acquire_alone(request)))
            except Interrupted as interruption:
                if isinstance(interruption.answer, Grant):
                    # The caller is gone, so no process would execute the run until the lease
                    # expires.
                    await self._release(interruption.answer.lease)
                raise asyncio.CancelledError from None

    async def _acquire_alone(self, request: LeaseRequest) -> Grant | Refusal:
        (answer,) = await require_lease(self.store).acquire([request])
        return answer

    async def _release(self, lease: Lease) -> None:
        try:
            await require_lease(self.store).release([lease])
        except Exception as error:  # noqa: BLE001  # the caller sees the cancellation
            logger.warning("run %r stays leased until its lease expires (%s)", lease.id, error)

    def hold(self, run: LeasedRun) -> None:
        """Renew the lease of this run from now on, if it has one."""
        if run.lease is None:
            return
        self._runs[run.id] = run
        self._start_renewer()

    def _start_renewer(self) -> None:
        if self._renewer is not None or self._first_renewal is not None:
            return
        self._renewed_at = self.clock.monotonic()
        # A third of the time to live, so that two renewals may fail before a lease is lost.
        pause = self.lease_ttl / 3
        if type(self.clock) is SystemClock:
            # Most calls of `durable.run` end before the first renewal. A timer saves them a task,
            # whose start and end are a sixth of the CPU time of a run with one step.
            self._first_renewal = self.loop.call_later(pause.total_seconds(), self._renew_from_now)
        else:
            self._renewer = detached(self._renew(pause))

    def _renew_from_now(self) -> None:
        self._renewer = detached(self._renew(timedelta(0)))

    def drop(self, run: LeasedRun) -> None:
        """Stop renewing the lease of this run."""
        # A host that ends late must not drop its successor: this process may have leased the run
        # again.
        if self._runs.get(run.id) is run:
            del self._runs[run.id]

    def keep(self, permit: Permit) -> None:
        """Renew the lease of a permit from now on."""
        self._permits[permit.id] = permit
        self._start_renewer()

    def forget(self, permit: Permit) -> None:
        """Stop renewing the lease of a permit."""
        if self._permits.get(permit.id) is permit:
            del self._permits[permit.id]

    def limits(self, store: QueueStore, owner: str) -> StepLimits:
        """Return the limits of steps, whose permits the first caller's owner claims."""
        if self._limits is None:
            permits = Permits(store, self, self.clock, self.lease_ttl, owner)
            permits.set_numbers(self._limit_numbers)
            self._limits = StepLimits(permits)
        return self._limits

    def change_limits(self, numbers: Mapping[str, int]) -> None:
        """Use the numbers that operators have set for limits of steps."""
        self._limit_numbers = numbers
        if self._limits is not None:
            self._limits.permits.set_numbers(numbers)

    def step_limits(self) -> list[PermitLimit]:
        """Return the limits that steps have used so far."""
        return [] if self._limits is None else self._limits.used_limits

    def poke(self, run_id: str) -> None:
        """Make an active run check its inbox."""
        if (run := self._runs.get(run_id)) is not None:
            run.message_came()

    def active_runs(self, run_ids: Iterable[str]) -> list[LeasedRun]:
        """Return the runs among these that are active here."""
        return [run for run_id in run_ids if (run := self._runs.get(run_id)) is not None]

    def entries_of(self, run_id: str) -> int:
        """Return how many entries an active run has written since it was leased."""
        run = self._runs.get(run_id)
        return 0 if run is None else run.entries

    async def catch_up(self) -> None:
        """Renew leases whose renewal is long overdue.

        The event loop may have been blocked, or the store unavailable. A worker does this before it
        looks for orphans, so as not to claim its own runs.
        """
        longest = self.lease_ttl.total_seconds() * 2 / 3
        is_renewing = self._runs or self._permits
        if is_renewing and self.clock.monotonic() - self._renewed_at > longest:
            await self._renew_once()

    async def _renew(self, pause: timedelta) -> None:
        while True:
            await self.clock.sleep(pause)
            try:
                await self._renew_once()
                pause = self.lease_ttl / 3
            except StoreError as error:
                # More often, because the leases have only two thirds of their time left.
                pause = self.lease_ttl / 12
                logger.warning("leases could not be renewed (%s); retrying in %s", error, pause)

    async def _renew_once(self) -> None:
        # A worker that catches up may meet the renewer: an older reply must not replace a newer
        # lease.
        async with self._renewal_lock:
            start = self.clock.monotonic()
            # A copy, because runs come and go while the store replies. A run that was released in
            # the meantime is reported as lost, which no longer matters.
            holders: list[Leased] = [*self._runs.values(), *self._permits.values()]
            pairs = [(each, each.lease) for each in holders if each.lease is not None]
            leases: Sequence[Lease | None] = ()
            if pairs:
                with store_errors(self.store, f"renew {len(pairs)} leases"):
                    leases = await require_lease(self.store).renew(
                        [lease for _, lease in pairs], self.lease_ttl
                    )
            # The time before the request, because leases count from when the store received it.
            self._renewed_at = start
        for (each, _), lease in zip(pairs, leases, strict=True):
            if lease is None:
                if self._permits.get(each.id) is each:
                    del self._permits[each.id]
                each.lose()
            else:
                each.update_lease(lease)


def borrow(store: Store, clock: Clock, lease_ttl: timedelta) -> Session:
    """Return the session of this store and event loop; enter it to use it."""
    loop = asyncio.get_running_loop()
    key = (id(store), id(loop), lease_ttl)
    session = _sessions.get(key)
    # A loop that was closed during a run may have left its session behind, and a new loop may have
    # the same id.
    if session is None or session.idle or session.loop is not loop:
        session = _sessions[key] = Session(store, clock, lease_ttl)
        session.on_idle = lambda: _sessions.pop(key, None)
    return session


def wake_workers(store: Store) -> None:
    """Wake the workers of this event loop, because a run of the store has become due.

    They would otherwise find it later, by polling or by a notification of the store.
    """
    for session in _sessions_of(store):
        for wake in session.workers:
            wake()


def poke(store: Store, run_ids: Iterable[str]) -> None:
    """Make runs that are active in this event loop check their inboxes at once.

    Runs in other processes notice when their leases are renewed.
    """
    for session in _sessions_of(store):
        for run_id in run_ids:
            session.poke(run_id)


@contextmanager
def notified_of_settled_runs(store: Store, notify: Callable[[str], None]) -> Generator[None]:
    """Call `notify` with the id of each run of the store that is settled in this event loop.

    Callers that wait for runs would otherwise notice later, by polling.
    """
    watcher = (store, asyncio.get_running_loop(), notify)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def notify_watchers(store: Store, run_id: str) -> None:
    """Notify callers in this event loop that a run was settled."""
    # Usually there are none, and this is called for every settled run.
    if _watchers:
        loop = asyncio.get_running_loop()
        for watched_store, watched_loop, notify in tuple(_watchers):
            if watched_store is store and watched_loop is loop:
                notify(run_id)


def is_running(store: Store, id: str) -> bool:
    """Return whether a call of `durable.run` in this event loop is running this id."""
    # Without `_sessions_of`, because this is asked for each run.
    loop = asyncio.get_running_loop()
    for session in _sessions.values():
        if session.store is store and session.loop is loop and id in session.running_ids:
            return True
    return False


def _sessions_of(store: Store) -> list[Session]:
    loop = asyncio.get_running_loop()
    sessions = _sessions.values()
    return [session for session in sessions if session.store is store and session.loop is loop]


def default_store() -> Store:
    """Return this process's memory store, for calls without a store."""
    if not _default:
        from perdure.stores.memory import MemoryStore

        _default.append(MemoryStore())
    return _default[0]


def check_lease_ttl(lease_ttl: Duration) -> timedelta:
    """Return how long a lease lasts; raise unless it is a positive duration."""
    ttl = parse_duration(lease_ttl, "lease_ttl")
    if not ttl:
        raise InvalidArgument("lease_ttl", lease_ttl, "a positive duration")
    return ttl


class store_errors:  # noqa: N801  # a context manager, like contextlib.suppress
    """Turns exceptions of a user's own store into a `StoreError` that says what failed."""

    __slots__ = ("_action", "_store")

    def __init__(self, store: Store, action: str) -> None:
        self._store = store
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PerdureError):
            text = f"{type(self._store).__name__} could not {self._action}: {error}"
            raise StoreError(text) from error
