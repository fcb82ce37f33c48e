"""Operators' verbs beside workers: on runs that are owned, and killed at every store call."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import Refused, StoreError
from perdure.insights import Insights, to_json
from perdure.operations import Operations
from perdure.runtime.requests import OPERATOR, Request, encode_request
from perdure.snapshot import Snapshot
from perdure.store import NewMessage
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock
from perdure.worker import Worker

started: list[str] = []
gates: dict[str, asyncio.Event] = {}


async def gated(name: str) -> str:
    started.append(name)
    await gates.setdefault(name, asyncio.Event()).wait()
    return name


@workflow("slow")
async def slow(step: Step) -> list[str]:
    return [await step(name, gated, name) for name in ("a", "b", "c")]


@workflow("parallel")
async def parallel(step: Step) -> list[str]:
    async def branch(name: str) -> str:
        first = await step(f"{name}1", gated, f"{name}1")
        await step(f"{name}2", gated, f"{name}2")
        return first

    return list(await asyncio.gather(branch("x"), branch("y")))


async def fail() -> None:
    raise ConnectionError("503")


@workflow("failing")
async def failing(step: Step) -> str:
    await step("first", lambda: 1)
    await step("second", fail)
    return "done"


@workflow("waiting")
async def waiting(step: Step) -> Any:
    await step("first", lambda: 1)
    return await step.wait_for_event("answer", "approved", timeout="1 day")


@pytest.fixture(autouse=True)
def clean() -> None:
    started.clear()
    gates.clear()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def open_gate(*names: str) -> None:
    for name in names:
        gates.setdefault(name, asyncio.Event()).set()


async def status_of(store: MemoryStore, run_id: str = "run") -> str:
    [summary] = await store.summaries([run_id])
    assert summary is not None
    return summary.status


async def acts_of(store: Any, run_id: str = "run") -> list[dict[str, Any]]:
    snapshot: Any = await store.load(run_id)
    return list((snapshot.get("metadata") or {}).get("acts", ()))


async def test_no_step_begins_after_a_running_run_is_paused() -> None:
    store = MemoryStore()
    operations = Operations(store)
    runtime = Runtime(store, workflows=[slow])
    async with Worker(runtime):
        await runtime.trigger(slow, run_id="run", wait=False)
        await until(lambda: started == ["a"])
        outcome = await operations.pause("run", by="ana")
        assert outcome.state == "requested"
        open_gate("a")
        await until_status(store, "paused")
        assert started == ["a"]
        run = await runtime.get_run("run")
        assert run is not None
        assert [step.key for step in run.history] == ["a"]
        await operations.unpause("run", by="ana")
        open_gate("b", "c")
        assert await runtime.result("run", timeout=10) == ["a", "b", "c"]
    assert started == ["a", "b", "c"]
    assert [act["verb"] for act in await acts_of(store)] == ["pause", "unpause"]


async def until_status(store: MemoryStore, status: str) -> None:
    for _ in range(2000):
        if await status_of(store) == status:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"the run is {await status_of(store)}, not {status}")


async def test_steps_under_way_in_other_branches_end_and_are_recorded() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[parallel])
    async with Worker(runtime):
        await runtime.trigger(parallel, run_id="run", wait=False)
        await until(lambda: len(started) == 2)
        await Operations(store).pause("run", by="ana")
        open_gate("x1")
        await asyncio.sleep(0.05)
        assert await status_of(store) == "running"
        open_gate("y1")
        await until_status(store, "paused")
    run = await runtime.get_run("run")
    assert run is not None
    assert {step.key for step in run.history} == {"x1", "y1"}
    assert sorted(started) == ["x1", "y1"]


async def test_a_step_that_ends_by_itself_is_not_completed_by_hand() -> None:
    """One of the two is refused: the step's own end, which came first, stays."""
    store = MemoryStore()
    runtime = Runtime(store, workflows=[slow])
    async with Worker(runtime):
        await runtime.trigger(slow, run_id="run", wait=False)
        await until(lambda: started == ["a"])
        outcome = await Operations(store).complete_step("run", "a", "by hand", by="ana")
        assert outcome.state == "requested"
        open_gate("a", "b", "c")
        assert await runtime.result("run", timeout=10) == ["a", "b", "c"]
    [act] = await acts_of(store)
    assert "step 'a' succeeded" in act["refused"]
    assert started == ["a", "b", "c"]


