"""Measure the dashboard and the command among a million runs against their targets.

    python -m bench.dashboard [--store sqlite|postgres] [--runs 1000000] [--url URL]

The SQLite file is kept in `build/bench` and used again. PostgreSQL is started and filled each time,
unless `--url` names a database: it is filled if it is empty, and kept.
"""

import argparse
import asyncio
import gzip
import logging
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, run
from typing import Any

import httpx
from starlette.requests import Request

from bench import live, tabs, workers
from bench.bars import Bar, p95_ms
from bench.million import BIG_RUNS, LONG_RUNS, TEMPLATES, fill
from bench.places import place
from bench.timing import now, timed
from perdure.dashboard import Access, Dashboard
from perdure.insights import Insights
from perdure.store import Query, require_maintenance, require_search
from perdure.stores import open_store

KEPT = Path("build/bench")
PAGE = 50
COUNT_CAP, COUNTED = 100, Query(statuses=("completed", "failed"))
"""Each group has more runs than the cap, also among ten thousand: the same number is counted."""
TABS, DUE_RUNS, THROUGHPUT_TURNS = 10, 3000, 3

INDEXED = {
    "newest": "",
    "by status": "status:failed",
    "by statuses": "status:suspended,waiting,paused",
    "by workflow": "workflow:order",
    "by both": "workflow:order status:failed",
    "by tag": "tag:customer=7",
    "by id prefix": "order-9",
    "by time": "since:24h status:completed",
    "oldest": "sort:oldest",
}
SCANNED = {"rare error": "error:NeverRaised", "payload": "payload.customer.id:43"}
STEP_BARS = dict(zip(LONG_RUNS, (40, 80, 300), strict=True))


async def insights_bars(store: Any) -> AsyncIterator[Bar]:
    """Measure the questions themselves, without pages."""
    insights = Insights(store)
    yield Bar("insights: overview", 100, await p95_ms(insights.overview))
    for name, query in INDEXED.items():
        yield Bar(f"insights: runs {name}", 60, await p95_ms(partial(insights.runs, query)))
    cursor = await cursor_of_page(insights, 1000)
    deep = partial(insights.runs, "", PAGE, cursor)
    yield Bar("insights: runs, page 1,000", 60, await p95_ms(deep))
    for name, query in SCANNED.items():
        scan = partial(insights.runs, query)
        yield Bar(f"insights: runs by {name}", 750, await p95_ms(scan, repeats=3))
    for name in ("errors", "agenda", "workflows", "queues", "workers"):
        question: Callable[[], Any] = getattr(insights, name)
        yield Bar(f"insights: {name}", 250, await p95_ms(question, repeats=10))


async def cursor_of_page(insights: Insights, page: int) -> str | None:
    """Return the cursor with which this page begins."""
    cursor = None
    for _ in range(page // 20):
        cursor = (await insights.runs("", PAGE * 20, cursor)).cursor
        if cursor is None:
            break
    return cursor


def browser_of(store: Any) -> httpx.AsyncClient:
    """Return a client of a new dashboard on the store."""
    people = count()

    async def let_in(request: Request) -> Access:
        # Each request is another person's: a session may send only 20 per second.
        return Access(f"person {next(people)}")

    transport = httpx.ASGITransport(app=Dashboard(store, auth=let_in))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30)


async def page_bars(url: str) -> AsyncIterator[Bar]:
    """Measure pages in this process: the whole answer of the ASGI app."""
    async with open_store(url) as store, browser_of(store) as client:
        yield Bar("/ cold", 400, 1000 * await timed(get(client, "/")))
        yield Bar("/ warm", 100, await p95_ms(partial(get, client, "/")))
        for name, query in INDEXED.items():
            work = partial(get, client, "/runs", q=query)
            yield Bar(f"/runs {name}", 60, await p95_ms(work))
        cursor = await cursor_of_page(Insights(store), 1000)
        yield Bar("/runs page 1,000", 60, await p95_ms(partial(get, client, "/runs", after=cursor)))
        for name, query in SCANNED.items():
            scan = partial(get, client, "/runs", q=query)
            yield Bar(f"/runs by {name}", 750, await p95_ms(scan, repeats=3))
        async for bar in run_bars(client):
            yield bar
        async for bar in weight_bars(client):
            yield bar


async def get(client: httpx.AsyncClient, path: str, **params: Any) -> httpx.Response:
    """Return the page; fail if it is an error."""
    parameters = {name: value for name, value in params.items() if value}
    client.cookies.clear()
    response = await client.get(path, params=parameters)
    response.raise_for_status()
    return response


async def run_bars(client: httpx.AsyncClient) -> AsyncIterator[Bar]:
    """Measure the pages of runs with many steps, and of those with a large value."""
    for steps, bar in STEP_BARS.items():
        path = f"/runs/long-{steps}"
        yield Bar(f"/runs/<id>, {steps:,} steps", bar, await p95_ms(partial(get, client, path)))
        size = len((await get(client, path)).content) / 1024
        yield Bar(f"/runs/<id>, {steps:,} steps: HTML", 120, size, "KB")
    for name in BIG_RUNS:
        path, title = f"/runs/{name}", f"/runs/<id>, value of 15 MB ({name})"
        yield Bar(title, 300, await p95_ms(partial(get, client, path), 5))
        size = len((await get(client, path)).content) / 1024
        yield Bar(f"{title}: HTML", 200, size, "KB")


