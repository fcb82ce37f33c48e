"""Recorded calls of several branches are answered in the order of their records, before others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Client, Run, Runtime, Step, durable, workflow
from perdure.errors import DriftError
from perdure.result import Err
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

Note = Callable[[str], None]


class Sequence:
    """Steps that end in this order, each after the function has seen the end of the one before."""

    def __init__(self, *names: str, failing: str = "") -> None:
        self._names = names
        self._failing = failing
        self._seen = {name: asyncio.Event() for name in names}

    async def end(self, name: str) -> str:
        """End when it is the step's turn; this is the function of each step."""
        if place := self._names.index(name):
            await self._seen[self._names[place - 1]].wait()
        if name in self._failing:
            raise ValueError(name)
        return name

    def see(self, name: str) -> None:
        """Let the next step end."""
        self._seen[name].set()


async def replayed(function: Callable[[Step, Note], Awaitable[None]]) -> list[list[str]]:
    """Return what a function notes, first with an execution that crashes and then with a replay."""
    store = MemoryStore()
    notes: list[list[str]] = []

    async def body(step: Step) -> None:
        notes.append([])
        await function(step, notes[-1].append)
        if len(notes) == 1:
            raise RuntimeError("crash")

    for _ in range(2):
        await durable.run({}, body, id="run", store=store)
    return notes


async def nested(levels: int, call: Callable[[], Awaitable[str]]) -> str:
    """Make a call in a branch that is nested this deeply below the calling one."""
    if not levels:
        return await call()
    [value] = await asyncio.gather(nested(levels - 1, call))
    return value


class Pause:
    """A function of steps that never returns in the first execution, and then takes no time."""

    def __init__(self) -> None:
        self.is_over = False

    async def __call__(self) -> str:
        """Return a name."""
        if not self.is_over:
            await asyncio.Event().wait()
        return "new"


async def test_gather_raises_the_failure_that_was_recorded_first() -> None:
    steps = Sequence("b", "a", failing="ab")

    async def function(step: Step, note: Note) -> None:
        tasks = [asyncio.create_task(step(name, steps.end, name)) for name in "ab"]
        try:
            await asyncio.gather(*tasks)
        except ValueError as error:
            note(str(error))
            steps.see("b")
        await asyncio.wait(tasks)

    assert await replayed(function) == [["b"], ["b"]]


@pytest.mark.parametrize("fails_by_itself", [False, True])
async def test_a_failure_is_seen_before_later_records_of_other_branches(
    fails_by_itself: bool,
) -> None:
    """Whether the step failed, or code behind it."""
    steps = Sequence("a", "b", failing="" if fails_by_itself else "a")

    async def failing(step: Step) -> None:
        raise ValueError(await step("a", steps.end, "a"))

    async def other(step: Step, note: Note) -> None:
        note(await step("b", steps.end, "b"))

    async def function(step: Step, note: Note) -> None:
        beside = asyncio.create_task(other(step, note))
        try:
            await asyncio.gather(failing(step), beside)
        except ValueError:
            note("failed")
            steps.see("a")
        await beside

    assert await replayed(function) == [["failed", "b"], ["failed", "b"]]


async def test_tasks_that_nothing_awaits_continue_in_order() -> None:
    """The function learns of their ends by events."""
    steps = Sequence("a", "b")

    async def function(step: Step, note: Note) -> None:
        ready, ended = asyncio.Event(), asyncio.Event()

        async def nested_task() -> None:
            await step("a", steps.end, "a")
            ready.set()

        async def wait_for_nested() -> None:
            tasks.append(asyncio.create_task(nested_task()))
            await ready.wait()
            note("a")
            steps.see("a")

        async def flat() -> None:
            note(await step("b", steps.end, "b"))
            ended.set()

        tasks = [asyncio.create_task(wait_for_nested()), asyncio.create_task(flat())]
        await ended.wait()
        await asyncio.wait(tasks)

    assert await replayed(function) == [["a", "b"], ["a", "b"]]


async def test_a_failure_under_several_timeouts_is_seen_before_a_new_call_begins() -> None:
    """The failure has cancelled that call, which must not begin in a replay."""
    begun: list[str] = []

    async def fail() -> None:
        raise ValueError("planned")

    async def begin() -> None:
        begun.append("x")
        await asyncio.Event().wait()

    async def function(step: Step, note: Note) -> None:
        async def inner() -> None:
            await asyncio.wait_for(step("a", fail), 60)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.wait_for(inner(), 60))
                await step("x", begin)
        except* ValueError:
            note(f"failed, begun {len(begun)}")

    assert await replayed(function) == [["failed, begun 1"], ["failed, begun 1"]]


