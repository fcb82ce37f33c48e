"""Runs whose recorded times no clock has shown, such as those that another tool wrote."""

from itertools import product
from typing import Any

import pytest

from perdure import Client
from perdure.snapshot import Snapshot, assert_valid_snapshot, new_snapshot
from perdure.stores import MemoryStore
from tests.unit.dashboard.visitor import Visitor, dashboard, text_of
from tests.unit.insights.long_runs import BEGIN, record

FIRST, LAST = "0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z"
TIMES = {"first": FIRST, "last": LAST, "usual": "2026-11-03T09:00:00.000Z"}
DURATIONS = {"none": 0, "centuries": 1e13, "ages": 1e16, "float": 1e308, "int": 10**400}
ZONES = ("UTC", "Asia/Tokyo", "America/New_York")


def absurd_snapshot(steps: int = 0, **fields: Any) -> Snapshot:
    """Return a run with absurd records, this many others, and these fields of its execution."""
    snapshot: Any = new_snapshot("absurd", now=BEGIN)
    snapshot["steps"] = {
        f"{time} {span}": record(0, at=at, durationMs=ms)
        for (time, at), (span, ms) in product(TIMES.items(), DURATIONS.items())
    }
    snapshot["steps"] |= {f"step {n}": record(n) for n in range(steps)}
    snapshot["execution"] |= fields
    return assert_valid_snapshot(snapshot)


async def stored(snapshot: Snapshot) -> MemoryStore:
    store = MemoryStore()
    await store.save("absurd", snapshot)
    return store


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("steps", [0, 1000])
async def test_a_page_shows_a_run_with_absurd_times(steps: int, zone: str) -> None:
    snapshot = absurd_snapshot(steps)
    visitor = Visitor(dashboard(await stored(snapshot)))
    await visitor.post("/preferences", {"theme": "dark", "zone": zone})
    for path in ("", "/steps?after=last+int"):
        page = await visitor.get(f"/runs/absurd{path}")
        assert page.status_code == 200
        assert "/runs/absurd" in page.text
    for key in snapshot["steps"]:
        if not key.startswith("step"):
            page = await visitor.http.get("/runs/absurd", params={"step": key})
            assert page.status_code == 200, text_of(page)


@pytest.mark.parametrize("at", [FIRST, LAST])
@pytest.mark.parametrize("state", ["completed", "cancelled", "suspended", "waiting", "paused"])
async def test_every_page_shows_a_run_that_was_stored_at_an_absurd_time(
    state: str, at: str
) -> None:
    ended = {"completed": "completed", "cancelled": "failed"}.get(state)
    waits = [
        {"id": "nap", "kind": "sleep", "wakeAt": at, "since": at},
        {"id": "ask", "kind": "event", "event": "paid", "since": at, "wakeAt": at},
    ]
    fields: dict[str, Any] = {"lastUpdated": at, "status": ended or "running"}
    fields |= {} if state == "completed" else {"state": state}
    fields |= {"completedAt": at} if ended else {"pending": waits}
    store = await stored(absurd_snapshot(**fields))
    for zone in ZONES:
        visitor = Visitor(dashboard(store))
        await visitor.post("/preferences", {"theme": "dark", "zone": zone})
        for path in ("", "runs", "runs/absurd", "errors", "agenda", "approvals", "workflows"):
            page = await visitor.get(f"/{path}")
            assert page.status_code == 200, text_of(page)
        page = await visitor.get("/compare?left=absurd&right=absurd")
        assert page.status_code == 200, text_of(page)


async def test_a_client_returns_steps_with_absurd_durations() -> None:
    async with Client(await stored(absurd_snapshot())) as client:
        run = await client.handle("absurd").get()
    assert run is not None
    assert len(run.history) == len(TIMES) * len(DURATIONS)