async def weight_bars(client: httpx.AsyncClient) -> AsyncIterator[Bar]:
    """Measure what a browser loads for the first page, compressed, and for the next one."""
    page = await get(client, "/")
    files = sorted(set(re.findall(r'(?:href|src)="([^"]*/static/[^"]+)"', page.text)))
    loaded = [page, *[await get(client, path) for path in files]]
    weights = [compressed(each.content) for each in loaded]
    yield Bar("/ and its files, compressed, cold", 60, sum(weights) / 1024, "KB")
    yield Bar("/ compressed, warm", 12, weights[0] / 1024, "KB")
    yield Bar("/ requests", 5, len(weights), "")


def compressed(content: bytes) -> int:
    """Return the size of what is sent."""
    return len(gzip.compress(content, 6))


async def growth_bars(url: str, small_url: str) -> AsyncIterator[Bar]:
    """Compare counts among a million runs with those among ten thousand."""

    async def measured(at: str) -> float:
        async with open_store(at) as store:
            counts = require_search(store, "bench").counts
            return await p95_ms(partial(counts, COUNTED, COUNT_CAP))

    small, large = await measured(small_url), await measured(url)
    yield Bar("counts, 1M runs against 10K", 1.5, large / small, "×")


async def throughput_bars(url: str) -> AsyncIterator[Bar]:
    """Compare the due runs per second of a worker with ten tabs open and with none."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    async with open_store(url) as store:
        for turn in range(2 * THROUGHPUT_TURNS):
            is_open = turn % 2 == 1
            async with tabs.opened(url, TABS) if is_open else nullcontext():
                outcome = await workers.together(store, url, f"turn-{turn}-{now()}", 1, DUE_RUNS)
            rates[is_open].append(outcome.rate)
            # The next measurement must find the store in the same state.
            await require_maintenance(store, "bench").prune(
                timedelta(0), workflow="bench-shared", limit=DUE_RUNS
            )
    ratio = median(rates[True]) / median(rates[False])
    yield Bar(f"due runs/s of a worker, {TABS} tabs against none", 0.97, ratio, "×", True)


def command_bars(url: str) -> Iterator[Bar]:
    """Measure the command as a process: the best of five, since starting Python varies."""
    environment = {**os.environ, "PERDURE_STORE": url}
    # With bytecode, as it is installed; the first of the five writes it.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(KEPT.resolve() / "bytecode")
    for arguments, bar in (("--help", 150), ("ls", 400), ("", 600)):
        command = [sys.executable, "-m", "perdure", *arguments.split()]
        times = []
        for _ in range(5):
            began = now()
            run(command, env=environment, check=True, stdout=DEVNULL, stderr=DEVNULL)
            times.append(1000 * (now() - began))
        yield Bar(f"perdure {arguments}".strip(), bar, min(times))


@contextmanager
def chosen_store(name: str, url: str | None, runs: int) -> Iterator[str]:
    """Yield the URL of a store with this many runs."""
    if url is not None:
        yield url
    elif name == "sqlite":
        KEPT.mkdir(parents=True, exist_ok=True)
        yield f"sqlite:///{KEPT.absolute()}/runs-{runs}.db"
    else:
        with place(name) as here:
            yield here.url


async def filled(url: str, runs: int) -> None:
    """Fill the store unless it has runs."""
    async with open_store(url) as store:
        if await store.list(limit=1):
            return
    began = now()
    await fill(url, runs)
    print(f"{runs:,} runs created in {now() - began:.0f} s")


async def measure(url: str, runs: int) -> AsyncIterator[Bar]:
    """Yield all bars."""
    await filled(url, runs)
    async with open_store(url) as store:
        async for bar in insights_bars(store):
            yield bar
    async for bar in page_bars(url):
        yield bar
    with tempfile.TemporaryDirectory() as folder:
        # The same kind of store: ratios between kinds would say nothing.
        if url.startswith("sqlite"):
            small = f"sqlite:///{folder}/small.db"
            await fill(small, TEMPLATES)
            async for bar in growth_bars(url, small):
                yield bar
    async for bar in throughput_bars(url):
        yield bar
    async for bar in live.measure(url):
        yield bar
    for bar in command_bars(url):
        yield bar


async def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--url", help="the store to fill, or to use if it has runs")
    chosen = parser.parse_args()
    missed = 0
    with chosen_store(chosen.store, chosen.url, chosen.runs) as url:
        async for bar in measure(url, chosen.runs):
            print(bar.line(), flush=True)
            missed += not bar.is_met
    print(f"{missed} bars missed" if missed else "all bars met")


if __name__ == "__main__":
    # The runs that fail are part of the data.
    logging.basicConfig(level=logging.CRITICAL)
    asyncio.run(main())
