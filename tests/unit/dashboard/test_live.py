"""The stream of changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from perdure import Client
from perdure.dashboard import Dashboard
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore
from tests.unit.dashboard.visitor import dashboard, failed_run, waiting_run

SESSION = ("cookie", "perdure_session=" + "0" * 64)


class Stream:
    """One response of an ASGI app, read while it is being sent."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.status = 0

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.sent.put(message.get("body", b""))

    async def until(self, wanted: bytes) -> None:
        """Wait until these bytes were sent."""
        async with asyncio.timeout(10):
            while wanted not in await self.sent.get():
                pass


@asynccontextmanager
async def listening(app: Dashboard, query: str) -> AsyncIterator[Stream]:
    stream = Stream()
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/live",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in [SESSION]],
    }
    task = asyncio.create_task(app(scope, stream.receive, stream.send))
    try:
        async with asyncio.timeout(10):
            await stream.sent.get()
        yield stream
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_change_of_a_run_is_announced() -> None:
    store = MemoryStore()
    await waiting_run(store)
    async with listening(dashboard(store), "topic=run:order-2") as stream:
        await stream.until(b"retry")
        await asyncio.sleep(0.5)
        await Operations(store).pause("order-2", by="ana")
        await stream.until(b'data: "run:order-2"\n\n')


async def test_a_new_match_of_a_query_is_announced() -> None:
    store = MemoryStore()
    async with listening(dashboard(store), "topic=query:status:failed") as stream:
        await stream.until(b"retry")
        await asyncio.sleep(0.5)
        await failed_run(store)
        await stream.until(b'data: "query:status:failed"\n\n')


async def test_all_listeners_of_a_run_cost_one_read_per_second() -> None:
    inner = MemoryStore()
    await waiting_run(inner)
    store = FaultyStore(inner)
    app, query = dashboard(store), "topic=run:order-2"
    async with listening(app, query), listening(app, query), listening(app, query):
        await asyncio.sleep(2.2)
    assert 2 <= sum(call.verb == "summaries" for call in store.calls) <= 4


async def test_a_notification_of_the_store_is_followed_at_once() -> None:
    store = MemoryStore()
    await waiting_run(store)
    async with listening(dashboard(store), "topic=run:order-2") as stream:
        await stream.until(b"retry")
        await asyncio.sleep(0.1)
        await Client(store).signal("order-2", "approved")
        async with asyncio.timeout(0.5):
            await stream.until(b'data: "run:order-2"\n\n')


async def test_a_run_that_is_settled_in_this_process_is_followed_at_once() -> None:
    store = MemoryStore()
    async with listening(dashboard(store), "topic=query:status:failed") as stream:
        await stream.until(b"retry")
        await asyncio.sleep(0.1)
        await failed_run(store)
        async with asyncio.timeout(0.5):
            await stream.until(b'data: "query:status:failed"\n\n')


async def test_many_notifications_cost_at_most_two_reads_per_second() -> None:
    inner = MemoryStore()
    await waiting_run(inner)
    store, loop = FaultyStore(inner), asyncio.get_running_loop()
    began = loop.time()
    async with listening(dashboard(store), "topic=run:order-2"):
        for number in range(200):
            await Client(inner).trigger("order", {}, run_id=f"other-{number}")
            await asyncio.sleep(0.01)
    # The loop takes two seconds, and longer on a busy machine.
    most = 3 + 2 * (loop.time() - began)
    assert 3 <= sum(call.verb == "summaries" for call in store.calls) <= most


async def test_a_fourth_stream_of_a_session_has_to_poll() -> None:
    app = dashboard(MemoryStore())
    query = "topic=counts"
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(listening(app, query)) for _ in range(4)]
    assert [stream.status for stream in streams] == [200, 200, 200, 204]


@pytest.mark.parametrize("query", ["", "topic=", "topic=unknown:x", "topic=__class__"])
async def test_unknown_topics_get_no_stream(query: str) -> None:
    async with listening(dashboard(MemoryStore()), query) as stream:
        assert stream.status == 204


async def test_a_dashboard_can_be_configured_to_poll() -> None:
    app = dashboard(MemoryStore(), live="poll")
    async with listening(app, "topic=counts") as stream:
        assert stream.status == 204


async def test_nothing_is_read_when_the_last_listener_has_left() -> None:
    store = FaultyStore(MemoryStore())
    app = dashboard(store)
    async with listening(app, "topic=run:x"):
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    count = len(store.calls)
    await asyncio.sleep(1.2)
    assert len(store.calls) == count


async def test_a_store_that_fails_does_not_end_the_stream() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, verbs={"summaries"})
    await failed_run(store)
    async with listening(dashboard(store), "topic=run:order-1") as stream:
        await stream.until(b'data: "run:order-1"\n\n')
