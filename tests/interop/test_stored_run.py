"""Runs of visulima's workflow runtime are imported and continued."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import StateFormatError
from perdure.snapshot import validate_snapshot
from perdure.stores import MemoryStore
from perdure.stores.adapters.visulima import snapshot_of_stored_run
from perdure.testing.clock import TestClock

RUN = "order:ddb1"
SAVED = 1794765413789
WAKE = 1794765414788
STEP_A = {"id": "a", "output": {"d": "1970-01-01T00:00:00.000Z", "n": None}, "type": "step"}
NAP = {"id": "nap", "type": "sleep"}


def stored(status: str, *history: dict[str, Any], **context: Any) -> dict[str, Any]:
    """Return a StoredRun as the runtime writes it."""
    active = status in ("suspended", "waiting")
    machine = {
        "status": "active" if active else "done",
        "value": status,
        "historyValue": {},
        "context": {
            "definitionId": "order",
            "history": list(history),
            "payload": {"x": 1},
            **context,
        },
        "children": {},
    }
    return {
        "definitionId": "order",
        "runId": RUN,
        "snapshot": machine,
        "status": status,
        "updatedAt": SAVED,
    }


SUSPENDED = stored("suspended", STEP_A, pending={"id": "nap", "kind": "sleep", "wakeAt": WAKE})
SUSPENDED["wakeAt"] = WAKE
WAITING = stored(
    "waiting",
    STEP_A,
    NAP,
    pending={"eventName": "go", "id": "ev", "kind": "event", "timeoutAt": WAKE},
)
COMPLETED = stored("completed", STEP_A, output={"sum": 3})
FAILED = stored("failed", STEP_A, error={"message": "boom", "name": "RangeError", "stack": "at x"})


@dataclass
class Made:
    d: datetime
    n: int | None


async def make() -> Made:
    raise AssertionError("a recorded step ran")


@workflow("order")
async def order(step: Step, payload: dict[str, int]) -> list[Any]:
    value = await step("a", make)
    await step.sleep("nap", 60)
    answer = await step.wait_for_event("ev", "go", timeout=60)
    return [value.d.year, value.n, payload["x"], answer]


@pytest.fixture
def clock() -> TestClock:
    return TestClock(datetime.fromtimestamp(SAVED / 1000, UTC))


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def runtime(store: MemoryStore, clock: TestClock) -> Runtime:
    return Runtime(store, workflows=[order], clock=clock, suspend_after=0)


async def imported(store: MemoryStore, run: dict[str, Any]) -> None:
    await store.save(RUN, snapshot_of_stored_run(run))


@pytest.mark.parametrize("run", [SUSPENDED, WAITING, COMPLETED, FAILED])
def test_an_imported_run_is_a_valid_snapshot(run: dict[str, Any]) -> None:
    assert validate_snapshot(snapshot_of_stored_run(run)).errors == ()


def test_a_suspended_run() -> None:
    assert snapshot_of_stored_run(SUSPENDED) == {
        "formatVersion": 1,
        "workflowName": "order",
        "steps": {"a": {"ok": True, "value": STEP_A["output"]}},
        "execution": {
            "status": "running",
            "state": "suspended",
            "lastUpdated": "2026-11-15T17:56:53.789Z",
            "pending": [{"id": "nap", "kind": "sleep", "wakeAt": "2026-11-15T17:56:54.788Z"}],
        },
        "metadata": {"version": 1, "input": {"x": 1}},
    }


async def test_a_suspended_run_sleeps_until_the_same_time(
    store: MemoryStore, runtime: Runtime, clock: TestClock
) -> None:
    await imported(store, SUSPENDED)
    assert await runtime.sweep() == []
    await clock.advance(timedelta(seconds=1))
    (run,) = await runtime.sweep()
    assert run.status == "waiting"
    signalled = await runtime.signal(RUN, "go", "yes")
    assert signalled.run is not None
    assert signalled.run.output == [1970, None, 1, "yes"]


async def test_a_waiting_run_receives_its_event(store: MemoryStore, runtime: Runtime) -> None:
    await imported(store, WAITING)
    signalled = await runtime.signal(RUN, "go", {"by": "ana"})
    assert signalled.run is not None
    assert signalled.run.output == [1970, None, 1, {"by": "ana"}]


async def test_a_waiting_run_times_out_at_the_same_time(
    store: MemoryStore, runtime: Runtime, clock: TestClock
) -> None:
    await imported(store, WAITING)
    await clock.advance(timedelta(seconds=1))
    (run,) = await runtime.sweep()
    assert run.output == [1970, None, 1, None]


@pytest.mark.parametrize(
    ("recorded", "answer"),
    [
        ({"id": "ev", "output": {"by": "ana"}, "type": "event"}, {"by": "ana"}),
        ({"id": "ev", "timedOut": True, "type": "event"}, None),
    ],
)
async def test_recorded_events_are_replayed(
    store: MemoryStore, runtime: Runtime, recorded: dict[str, Any], answer: object
) -> None:
    """This includes an event that was received and one that timed out."""
    run = stored("waiting", STEP_A, NAP, recorded)
    await imported(store, run)
    assert (await runtime.resume(RUN)).output == [1970, None, 1, answer]


async def test_a_completed_run_keeps_its_output(store: MemoryStore, runtime: Runtime) -> None:
    await imported(store, COMPLETED)
    run = await runtime.resume(RUN)
    assert (run.status, run.output, run.payload) == ("completed", {"sum": 3}, {"x": 1})


async def test_a_failed_run_keeps_its_error(store: MemoryStore, runtime: Runtime) -> None:
    await imported(store, FAILED)
    run = await runtime.resume(RUN)
    assert (run.status, str(run.error)) == ("failed", "RangeError: boom")


async def test_a_failed_run_can_be_retried(store: MemoryStore, runtime: Runtime) -> None:
    await imported(store, FAILED)
    assert (await runtime.retry(RUN)).status == "suspended"


def test_values_that_look_like_tags_are_not_decoded() -> None:
    run = stored("suspended", {"id": "a", "output": {"~date": "no date"}, "type": "step"})
    assert snapshot_of_stored_run(run)["steps"]["a"]["value"] == {"~": {"~date": "no date"}}  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    "run",
    [
        {},
        {**SUSPENDED, "status": "lost"},
        {**SUSPENDED, "updatedAt": "today"},
        {**SUSPENDED, "updatedAt": 1e300},
        {**SUSPENDED, "snapshot": {}},
    ],
)
def test_other_json_is_refused(run: dict[str, Any]) -> None:
    with pytest.raises(StateFormatError):
        snapshot_of_stored_run(run)