async def test_a_request_that_comes_after_the_last_step_is_refused() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[slow])
    async with Worker(runtime):
        await runtime.trigger(slow, run_id="run", wait=False)
        open_gate("a", "b")
        await until(lambda: started == ["a", "b", "c"])
        await Operations(store).pause("run", by="ana")
        open_gate("c")
        assert await runtime.result("run", timeout=10) == ["a", "b", "c"]
    [act] = await acts_of(store)
    assert act["refused"] == "the run ended first"


async def test_an_owned_run_is_cancelled_with_the_act_in_the_same_write() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[slow])
    async with Worker(runtime):
        await runtime.trigger(slow, run_id="run", wait=False)
        await until(lambda: started == ["a"])
        outcome = await Operations(store).cancel("run", by="ana", why="wrong address")
        assert outcome.sentence.endswith("will apply it within seconds.")
        await until_status(store, "cancelled")
    [act] = await acts_of(store)
    assert (act["verb"], act["by"], act["why"]) == ("cancel", "ana", "wrong address")


async def test_rewinding_an_owned_run_keeps_the_steps_before() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[slow])
    async with Worker(runtime):
        await runtime.trigger(slow, run_id="run", wait=False)
        open_gate("a", "b")
        await until(lambda: started == ["a", "b", "c"])
        await Operations(store).rewind("run", "b", by="ana")
        open_gate("c")
        # Its own end came first: then the run is rewound at rest.
        await runtime.result("run", timeout=10)
        await Operations(store).rewind("run", "b", by="ana")
        await until(lambda: len(started) == 5)
        assert await runtime.result("run", timeout=10) == ["a", "b", "c"]
    assert started == ["a", "b", "c", "b", "c"]


Do = Callable[[Operations], Awaitable[object]]


async def _import(do: Operations) -> None:
    bundle = await Insights(do.store, clock=do.clock).export("run")
    await do.import_run(to_json(bundle), run_id="copy", by="ana", why="w")


VERBS: dict[str, tuple[Any, Do]] = {
    "cancel": (waiting, lambda do: do.cancel("run", by="ana", why="w")),
    "pause": (waiting, lambda do: do.pause("run", by="ana", why="w")),
    "wake": (waiting, lambda do: do.wake("run", by="ana", why="w")),
    "signal": (waiting, lambda do: do.signal("run", "approved", 1, by="ana", why="w")),
    "retry": (failing, lambda do: do.retry("run", by="ana", why="w")),
    "complete_step": (failing, lambda do: do.complete_step("run", "second", 2, by="ana", why="w")),
    "skip_step": (failing, lambda do: do.skip_step("run", "second", by="ana", why="w")),
    "fail_step": (failing, lambda do: do.fail_step("run", "second", "no", by="ana", why="w")),
    "retry_step": (failing, lambda do: do.retry_step("run", "second", by="ana", why="w")),
    "rewind": (failing, lambda do: do.rewind("run", "first", by="ana", why="w")),
    "fork": (failing, lambda do: do.fork("run", "second", new_id="copy", by="ana", why="w")),
    "start": (failing, lambda do: do.start("failing", run_id="new", by="ana", why="w")),
    "unpause": (waiting, lambda do: do.unpause("run", by="ana", why="w")),
    "edit_payload": (failing, lambda do: do.edit_payload("new", {"n": 2}, by="ana", why="w")),
    "import_run": (failing, _import),
}

# Nothing of the run remains that could contain the act.
DELETE: tuple[Any, Do] = (failing, lambda do: do.delete("run", by="ana"))

# What an operator has done before.
PREPARATIONS: dict[str, Do] = {
    "unpause": lambda do: do.pause("run", by="eva"),
    "edit_payload": lambda do: do.start("failing", {"n": 1}, run_id="new", by="eva"),
}

