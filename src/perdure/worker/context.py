"""What middleware sees of a worker."""

from collections.abc import Callable
from typing import Protocol

from perdure.clock import Clock
from perdure.durable.session import Session
from perdure.store import Stats, can_maintain


class ActiveWorker(Protocol):
    """The worker itself."""

    @property
    def id(self) -> str: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def running(self) -> int: ...


class WorkerContext:
    """A worker, and the store of its runs; see `perdure.WorkerContext`."""

    def __init__(self, worker: ActiveWorker, session: Session) -> None:
        self._worker = worker
        self._session = session

    @property
    def id(self) -> str:
        """The worker's name."""
        return self._worker.id

    @property
    def concurrency(self) -> int:
        """How many runs it executes at once."""
        return self._worker.concurrency

    @property
    def running(self) -> int:
        """How many runs it is executing."""
        return self._worker.running

    @property
    def clock(self) -> Clock:
        """The clock of its runtime."""
        return self._session.clock

    async def stats(self) -> Stats | None:
        """Return how many runs the store has; `None` if it cannot count."""
        store = self._session.store
        return await store.stats() if can_maintain(store) else None

    def observe_appends(self, callback: Callable[[float], None], /) -> None:
        """Call `callback` with the duration in seconds of each write of step records."""
        self._session.committer.observe_appends(callback)
