"""The part of the user's handle that waits for a time or an event.

await step.sleep("settle", "7d")
payment = await step.wait_for_event("payment", "paid", timeout="3d")
"""

from collections.abc import Coroutine
from datetime import datetime
from typing import Any, TypeVar, overload

from perdure.clock import Cron, Duration, add_duration, as_utc, isoformat
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.waiting import wait
from perdure.snapshot import PendingWait
from perdure.validation import check_event

T = TypeVar("T")
U = TypeVar("U")


class WaitSteps:
    """A base class of `Step`."""

    __slots__ = ()

    _run: Execution

    def sleep(self, id: str, duration: Duration | Cron, /) -> Coroutine[object, None, None]:
        """Sleep for a duration, or until the next time of a cron expression.

        ```python
        await step.sleep("settle", "7d")  # or 90, timedelta(days=7), Cron("0 9 * * MON")
        ```

        The wake time is fixed by the first call, however often the run resumes.
        """
        call = self._run.call(id, self.sleep)
        return self._sleep(call, self._wake_time(duration, "duration"))

    def sleep_until(self, id: str, time: datetime, /) -> Coroutine[Any, Any, None]:
        """Sleep until a datetime with a time zone; return at once if it has passed.

        The time is fixed by the first call, however often the run resumes.
        """
        wake_at = as_utc(time, "time")
        call = self._run.call(id, self.sleep_until)
        return self._sleep(call, wake_at)

    def _sleep(self, call: StepCall, wake_at: datetime) -> Coroutine[Any, Any, None]:
        call.kind = "sleep"
        pending: PendingWait = {"id": call.wait_id(), "kind": "sleep", "wakeAt": isoformat(wake_at)}
        return wait(self._run, call, pending)

    @overload
    def wait_for_event(
        self, id: str, name: str, /, *, timeout: Duration | None = ..., returns: type[T]
    ) -> Coroutine[object, None, T | None]: ...
    @overload
    def wait_for_event(
        self, id: str, name: str, /, *, timeout: Duration | None = ..., returns: type[T], default: U
    ) -> Coroutine[object, None, T | U]: ...
    @overload
    def wait_for_event(
        self,
        id: str,
        name: str,
        /,
        *,
        timeout: Duration | None = ...,
        returns: None = ...,
        default: object = ...,
    ) -> Coroutine[object, None, Any]: ...
    def wait_for_event(
        self,
        id: str,
        name: str,
        /,
        *,
        timeout: Duration | None = None,
        returns: type[Any] | None = None,
        default: object = None,
    ) -> Coroutine[object, None, Any]:
        """Return the payload of the next event with this name, or `default` after the timeout.

        ```python
        payment = await step.wait_for_event("payment", "paid", timeout="3d")
        if payment is None:
            raise TimeoutError("nobody paid")
        ```

        An operator can end the wait earlier, which is like a timeout. The payload of an event that
        is sent without one is `None`: pass another `default` to tell the two apart. `returns` is
        the type of the payload; one of another type fails the step with `CodecError`.
        """
        name = check_event(name, "name")
        call = self._run.call(id, self.wait_for_event)
        call.kind = "event"
        call.returns = returns
        pending: PendingWait = {"id": call.wait_id(), "kind": "event", "event": name}
        if timeout is not None:
            pending["wakeAt"] = isoformat(self._wake_time(timeout, "timeout"))
        return wait(self._run, call, pending, default)

    def _wake_time(self, duration: Duration | Cron, parameter: str) -> datetime:
        now = self._run.clock.now()
        if isinstance(duration, Cron):
            return duration.next(now)
        return add_duration(now, duration, parameter)
