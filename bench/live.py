"""Live pages: how soon a change is seen, what ten tabs cost, and what the dashboard keeps."""

import asyncio
import gc
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from html import unescape
from itertools import cycle, islice
from pathlib import Path
from random import Random
from resource import getpagesize
from typing import Any

import httpx
import uvicorn

from bench.bars import Bar, p95
from bench.timing import now
from perdure import Client
from perdure.dashboard import Access, Dashboard
from perdure.operations import Operations
from perdure.store import can_notify
from perdure.stores import open_store
from perdure.testing import FaultyStore

RUN = "bench-live"
TABS, LISTENERS, CHANGES, REQUESTS = 10, 100, 50, 10_000
PAGES = ("/", "/runs", f"/runs/{RUN}", "/errors", "/workers", "/runs?q=status:failed")
_SECONDS = 5


async def measure(url: str) -> AsyncIterator[Bar]:
    """Yield the bars of live pages on the store at `url`."""
    async with open_store(url) as store:
        await Client(store).trigger("bench-live", None, run_id=RUN)
        try:
            async for bar in _measure(store):
                yield bar
        finally:
            await store.delete(RUN)


async def _measure(store: Any) -> AsyncIterator[Bar]:
    counted = FaultyStore(store)
    async with served(counted) as base:
        delays_by_verb = await delays(store, base)
        yield Bar(
            "a run that is paused until a live page shows it", 1500, p95(delays_by_verb["pause"])
        )
        bar = 300 if can_notify(store) else 1500
        yield Bar(
            "a run that becomes due until a live page shows it", bar, p95(delays_by_verb["unpause"])
        )
        async with AsyncExitStack() as stack:
            for _ in range(TABS):
                await stack.enter_async_context(listening(base, f"/runs/{RUN}"))
            before = _summaries(counted)
            await asyncio.sleep(_SECONDS)
            rate = (_summaries(counted) - before) / _SECONDS
        yield Bar(f"summaries per second, {TABS} tabs on a run", 1.2, rate, "")
    # Without the store that counts, which keeps the ids of every call.
    async with served(store) as base:
        yield Bar(f"memory after {REQUESTS:,} requests", 10, await growth(base), "MB")


def _summaries(store: FaultyStore) -> int:
    return sum(call.verb == "summaries" for call in store.calls)


@asynccontextmanager
async def served(store: Any) -> AsyncGenerator[str]:
    """Serve a dashboard on the store in this process, and yield its address."""

    async def let_in(request: Any) -> Access:
        # Each request is another person's: a session may send only 20 per second.
        return Access(request.headers.get("x-person", "bench"))

    app = Dashboard(store, auth=let_in)
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


@asynccontextmanager
async def listening(base: str, path: str) -> AsyncGenerator[tuple[httpx.AsyncClient, Any]]:
    """Act as a tab: yield a client and the lines of the stream of changes."""
    # Each tab is a session of its own: a session may open only three streams.
    async with httpx.AsyncClient(base_url=base, timeout=None) as client:
        page = await client.get(path)
        page.raise_for_status()
        [topics] = re.findall(r'data-topics="([^"]*)"', page.text)
        async with client.stream("GET", f"/live?{unescape(topics)}") as stream:
            assert stream.status_code == 200, "204 would mean that nothing is sent"
            yield client, stream.aiter_lines()


async def delays(store: Any, base: str) -> dict[str, list[float]]:
    """Return how many ms it takes from a change to the page that shows it, by the verb."""
    operations, random = Operations(store), Random(1)
    delays_by_verb: dict[str, list[float]] = {"pause": [], "unpause": []}
    async with listening(base, f"/runs/{RUN}") as (client, lines):
        await asyncio.sleep(1.5)
        for verb, word in islice(cycle([("pause", "Paused"), ("unpause", "Queued")]), CHANGES):
            await asyncio.sleep(random.uniform(1, 2))
            await getattr(operations, verb)(RUN, by="bench")
            began = now()
            async for line in lines:
                if line.startswith("data:") and word in (await client.get(f"/runs/{RUN}")).text:
                    break
            delays_by_verb[verb].append(1000 * (now() - began))
    return delays_by_verb


async def growth(base: str) -> float:
    """Return by how many MB this process grows with many requests and listeners."""
    async with AsyncExitStack() as stack:
        for path in islice(cycle(PAGES), LISTENERS):
            await stack.enter_async_context(listening(base, path))
        await _visit(base, REQUESTS // 10)
        before = _resident()
        await _visit(base, REQUESTS)
        return (_resident() - before) / 2**20


async def _visit(base: str, requests: int) -> None:
    async with httpx.AsyncClient(base_url=base, timeout=30) as client:
        for number, path in enumerate(islice(cycle(PAGES), requests)):
            client.cookies.clear()
            page = await client.get(path, headers={"x-person": f"person {number}"})
            page.raise_for_status()


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
