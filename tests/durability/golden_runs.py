"""Runs that an earlier version of perdure has stored, and the workflows that they belong to.

`python -m tests.durability.golden_runs` adds the snapshots that are missing in `golden/`. Those
that are there stay as they are: later code must replay what earlier code has written. A workflow
here may get new steps, as users' do, but it must keep fitting its snapshot.
"""

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from perdure import Runtime, Step, workflow
from perdure.snapshot import Snapshot
from perdure.stores import MemoryStore
from perdure.testing import TestClock

FOLDER = Path(__file__).parent / "golden"
START = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Order:
    """A value that is rebuilt from its type."""

    id: int
    at: datetime
    parts: tuple[str, ...] = ()


class Declined(Exception):
    """An error that keeps its class."""


def reserve(id: int) -> Order:
    return Order(id, START, ("a", "b"))


def decline() -> None:
    raise Declined("no money")


async def double(n: int) -> int:
    return 2 * n


@workflow("golden-values")
async def values(step: Step, id: int) -> list[Any]:
    order = await step("reserve", reserve, id)
    try:
        await step("charge", decline)
    except Declined as error:
        order = await step("again", reserve, len(str(error)))
    key = await step("keyed", double, 4, key="one-for-all")
    return [order.parts, key, str(step.uuid("order")), (await step.now()).isoformat()]


@workflow("golden-branches")
async def branches(step: Step) -> list[Any]:
    async def part(n: int) -> int:
        await step("first", double, n)
        return await step("second", double, n + 1)

    gathered = await asyncio.gather(part(1), part(2))
    mapped = await step.map("each", [1, 2, 3], double)
    both = await step.all(step("left", double, 1), step("right", double, 2))
    won = await step.race("race", {"fast": lambda: part(5), "slow": lambda: asyncio.sleep(9)})
    return [gathered, mapped, both, won]


@workflow("golden-waits")
async def waits(step: Step) -> Any:
    is_new = step.patched("checked")
    await step.sleep("settle", "1h")
    event = await step.wait_for_event("paid", "paid", timeout="1d")
    return [is_new, event, await step.wait_for_event("never", "never", timeout="1d")]


@workflow("golden-child")
async def child(step: Step, n: int) -> int:
    return await step("double", double, n)


@workflow("golden-parent")
async def parent(step: Step) -> list[Any]:
    called = await step.call("call", child, 1)
    ref = await step.start("start", child, 2)
    many = await step.map_runs("many", child, [3, 4], on_error="collect")
    return [called, await step.result("started", ref), [str(each) for each in many]]


@workflow("golden-failed")
async def failed(step: Step) -> None:
    await step("ok", double, 1)
    await step("charge", decline)


@workflow("golden-loop")
async def loop(step: Step, n: int) -> int:
    await step("work", double, n)
    if n < 3:
        await step.continue_as_new(n + 1)
    return n


@workflow("golden-open")
async def still_open(step: Step) -> None:
    await step("before", double, 1)
    await asyncio.gather(step.sleep("long", "365d"), step.wait_for_event("go", "go"))
    await step("after", double, 2)


WORKFLOWS: dict[str, Any] = {
    each.name: each for each in (values, branches, waits, child, parent, failed, loop, still_open)
}
_PAYLOADS = {"golden-values": 7, "golden-loop": 1}


async def record(name: str) -> Snapshot:
    """Run a workflow to its end, or as far as it comes in some days; return its snapshot."""
    clock = TestClock(START)
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=WORKFLOWS.values(), clock=clock, random=Random(1))
    await runtime.trigger(name, _PAYLOADS.get(name), run_id="golden", wait=False)
    for _ in range(30):
        await runtime.sweep()
        if name == "golden-waits":
            await runtime.signal("golden", "paid", {"by": "ana"}, dedup_id="1")
        await clock.advance("2h")
    snapshot = await store.load("golden")
    assert snapshot is not None
    return snapshot


async def write_missing() -> None:
    """Write the snapshots that are not there yet."""
    for name in WORKFLOWS:
        path = FOLDER / f"{name}.json"
        if name != "golden-child" and not path.exists():
            path.write_text(json.dumps(_portable(await record(name)), indent=1) + "\n")


def _portable(data: Any) -> Any:
    """Return a snapshot without tracebacks, which name the files of one machine."""
    if isinstance(data, list):
        return [_portable(each) for each in data]
    if isinstance(data, dict):
        return {key: "" if key == "stack" else _portable(data[key]) for key in data}
    return data


if __name__ == "__main__":
    # Not those of `__main__`: classes are found again by their module.
    from tests.durability import golden_runs

    asyncio.run(golden_runs.write_missing())
