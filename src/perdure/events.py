"""Events of runs and steps, and the bus that delivers them to listeners.

Each event is a frozen class; its `type` is the name of the event in logs and in awaitly's event
stream. An exception raised by a listener is logged and does not affect the run; an awaitable that a
listener returns is awaited by `Bus.flush`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from perdure.engine.tasks import detached
from perdure.errors import InvalidArgument
from perdure.result import Result

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["sync", "async"]
Coalesce: TypeAlias = Literal["none", "latest"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of events: the workflow, the run and the time."""

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
    """The task that ran the function was cancelled; the run's state is kept."""

    type: ClassVar[Literal["workflow_cancelled"]] = "workflow_cancelled"
    duration: timedelta
    reason: str = ""
    last_step: str | None = None


class WorkflowSuspended(Event, frozen=True, kw_only=True):
    """The run was suspended: every branch waits for a time or an event."""

    type: ClassVar[Literal["workflow_suspended"]] = "workflow_suspended"
    duration: timedelta


class StepEvent(Event, frozen=True, kw_only=True):
    """The base class of step events: `step` is the id in the call, `key` the key of the record.

    All events of one call have the same `branch` and `call`, which are its identity in the run: the
    path of the branch that called the step, and the id with the number of the call, or the key.
    """

    step: str
    key: str
    branch: str = ""
    call: str = ""


class StepStart(StepEvent, frozen=True, kw_only=True):
    """The step's function is about to be called."""

    type: ClassVar[Literal["step_start"]] = "step_start"


class StepSuccess(StepEvent, frozen=True, kw_only=True):
    """The step's function returned a value."""

    type: ClassVar[Literal["step_success"]] = "step_success"
    duration: timedelta


class StepFailure(StepEvent, frozen=True, kw_only=True):
    """The step's function failed, and no attempts are left."""

    type: ClassVar[Literal["step_error"]] = "step_error"
    duration: timedelta
    error: object


class StepComplete(StepEvent, frozen=True, kw_only=True):
    """The step, whether it succeeded or failed, is recorded; `result` is what the function sees.

    `facts` are the fields of the record that identify the step.
    """

    type: ClassVar[Literal["step_complete"]] = "step_complete"
    duration: timedelta
    result: Result[Any, Any]
    origin: Literal["result", "throw"] | None = None
    facts: Mapping[str, Any] = {}


class StepRetry(StepEvent, frozen=True, kw_only=True):
    """An attempt failed; the next one begins after `delay`."""

    type: ClassVar[Literal["step_retry"]] = "step_retry"
    attempt: int
    attempts: int
    delay: timedelta
    error: object


class StepTimedOut(StepEvent, frozen=True, kw_only=True):
    """An attempt did not finish within its timeout."""

    type: ClassVar[Literal["step_timeout"]] = "step_timeout"
    after: timedelta
    attempt: int


class StepCacheHit(StepEvent, frozen=True, kw_only=True):
    """The step was not run: its `result` came from its record, a resume state or the cache."""

    type: ClassVar[Literal["step_cache_hit"]] = "step_cache_hit"
    result: Result[Any, Any]
    origin: Literal["result", "throw"] | None = None
    facts: Mapping[str, Any] = {}


class StepCacheMiss(StepEvent, frozen=True, kw_only=True):
    """The cache had no entry for the step."""

    type: ClassVar[Literal["step_cache_miss"]] = "step_cache_miss"


class PersistSuccess(StepEvent, frozen=True, kw_only=True):
    """The step's record is durable in the store."""

    type: ClassVar[Literal["persist_success"]] = "persist_success"


class PersistError(StepEvent, frozen=True, kw_only=True):
    """The step's record could not be stored; the run stops."""

    type: ClassVar[Literal["persist_error"]] = "persist_error"
    error: object


Listener: TypeAlias = Callable[[Any], Awaitable[object] | object]


def check_listener(listener: object, parameter: str = "on_event") -> Listener:
    """Check for a callable."""
    if not callable(listener):
        raise InvalidArgument(parameter, listener, "a function that takes an event")
    return listener


class Subscription:
    """One listener with its mode of delivery."""

    __slots__ = ("_bus", "_coalesce", "_deliver", "_mode", "_queue", "_task")

    def __init__(self, bus: "Bus", deliver: Listener, mode: Mode, coalesce: Coalesce) -> None:
        self._bus = bus
        self._deliver = deliver
        self._mode = mode
        self._coalesce = coalesce
        self._queue: deque[tuple[Any, bool]] = deque()
        self._task: asyncio.Task[None] | None = None

    def notify(self, event: Any, terminal: bool) -> None:
        """Deliver an event now, or queue it for the next iteration of the event loop."""
        if self._mode == "sync":
            self._bus.call(self._deliver, event)
            return
        if self._coalesce == "latest" and self._queue and not self._queue[-1][1]:
            self._queue.pop()
        self._queue.append((event, terminal))
        if self._task is None:
            self._task = detached(self._drain())
            self._bus.track(self._task)

    async def _drain(self) -> None:
        # The next event is taken only when the listener has finished, so that events stay in order,
        # and events that arrive in the meantime can be coalesced.
        while self._queue:
            event, _ = self._queue.popleft()
            try:
                result = self._deliver(event)
                if isinstance(result, Awaitable):
                    await result
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
        """Add a listener; return a function that removes it, and may be called more than once."""
        subscription = Subscription(self, listener, mode, coalesce)
        self._subscriptions.append(subscription)

        def unsubscribe() -> None:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

        return unsubscribe

    def publish(self, event: Any, *, terminal: bool = False) -> None:
        """Deliver an event to every listener, in the order of their subscription."""
        for subscription in tuple(self._subscriptions):
            subscription.notify(event, terminal)

    def call(self, listener: Listener, event: Any) -> None:
        """Call a listener now; an awaitable that it returns runs concurrently with the workflow."""
        try:
            result = listener(event)
        except Exception:
            logger.exception("a listener failed on %s", getattr(event, "type", event))
            return
        if isinstance(result, Awaitable):
            self.track(asyncio.ensure_future(result))

    def track(self, task: "asyncio.Future[Any]") -> None:
        """Keep a reference to a listener's task until it is done, and log any exception."""
        self._tasks.add(task)
        task.add_done_callback(self._handle_result)

    def _handle_result(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a listener failed", exc_info=error)

    async def flush(self) -> None:
        """Wait until the listeners have handled every event published so far."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
