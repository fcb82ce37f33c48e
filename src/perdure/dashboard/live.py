"""Live updates: the server says what changed, and the browser fetches it again.

While a browser listens, one task per dashboard asks the store for everything that is on screen,
once for all listeners: every second or less often, and at once after a notification of the store.
The events contain topics and no data, so they need no redaction.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response, StreamingResponse

from perdure.clock import Clock
from perdure.dashboard.board import Board
from perdure.dashboard.visit import Visit
from perdure.errors import PerdureError, StoreError
from perdure.insights import Insights
from perdure.store import Store, can_notify

MAX_STREAMS = 3
"""How many streams a session may have: a browser opens six connections per host."""

_MAX_TOPICS = 8
_HEARTBEAT = 15.0
_TICK = 0.1
_RETRY = 5.0
# A topic that is slow to read is read less often: it may take a tenth of the time.
_SHARE = 10


@dataclass(eq=False, slots=True)
class _Listener:
    session: str
    topics: frozenset[str]
    changed: set[str] = field(default_factory=set)
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    beat_at: float = 0.0


@dataclass(slots=True)
class _Topic:
    """When a topic is to be read next, and from when on a notification may change that."""

    next_at: float = 0.0
    hurry_at: float = 0.0
    digest: bytes = b""


class Live:
    """The listeners of one dashboard, and the task that reads for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: set[_Listener] = set()
        self._task: asyncio.Task[None] | None = None
        self._topics: dict[str, _Topic] = {}

    async def stream(self, board: Board, visit: Visit) -> Response:
        """Return a stream of changed topics; 204 if the session has enough of them."""
        asked = visit.request.query_params.getlist("topic")[:_MAX_TOPICS]
        topics = frozenset(each for each in asked if each.partition(":")[0] in _TOPICS)
        open_streams = sum(each.session == visit.session for each in self._listeners)
        if board.live == "poll" or not topics or open_streams >= MAX_STREAMS:
            return Response(status_code=204)
        events = self._events(board, _Listener(visit.session, topics))
        return StreamingResponse(events, 200, {"X-Accel-Buffering": "no"}, "text/event-stream")

    async def _events(self, board: Board, listener: _Listener) -> AsyncGenerator[bytes, None]:
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(board))
        try:
            yield b"retry: 3000\n\n"
            while True:
                await listener.wakes.wait()
                listener.wakes.clear()
                changed, listener.changed = sorted(listener.changed), set()
                # A comment keeps proxies from closing the connection, and shows that it is gone.
                yield b"".join(map(_event, changed)) or b":\n\n"
        finally:
            self._listeners.discard(listener)

    async def _watch(self, board: Board) -> None:
        """Read what is on screen until no browser listens."""
        listening = asyncio.create_task(self._listen(board.operations.store))
        try:
            while self._listeners:
                wanted = {topic for each in self._listeners for topic in each.topics}
                self._topics = {name: self._topics.get(name, _Topic()) for name in wanted}
                for name, topic in self._topics.items():
                    if topic.next_at <= self._clock.monotonic():
                        await self._look(board, name, topic)
                for listener in self._listeners:
                    if listener.beat_at <= (now := self._clock.monotonic()):
                        listener.beat_at = now + _HEARTBEAT
                        listener.wakes.set()
                await self._clock.sleep(_TICK)
        finally:
            listening.cancel()

    async def _listen(self, store: Store) -> None:
        """Look at once when the store sends a notification. Polling finds what this misses."""
        while can_notify(store):
            with suppress(StoreError):
                async for _ in store.notifications():
                    for topic in self._topics.values():
                        # However many arrive, a topic is read at most twice per period.
                        times = topic.next_at, topic.hurry_at
                        topic.next_at, topic.hurry_at = min(times), max(times)
            await self._clock.sleep(_RETRY)

    async def _look(self, board: Board, name: str, topic: _Topic) -> None:
        """Read one topic, and notify its listeners if it has changed."""
        begun = self._clock.monotonic()
        try:
            digest = await digest_of(board, name)
        except PerdureError as error:
            digest = hashlib.sha256(str(error).encode()).digest()
        now = self._clock.monotonic()
        period = max(_TOPICS[name.partition(":")[0]][0], (now - begun) * _SHARE)
        topic.next_at = now + period
        is_changed = bool(topic.digest) and digest != topic.digest
        topic.digest = digest
        for listener in self._listeners:
            if is_changed and name in listener.topics:
                listener.changed.add(name)
                listener.wakes.set()


def _event(topic: str) -> bytes:
    """Return one event; a topic contains no line break that could end it early."""
    return b"data: " + msgspec.json.encode(topic) + b"\n\n"


async def digest_of(board: Board, topic: str) -> bytes:
    """Return a hash of what a topic currently shows."""
    kind, _, rest = topic.partition(":")
    async with board.reading():
        data = await _TOPICS[kind][1](board.insights, rest)
    return hashlib.sha256(msgspec.json.encode(data)).digest()


async def _counts(insights: Insights, _: str) -> object:
    overview = await insights.overview()
    return overview.counts, overview.due, overview.attention, overview.failures


# How often a topic is read, in seconds, and how.
_TOPICS: Mapping[str, tuple[float, Callable[[Insights, str], Awaitable[object]]]] = {
    "run": (1.0, lambda insights, run_id: insights.revisions([run_id])),
    "query": (1.0, lambda insights, query: insights.runs(query)),
    "bulk": (1.0, lambda insights, id: insights.bulk(id)),
    "fleet": (2.0, lambda insights, _: insights.workers()),
    "acts": (5.0, lambda insights, _: insights.acts()),
    "counts": (5.0, _counts),
}
