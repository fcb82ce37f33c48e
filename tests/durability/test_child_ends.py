"""What happens to child runs when a run ends, and to a run when its children end."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from perdure import Run, Runtime, Step, workflow
from perdure.errors import Cancelled, RunFailed, StepTimeout
from perdure.operations import Operations
from perdure.runtime.definition import Definition
from perdure.store import NewMessage, NewRun
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

MakeRuntime = Callable[..., Runtime]


@workflow("nap")
async def nap(step: Step, n: int = 1) -> int:
    await step.sleep("nap", "1h")
    return n


@workflow("waits for go")
async def waits_for_go(step: Step) -> Any:
    return await step.wait_for_event("go", "go")


async def settle(runtime: Runtime) -> None:
    for _ in range(500):
        if not await runtime.sweep():
            return
    raise AssertionError("there is always a run that is due")


async def status(runtime: Runtime, run_id: str) -> str:
    await settle(runtime)
    run = await runtime.get_run(run_id)
    assert run is not None
    return run.status


async def settled(runtime: Runtime, run_id: str) -> Run:
    await settle(runtime)
    run = await runtime.get_run(run_id)
    assert run is not None
    return run


async def has_run(store: MemoryStore, run_id: str) -> bool:
    return await store.load(run_id) is not None


def parent_that(ends: Callable[[Step], Any], **options: Any) -> Definition[Any, Any]:
    """Return a workflow with a child that is called, one that is started, and an abandoned one."""

    @workflow("parent", **options)
    async def parent(step: Step) -> None:
        async def call() -> None:
            await step.call("called", nap, 1)

        await step.start("started", nap, 2)
        await step.start("abandoned", nap, 3, on_parent_end="abandon")
        task = asyncio.create_task(call())
        await step.sleep("a little", "10m")
        await ends(step)
        del task

    return parent


async def complete(step: Step) -> None:
    pass


async def fail(step: Step) -> None:
    raise ValueError("no")


async def wait(step: Step) -> None:
    await step.sleep("long", "2h")


async def begin(runtime: Runtime, clock: TestClock, parent: Definition[Any, Any]) -> None:
    """Run a parent until its children sleep and it has done what it does after that."""
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await clock.advance("10m")
    await settle(runtime)


async def children(runtime: Runtime) -> list[str]:
    await settle(runtime)
    names = ("1/called", "started", "abandoned")
    return [await status(runtime, f"p/1/{name}") for name in names]


@pytest.mark.parametrize(("ends", "expected"), [(complete, "completed"), (fail, "failed")])
async def test_the_end_of_a_run_cancels_what_it_started_and_has_not_abandoned(
    make_runtime: MakeRuntime, clock: TestClock, ends: Any, expected: str
) -> None:
    parent = parent_that(ends)
    runtime = make_runtime(parent, nap)
    await begin(runtime, clock, parent)
    assert await status(runtime, "p") == expected
    assert await children(runtime) == ["cancelled", "cancelled", "suspended"]
    await clock.advance("1h")
    assert await status(runtime, "p/1/abandoned") == "completed"


async def test_a_suspended_run_that_a_client_cancels_cancels_its_children(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    parent = parent_that(wait)
    runtime = make_runtime(parent, nap)
    await begin(runtime, clock, parent)
    assert await children(runtime) == ["suspended"] * 3
    assert (await runtime.cancel("p")).status == "cancelled"
    assert await children(runtime) == ["cancelled", "cancelled", "suspended"]


async def test_a_suspended_run_that_an_operator_cancels_cancels_its_children(
    make_runtime: MakeRuntime, clock: TestClock, store: MemoryStore
) -> None:
    parent = parent_that(wait)
    runtime = make_runtime(parent, nap)
    await begin(runtime, clock, parent)
    await Operations(store, clock=clock).cancel("p", by="ana")
    assert await children(runtime) == ["cancelled", "cancelled", "suspended"]


async def test_a_run_that_is_cancelled_while_it_works_cancels_its_children(
    store: MemoryStore, clock: TestClock
) -> None:
    working, never = asyncio.Event(), asyncio.Event()

    async def work(step: Step) -> None:
        async def hang() -> None:
            working.set()
            await never.wait()

        await step("hang", hang)

    parent = parent_that(work)
    runtime = Runtime(store, workflows=[parent, nap], clock=clock)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await clock.advance("10m")
    driving = asyncio.ensure_future(settle(runtime))
    await working.wait()
    await runtime.cancel("p")
    await driving
    assert await status(runtime, "p") == "cancelled"
    assert await children(runtime) == ["cancelled", "cancelled", "suspended"]


async def test_a_run_that_passes_its_deadline_cancels_its_children(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("later")
    async def later(step: Step) -> None:
        await step.sleep("nap", "3h")

    @workflow("parent", deadline="1h")
    async def parent(step: Step) -> None:
        await step.start("abandoned", later, on_parent_end="abandon")
        await step.call("called", waits_for_go)

    runtime = make_runtime(parent, later, waits_for_go)
    await begin(runtime, clock, parent)
    await clock.advance("1h")
    assert await status(runtime, "p") == "failed"
    assert await status(runtime, "p/1/called") in ("failed", "cancelled")


async def test_a_run_that_continues_as_new_keeps_its_children_until_it_ends(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step, n: int) -> None:
        if n < 3:
            await step.start("child", waits_for_go)
            await step.continue_as_new(n + 1)
        await step.sleep("long", "1h")

    runtime = make_runtime(parent, waits_for_go)
    await runtime.trigger(parent, 1, run_id="p")
    assert await status(runtime, "p/1/child") == await status(runtime, "p/2/child") == "waiting"
    await clock.advance("1h")
    assert await status(runtime, "p") == "completed"
    assert await status(runtime, "p/1/child") == await status(runtime, "p/2/child") == "cancelled"


async def test_a_branch_that_loses_a_race_cancels_what_it_started(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        async def slow() -> None:
            await step.start("started", nap)
            await step.call("called", nap)

        await step.start("outside", nap)
        await step.race("r", {"slow": slow, "fast": lambda: step.sleep("s", "1m")})
        await step.sleep("long", "1h")
        return "done"

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await clock.advance("1m")
    await settle(runtime)
    ids = [run.id for run in await runtime.list_runs(prefix="p/1/")]
    statuses = {id.rpartition("/")[2]: await status(runtime, id) for id in ids}
    assert statuses == {"started": "cancelled", "called": "cancelled", "outside": "suspended"}


async def test_a_call_that_the_function_stops_waiting_for_cancels_its_child(
    store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        task = asyncio.create_task(step.call("c", nap))
        await step("before", asyncio.sleep, 0)
        task.cancel()
        await asyncio.wait([task])
        await step("after", asyncio.sleep, 0)
        await step.sleep("long", "1h")
        return "done"

    runtime = Runtime(store, workflows=[parent, nap], clock=clock)
    await runtime.trigger(parent, run_id="p")
    ids = [run.id for run in await runtime.list_runs(prefix="p/1/")]
    assert [await status(runtime, id) for id in ids] in (["cancelled"], [])


async def test_a_cancelled_child_is_a_failure_of_the_call(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        try:
            await step.call("c", nap)
        except RunFailed as failed:
            return failed.run_id if isinstance(failed.__cause__, Cancelled) else "?"
        return ""

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await Operations(store, clock=clock).cancel("p/1/c", by="ana", why="enough")
    assert (await settled(runtime, "p")).output == "p/1/c"


async def test_a_child_that_is_cancelled_by_a_message_reports_it(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    """A request that arrives while the child is owned is applied by its next owner."""
    from perdure.runtime.requests import OPERATOR, Request, encode_request

    @workflow("parent")
    async def parent(step: Step) -> str:
        try:
            await step.call("c", nap)
        except RunFailed as failed:
            return failed.run_id
        return ""

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    request = encode_request(Request("", "cancel", why="enough"))
    await store.send([NewMessage("p/1/c", OPERATOR, request, "once")])
    assert (await settled(runtime, "p")).output == "p/1/c"


async def test_a_deleted_child_is_a_failure_of_the_call(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        try:
            await step.call("c", nap)
        except RunFailed as failed:
            return type(failed.__cause__).__name__
        return ""

    for n, delete in enumerate((Operations(store, clock=clock).delete, None)):
        runtime = make_runtime(parent, nap)
        await runtime.trigger(parent, run_id=f"p{n}")
        await settle(runtime)
        if delete is None:
            assert await runtime.delete(f"p{n}/1/c")
        else:
            await delete(f"p{n}/1/c", by="ana")
        assert (await settled(runtime, f"p{n}")).output == "RunNotFound"


async def test_a_child_that_an_operator_retries_reports_its_second_end(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    broken = True

    def work() -> str:
        if broken:
            raise ValueError("no")
        return "done"

    @workflow("child")
    async def child(step: Step) -> str:
        return await step("work", work)

    @workflow("parent")
    async def parent(step: Step) -> Any:
        ref = await step.start("c", child)
        await step.sleep("a while", "1h")
        return await step.result("r", ref)

    runtime = make_runtime(parent, child)
    await runtime.trigger(parent, run_id="p")
    assert await status(runtime, "p/1/c") == "failed"
    broken = False
    await Operations(store, clock=clock).retry("p/1/c", by="ana")
    await settle(runtime)
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == "done"


async def test_a_paused_child_keeps_its_parent_waiting(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.call("c", nap, 4)

    operations = Operations(store, clock=clock)
    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await operations.pause("p/1/c", by="ana")
    await clock.advance("2h")
    assert await status(runtime, "p") == "waiting"
    await operations.unpause("p/1/c", by="ana")
    assert (await settled(runtime, "p")).output == 4


async def test_a_paused_child_is_cancelled_with_its_parent(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    parent = parent_that(wait)
    runtime = make_runtime(parent, nap)
    await begin(runtime, clock, parent)
    await Operations(store, clock=clock).pause("p/1/1/called", by="ana")
    await runtime.cancel("p")
    assert await children(runtime) == ["cancelled", "cancelled", "suspended"]


async def test_a_paused_parent_gets_the_result_when_it_is_unpaused(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.call("c", nap, 4)

    operations = Operations(store, clock=clock)
    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await operations.pause("p", by="ana")
    await clock.advance("2h")
    assert await status(runtime, "p/1/c") == "completed"
    assert await status(runtime, "p") == "paused"
    await operations.unpause("p", by="ana")
    assert (await settled(runtime, "p")).output == 4


async def test_a_child_ends_although_its_parent_was_deleted(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.call("c", nap, 4)

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await runtime.delete("p")
    await clock.advance("1h")
    assert (await settled(runtime, "p/1/c")).output == 4
    assert await runtime.sweep() == []


async def test_a_child_ends_although_its_parent_is_over(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        call = step.call("c", nap, 4, on_parent_end="abandon")
        await step.race("r", call, step.sleep("s", "1m"))

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await clock.advance("1m")
    assert await status(runtime, "p") == "completed"
    await clock.advance("1h")
    (run,) = await runtime.list_runs(prefix="p/1/")
    assert (await settled(runtime, run.id)).output == 4


async def test_an_operator_who_wakes_a_call_lets_it_time_out_and_cancels_the_child(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> str:
        try:
            await step.call("c", nap)
        except StepTimeout:
            await step.sleep("long", "2h")
            return "late"
        return ""

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await Operations(store, clock=clock).wake("p", by="ana")
    await settle(runtime)
    assert await status(runtime, "p/1/c") == "cancelled"
    await clock.advance("2h")
    assert (await settled(runtime, "p")).output == "late"


async def test_a_run_that_another_run_only_awaits_is_not_cancelled_with_it(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.start("s", nap, 1, run_id="shared")
        await step.call("c", nap, 1, run_id="shared")

    runtime = make_runtime(parent, nap)
    await runtime.trigger(nap, 1, run_id="shared")
    await runtime.trigger(parent, run_id="p")
    await settle(runtime)
    await runtime.cancel("p")
    assert await status(runtime, "shared") == "suspended"


async def test_messages_of_children_that_ended_do_not_pile_up_in_a_loop(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step, n: int) -> None:
        # The call loses, and its child is reported when the next generation runs.
        call = step.call("c", nap, on_parent_end="abandon")
        await step.race("r", call, step.sleep("s", "59m"))
        if n < 20:
            await step.continue_as_new(n + 1)
        await step.sleep("last", "2h")

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, 1, run_id="p")
    for _ in range(21):
        await settle(runtime)
        await clock.advance("59m")
    await settle(runtime)
    assert len(await store.inbox("p")) <= 2


class SlowToCreate(MemoryStore):
    """A store that creates runs only when it is told to."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__(clock=clock)
        self.may_create = asyncio.Event()

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        await self.may_create.wait()
        return await super().enqueue(runs)


async def test_a_result_that_is_awaited_before_the_run_exists_is_not_missed(
    clock: TestClock,
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.result("r", await step.start("c", nap, 7))

    store = SlowToCreate(clock)
    runtime = Runtime(store, workflows=[parent, nap], clock=clock)
    driving = asyncio.ensure_future(runtime.trigger(parent, run_id="p"))
    await asyncio.sleep(0.05)
    store.may_create.set()
    await driving
    await settle(runtime)
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == 7


async def test_a_child_is_cancelled_although_it_does_not_exist_yet(clock: TestClock) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.start("c", nap, 7)

    store = SlowToCreate(clock)
    runtime = Runtime(store, workflows=[parent, nap], clock=clock)
    driving = asyncio.ensure_future(runtime.trigger(parent, run_id="p"))
    await asyncio.sleep(0.05)
    store.may_create.set()
    await driving
    assert await status(runtime, "p/1/c") == "cancelled"
