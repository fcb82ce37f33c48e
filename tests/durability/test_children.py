"""Child runs: ids, values, errors, options, and the calls that start them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pydantic
import pytest

from perdure import Err, Ok, Result, Run, Runtime, Step, durable, workflow
from perdure.engine.children import RunRef
from perdure.errors import (
    Cancelled,
    InvalidArgument,
    InvalidPayload,
    NestedStep,
    PerdureError,
    RunConflict,
    RunFailed,
    RunNotFound,
    StepTimeout,
    TooDeep,
    UnknownWorkflow,
)
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

MakeRuntime = Callable[..., Runtime]


class CardDeclined(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"declined with {code}")
        self.code = code


@dataclass
class Receipt:
    amount: int


class Photo(msgspec.Struct):
    name: str


class Page(pydantic.BaseModel):
    number: int


async def decline() -> None:
    raise CardDeclined(51)


@workflow("double")
async def double(step: Step, n: int) -> int:
    return await step("double", lambda: n * 2)


@workflow("nap")
async def nap(step: Step, n: int) -> int:
    await step.sleep("nap", "1h")
    return n


@workflow("declined")
async def declined(step: Step) -> None:
    await step("pay", decline)


async def settled(runtime: Runtime, run_id: str) -> Run:
    """Drive everything that is due, and return the run."""
    for _ in range(500):
        if not await runtime.sweep():
            run = await runtime.get_run(run_id)
            assert run is not None
            return run
    raise AssertionError("there is always a run that is due")


async def outcome(runtime: Runtime, fn: Any, payload: Any = None, run_id: str = "p") -> Run:
    """Run a workflow of this name as far as it can go without time passing."""
    await runtime.trigger(workflow("parent")(fn), payload, run_id=run_id)
    return await settled(runtime, run_id)


async def test_the_id_of_a_child_is_made_of_parent_generation_and_call(
    make_runtime: MakeRuntime,
) -> None:
    async def parent(step: Step) -> list[str]:
        refs = [await step.start("go", double, n) for n in range(2)]
        return [ref.id for ref in refs]

    run = await outcome(make_runtime(double), parent, run_id="order-1")
    assert run.output == ["order-1/1/go", "order-1/1/go#2"]


@pytest.mark.parametrize("id", ["x" * 512, 'it\'s "1/1" 🚀 ' * 30, "/" * 511, "%2F"])
async def test_a_child_has_a_valid_id_whatever_the_parent_s_is(
    make_runtime: MakeRuntime, id: str
) -> None:
    async def parent(step: Step) -> int:
        return await step.call("🚀/'\"" * 40, double, 4)

    run = await outcome(make_runtime(double), parent, run_id=id)
    assert run.output == 8


async def test_a_replay_starts_no_child_twice(
    make_runtime: MakeRuntime, clock: TestClock, store: MemoryStore
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        first = await step.call("first", double, 1)
        await step.sleep("pause", "1h")
        return first + await step.call("second", double, 2)

    await make_runtime(parent, double).trigger(parent, run_id="p")
    await settled(make_runtime(parent, double), "p")
    await clock.advance("1h")
    run = await settled(make_runtime(parent, double), "p")
    assert run.output == 6
    assert len(await store.list()) == 3


async def test_a_child_continues_as_new_and_the_parent_gets_the_last_output(
    make_runtime: MakeRuntime,
) -> None:
    @workflow("loop")
    async def loop(step: Step, n: int) -> int:
        if n < 5:
            await step.continue_as_new(n + 1)
        return n

    async def parent(step: Step) -> int:
        return await step.call("loop", loop, 0)

    assert (await outcome(make_runtime(loop), parent)).output == 5


async def test_a_new_generation_of_the_parent_has_children_of_its_own(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    @workflow("parent")
    async def parent(step: Step, n: int) -> int:
        total = n + await step.call("add", double, 1)
        if total < 6:
            await step.continue_as_new(total)
        return total

    runtime = make_runtime(parent, double)
    await runtime.trigger(parent, 0, run_id="p")
    assert (await settled(runtime, "p")).output == 6
    ids = sorted(run.id for run in await store.list())
    assert ids == ["p", "p/1/add", "p/2/add", "p/3/add"]


@pytest.mark.parametrize(
    "join", ["gather", "task group", "wait_for", "step.all", "step.map", "race"]
)
async def test_calls_run_side_by_side(make_runtime: MakeRuntime, join: str) -> None:
    async def parent(step: Step) -> list[int]:
        match join:
            case "gather":
                return await asyncio.gather(*(step.call("c", double, n) for n in range(3)))
            case "task group":
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(step.call("c", double, n)) for n in range(3)]
                return [task.result() for task in tasks]
            case "wait_for":
                return [await asyncio.wait_for(step.call("c", double, n), 10) for n in range(3)]
            case "step.all":
                return list(await step.all(*(step.call("c", double, n) for n in range(3))))
            case "step.map":
                refs = [await step.start("c", double, n) for n in range(3)]
                return [await step.result("r", ref) for ref in refs]
            case _:
                races = [step.race(f"r{n}", step.call("c", double, n)) for n in range(3)]
                return [value for _, value in await asyncio.gather(*races)]

    assert (await outcome(make_runtime(double), parent)).output == [0, 2, 4]


@pytest.mark.parametrize(
    "value", [Receipt(3), Photo("a.png"), Page(number=7), b"\x00", {1, 2}, None, [Receipt(1)]]
)
async def test_an_output_has_the_type_that_the_child_declares(
    make_runtime: MakeRuntime, value: Any
) -> None:
    annotation = list[Receipt] if isinstance(value, list) else type(value)

    async def make(step: Step) -> Any:
        return value

    make.__annotations__["return"] = annotation
    child = workflow("make")(make)

    async def parent(step: Step) -> bool:
        ref = await step.start("start", child)
        return bool(value == await step.call("make", child) == await step.result("result", ref))

    assert (await outcome(make_runtime(child), parent)).output is True


async def test_a_child_that_returns_a_result_fails_with_its_error(
    make_runtime: MakeRuntime,
) -> None:
    @workflow("check")
    async def check(step: Step, n: int) -> Result[int, str]:
        return Ok(n) if n else Err("none left")

    async def parent(step: Step) -> Any:
        good = await step.call("good", check, 1)
        try:
            await step.call("bad", check, 0)
        except RunFailed as failed:
            return [good, failed.error, failed.run_id]

    assert (await outcome(make_runtime(check), parent)).output == [1, "none left", "p/1/bad"]


async def test_the_cause_of_a_failure_is_the_child_s_exception_before_and_after_a_crash(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> list[Any]:
        try:
            await step.call("pay", declined)
        except RunFailed as failed:
            cause = failed.__cause__
            assert isinstance(cause, CardDeclined)
            await step.sleep("a while", "1h")
            return [cause.code, type(cause).__name__]
        return []

    runtime = make_runtime(parent, declined)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p")).status == "suspended"
    await clock.advance("1h")
    again = await settled(make_runtime(parent, declined), "p")
    assert again.output == [51, "CardDeclined"]


async def test_a_payload_and_an_output_of_several_megabytes(make_runtime: MakeRuntime) -> None:
    @workflow("echo")
    async def echo(step: Step, text: str) -> str:
        return text * 2

    async def parent(step: Step) -> int:
        return len(await step.call("echo", echo, "ä" * 3_000_000))

    assert (await outcome(make_runtime(echo), parent)).output == 6_000_000


async def test_a_workflow_calls_itself_to_depth_50(make_runtime: MakeRuntime) -> None:
    @workflow("down")
    async def down(step: Step, n: int) -> int:
        return 1 + await step.call("down", "down", n - 1) if n else 0

    runtime = make_runtime(down)
    await runtime.trigger(down, 50, run_id="d")
    assert (await settled(runtime, "d")).output == 50


async def test_a_workflow_that_calls_itself_without_end_fails(
    store: MemoryStore, clock: TestClock
) -> None:
    @workflow("forever")
    async def forever(step: Step) -> None:
        await step.call("x", "forever")

    runtime = Runtime(store, workflows=[forever], clock=clock)
    await runtime.trigger(forever, run_id="f")
    run = await settled(runtime, "f")
    assert run.status == "failed"
    assert len(await store.list(limit=1000)) == 101
    error: Any = run.error
    while error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, TooDeep) or "100 ancestors" in str(error)


async def test_a_child_has_its_own_tags_those_it_inherits_and_its_parent_s_id(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        step.tag(late="yes")
        await step.start(
            "c", double, 1, tags={"own": "1"}, inherit=["tenant", "late", "none"],
            on_parent_end="abandon",
        )  # fmt: skip

    runtime = make_runtime(parent, double)
    await runtime.trigger(parent, run_id="p", tags={"tenant": "7", "other": "8"})
    child = await settled(runtime, "p/1/c")
    assert child.tags == {"own": "1", "tenant": "7", "late": "yes"}
    (summary,) = await store.summaries(["p/1/c"])
    assert summary is not None
    assert "~parent=p" in summary.tags


async def test_a_child_may_have_sixteen_tags_beside_the_engine_s(make_runtime: MakeRuntime) -> None:
    async def parent(step: Step) -> int:
        return await step.call("c", double, 1, tags={f"t{n}": "x" for n in range(16)})

    assert (await outcome(make_runtime(double), parent)).output == 2


async def test_a_child_that_would_inherit_too_many_tags_is_refused(
    make_runtime: MakeRuntime,
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.call("c", double, 1, tags={f"t{n}": "x" for n in range(16)}, inherit=["tenant"])

    runtime = make_runtime(parent, double)
    await runtime.trigger(parent, run_id="p", tags={"tenant": "7"})
    run = await settled(runtime, "p")
    assert isinstance(run.error, InvalidArgument)


@pytest.mark.parametrize(
    ("parent_s", "own", "expected"),
    [("1h", "2h", 60), ("2h", "1h", 60), ("1h", None, 60), (None, "1h", 60)],
)
async def test_the_earlier_deadline_ends_a_child(
    make_runtime: MakeRuntime, clock: TestClock, parent_s: Any, own: Any, expected: int
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.start("c", nap, 1, deadline=own, on_parent_end="abandon")
        await step.sleep("long", "3h")

    @workflow("nap")
    async def nap(step: Step, n: int) -> None:
        await step.sleep("longer", "5h")

    runtime = make_runtime(parent, nap)
    began = clock.now()
    await runtime.trigger(parent, run_id="p", deadline=parent_s)
    child = await settled(runtime, "p/1/c")
    assert child.deadline == began + timedelta(minutes=expected)
    await clock.advance(timedelta(minutes=expected))
    assert (await settled(runtime, "p/1/c")).status == "failed"


async def test_a_child_is_due_at_a_time_or_after_a_delay(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        later = await step.start("later", double, 1, delay="1h")
        at = await step.start("at", double, 2, at=await step.now() + timedelta(hours=2))
        return await step.result("1", later) + await step.result("2", at)

    runtime = make_runtime(parent, double)
    await runtime.trigger(parent, run_id="p")
    assert (await settled(runtime, "p/1/later")).status == "queued"
    await clock.advance("1h")
    assert (await settled(runtime, "p/1/later")).status == "completed"
    assert (await settled(runtime, "p/1/at")).status == "queued"
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == 6


async def test_a_result_is_awaited_until_its_timeout_and_the_run_continues(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        ref = await step.start("c", nap, 3)
        try:
            await step.result("soon", ref, timeout="1m")
        except StepTimeout:
            return await step.result("later", ref)
        return -1

    runtime = make_runtime(parent, nap)
    await runtime.trigger(parent, run_id="p")
    await settled(runtime, "p")
    await clock.advance("1m")
    assert (await settled(runtime, "p")).status == "waiting"
    await clock.advance("1h")
    assert (await settled(runtime, "p")).output == 3


async def test_two_runs_await_one_run_that_neither_started(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.result("r", "shared", returns=int)

    runtime = make_runtime(parent, nap)
    await runtime.trigger(nap, 5, run_id="shared")
    for name in ("a", "b"):
        await runtime.trigger(parent, run_id=name)
    await clock.advance("1h")
    assert (await settled(runtime, "a")).output == 5
    assert (await settled(runtime, "b")).output == 5
    await runtime.trigger(parent, run_id="late")
    assert (await settled(runtime, "late")).output == 5


async def test_the_result_of_an_unknown_run_is_a_failure(make_runtime: MakeRuntime) -> None:
    async def parent(step: Step) -> str:
        try:
            await step.result("r", "nobody")
        except RunFailed as failed:
            return failed.run_id if isinstance(failed.__cause__, RunNotFound) else "?"
        return ""

    assert (await outcome(make_runtime(), parent)).output == "nobody"


async def test_a_run_id_that_exists_with_the_same_payload_is_that_run(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    async def parent(step: Step) -> int:
        ref = await step.start("s", double, 4, run_id="mine")
        return await step.call("c", double, 4, run_id="mine") + await step.result("r", ref)

    runtime = make_runtime(double)
    await runtime.trigger(double, 4, run_id="mine")
    assert (await outcome(runtime, parent)).output == 16
    assert len(await store.list()) == 2


@pytest.mark.parametrize("how", ["call", "start"])
@pytest.mark.parametrize(("other", "payload"), [(nap, 4), (double, 5)])
async def test_a_run_id_of_another_run_is_a_conflict(
    make_runtime: MakeRuntime, other: Any, payload: int, how: str
) -> None:
    async def parent(step: Step) -> str:
        try:
            if how == "call":
                await step.call("c", double, 4, run_id="taken")
            else:
                await step.start("c", double, 4, run_id="taken")
        except RunConflict:
            return "conflict" if how == "start" else "?"
        except RunFailed as failed:
            return "conflict" if isinstance(failed.__cause__, RunConflict) else "?"
        return "none"

    runtime = make_runtime(double, nap)
    await runtime.trigger(other, payload, run_id="taken")
    assert (await outcome(runtime, parent)).output == "conflict"


BAD: list[tuple[Callable[[Step], Any], type[Exception], str]] = [
    (lambda step: step.call("c", "nobody", 1), UnknownWorkflow, "nobody"),
    (lambda step: step.call("c", print, 1), InvalidArgument, "@workflow"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.call("c", double, "x"), InvalidPayload, "double"),  # type: ignore[misc]  # on purpose
    (lambda step: step.call("c", double, 1, run_id="~x"), InvalidArgument, "run_id"),
    (lambda step: step.call("c", double, 1, run_id="x" * 513), InvalidArgument, "512"),
    (lambda step: step.call("c", double, 1, priority=-1), InvalidArgument, "priority"),
    (lambda step: step.call("c", double, 1, deadline="soon"), InvalidArgument, "deadline"),
    (lambda step: step.call("c", double, 1, deadline=0), InvalidArgument, "deadline"),
    (lambda step: step.call("c", double, 1, tags={"~x": "1"}), InvalidArgument, "tags"),
    (lambda step: step.call("c", double, 1, inherit="x"), InvalidArgument, "inherit"),
    (lambda step: step.call("c", double, 1, inherit=3), InvalidArgument, "inherit"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.call("c", double, 1, on_parent_end="x"), InvalidArgument, "abandon"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.call("", double, 1), InvalidArgument, "id"),
    (lambda step: step.call("c", double, 1, run_id="p"), InvalidArgument, "its own end"),
    (lambda step: step.call("c", double, 1, delay="1h"), InvalidArgument, "delay: expected one of"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.call("c", double, 1, inherit=["~x"]), InvalidArgument, "reserved"),
    (lambda step: step.map_runs("c", double, [1], run_id="x"), InvalidArgument, "run_id: expected"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.map_runs("c", double, "12"), InvalidArgument, "items"),  # type: ignore[misc]  # on purpose
    (lambda step: step.map_runs("c", double, [1, "x"]), InvalidPayload, "double"),  # type: ignore[misc]  # on purpose
    (lambda step: step.start("c", double, 1, delay=1, at=1), InvalidArgument, "at"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.start("c", double, 1, delay=-1), InvalidArgument, "delay"),
    (lambda step: step.result("c", "p"), InvalidArgument, "its own end"),
    (lambda step: step.result("c", "~schedule:x"), InvalidArgument, "reserved"),
    (lambda step: step.result("c", 7), InvalidArgument, "run"),  # type: ignore[call-overload]  # on purpose
    (lambda step: step.result("c", RunRef("")), InvalidArgument, "run"),
    (lambda step: step.result("c", "x", timeout=-1), InvalidArgument, "timeout"),
    (lambda step: step.result("c", "x", timeout="4000000d"), InvalidArgument, "timeout"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
async def test_a_bad_call_is_refused_where_it_is_made(
    make_runtime: MakeRuntime,
    store: MemoryStore,
    call: Callable[[Step], Any],
    error: type[Exception],
    text: str,
) -> None:
    async def parent(step: Step) -> str:
        with pytest.raises(error, match=text):
            await call(step)
        return "continued"

    assert (await outcome(make_runtime(double), parent)).output == "continued"
    assert len(await store.list()) == 1


async def test_a_call_inside_a_step_is_refused(make_runtime: MakeRuntime) -> None:
    async def parent(step: Step) -> None:
        async def inner() -> int:
            return await step.call("c", double, 1)

        await step("outer", inner)

    run = await outcome(make_runtime(double), parent)
    assert isinstance(run.error, NestedStep)


async def test_a_call_in_a_task_that_a_step_left_behind_is_refused(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    leftover_tasks: list[asyncio.Task[int]] = []

    async def parent(step: Step) -> None:
        async def late() -> int:
            return await step.call("c", double, 1)

        async def leave() -> None:
            leftover_tasks.append(asyncio.create_task(late()))

        await step("leave", leave)
        await asyncio.wait(leftover_tasks)

    await outcome(make_runtime(double), parent)
    assert isinstance(leftover_tasks[0].exception(), NestedStep)
    assert len(await store.list()) == 1


async def test_a_call_in_finally_runs_when_the_function_fails(make_runtime: MakeRuntime) -> None:
    async def parent(step: Step) -> None:
        try:
            await step("pay", decline)
        finally:
            await step.call("clean up", double, 1)

    runtime = make_runtime(double)
    run = await outcome(runtime, parent)
    assert isinstance(run.error, CardDeclined)
    assert (await settled(runtime, "p/1/clean up")).output == 2


async def test_a_call_in_finally_of_a_cancelled_run_starts_nothing(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    @workflow("parent")
    async def parent(step: Step) -> None:
        try:
            await step.sleep("long", "1h")
        finally:
            await step.call("clean up", double, 1)

    runtime = make_runtime(parent, double)
    await runtime.trigger(parent, run_id="p")
    await runtime.cancel("p")
    assert (await settled(runtime, "p")).status == "cancelled"
    assert len(await store.list()) == 1


async def test_durable_run_says_that_child_runs_need_a_runtime() -> None:
    async def parent(step: Step, deps: None) -> None:
        await step.call("c", double, 1)

    result = await durable.run(None, parent, id="p", store=MemoryStore())
    assert isinstance(result, Err)
    assert isinstance(result.error, PerdureError)
    assert "needs a Runtime" in str(result.error)


async def test_a_child_that_the_function_cancelled_is_reported_as_cancelled(
    make_runtime: MakeRuntime,
) -> None:
    @workflow("quits")
    async def quits(step: Step) -> None:
        raise asyncio.CancelledError

    async def parent(step: Step) -> str:
        try:
            await step.call("c", quits)
        except RunFailed as failed:
            return "cancelled" if isinstance(failed.__cause__, Cancelled) else "?"
        return ""

    assert (await outcome(make_runtime(quits), parent)).output == "cancelled"
