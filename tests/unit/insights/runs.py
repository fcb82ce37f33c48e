"""Workflows, errors and workers that the tests of insights share."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from perdure import Err, Retry, Runtime, Step, workflow
from perdure.presence import WorkerPresence
from perdure.presence.documents import write_worker
from perdure.store import SearchStore, SupportedVersions
from perdure.testing import TestClock


class CarrierDown(Exception):
    """A service that a step calls is unavailable."""


def ship() -> None:
    try:
        raise ConnectionError("cannot reach https://ana:hunter2@carrier")
    except ConnectionError as error:
        raise CarrierDown("503 from carrier") from error


@workflow("order")
async def order(step: Step, payload: Any) -> str:
    """Take some steps, then do what the payload names."""
    does = payload.get("does", "") if isinstance(payload, dict) else ""
    await step("reserve", lambda: {"parcel": 7, "token": "abc"})
    await step.map("pack", [1, 2], _pack)
    match does:
        case "fail":
            await step("ship", ship, retry=Retry(2, delay=0))
        case "crash":
            raise CarrierDown("outside of steps")
        case "refuse":
            await step("charge", lambda: Err({"code": 7, "secret": "s"}))
        case "retry":
            await step("ship", ship, retry=Retry(6, delay="9m", max_delay="1h", jitter=False))
        case "sleep":
            await step.sleep("settle", "6h12m")
        case "wait":
            await step.wait_for_event("approval", "approved", timeout="3d")
        case "handle":
            await step("ship", _handle)
        case "group":
            await step("ship", _fail_twice)
        case _:
            pass
    return "done"


def _pack(number: int) -> int:
    return number


def _handle() -> None:
    parcels: dict[str, int] = {}
    try:
        parcels["parcel"] += 1
    except KeyError:
        raise CarrierDown("no parcel")  # noqa: B904  # raised while another is handled


def _fail_twice() -> None:
    raise ExceptionGroup("both", [CarrierDown("a"), ValueError("b")])


@workflow("order", version=2)
async def order_v2(step: Step, payload: Any) -> str:
    """A newer version."""
    return "done"


async def run_order(
    store: SearchStore, run_id: str, does: str = "", clock: TestClock | None = None, **fields: Any
) -> None:
    """Run an order until it ends or waits."""
    runtime = Runtime(store, workflows=[order], clock=clock or TestClock(), suspend_after=0)
    await runtime.trigger(order, {"does": does, **fields}, run_id=run_id)


async def live_worker(
    store: SearchStore, now: datetime, worker: str = "w-1", **fields: Any
) -> None:
    """Write the heartbeat of a worker that knows version 1 of orders."""
    known: Mapping[str, Any] = {
        "workflows": (SupportedVersions("order", 1, 1),),
        "slots": 10,
        "started_at": now,
        "seen_at": now,
    }
    await write_worker(store, WorkerPresence(id=worker, host="h", pid=1, **{**known, **fields}))
