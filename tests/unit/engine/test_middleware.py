"""Middleware around runs and steps."""

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import pytest

import perdure
from perdure import Middleware, Retry, RunContext, Runtime, Step, StepContext, workflow
from perdure.engine.middleware import Call
from perdure.engine.user_metadata import MAX_METADATA
from perdure.errors import InvalidArgument, Suspended
from perdure.stores import MemoryStore
from perdure.testing import TestClock

TENANT: ContextVar[str] = ContextVar("tenant", default="none")


class Log(Middleware):
    """Writes down what it is called around."""

    def __init__(self, name: str = "log") -> None:
        self.name = name
        self.lines: list[str] = []

    async def around_run(self, run: RunContext, call: Call) -> Any:
        self.lines.append(f"{self.name} begins {run.workflow}")
        try:
            return await call()
        finally:
            ended = type(run.interrupted_by).__name__ if run.interrupted_by else "ended"
            self.lines.append(f"{self.name} {ended} after {run.replayed} replayed")

    async def around_step(self, step: StepContext, call: Call) -> Any:
        self.lines.append(f"{self.name} step {step.id}")
        return await call()


async def greet(name: str) -> str:
    return f"hello {name}"


@workflow("greeting")
async def greeting(step: Step, name: str) -> str:
    first = await step("greet", greet, name)
    await step.sleep("night", "8h")
    return await step("shout", str.upper, first)


async def test_runs_and_executed_steps_are_surrounded_and_replayed_steps_are_not() -> None:
    log, clock = Log(), TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[greeting], around=[log], clock=clock)
    await runtime.trigger(greeting, "ana", run_id="1")
    await clock.advance("8h")
    await runtime.sweep()
    assert log.lines == [
        "log begins greeting",
        "log step greet",
        "log Suspended after 0 replayed",
        "log begins greeting",
        "log step shout",
        "log ended after 1 replayed",
    ]


async def test_the_first_middleware_is_the_outermost() -> None:
    order: list[str] = []

    class Named(Middleware):
        def __init__(self, name: str) -> None:
            self.name = name

        async def around_step(self, step: StepContext, call: Call) -> Any:
            order.append(f"{self.name} in")
            value = await call()
            order.append(f"{self.name} out")
            return value

    @workflow("one")
    async def one(step: Step) -> str:
        return await step("greet", greet, "bo")

    runtime = Runtime(workflows=[one], around=[Named("outer"), Named("inner")])
    assert (await runtime.trigger(one)).output == "hello bo"
    assert order == ["outer in", "inner in", "inner out", "outer out"]


class Stub(Middleware):
    """Answers steps instead of their functions."""

    async def around_step(self, step: StepContext, call: Call) -> Any:
        if step.id == "refused":
            raise PermissionError("not allowed")
        return f"stub of {step.id}{step.args}"


async def test_what_middleware_returns_or_raises_is_recorded() -> None:
    @workflow("stubbed")
    async def stubbed(step: Step) -> str:
        value = await step("greet", greet, "cy")
        with pytest.raises(PermissionError):
            await step("refused", greet, "cy", errors=[PermissionError])
        return value

    run = await Runtime(workflows=[stubbed], around=[Stub()]).trigger(stubbed)
    assert run.output == "stub of greet('cy',)"
    assert [step.ok for step in run.history] == [True, False]


async def test_a_transaction_is_surrounded_inside_the_transaction() -> None:
    log = Log()

    async def write(data: dict[str, str], name: str) -> str:
        data["name"] = name
        return name

    @workflow("transactional")
    async def transactional(step: Step) -> str:
        return await step.transaction("write", write, "di")

    run = await Runtime(workflows=[transactional], around=[log]).trigger(transactional)
    assert run.output == "di"
    assert "log step write" in log.lines