# The runs that the other verbs change or create; otherwise it is "run".
RUN_IDS = {"fork": "copy", "import_run": "copy", "start": "new", "edit_payload": "new"}


class _Crash(StoreError):
    """The operator's process dies here."""


async def _calls(verb: str, fail_at: int | None, how: Any) -> tuple[Any, int]:
    """Return the store after a verb that was cut off, and how many store calls it makes."""
    shape, do = VERBS.get(verb, DELETE)
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await Runtime(store, workflows=[shape], clock=clock).trigger(shape, run_id="run")
    if verb in PREPARATIONS:
        await PREPARATIONS[verb](Operations(store, clock=clock))
    faulty = FaultyStore(store, fail_at=fail_at, how=how, error=_Crash, stays_down=True)
    with suppress(_Crash):
        await do(Operations(faulty, clock=clock))
    return store, len(faulty.calls)


def _changed(before: Snapshot | None, after: Snapshot | None) -> bool:
    def visible(snapshot: Any) -> object:
        if snapshot is None:
            return None
        ignored = ("acts", "actCount", "seed", "createdAt")
        metadata = {k: v for k, v in snapshot["metadata"].items() if k not in ignored}
        steps = [(key, step["ok"], step.get("by")) for key, step in snapshot["steps"].items()]
        execution = {k: v for k, v in snapshot["execution"].items() if k != "error"}
        return steps, execution, metadata

    return visible(before) != visible(after)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_killed_verb_leaves_change_and_act_or_neither(verb: str) -> None:
    """Killed before and after each of its store calls."""
    run_id = RUN_IDS.get(verb, "run")
    untouched, _ = await _calls(verb, 1, "before")
    _, calls = await _calls(verb, None, "before")
    outcomes = set()
    for number in range(1, calls + 1):
        for how in ("before", "after"):
            store, _ = await _calls(verb, number, how)
            before, after = await untouched.load(run_id), await store.load(run_id)
            new_acts = _act_count(after) - _act_count(before)
            assert new_acts == _changed(before, after), (number, how)
            outcomes.add(new_acts)
    assert outcomes == {0, 1}


def _act_count(snapshot: Any) -> int:
    return 0 if snapshot is None else len((snapshot.get("metadata") or {}).get("acts", []))


async def test_a_killed_delete_has_its_act_first() -> None:
    _, calls = await _calls("delete", None, "before")
    deleted = set()
    for number in range(1, calls + 1):
        for how in ("before", "after"):
            store, _ = await _calls("delete", number, how)
            is_gone = await store.load("run") is None
            acts = await store.documents.keys("act:*")
            assert not is_gone or acts
            deleted.add(is_gone)
    assert deleted == {False, True}


async def test_a_run_whose_operator_died_continues_when_the_lease_expires() -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[waiting], clock=clock)
    await runtime.trigger(waiting, run_id="run")
    faulty = FaultyStore(store, fail_at=1, verbs={"append"}, error=_Crash, stays_down=True)
    with pytest.raises(StoreError):
        await Operations(faulty, clock=clock).wake("run", by="ana")
    await clock.advance(timedelta(seconds=60))
    [run] = await runtime.sweep()
    assert run.status == "waiting"


async def test_a_run_that_is_suspended_without_a_wait_is_due_after_a_refused_request(
    clock: TestClock, store: MemoryStore
) -> None:
    """Only `always_replay` suspends a run that waits for nothing."""

    @workflow("steps")
    async def steps(step: Step) -> int:
        return await step("one", lambda: 1) + await step("two", lambda: 2)

    runtime = Runtime(store, workflows=[steps], clock=clock, always_replay=True)
    await runtime.trigger(steps, run_id="r")
    with pytest.raises(Refused):
        await Operations(store, clock=clock).unpause("r", by="ana")
    request = encode_request(Request("1", "unpause", by="ana"))
    await store.send([NewMessage("r", OPERATOR, request, "1")])
    for _ in range(5):
        await runtime.sweep()
    run = await runtime.get_run("r")
    assert run is not None
    assert run.output == 3
