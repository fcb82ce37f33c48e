"""Fill a SQLite or PostgreSQL store with a million runs in a minute or two.

Ten thousand runs are created through the store; each has a tag. The database then copies them until
there are enough. The copies have no tags, and are up to a month older.
"""

import asyncio
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from typing import Any, NamedTuple

import psycopg

from perdure import Runtime, Step, codec, workflow
from perdure.clock import SystemClock
from perdure.runtime.definition import Definition
from perdure.snapshot import RunStatus, Snapshot, awaits_of, new_snapshot, rest_status
from perdure.snapshot.summary import summarize
from perdure.store import NewRun, Rest, Store, require_schedule
from perdure.stores import MemoryStore, open_store

WORKFLOWS = ("order", "welcome", "restock", "invoice", "refund", "import", "report", "label")
TEMPLATES = 10_000
BATCH = 1000
SECONDS_BACK = 30 * 86_400
LONG_RUNS = (100, 1000, 10_000)
BIG_RUNS = ("big-text", "big-rows")
"""Runs with a value of 15 MB."""

LIVE: tuple[RunStatus, ...] = (*("suspended",) * 5, *("waiting",) * 3, "paused", "queued")
"""The statuses of ten live runs. Of a hundred runs one is live, five are failed."""


class Shape(NamedTuple):
    """A run as the engine has left it: its snapshot, and the header that goes with it."""

    snapshot: bytes
    rest: Rest | None


class CarrierDown(Exception):
    """The error of the runs that failed."""


async def part(value: Any) -> Any:
    return value


async def ship() -> str:
    raise CarrierDown("503 from carrier")


def definition(name: str) -> Definition[Any, Any]:
    """Return a workflow whose payload says how it ends."""

    @workflow(name)
    async def body(step: Step, payload: dict[str, Any]) -> str:
        for number in range(3):
            await step(f"part-{number}", part, f"{name}: part {number}")
        match payload["ends"]:
            case "failed":
                await step("ship", ship)
            case "suspended" | "paused":
                await step.sleep("settle", "30d")
            case "waiting":
                await step.wait_for_event("approval", "approved", timeout="30d")
        return "parcel 7"

    return body


async def shapes() -> Mapping[tuple[str, RunStatus], Shape]:
    """Return a run of each workflow in each status, as the engine writes them."""
    store = MemoryStore()
    shapes_by_status = {}
    for name in WORKFLOWS:
        runtime = Runtime(store, workflows=[definition(name)])
        for status in ("completed", "failed", *dict.fromkeys(LIVE)):
            run_id = f"{name}-{status}"
            payload = {"ends": status, "customer": {"id": 42}, "note": "n" * 400}
            if status != "queued":
                await runtime.trigger(name, payload, run_id=run_id)
                snapshot = await store.load(run_id)
                assert snapshot is not None
            else:
                snapshot = new_snapshot(
                    name, now=SystemClock().now(), metadata={"version": 1, "input": payload}
                )
            shapes_by_status[name, status] = _shape(snapshot, status)
    return shapes_by_status


def _shape(snapshot: Snapshot, status: RunStatus) -> Shape:
    if status == "queued":
        return Shape(codec.dumps(snapshot), None)
    if status == "paused":
        snapshot["execution"]["state"] = status
        snapshot["execution"]["reason"] = "carrier outage"
    data = codec.dumps(snapshot)
    assert rest_status(snapshot) == status
    later = SystemClock().now() + timedelta(days=30)
    wake_at = later if status in ("suspended", "waiting") else None
    return Shape(data, Rest(status, wake_at, awaits_of(snapshot)))