async def test_a_handler_that_sleeps_handles_the_same_failure_afterwards() -> None:
    """No crash is needed: a run that wakes up is a replay too."""
    clock, steps = TestClock(), Sequence("payment", "stock", failing="payment stock")
    handled = []

    @workflow("order")
    async def order(step: Step) -> None:
        try:
            await asyncio.gather(
                step("stock", steps.end, "stock"), step("payment", steps.end, "payment")
            )
        except ValueError as error:
            handled.append(str(error))
            steps.see("payment")
            await step.sleep("before the reminder", "1h")

    runtime = Runtime(MemoryStore(clock=clock), workflows=[order], clock=clock)
    run = await runtime.trigger(order)
    assert run.status == "suspended"
    await clock.advance("1h")
    assert [each.status for each in await runtime.sweep()] == ["completed"]
    assert handled == ["payment", "payment"]


async def test_as_completed_yields_in_the_order_of_the_records() -> None:
    names = [f"{number * 7 % 40}" for number in range(40)]
    steps = Sequence(*names)

    async def function(step: Step, note: Note) -> None:
        for value in asyncio.as_completed([step(name, steps.end, name) for name in sorted(names)]):
            note(name := await value)
            steps.see(name)

    assert await replayed(function) == [names, names]


async def test_the_first_task_of_a_wait_is_the_same() -> None:
    steps = Sequence("b", "c", "a")

    async def function(step: Step, note: Note) -> None:
        pending = {asyncio.create_task(step(name, steps.end, name)) for name in "abc"}
        while pending:
            done, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
            for task in done:
                note(task.result())
                steps.see(task.result())

    assert await replayed(function) == [["b", "c", "a"], ["b", "c", "a"]]


async def test_a_branch_ends_before_a_less_nested_one_that_ended_later() -> None:
    """It takes more turns of the event loop until the function notices its end."""
    steps = Sequence("deep", "flat")

    async def function(step: Step, note: Note) -> None:
        flat = asyncio.create_task(step("flat", steps.end, "flat"))
        deep = asyncio.create_task(nested(5, lambda: step("deep", steps.end, "deep")))
        for value in asyncio.as_completed([flat, deep]):
            note(name := await value)
            steps.see(name)

    assert await replayed(function) == [["deep", "flat"], ["deep", "flat"]]


async def test_the_end_of_a_join_is_seen_before_a_record_of_a_branch_beside_it() -> None:
    """All three branches are nested equally deeply, but the join does not wait for the third."""
    steps = Sequence("a", "b", "beside")

    async def branch(step: Step, name: str, see: Callable[[str], object]) -> None:
        see(await step(name, steps.end, name))

    async def function(step: Step, note: Note) -> None:
        beside = asyncio.create_task(branch(step, "beside", note))
        await asyncio.gather(branch(step, "a", steps.see), branch(step, "b", len))
        note("joined")
        steps.see("b")
        await beside

    assert await replayed(function) == [["joined", "beside"], ["joined", "beside"]]


async def test_the_ends_of_nested_joins_are_seen_before_a_record_of_another_branch() -> None:
    """Both calls are nested equally deeply, in different branches of the function."""
    steps = Sequence("first", "second")

    async def function(step: Step, note: Note) -> None:
        second = asyncio.create_task(nested(3, lambda: note_second(step, note)))
        note(await nested(3, lambda: step("first", steps.end, "first")))
        steps.see("first")
        await second

    async def note_second(step: Step, note: Note) -> str:
        note(value := await step("second", steps.end, "second"))
        return value

    assert await replayed(function) == [["first", "second"], ["first", "second"]]


async def test_a_run_is_not_suspended_while_a_call_waits_for_its_turn() -> None:
    """It would be stored without a wait that the branch had begun, and sleep for longer."""
    clock = TestClock()

    @workflow("trip")
    async def trip(step: Step) -> None:
        async def offer(name: str) -> None:
            await step(name, lambda: 1)

        async def book() -> None:
            await step.race("fastest", offer("train"), offer("bus"))
            await asyncio.gather(rest())

        async def rest() -> None:
            await step("pack", lambda: 3)
            await step.sleep("night", "1d")

        async def work() -> None:
            await step.sleep("week", "7d")

        await asyncio.gather(work(), book())

    runtime = Runtime(MemoryStore(clock=clock), workflows=[trip], clock=clock, always_replay=True)
    run = await runtime.trigger(trip, run_id="run")
    # A replay for each step, until both branches sleep.
    for _ in range(10):
        run = await runtime.resume("run")
    begun = {wait.id: wait.wake_at for wait in run.pending}
    assert begun.keys() == {"1/week", "2/1/night"}
    await clock.advance("1h")
    run = await runtime.resume("run")
    assert {wait.id: wait.wake_at for wait in run.pending} == begun