async def test_context_variables_reach_branches_steps_and_threads() -> None:
    class Tenancy(Middleware):
        async def around_run(self, run: RunContext, call: Call) -> Any:
            token = TENANT.set(run.metadata["tenant"])
            try:
                return await call()
            finally:
                TENANT.reset(token)

    async def in_step() -> str:
        return await asyncio.to_thread(TENANT.get)

    @workflow("tenants")
    async def tenants(step: Step) -> list[str]:
        async def branch(n: int) -> str:
            return TENANT.get() + await step("in step", in_step)

        return list(await asyncio.gather(branch(1), branch(2)))

    runtime = Runtime(workflows=[tenants], around=[Tenancy()])
    run = await runtime.trigger(tenants, metadata={"tenant": "acme"})
    assert run.output == ["acmeacme"] * 2
    assert run.metadata == {"tenant": "acme"}
    assert TENANT.get() == "none"


async def test_tasks_of_middleware_are_not_branches() -> None:
    """They would move the numbers of the function's own branches."""
    count = 0

    class Busy(Middleware):
        async def around_run(self, run: RunContext, call: Call) -> Any:
            nonlocal count
            count += 1
            tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(count)]
            await asyncio.gather(*tasks)
            return await call()

    @workflow("branching")
    async def branching(step: Step) -> list[str]:
        async def branch(name: str) -> str:
            await step.sleep("night", "8h")
            return await step("greet", greet, name)

        return list(await asyncio.gather(branch("a"), branch("b")))

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[branching], around=[Busy()], clock=clock)
    await runtime.trigger(branching, run_id="1")
    await clock.advance("8h")
    [run] = await runtime.sweep()
    assert run.output == ["hello a", "hello b"]
    assert sorted({step.branch for step in run.history}) == ["1", "2"]


async def test_swallowing_a_suspension_changes_nothing() -> None:
    class Swallow(Middleware):
        async def around_run(self, run: RunContext, call: Call) -> Any:
            try:
                return await call()
            except asyncio.CancelledError:
                assert isinstance(run.interrupted_by, Suspended)
                return "swallowed"

    clock = TestClock()
    runtime = Runtime(
        MemoryStore(clock=clock), workflows=[greeting], around=[Swallow()], clock=clock
    )
    run = await runtime.trigger(greeting, "ed", run_id="1")
    assert run.status == "suspended"
    await clock.advance("8h")
    assert [run.output for run in await runtime.sweep()] == ["HELLO ED"]


async def test_attempts_are_inside_and_counted() -> None:
    attempts: list[int] = []

    class Attempts(Middleware):
        async def around_step(self, step: StepContext, call: Call) -> Any:
            value = await call()
            attempts.append(step.attempt)
            return value

    failures = iter([True, False])

    async def flaky() -> str:
        if next(failures):
            raise OSError("once")
        return "done"

    @workflow("retrying")
    async def retrying(step: Step) -> str:
        return await step("flaky", flaky, retry=Retry(3, delay=0))

    await Runtime(workflows=[retrying], around=[Attempts()]).trigger(retrying)
    assert attempts == [2]


async def test_calling_twice_is_refused() -> None:
    class Twice(Middleware):
        async def around_step(self, step: StepContext, call: Call) -> Any:
            await call()
            return await call()

    @workflow("twice")
    async def twice(step: Step) -> str:
        return await step("greet", greet, "flo")

    run = await Runtime(workflows=[twice], around=[Twice()]).trigger(twice)
    assert run.status == "failed"
    assert "called call() twice" in str(run.error)


async def test_the_function_must_be_called_in_the_task_of_the_run() -> None:
    class Elsewhere(Middleware):
        async def around_run(self, run: RunContext, call: Call) -> Any:
            return await asyncio.create_task(_await(call))

    run = await Runtime(workflows=[greeting], around=[Elsewhere()]).trigger(greeting, "gus")
    assert run.status == "failed"
    assert "in its own task" in str(run.error)


async def _await(call: Call) -> Any:
    return await call()