def status_of(number: int) -> RunStatus:
    """Return the status of the run with this number."""
    match number % 100:
        case 99:
            return LIVE[number // 100 % len(LIVE)]
        case rest if rest >= 94:
            return "failed"
        case _:
            return "completed"


def new_run(number: int, shapes_by_status: Mapping[tuple[str, RunStatus], Shape]) -> NewRun:
    """Return the run with this number."""
    # Not a multiple of the hundred after which statuses repeat: each workflow has them all.
    name, status = WORKFLOWS[number // 7 % len(WORKFLOWS)], status_of(number)
    shape = shapes_by_status[name, status]
    return NewRun(
        f"{name}-{number}",
        name,
        shape.snapshot,
        version=1,
        tags=(f"customer={number % 200}",),
        summary=summarize(codec.loads(shape.snapshot), len(shape.snapshot)),
        rest=shape.rest,
    )


async def fill(url: str, runs: int) -> None:
    """Fill the empty store at `url`, and add the long runs."""
    async with open_store(url) as store:
        await _create_templates(store)
        await _create_long_runs(store)
    await asyncio.to_thread(copy_runs, url, runs // TEMPLATES - 1)


async def _create_templates(store: Store) -> None:
    schedule, shapes_by_status = require_schedule(store, "fill"), await shapes()
    for start in range(0, TEMPLATES, BATCH):
        await schedule.enqueue([new_run(n, shapes_by_status) for n in range(start, start + BATCH)])


async def _create_long_runs(store: Store) -> None:
    """Create runs with many steps, and one with a large value, by the engine."""

    @workflow("long")
    async def long(step: Step, payload: int) -> int:
        for number in range(payload):
            await step("fetch" if number % 2 else "load", part, f"page {number}")
        return payload

    @workflow("big")
    async def big(step: Step, payload: str) -> int:
        rows = [{"id": n, "name": f"article {n}", "price": n / 4} for n in range(300_000)]
        value = rows if payload == "big-rows" else "x" * (15 << 20)
        return len(await step("read", part, value))

    runtime = Runtime(store, workflows=[long, big])
    for steps in LONG_RUNS:
        await runtime.trigger(long, steps, run_id=f"long-{steps}")
    for name in BIG_RUNS:
        await runtime.trigger(big, name, run_id=name)


_COPIED_BY_SQLITE = """
    WITH RECURSIVE copies(n) AS (
        SELECT 1 UNION ALL SELECT n + 1 FROM copies WHERE n < :copies
    )
    INSERT INTO perdure_runs (
        id, snapshot, updated_at, workflow, status, wake_at, awaits, epoch, version, summary,
        created_at
    )
    SELECT
        id || '-' || n, snapshot,
        strftime('%Y-%m-%dT%H:%M:%f000Z', updated_at, '-' || (seconds(n, r.rowid)) || ' seconds'),
        workflow, status, wake_at + n, awaits, epoch, version, summary,
        created_at - seconds(n, r.rowid) * 1000000
    FROM copies CROSS JOIN perdure_runs r WHERE tags <> '[]'
"""

_COPIED_BY_POSTGRES = f"""
    INSERT INTO perdure_runs (
        id, snapshot, updated_at, workflow, status, wake_at, awaits, epoch, version, summary,
        created_at
    )
    SELECT
        r.id || '-' || n, snapshot, updated_at - shift, workflow, status, wake_at, awaits, epoch,
        version, summary, created_at - shift
    FROM generate_series(1, %(copies)s) n
    CROSS JOIN (SELECT *, row_number() OVER () AS number FROM perdure_runs WHERE tags <> '[]') r
    CROSS JOIN LATERAL (
        SELECT make_interval(secs => (n - 1 + r.number / {TEMPLATES}.0) * %(slot)s) AS shift
    ) s
"""


def copy_runs(url: str, copies: int) -> None:
    """Copy the templates until there are enough runs, each time a little older."""
    slot = SECONDS_BACK / max(copies, 1)
    if url.startswith("sqlite:///"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            connection.create_function(
                "seconds", 2, lambda n, row: round((n - 1 + row / TEMPLATES) * slot, 3)
            )
            connection.execute(_COPIED_BY_SQLITE, {"copies": copies})
        return
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(_COPIED_BY_POSTGRES, {"copies": copies, "slot": slot})
        database.execute("VACUUM ANALYZE perdure_runs")