@pytest.mark.parametrize("iterations", [0, 5, 9])
async def test_a_step_that_is_executed_is_seen_after_an_older_record(iterations: int) -> None:
    """Whether the record is asked for later, or its branch takes longer to end."""
    new = Pause()

    async def late(step: Step) -> str:
        for _ in range(iterations):
            await asyncio.sleep(0)
        return await step("new", new)

    async def function(step: Step, note: Note) -> None:
        deep = nested(4, lambda: step("old", lambda: "old"))
        for value in asyncio.as_completed([asyncio.create_task(late(step)), deep]):
            note(await value)
            if not new.is_over:
                new.is_over = True
                return

    assert await replayed(function) == [["old"], ["old", "new"]]


async def test_a_sleep_that_is_over_is_seen_after_an_older_record() -> None:
    """The end of the sleep is why the run is resumed."""
    clock, notes = TestClock(), list[list[str]]()

    @workflow("trip")
    async def trip(step: Step) -> None:
        notes.append([])
        night = asyncio.create_task(step.sleep("night", "8h"), name="night")
        pack = asyncio.create_task(nested(4, lambda: step("pack", lambda: "pack")), name="pack")
        pending = {night, pack}
        while pending:
            done, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
            notes[-1] += [task.get_name() for task in done]

    runtime = Runtime(MemoryStore(clock=clock), workflows=[trip], clock=clock)
    assert (await runtime.trigger(trip)).status == "suspended"
    await clock.advance("8h")
    assert [run.status for run in await runtime.sweep()] == ["completed"]
    assert notes == [["pack"], ["pack", "night"]]


async def test_a_step_does_not_begin_in_a_branch_that_was_cancelled() -> None:
    """The failure of the other branch is recorded, and has ended this one."""
    begun = []

    async def begin() -> None:
        begun.append("new")
        await asyncio.Event().wait()

    async def fail() -> str:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def function(step: Step, note: Note) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(step("new", begin))
                group.create_task(step("fail", fail))
        except* ValueError:
            note("failed")

    assert await replayed(function) == [["failed"], ["failed"]]
    assert begun == ["new"]


@workflow("child")
async def child(step: Step) -> None:
    await step.sleep("long", "30d")


@workflow("parent")
async def parent(step: Step, how: str) -> None:
    """Fail in one branch while another one waits; the run is stored in between."""

    async def fail() -> str:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def wait() -> None:
        if how == "call":
            await step.call("child", child)
        elif how == "map":
            await step.map_runs("child", child, [None])
        else:
            await step.approval("approval", "Continue?")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(nested(3, lambda: step("fail", fail)))
    except* ValueError:
        await step.wait_for_event("end", "end")


async def wait_in_parent(how: str) -> tuple[Runtime, Run]:
    """Return a run that waits in one branch, while the other one has just failed."""
    runtime = Runtime(MemoryStore(), workflows=[parent, child], always_replay=True)
    run = await runtime.trigger(parent, how, run_id="run")
    while "fail" not in {record.key for record in run.history}:
        run = await runtime.resume("run")
    return runtime, run


@pytest.mark.parametrize("how", ["call", "map"])
async def test_a_child_is_cancelled_with_a_branch_that_waits_for_its_turn(how: str) -> None:
    runtime, _ = await wait_in_parent(how)
    run = await runtime.resume("run")
    assert [wait.id for wait in run.pending] == ["end"]
    snapshot: Any = await runtime.store.load("run")
    assert "cancel:1/child" in snapshot["outbox"]


async def test_an_answer_is_recorded_if_its_branch_is_cancelled_before_its_turn() -> None:
    """It was accepted, because the question was still open."""
    runtime, run = await wait_in_parent("approval")
    await Client(runtime.store).approve(run.pending[0].token, by="ana")
    run = await runtime.resume("run")
    assert {record.key for record in run.history} == {"fail", "approval"}


