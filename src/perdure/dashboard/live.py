"""Live updates: the server announces what changed, and the browser fetches it again.

While a browser listens, one task per dashboard asks for everything that is on screen, once for all
listeners. The events contain topics and no data, so they need no redaction.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.responses import Response, StreamingResponse

from perdure.clock import Clock
from perdure.dashboard.board import Board
from perdure.dashboard.visit import Visit
from perdure.insights.changes import is_topic

MAX_STREAMS = 3
"""The maximum number of streams of a session: a browser opens six connections per host."""

_MAX_TOPICS = 8
_HEARTBEAT = 15.0


@dataclass(eq=False, slots=True)
class _Listener:
    session: str
    topics: frozenset[str]
    changes: set[str] = field(default_factory=set)
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    beat_at: float = 0.0


class Live:
    """The listeners of one dashboard, and the task that reads for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: set[_Listener] = set()
        self._task: asyncio.Task[None] | None = None

    async def stream(self, visit: Visit) -> Response:
        """Return a stream of changed topics; 204 if the session has enough of them."""
        names = visit.request.query_params.getlist("topic")[:_MAX_TOPICS]
        topics = frozenset(filter(is_topic, names))
        open_streams = sum(each.session == visit.session for each in self._listeners)
        if visit.board.live == "poll" or not topics or open_streams >= MAX_STREAMS:
            return Response(status_code=204)
        events = self._events(visit.board, _Listener(visit.session, topics))
        return StreamingResponse(events, 200, {"X-Accel-Buffering": "no"}, "text/event-stream")

    async def _events(self, board: Board, listener: _Listener) -> AsyncGenerator[str, None]:
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(board))
        try:
            yield "retry: 3000\n\n"
            while True:
                await listener.wakes.wait()
                listener.wakes.clear()
                topics, listener.changes = sorted(listener.changes), set()
                # A comment keeps proxies from closing the connection, and shows that it is gone.
                yield "".join(f"data: {json.dumps(topic)}\n\n" for topic in topics) or ":\n\n"
        finally:
            self._listeners.discard(listener)

    async def _watch(self, board: Board) -> None:
        """Notify listeners of what changed, until no browser listens."""
        async with aclosing(board.insights.changes(self._topics, board.reading)) as rounds:
            async for changes in rounds:
                now = self._clock.monotonic()
                for listener in self._listeners:
                    listener.changes |= changes & listener.topics
                    if listener.changes or listener.beat_at <= now:
                        listener.beat_at = now + _HEARTBEAT
                        listener.wakes.set()

    def _topics(self) -> set[str]:
        return {topic for each in self._listeners for topic in each.topics}
