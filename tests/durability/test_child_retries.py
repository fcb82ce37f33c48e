"""Child runs of a run that is retried, rewound, forked or started again."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import pytest

from perdure import Run, Runtime, Step, workflow
from perdure.errors import RunFailed, StepTimeout
from perdure.operations import Operations
from perdure.runtime.definition import Definition
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore

MakeRuntime = Callable[..., Runtime]


class Machine:
    """A step that fails until it is repaired, and counts what it did."""

    def __init__(self) -> None:
        self.is_broken = True
        self.works = 0
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def work(self) -> str:
        self.works += 1
        if self.is_broken:
            raise ValueError("broken")
        return "done"


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def child(machine: Machine) -> Definition[None, str]:
    @workflow("child")
    async def child(step: Step) -> str:
        await step("prepare", machine.prepare)
        return await step("work", machine.work)

    return child


@workflow("nap")
async def nap(step: Step, n: int = 1) -> int:
    await step.sleep("nap", "1h")
    return n


async def settled(runtime: Runtime, run_id: str) -> Run:
    for _ in range(500):
        if not await runtime.sweep():
            run = await runtime.get_run(run_id)
            assert run is not None
            return run
    raise AssertionError("there is always a run that is due")


async def test_a_retried_run_retries_the_child_that_it_failed_on(
    make_runtime: MakeRuntime, machine: Machine, child: Definition[None, str]
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        return await step.call("c", child)

    runtime = make_runtime(parent, child)
    await runtime.trigger(parent, run_id="p")
    for _ in range(2):
        assert (await settled(runtime, "p")).status == "failed"
        await runtime.retry("p")
    assert (await settled(runtime, "p")).status == "failed"
    machine.is_broken = False
    await runtime.retry("p")
    assert (await settled(runtime, "p")).output == "done"
    assert (machine.prepared, machine.works) == (1, 4)


async def test_a_retry_reaches_the_grandchild_that_failed(
    make_runtime: MakeRuntime, machine: Machine, child: Definition[None, str]
) -> None:
    @workflow("middle")
    async def middle(step: Step) -> str:
        return await step.call("c", child)

    @workflow("parent")
    async def parent(step: Step) -> str:
        return await step.call("m", middle)

    runtime = make_runtime(parent, middle, child)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p")).status == "failed"
    machine.is_broken = False
    await runtime.retry("p")
    assert (await settled(runtime, "p")).output == "done"
    assert machine.prepared == 1


@pytest.mark.parametrize("how", ["call", "start"])
async def test_a_retry_continues_children_that_were_cancelled_with_the_run(
    make_runtime: MakeRuntime,
    clock: TestClock,
    machine: Machine,
    child: Definition[None, str],
    how: str,
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> list[Any]:
        async def other() -> int:
            if how == "call":
                return await step.call("n", nap, 7)
            return await step.result("r", await step.start("n", nap, 7))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(other()), group.create_task(step.call("c", child))]
        return [task.result() for task in tasks]

    runtime = make_runtime(parent, child, nap)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p")).status == "failed"
    assert (await settled(runtime, "p/1/1/n")).status == "cancelled"
    machine.is_broken = False
    await runtime.retry("p")
    assert (await settled(runtime, "p/1/1/n")).status == "suspended"
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == [7, "done"]


async def test_a_second_request_to_cancel_a_child_does_not_cancel_its_retry(
    make_runtime: MakeRuntime, clock: TestClock, machine: Machine, child: Definition[None, str]
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> list[Any]:
        async def slow() -> int:
            return await step.result("r", await step.start("n", nap, 7))

        winner, _ = await step.race("race", {"slow": slow, "c": lambda: step.call("c", child)})
        return [winner]

    runtime = make_runtime(parent, child, nap)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p")).status == "failed"
    machine.is_broken = False
    await runtime.retry("p")
    run = await settled(runtime, "p")
    assert (run.status, run.output) == ("completed", ["c"])


async def test_a_run_that_is_retried_after_its_deadline_continues_its_child(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("listens")
    async def listens(step: Step) -> Any:
        return await step.wait_for_event("go", "go")

    @workflow("parent", deadline="30m")
    async def parent(step: Step) -> Any:
        return await step.call("c", listens)

    runtime = make_runtime(parent, listens)
    await runtime.trigger(parent, run_id="p")
    await settled(runtime, "p")
    await clock.advance("30m")
    assert (await settled(runtime, "p")).status == "failed"
    await clock.advance("10m")
    await runtime.retry("p")
    assert (await settled(runtime, "p")).status == "waiting"
    await runtime.signal("p/1/c", "go", 7)
    assert (await settled(runtime, "p")).output == 7


async def test_a_failure_that_was_handled_is_not_retried_with_the_run(
    make_runtime: MakeRuntime, machine: Machine, child: Definition[None, str]
) -> None:
    broken = True

    def check() -> None:
        if broken:
            raise ValueError("no")

    @workflow("parent")
    async def parent(step: Step) -> str:
        try:
            await step.call("c", child)
        except RunFailed:
            await step("check", check)
            return "handled"
        return "not failed"

    runtime = make_runtime(parent, child)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p")).status == "failed"
    broken = machine.is_broken = False
    await runtime.retry("p")
    assert (await settled(runtime, "p")).output == "handled"
    assert machine.works == 1


async def test_a_rewind_cancels_open_children_of_dropped_calls(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        await step.start("kept", nap, 1)
        await step("here", lambda: None)
        await step.start("dropped", nap, 2)
        return await step.call("called", nap, 3)

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settled(runtime, "p")
    await Operations(store, clock=clock).rewind("p", "here", by="ana")
    await settled(runtime, "p")
    statuses = {run.id: run.status for run in await runtime.list_runs(prefix="p/")}
    assert statuses == {
        "p/1/kept": "suspended",
        "p/1/dropped": "cancelled",
        "p/1/called": "cancelled",
        "p/2/dropped": "suspended",
        "p/2/called": "suspended",
    }
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == 3


async def test_a_rewind_over_a_failure_continues_the_child(
    make_runtime: MakeRuntime,
    store: MemoryStore,
    clock: TestClock,
    machine: Machine,
    child: Definition[None, str],
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        return await step.call("c", child)

    runtime = make_runtime(parent, child)
    await runtime.trigger(parent, run_id="p")
    await settled(runtime, "p")
    machine.is_broken = False
    await Operations(store, clock=clock).rewind("p", "c", by="ana")
    assert (await settled(runtime, "p")).output == "done"
    assert machine.prepared == 1


async def test_a_fork_has_children_of_its_own_and_leaves_those_of_its_source_alone(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        await step.start("started", nap, 1)
        await step("here", lambda: None)
        return await step.call("called", nap, 3)

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settled(runtime, "p")
    await Operations(store, clock=clock).fork("p", "here", new_id="f", by="ana")
    await settled(runtime, "f")
    await runtime.cancel("f")
    await settled(runtime, "f")
    statuses = {run.id: run.status for run in await runtime.list_runs()}
    assert statuses["p/1/started"] == statuses["p/1/called"] == "suspended"
    assert statuses["f/1/called"] == "cancelled"
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == 3


async def test_a_fork_of_a_child_does_not_report_to_the_parent(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("child")
    async def child(step: Step) -> str:
        await step("first", lambda: None)
        answer = await step.wait_for_event("go", "go")
        return str(answer)

    @workflow("parent")
    async def parent(step: Step) -> str:
        return await step.call("c", child)

    runtime = make_runtime(parent, child)
    await runtime.trigger(parent, run_id="p")
    await settled(runtime, "p")
    await Operations(store, clock=clock).fork("p/1/c", new_id="f", by="ana")
    await settled(runtime, "f")
    await runtime.signal("f", "go", "fork")
    assert (await settled(runtime, "p")).status == "waiting"
    await runtime.signal("p/1/c", "go", "original")
    assert (await settled(runtime, "p")).output == "original"


async def test_a_child_that_is_started_again_reports_to_its_parent(
    store: MemoryStore, clock: TestClock
) -> None:
    """Its first end was durable, and its process died before the parent learned of it."""

    @workflow("child")
    async def child(step: Step, n: int) -> int:
        return n

    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.call("c", child, 1)

    good = Runtime(store, workflows=[parent, child], clock=clock)
    await good.trigger(parent, run_id="p")
    dying = FaultyStore(store, fail_at=1, verbs={"send"}, error=RuntimeError, stays_down=True)
    await Runtime(dying, workflows=[child], clock=clock).sweep()
    await clock.advance("1m")
    assert (await good.get_run("p/1/c")) is not None
    run = await good.trigger(child, 2, run_id="p/1/c", if_exists="restart_if_over")
    assert run.output == 2
    assert (await settled(good, "p")).output in (1, 2)


async def test_a_call_that_is_repeated_after_a_timeout_continues_its_child() -> None:
    """A timeout of asyncio is not recorded, so a replay makes the call again."""

    @workflow("impatient")
    async def impatient(step: Step) -> str:
        async def call() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await step.call("slow", nap, 1)

        await asyncio.gather(call(), step("beside", asyncio.sleep, 0.1))
        await step.sleep("later", "1h")
        return "done"

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[impatient, nap], clock=clock)
    await runtime.trigger(impatient, run_id="p")
    await runtime.sweep()
    first = await runtime.get_run("p/1/1/slow")
    assert first is not None
    assert first.status == "cancelled"
    for _ in range(4):
        await clock.advance("1h")
        await settled(runtime, "p")
    parent = await settled(runtime, "p")
    assert (parent.status, parent.output) == ("completed", "done")


async def test_an_operator_may_end_the_wait_for_many_children() -> None:
    @workflow("many")
    async def many(step: Step) -> list[int]:
        return await step.map_runs("nap", nap, [1, 2])

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[many, nap], clock=clock)
    await runtime.trigger(many, run_id="p")
    await Operations(runtime.store, clock=clock).wake("p", by="ana")
    for _ in range(5):
        await runtime.sweep()
    parent, child = await runtime.get_run("p"), await runtime.get_run("p/1/nap/0")
    assert parent is not None
    assert child is not None
    assert isinstance(parent.error, StepTimeout)
    assert child.status == "cancelled"


@pytest.mark.parametrize("on_error", ["raise", "collect"])
async def test_a_failure_of_a_map_that_was_handled_stays_after_a_retry(
    make_runtime: MakeRuntime,
    machine: Machine,
    child: Definition[None, str],
    on_error: Literal["raise", "collect"],
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        try:
            results: list[Any] = await step.map_runs("c", child, [None], on_error=on_error)
            handled = results[0].ok
        except RunFailed:
            handled = False
        await step("work", machine.work)
        return f"handled: {not handled}"

    runtime = make_runtime(parent, child)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p")).status == "failed"
    machine.is_broken = False
    await runtime.retry("p")
    assert (await settled(runtime, "p")).output == "handled: True"
    # The child's step, and that of the parent twice.
    assert machine.works == 3


async def test_a_retry_overtakes_the_request_to_cancel_a_child(
    make_runtime: MakeRuntime, clock: TestClock, machine: Machine, child: Definition[None, str]
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> list[Any]:
        return list(await asyncio.gather(step.call("c", child), step.call("n", nap, 7)))

    runtime = make_runtime(parent, child, nap)
    await runtime.trigger(parent, run_id="p")
    while (run := await runtime.get_run("p")) is not None and not run.over:
        await runtime.sweep(limit=1)
    machine.is_broken = False
    # The child that sleeps has not read its message yet.
    await runtime.retry("p")
    for _ in range(3):
        await settled(runtime, "p")
        await clock.advance("1h")
    assert (await settled(runtime, "p")).output == ["done", 7]