async def test_branches_see_each_others_steps_in_the_same_order() -> None:
    steps = Sequence("a1", "b1", "b2", "a2", "b3", "a3")

    async def branch(step: Step, note: Note, name: str) -> None:
        for number in "123":
            note(value := await step(f"{name}{number}", steps.end, f"{name}{number}"))
            steps.see(value)

    async def function(step: Step, note: Note) -> None:
        await asyncio.gather(branch(step, note, "a"), branch(step, note, "b"))

    first, again = await replayed(function)
    assert first == again == ["a1", "b1", "b2", "a2", "b3", "a3"]


async def test_a_record_that_is_no_longer_asked_for_is_not_waited_for() -> None:
    steps = Sequence("removed", "a", "b")
    versions = iter([["b", "a", "removed"], ["b", "a"]])

    async def function(step: Step, note: Note) -> None:
        calls = [step(name, steps.end, name) for name in next(versions)]
        for value in asyncio.as_completed(calls):
            note(name := await value)
            steps.see(name)

    assert await replayed(function) == [["removed", "a", "b"], ["a", "b"]]


async def test_what_no_step_records_may_end_in_another_order() -> None:
    """The response comes at once in the first execution, and late in the replay."""
    response = asyncio.Event()
    response.set()

    async def request(step: Step) -> str:
        await response.wait()
        return await step("a", lambda: "a")

    async def call(step: Step) -> str:
        return await step("b", lambda: "b")

    async def function(step: Step, note: Note) -> None:
        tasks = [asyncio.create_task(request(step)), asyncio.create_task(call(step))]
        for value in asyncio.as_completed(tasks):
            note(await value)
            response.set()
        response.clear()

    assert await replayed(function) == [["a", "b"], ["b", "a"]]


async def test_a_branch_that_never_becomes_quiet_does_not_stop_others() -> None:
    """What it waits for comes after its own record now."""
    is_ready = asyncio.Event()
    is_ready.set()

    async def spin_and_call(step: Step) -> str:
        while not is_ready.is_set():
            await asyncio.sleep(0)
        return await step("a", lambda: "a")

    async def call(step: Step) -> str:
        value = await step("b", lambda: "b")
        is_ready.set()
        return value

    async def function(step: Step, note: Note) -> None:
        for value in await asyncio.gather(spin_and_call(step), call(step)):
            note(value)
        is_ready.clear()

    assert await replayed(function) == [["a", "b"], ["a", "b"]]


async def test_a_call_can_be_cancelled_while_it_waits_for_its_turn() -> None:
    steps, is_replay = Sequence("b", "c", "a"), iter([False, True])

    async def function(step: Step, note: Note) -> None:
        tasks = {name: asyncio.create_task(step(name, steps.end, name)) for name in "abc"}
        if next(is_replay):
            await asyncio.sleep(0)
            tasks["a"].cancel()
        for name in "bca":
            try:
                note(await tasks[name])
                steps.see(name)
            except asyncio.CancelledError:
                note("cancelled")

    assert await replayed(function) == [["b", "c", "a"], ["b", "c", "cancelled"]]


async def test_a_call_that_waits_for_its_turn_stops_with_the_run() -> None:
    """The other call has not the arguments of its record, which stops the run."""
    steps, sizes = Sequence("b", "a"), iter(["small", "large"])

    async def end(name: str, _: str) -> str:
        return await steps.end(name)

    async def body(step: Step) -> None:
        other = asyncio.create_task(step("a", end, "a", ""))
        await step("b", end, "b", next(sizes))
        steps.see("b")
        await other
        raise RuntimeError("crash")

    store = MemoryStore()
    await durable.run({}, body, id="run", store=store)
    async with asyncio.timeout(5):
        result = await durable.run({}, body, id="run", store=store)
    assert isinstance(result, Err)
    assert isinstance(result.error, DriftError)


async def test_many_parallel_calls_take_three_turns_of_the_event_loop_each() -> None:
    """In a busy process, each turn may take milliseconds."""
    names = [f"{number * 7 % 1000}" for number in range(1000)]
    steps, turns = Sequence(*names), 0

    def count_turns(tasks: "asyncio.Future[Any]") -> None:
        nonlocal turns
        turns += 1
        if not tasks.done():
            asyncio.get_running_loop().call_soon(count_turns, tasks)

    async def call(step: Step, name: str) -> None:
        await step(name, steps.end, name)
        steps.see(name)

    async def function(step: Step, _: Note) -> None:
        nonlocal turns
        turns = 0
        tasks = asyncio.gather(*(call(step, name) for name in sorted(names)))
        count_turns(tasks)
        await tasks

    await replayed(function)
    assert 1 < turns < 3020
