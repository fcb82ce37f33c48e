"""Searches among many runs: the time of a page must not depend on how many runs there are.

A small and a large store are measured alternately. Measured minutes apart, as the large one was
filled, the counts of the same statement seemed to take up to four times as long.

    python -m bench.search [--rows 1000000] [--only sqlite,postgres]

Filling a store with a million runs takes minutes, so `bench.run` does it only when it is not fast.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, TypeAlias

from bench.places import place
from bench.timing import timed
from perdure import codec
from perdure.clock import SystemClock
from perdure.snapshot import RunStatus, new_snapshot
from perdure.snapshot.summary import encode_summary
from perdure.store import NewRun, Query, Rest, ScheduleStore, require_schedule, require_search

BATCH = 1000
PAGE = 50
CAP = 100
"""Less than any group has among ten thousand runs: so all of them are counted up to here."""
REPEATS = 15
WARM = 4
"""Calls before the measured ones: a store has several connections, each with its own cache."""
SMALL = 10_000
WORKFLOWS = tuple(f"workflow-{number}" for number in range(10))
STATUSES: tuple[RunStatus, ...] = ("completed",) * 7 + ("failed", "suspended", "waiting")
PLACES = ("sqlite", "postgres")

Work: TypeAlias = Callable[[], Awaitable[object]]

TARGETS = {
    **dict.fromkeys(
        (
            "newest",
            "by status",
            "by workflow",
            "by both",
            "by tag",
            "by prefix",
            "by time",
            "oldest",
            "page 1,000",
        ),
        0.020,
    ),
    "counts": 0.030,
}
MOST_GROWTH = 1.5
"""How much longer counts may take than among ten thousand runs."""


def new_run(number: int) -> NewRun:
    """Return a run; the number determines its workflow, status, tags and prefix."""
    workflow = WORKFLOWS[number % len(WORKFLOWS)]
    status = STATUSES[number // 7 % len(STATUSES)]
    now = SystemClock().now()
    wake_at = now + timedelta(days=30) if status == "suspended" else None
    prefix = "rare" if number % 5000 == 0 else "run"
    return NewRun(
        f"{prefix}-{number}",
        workflow,
        codec.dumps(new_snapshot(workflow, now=now, metadata={"version": 1})),
        version=1,
        tags=(f"customer={number % 1000}",),
        summary=encode_summary({}, {}, 12, 0, "send the invoice", 4096),
        rest=Rest(status, wake_at),
    )


async def fill(store: ScheduleStore, first: int, last: int) -> None:
    """Create the runs with these numbers."""
    for start in range(first, last, BATCH):
        await store.enqueue([new_run(n) for n in range(start, min(start + BATCH, last))])


def queries() -> Mapping[str, Query]:
    """Return a query of each indexed kind."""
    now = SystemClock().now()
    return {
        "newest": Query(),
        "by status": Query(statuses=("failed",)),
        "by workflow": Query(workflows=(WORKFLOWS[3],)),
        "by both": Query(workflows=(WORKFLOWS[3],), statuses=("waiting",)),
        "by tag": Query(tags=("customer=7",)),
        "by prefix": Query(prefix="rare-"),
        "by time": Query(until=now - timedelta(seconds=1), statuses=("completed",)),
        "oldest": Query(oldest_first=True),
    }


async def works_of(store: Any) -> dict[str, Work]:
    """Return what is measured: each kind of page, and the counts."""
    search = require_search(store)
    works: dict[str, Work] = {
        name: partial(search.search, query, PAGE) for name, query in queries().items()
    }
    cursor = await _cursor_of_page(search, 1000)
    works["page 1,000"] = partial(search.search, Query(), PAGE, after=cursor)
    works["counts"] = partial(search.counts, Query(), CAP)
    return works


async def _cursor_of_page(search: Any, page: int) -> str | None:
    cursor = None
    for _ in range(page // 20):
        results = await search.search(Query(), PAGE * 20, after=cursor)
        if (cursor := results.cursor) is None:
            break
    return cursor


async def _medians(works: Mapping[int, Work]) -> dict[int, float]:
    """Return the median seconds of each, measured alternately."""
    for work in works.values():
        for _ in range(WARM):
            await work()
    seconds: dict[int, list[float]] = {size: [] for size in works}
    for _ in range(REPEATS):
        for size, work in works.items():
            seconds[size].append(await timed(work()))
    return {size: median(values) for size, values in seconds.items()}


async def measure(name: str, rows: int) -> AsyncIterator[tuple[str, int, float]]:
    """Yield the seconds of each search on a store, among ten thousand runs and among `rows`."""
    with place(name) as small, place(name) as large:
        stores: dict[int, Any] = {SMALL: small.open(), rows: large.open()}
        try:
            for size, store in stores.items():
                await fill(require_schedule(store), 0, size)
            works = {size: await works_of(store) for size, store in stores.items()}
            for work in works[rows]:
                medians = await _medians({size: works[size][work] for size in works})
                for size, seconds in medians.items():
                    yield work, size, seconds
        finally:
            for store in stores.values():
                await store.close()


async def main() -> None:
    """Measure, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--only", default=",".join(PLACES), help="stores, separated by commas")
    chosen = parser.parse_args()
    for name in filter(None, chosen.only.split(",")):
        async for work, size, seconds in measure(name, chosen.rows):
            target = TARGETS[work] if size == chosen.rows else None
            missed = "  (missed)" if target is not None and seconds > target else ""
            print(f"{name:<9} {size:>9,} runs  {work:<12} {seconds * 1e3:8.2f} ms{missed}")


if __name__ == "__main__":
    asyncio.run(main())
