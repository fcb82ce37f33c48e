"""Runs with so many steps that only a part of them is listed."""

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.operations.starts import OperatorStarter
from perdure.snapshot import Snapshot, new_snapshot
from perdure.store import Store

BEGIN = datetime(2026, 11, 3, 9, tzinfo=UTC)


def record(seconds: float, *, ok: bool = True, **fields: Any) -> dict[str, Any]:
    """Return the record of a step that ended this long after `BEGIN`."""
    at = (BEGIN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    value: dict[str, Any] = {"value": 7} if ok else {"error": "lost"}
    return {"ok": ok, "kind": "step", "at": at, "durationMs": 100, **value, **fields}


def long_snapshot(steps: int, *, fails_every: int = 0) -> Snapshot:
    """Return a run with a step per 0.1 s, which sleeps for a day when half of them have ended."""
    snapshot: Any = new_snapshot("long", now=BEGIN)
    for n in range(steps):
        pause = 86_400 if n >= steps // 2 else 0
        is_ok = not fails_every or n % fails_every != 0
        snapshot["steps"][f"pack#{n + 1}"] = record(n / 10 + pause, ok=is_ok)
    checked: Snapshot = snapshot
    return checked


async def create_long_run(store: Store, run_id: str, steps: int, *, fails_every: int = 0) -> None:
    """Create a run with this history."""
    await OperatorStarter(store).create(run_id, long_snapshot(steps, fails_every=fails_every))