async def test_metadata_of_middleware_are_stored_with_runs_and_their_children() -> None:
    class Trace(Middleware):
        def metadata(self, workflow: str, run_id: str) -> Mapping[str, Any]:
            return {"trace": f"{workflow} {run_id}", "kept": "of the middleware"}

    @workflow("child")
    async def child(step: Step) -> None: ...

    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.start("child", child, run_id="c")

    runtime = Runtime(workflows=[parent, child], around=[Trace()])
    run = await runtime.trigger(parent, run_id="p", metadata={"kept": "of the caller"})
    assert run.metadata == {"trace": "parent p", "kept": "of the caller"}
    started = await runtime.get_run("c")
    assert started is not None
    assert started.metadata["trace"] == "child c"


async def test_metadata_that_middleware_changes_are_seen_by_the_next_activation() -> None:
    observations: list[Any] = []

    class Count(Middleware):
        async def around_run(self, run: RunContext, call: Call) -> Any:
            observations.append(run.metadata.get("activations", 0))
            run.update_metadata(activations=observations[-1] + 1)
            return await call()

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[greeting], around=[Count()], clock=clock)
    await runtime.trigger(greeting, "hal", run_id="1")
    await clock.advance("8h")
    await runtime.sweep()
    assert observations == [0, 1]


async def test_when_a_run_became_due_is_known() -> None:
    late: list[float | None] = []

    class Lateness(Middleware):
        async def around_run(self, run: RunContext, call: Call) -> Any:
            due = run.due_at
            late.append(None if due is None else (clock.now() - due).total_seconds())
            return await call()

    clock = TestClock()
    runtime = Runtime(
        MemoryStore(clock=clock), workflows=[greeting], around=[Lateness()], clock=clock
    )
    await runtime.trigger(greeting, "ian", run_id="1", delay="1h", wait=False)
    await clock.advance("61m")
    await runtime.sweep()
    await clock.advance("8h")
    await clock.advance("5s")
    await runtime.sweep()
    assert late == [60.0, 5.0]


@pytest.mark.parametrize("metadata", ["text", {"": 1}, {1: 2}, {"a": object()}, {"a": b"x"}])
async def test_metadata_that_are_not_a_json_object_are_refused(metadata: Any) -> None:
    with pytest.raises(InvalidArgument, match="metadata"):
        await Runtime(workflows=[greeting]).trigger(greeting, "jo", metadata=metadata)


async def test_large_metadata_are_refused() -> None:
    metadata = {"a": "x" * MAX_METADATA}
    with pytest.raises(InvalidArgument, match="8192 bytes"):
        await Runtime(workflows=[greeting]).trigger(greeting, "jo", metadata=metadata)


@pytest.mark.parametrize("around", [Log, [Log], ["log"], "log", [object()]])
def test_what_is_not_middleware_is_refused(around: Any) -> None:
    with pytest.raises(InvalidArgument, match="instances of perdure"):
        Runtime(around=around)


async def test_the_current_run_is_known_in_functions_steps_and_threads() -> None:
    def in_thread() -> tuple[str, str | None]:
        handle = perdure.current()
        assert handle is not None
        return handle.run_id, handle.executing

    @workflow("current")
    async def current(step: Step) -> list[Any]:
        assert perdure.current() is step
        assert step.workflow == "current"
        assert step.executing is None
        return list(await step("ask", in_thread))

    assert perdure.current() is None
    run = await Runtime(workflows=[current]).trigger(current, run_id="1")
    assert run.output == ["1", "ask"]


async def test_events_of_one_call_have_its_identity() -> None:
    events: list[Any] = []

    @workflow("parallel")
    async def parallel(step: Step) -> None:
        await asyncio.gather(*(step("greet", greet, name) for name in ("k", "l")))

    runtime = Runtime(workflows=[parallel], on_event=events.append)
    await runtime.trigger(parallel)
    pairs = {
        kind: {(event.branch, event.call) for event in events if event.type == kind}
        for kind in ("step_start", "step_complete")
    }
    assert len(pairs["step_start"]) == 2
    assert pairs["step_start"] == pairs["step_complete"]
