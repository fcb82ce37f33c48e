"""Send messages, and hand the runs that they make due to a worker of this process.

A worker that finds such a run by a claim needs a write of its own, after the message's. If the
store can lease a run with its message, and a worker of this event loop has free slots, both are one
write. A run whose lease got lost with the reply is continued when the lease has expired, as after
the lost reply of a claim.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from perdure.durable.leases import HeldLeases
from perdure.engine.tasks import detached, finish
from perdure.store import (
    Delivery,
    Grant,
    HandoffStore,
    NewMessage,
    Receipt,
    Store,
    SupportedVersions,
    can_hand_off,
    require_inbox,
)

_RECEIVED = (Delivery.DELIVERED, Delivery.DUPLICATE)


class Slots(NamedTuple):
    """Slots of a worker that are reserved for runs which a message makes due."""

    owner: str
    ttl: timedelta
    limit: int
    supports: Sequence[SupportedVersions]


class LocalWorker(Protocol):
    """A worker of this event loop."""

    def wake(self) -> None:
        """Look for due runs."""
        ...

    def reserve(self, limit: int) -> Slots | None:
        """Reserve up to `limit` slots; `None` if the worker takes no runs currently."""
        ...

    async def accept(self, slots: Slots, grants: Sequence[Grant]) -> None:
        """Execute runs in reserved slots, and free the other slots."""
        ...


class _Promise(NamedTuple):
    """Reserved slots, and the worker that they belong to."""

    worker: LocalWorker
    slots: Slots


class LocalSession(Protocol):
    """What a session tells about the runs and workers of this event loop."""

    @property
    def leases(self) -> HeldLeases: ...
    @property
    def workers(self) -> Collection[LocalWorker]: ...


class Messages:
    """Sends messages, and tells the active runs and the workers of this event loop about them.

    `sessions` returns all sessions of the store in this event loop.
    """

    def __init__(self, store: Store, sessions: Callable[[], Collection[LocalSession]]) -> None:
        self._store = store
        self._handoffs = store if can_hand_off(store) else None
        self._sessions = sessions

    async def deposit(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        """Send messages to runs that the caller continues, unless they are active already."""
        receipts = await require_inbox(self._store, "sending a message").send(messages)
        _poke(self._sessions(), {message.to for message in messages})
        return receipts

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        """Send messages; workers continue the runs that they make due."""
        if self._handoffs is not None and (promise := self._reserve(len(messages))) is not None:
            # In a task of its own: if the caller is cancelled, no lease may be lost.
            return await finish(detached(self._hand_off(self._handoffs, messages, promise)))
        receipts = await require_inbox(self._store, "sending a message").send(messages)
        self._announce(messages, receipts)
        return receipts

    def _reserve(self, limit: int) -> _Promise | None:
        for session in self._sessions():
            for worker in session.workers:
                if (slots := worker.reserve(limit)) is not None:
                    return _Promise(worker, slots)
        return None

    async def _hand_off(
        self, store: HandoffStore, messages: Sequence[NewMessage], promise: _Promise
    ) -> Sequence[Receipt]:
        grants: Sequence[Grant] = ()
        worker, slots = promise
        owner, ttl, limit, supports = slots
        try:
            handoff = await store.send_and_claim(messages, owner, ttl, limit, supports=supports)
            grants = handoff.grants
        finally:
            await worker.accept(slots, grants)
        self._announce(messages, handoff.receipts, grants)
        return handoff.receipts

    def _announce(
        self,
        messages: Sequence[NewMessage],
        receipts: Sequence[Receipt],
        grants: Sequence[Grant] = (),
    ) -> None:
        """Make active runs read their messages, and wake the workers for others."""
        pairs = zip(messages, receipts, strict=True)
        run_ids = {message.to for message, receipt in pairs if receipt.delivery in _RECEIVED}
        if grants:
            # Their workers have their messages, too.
            run_ids.difference_update(grant.lease.id for grant in grants)
        if run_ids:
            sessions = self._sessions()
            _poke(sessions, run_ids)
            for session in sessions:
                for worker in session.workers:
                    worker.wake()


def _poke(sessions: Iterable[LocalSession], run_ids: Collection[str]) -> None:
    """Make runs that are active in this event loop check their inboxes."""
    for session in sessions:
        for run_id in run_ids:
            session.leases.poke(run_id)
