"""Tasks whose cancellations are held back, so that a replay decides when they are delivered."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from perdure.engine.asyncio_internals import canceller, is_timeout


class CancelRequest:
    """A cancellation of a task that is not delivered yet.

    `source` requested it `count` times. It `is_soft` if it comes from a timeout around a part of
    the task's code, after which the task continues.
    """

    __slots__ = ("count", "is_soft", "message", "source")

    def __init__(self, source: object, message: object) -> None:
        self.source, self.message = source, message
        self.count = 0
        self.is_soft = is_timeout(source)


class PatientTask(asyncio.Task[Any]):
    """A task that keeps cancellations in `requests`, oldest first, until `deliver` is called.

    A request that its source withdraws before that has no effect. After `hurry`, cancellations are
    delivered at once.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        # Set first, because an eager task runs inside the constructor of its base class.
        self.requests: dict[int, CancelRequest] = {}
        self._is_patient = True
        super().__init__(work, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        """Request a cancellation."""
        if not self._is_patient or self.done():
            return super().cancel(msg)
        source = canceller()
        # The request keeps its source alive, so no other object can have the same id.
        request = self.requests.setdefault(id(source), CancelRequest(source, msg))
        request.count += 1
        return True

    def uncancel(self) -> int:
        """Withdraw a cancellation, whether it has been delivered or not."""
        source = id(canceller())
        request = self.requests.get(source)
        if request is None:
            return super().uncancel()
        request.count -= 1
        if not request.count:
            del self.requests[source]
        return self.cancelling()

    def deliver(self, request: CancelRequest) -> None:
        """Cancel the task as requested."""
        del self.requests[id(request.source)]
        super().cancel(request.message)

    def hurry(self) -> None:
        """Cancel the task, and deliver all later cancellations at once."""
        self._is_patient = False
        super().cancel()
