"""News of a run as data, and the listeners that hear it.

Each kind of news is a frozen class with a `type` that reads as in the seeds' event stream. A
listener that fails is logged and harms nobody; one that returns an awaitable is awaited by
`Bus.flush`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from perdure.errors import InvalidArgument
from perdure.result import Result

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["sync", "async"]
Coalesce: TypeAlias = Literal["none", "latest"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What all news has: which workflow, which run, when."""

    type: ClassVar[str]
    workflow: str
    run_id: str
    at: datetime


class WorkflowStart(Event, frozen=True, kw_only=True):
    """The function is about to be called."""

    type: ClassVar[Literal["workflow_start"]] = "workflow_start"


class WorkflowSuccess(Event, frozen=True, kw_only=True):
    """The function returned."""

    type: ClassVar[Literal["workflow_success"]] = "workflow_success"
    duration: timedelta


class WorkflowError(Event, frozen=True, kw_only=True):
    """The function ended with an error."""

    type: ClassVar[Literal["workflow_error"]] = "workflow_error"
    duration: timedelta
    error: object


class WorkflowCancelled(Event, frozen=True, kw_only=True):
    """The task that ran the function was cancelled; the state is kept."""

    type: ClassVar[Literal["workflow_cancelled"]] = "workflow_cancelled"
    duration: timedelta
    reason: str = ""
    last_step: str | None = None


class WorkflowSuspended(Event, frozen=True, kw_only=True):
    """Every branch of the run waits; it goes on when its time or its event comes."""

    type: ClassVar[Literal["workflow_suspended"]] = "workflow_suspended"
    duration: timedelta


class StepEvent(Event, frozen=True, kw_only=True):
    """News of one step: `step` is the id it was called by, `key` its identity in the record."""

    step: str
    key: str


class StepStart(StepEvent, frozen=True, kw_only=True):
    """The step's function is about to be called."""

    type: ClassVar[Literal["step_start"]] = "step_start"


class StepSuccess(StepEvent, frozen=True, kw_only=True):
    """The step's function gave a value."""

    type: ClassVar[Literal["step_success"]] = "step_success"
    duration: timedelta


class StepFailure(StepEvent, frozen=True, kw_only=True):
    """The step's function failed for good."""

    type: ClassVar[Literal["step_error"]] = "step_error"
    duration: timedelta
    error: object


class StepComplete(StepEvent, frozen=True, kw_only=True):
    """The step is recorded, success or failure; `result` is what the function sees.

    `facts` are what the record holds of the step's identity.
    """

    type: ClassVar[Literal["step_complete"]] = "step_complete"
    duration: timedelta
    result: Result[Any, Any]
    origin: Literal["result", "throw"] | None = None
    facts: Mapping[str, Any] = {}


class StepRetry(StepEvent, frozen=True, kw_only=True):
    """An attempt failed and another will follow after `delay`."""

    type: ClassVar[Literal["step_retry"]] = "step_retry"
    attempt: int
    attempts: int
    delay: timedelta
    error: object


class StepTimedOut(StepEvent, frozen=True, kw_only=True):
    """An attempt did not answer within its time."""

    type: ClassVar[Literal["step_timeout"]] = "step_timeout"
    after: timedelta
    attempt: int


class StepCacheHit(StepEvent, frozen=True, kw_only=True):
    """The step answered from its record, from a resume state or from the cache; `result` is what
    it gave.
    """

    type: ClassVar[Literal["step_cache_hit"]] = "step_cache_hit"
    result: Result[Any, Any]
    origin: Literal["result", "throw"] | None = None
    facts: Mapping[str, Any] = {}


class StepCacheMiss(StepEvent, frozen=True, kw_only=True):
    """The cache was asked and had nothing."""

    type: ClassVar[Literal["step_cache_miss"]] = "step_cache_miss"


class PersistSuccess(StepEvent, frozen=True, kw_only=True):
    """The step's record is durable in the store."""

    type: ClassVar[Literal["persist_success"]] = "persist_success"


class PersistError(StepEvent, frozen=True, kw_only=True):
    """The step's record could not be written; the run stops."""

    type: ClassVar[Literal["persist_error"]] = "persist_error"
    error: object


Listener: TypeAlias = Callable[[Any], Awaitable[object] | object]


def check_listener(listener: object, parameter: str = "on_event") -> Listener:
    """Give the listener back, or raise: something to be called with one event."""
    if not callable(listener):
        raise InvalidArgument(parameter, listener, "a function of one event")
    return listener


class Subscription:
    """One listener with its way of delivery."""

    __slots__ = ("_bus", "_coalesce", "_deliver", "_mode", "_queue", "_task")

    def __init__(self, bus: "Bus", deliver: Listener, mode: Mode, coalesce: Coalesce) -> None:
        self._bus = bus
        self._deliver = deliver
        self._mode = mode
        self._coalesce = coalesce
        self._queue: deque[tuple[Any, bool]] = deque()
        self._task: asyncio.Task[None] | None = None

    def notify(self, event: Any, terminal: bool) -> None:
        """Deliver now, or queue for the event loop's next turn."""
        if self._mode == "sync":
            self._bus.call(self._deliver, event)
            return
        if self._coalesce == "latest" and self._queue and not self._queue[-1][1]:
            self._queue.pop()
        self._queue.append((event, terminal))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())
            self._bus.track(self._task)

    async def _drain(self) -> None:
        # One event at a time: the next is taken only when the listener is done with this one, so
        # that a burst meanwhile can be coalesced and the order is kept.
        while self._queue:
            event, _ = self._queue.popleft()
            try:
                answer = self._deliver(event)
                if isinstance(answer, Awaitable):
                    await answer
            except Exception:
                logger.exception("a listener failed on %s", getattr(event, "type", event))
        self._task = None


class Bus:
    """The listeners of one workflow."""

    __slots__ = ("_subscriptions", "_tasks")

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Future[object]] = set()

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def subscribe(
        self, listener: Listener, *, mode: Mode = "sync", coalesce: Coalesce = "none"
    ) -> Callable[[], None]:
        """Add a listener; the answer takes it away again, and may be called twice."""
        subscription = Subscription(self, listener, mode, coalesce)
        self._subscriptions.append(subscription)

        def unsubscribe() -> None:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

        return unsubscribe

    def publish(self, event: Any, *, terminal: bool = False) -> None:
        """Tell every listener, in the order they subscribed."""
        for subscription in tuple(self._subscriptions):
            subscription.notify(event, terminal)

    def call(self, listener: Listener, event: Any) -> None:
        """Call a listener in place; an awaitable it returns runs beside the workflow."""
        try:
            answer = listener(event)
        except Exception:
            logger.exception("a listener failed on %s", getattr(event, "type", event))
            return
        if isinstance(answer, Awaitable):
            self.track(asyncio.ensure_future(answer))

    def track(self, task: "asyncio.Future[Any]") -> None:
        """Keep a listener's task until it is done, and log its failure."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a listener failed", exc_info=error)

    async def flush(self) -> None:
        """Wait until every listener has dealt with everything published so far."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
