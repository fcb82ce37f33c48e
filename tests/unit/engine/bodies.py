"""Run a workflow function in this process: once, from its own snapshot, or as a clock advances."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from perdure import Err, Result, Step, Workflow
from perdure.testing import TestClock

Body = Callable[[Step], Awaitable[Any]]

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def workflow(**options: Any) -> Workflow[Any]:
    return Workflow("steps", **options)


async def run(body: Body, **options: Any) -> Any:
    """Return the result of one run."""
    return await workflow(**options).run(body)


async def run_and_replay(body: Body, **options: Any) -> tuple[Any, Any]:
    """Return the result of a run, and that of another run from the snapshot of the first."""
    first = workflow(**options)
    result = await first.run(body)
    return result, await workflow(snapshot=first.snapshot(), **options).run(body)


def single(call: Callable[[Step], Awaitable[Any]]) -> Body:
    """Return a workflow function of one call."""

    async def body(step: Step) -> Any:
        return await call(step)

    return body


def error_of(result: Result[Any, Any]) -> Any:
    assert isinstance(result, Err), result
    return result.error


async def advance_until_done(clock: TestClock, running: Awaitable[Any], by: str = "1s") -> Any:
    """Advance the clock until the task is done, and return its result."""
    task = asyncio.ensure_future(running)
    while not task.done():
        await clock.advance(by)
    return task.result()


def recorded_value(workflow: Workflow[Any], step: str) -> Any:
    """Return the value in the record of a step that succeeded."""
    record = workflow.snapshot()["steps"][step]
    assert record["ok"], record
    return record["value"]
