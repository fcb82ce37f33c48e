"""A process's use of a store: its committer, and the leases of all active runs."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from msgspec.structs import replace

from perdure.clock import Clock
from perdure.durable.committer import Committer
from perdure.durable.handoff import LocalWorker, Messages
from perdure.durable.leases import HeldLeases
from perdure.durable.owners import is_gone
from perdure.durable.permits import Permits
from perdure.durable.signals import Signals
from perdure.durable.step_limits import StepLimits
from perdure.durable.store_errors import store_errors
from perdure.engine.tasks import Interrupted, complete, detached, finish
from perdure.errors import StoreCorrupted
from perdure.limits import PermitLimit
from perdure.store import (
    INBOX_PAGE,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    QueueStore,
    Receipt,
    Refusal,
    Store,
    can_inbox,
    can_journal,
    require_lease,
)

logger = logging.getLogger(__name__)

# Also by time to live, because one request renews all leases of a session for the same time.
_sessions: dict[tuple[int, int, timedelta], "Session"] = {}
_default_stores: list[Store] = []


class Session:
    """What the runs of one store and event loop share.

    As a context manager, it counts its users; its tasks end with the last of them. `running_ids`
    counts the calls of `durable.run` by id, `idempotency_keys` are those in use, `workers` are
    those of this event loop.
    """

    def __init__(self, store: Store, clock: Clock, lease_ttl: timedelta) -> None:
        self.store = store
        self.clock = clock
        self.lease_ttl = lease_ttl
        self._journal = store if can_journal(store) else None
        self.has_journal = self._journal is not None
        self.loop = asyncio.get_running_loop()
        self.running_ids: defaultdict[str, int] = defaultdict(int)
        self.idempotency_keys: dict[str, asyncio.Event] = {}
        self.workers: set[LocalWorker] = set()
        self.leases = HeldLeases(store, clock, lease_ttl)
        self._limits: StepLimits | None = None
        self._limit_numbers: Mapping[str, int] = {}
        self.on_idle: Callable[[], object] | None = None
        self.idle = False
        self._users = 0
        self._committer: Committer | None = None
        self._messages: Messages | None = None
        self._signals: Signals | None = None
        self._deposits: Signals | None = None

    async def __aenter__(self) -> "Session":
        self._users += 1
        if self._committer is None and self._journal is not None:
            self._committer = Committer(self._journal, require_lease(self.store), self.send)
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
        committer, self._committer = self._committer, None
        if self._limits is not None:
            await self._limits.close()
        await self.leases.close()
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
    def messages(self) -> Messages:
        """Sends messages, and tells this event loop's runs and workers about them."""
        if self._messages is None:
            self._messages = messages_of(self.store)
        return self._messages

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        """Send messages; workers continue the runs that they make due."""
        return await self.messages.send(messages)

    @property
    def signals(self) -> Signals:
        """Sends the signals of programs to runs that workers continue."""
        if self._signals is None:
            self._signals = Signals(self.messages.send)
        return self._signals

    @property
    def deposits(self) -> Signals:
        """Sends the signals of programs to runs that they continue themselves."""
        if self._deposits is None:
            self._deposits = Signals(self.messages.deposit)
        return self._deposits

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
                raise interruption.plain() from None

    async def _acquire_alone(self, request: LeaseRequest) -> Grant | Refusal:
        (answer,) = await require_lease(self.store).acquire([request])
        return answer

    async def _release(self, lease: Lease) -> None:
        try:
            await complete(require_lease(self.store).release([lease]))
        except Exception as error:  # noqa: BLE001  # the caller sees the cancellation
            logger.warning("run %r stays leased until its lease expires (%s)", lease.id, error)

    def limits(self, store: QueueStore, owner: str) -> StepLimits:
        """Return the limits of steps, whose permits the first caller's owner claims."""
        if self._limits is None:
            permits = Permits(store, self.leases, self.clock, self.lease_ttl, owner)
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


def messages_of(store: Store) -> Messages:
    """Return what sends messages, and tells this event loop's runs and workers about them."""
    return Messages(store, partial(_sessions_of, store))


def wake_workers(store: Store) -> None:
    """Wake the workers of this event loop, because a run of the store has become due.

    They would otherwise find it later, by polling or by a notification of the store.
    """
    for session in _sessions_of(store):
        for worker in session.workers:
            worker.wake()


def poke(store: Store, run_ids: Iterable[str]) -> None:
    """Make runs that are active in this event loop check their inboxes at once.

    Runs in other processes notice when their leases are renewed.
    """
    for session in _sessions_of(store):
        for run_id in run_ids:
            session.leases.poke(run_id)


def is_running(store: Store, id: str, loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a call of `durable.run` in this event loop is running this id."""
    # Without `_sessions_of`, because this is asked for each run.
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
    if not _default_stores:
        from perdure.stores.memory import MemoryStore

        # Two threads may get here at once; both then use the first one.
        _default_stores.append(MemoryStore())
    return _default_stores[0]
