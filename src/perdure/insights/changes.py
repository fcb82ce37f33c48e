"""Detect which results have changed, for pages that stay open.

A topic is what is shown: "counts", "fleet", "run:order-1", "query:status:failed". Each is read
every few seconds, and at once after a notification of the store or when a run is settled in this
event loop. Polling finds what these miss.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from perdure.clock import Clock
from perdure.durable.timers import wait_until_set
from perdure.durable.watchers import notified_of_settled_runs
from perdure.engine.tasks import detached
from perdure.errors import PerdureError, StoreError
from perdure.store import Store, can_notify

if TYPE_CHECKING:
    from perdure.insights.insights import Insights

Reading: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""The context manager around each read, which may wait and limit the time."""

_TICK = 0.1
_RETRY = 5.0
# A topic that is slow to read is read less often, so that it takes at most a tenth of the time.
_SHARE = 10


@dataclass(slots=True)
class _Topic:
    """When to read a topic next, and from when on a notification may change that."""

    next_at: float = 0.0
    hurry_at: float = 0.0
    digest: bytes = b""


class Changes:
    """Reads topics repeatedly, each once for all listeners."""

    def __init__(self, insights: "Insights", store: Store, clock: Clock, reading: Reading) -> None:
        self._insights = insights
        self._store = store
        self._clock = clock
        self._reading = reading
        self._topics: dict[str, _Topic] = {}
        self._wake_up = asyncio.Event()

    async def rounds(
        self, topics: Callable[[], Collection[str]]
    ) -> AsyncGenerator[frozenset[str], None]:
        """Yield after each round which topics have changed, until there are no topics."""
        listening = detached(self._listen())
        try:
            with notified_of_settled_runs(self._store, lambda run_id: self._hurry()):
                while names := topics():
                    self._topics = {name: self._topics.get(name, _Topic()) for name in names}
                    self._wake_up.clear()
                    yield frozenset([name async for name in self._changed()])
                    await self._rest()
        finally:
            listening.cancel()

    async def _changed(self) -> AsyncGenerator[str, None]:
        for name, topic in self._topics.items():
            if topic.next_at <= self._clock.monotonic() and await self._has_changed(name, topic):
                yield name

    async def _has_changed(self, name: str, topic: _Topic) -> bool:
        """Read one topic, and return whether it has changed."""
        started_at = self._clock.monotonic()
        kind, _, rest = name.partition(":")
        try:
            async with self._reading():
                answer = msgspec.json.encode(await _TOPICS[kind][1](self._insights, rest))
        except PerdureError as error:
            answer = str(error).encode()
        now, digest = self._clock.monotonic(), hashlib.sha256(answer).digest()
        topic.next_at = now + max(_TOPICS[kind][0], (now - started_at) * _SHARE)
        is_changed = topic.digest not in (b"", digest)
        topic.digest = digest
        return is_changed

    async def _rest(self) -> None:
        """Sleep briefly, or until a notification arrives."""
        await wait_until_set(self._wake_up, self._clock, _TICK)

    async def _listen(self) -> None:
        while can_notify(self._store):
            with suppress(StoreError):
                async for _ in self._store.notifications():
                    self._hurry()
            await self._clock.sleep(_RETRY)

    def _hurry(self) -> None:
        """Read at once; however often this is called, a topic is read at most twice per period."""
        for topic in self._topics.values():
            times = topic.next_at, topic.hurry_at
            topic.next_at, topic.hurry_at = min(times), max(times)
            if topic.next_at <= self._clock.monotonic():
                self._wake_up.set()


def is_topic(name: str) -> bool:
    """Return whether `Changes` can read a topic."""
    return name.partition(":")[0] in _TOPICS


async def _counts(insights: "Insights", _: str) -> object:
    overview = await insights.overview()
    return overview.counts, overview.due, overview.attention, overview.failures


# How often a topic is read, in seconds, and how.
_TOPICS: Mapping[str, tuple[float, Callable[["Insights", str], Awaitable[object]]]] = {
    "run": (1.0, lambda insights, run_id: insights.revisions([run_id])),
    "query": (1.0, lambda insights, query: insights.runs(query)),
    "bulk": (1.0, lambda insights, id: insights.bulk(id)),
    "fleet": (2.0, lambda insights, _: insights.workers()),
    "acts": (5.0, lambda insights, _: insights.acts()),
    "counts": (5.0, _counts),
}
