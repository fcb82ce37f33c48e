"""Agents of pydantic-ai as parts of runs, with a model that follows a script."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest
from fastmcp import FastMCP
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    BinaryContent,
    DeferredToolRequests,
    DeferredToolResults,
    FunctionToolset,
    ModelRetry,
    RunContext,
    ToolDenied,
)
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ModelHTTPError, UserError
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import AgentStreamEvent, FunctionToolResultEvent, ModelMessage
from pydantic_ai.toolsets import AbstractToolset, DynamicToolset

import perdure
from perdure import Retry, Run, Runtime, Step, workflow
from perdure.errors import InvalidArgument
from perdure.integrations.pydantic_ai import PerdureDurability
from perdure.stores import MemoryStore
from perdure.testing import TestClock, explore_crashes
from tests.integrations.agents import Script, calls, returned, says

PAY = "shop__function_toolset__<agent>.call_tool:pay"


def shop(script: Script, **options: Any) -> Agent[None, Any]:
    return Agent(script.model, name="shop", capabilities=[PerdureDurability(**options)])


def asking(agent: Agent[None, Any]) -> perdure.runtime.definition.Definition[Any, Any]:
    @workflow("ask")
    async def ask(step: Step) -> Any:
        return (await agent.run("Go")).output

    return ask


async def run(definition: Any, store: MemoryStore | None = None) -> Run:
    return await Runtime(store or MemoryStore(), workflows=[definition]).trigger(
        definition, run_id="1"
    )


def tool_values(outcome: Run) -> list[Any]:
    """Return what is recorded of the tool calls of a run."""
    return [step.value for step in outcome.history if "call_tool" in step.key]


# --- What is recorded


async def test_requests_and_tool_calls_are_steps_with_pinned_names() -> None:
    """These names are in the stores of users: a change of them repeats the tools of their runs."""
    agent = shop(Script(calls(("pay", {"n": 1}), ("pay", {"n": 2})), says("paid")))

    @agent.tool_plain
    async def pay(n: int) -> str:
        return f"receipt {n}"

    outcome = await run(asking(agent))
    assert outcome.output == "paid"
    assert [(step.key, step.branch) for step in outcome.history] == [
        ("shop__model.request", "~agent:shop"),
        (PAY, "~agent:shop/call 1"),
        (f"{PAY}#2", "~agent:shop/call 2"),
        ("shop__model.request#2", "~agent:shop"),
    ]


async def test_outside_a_run_nothing_changes() -> None:
    agent = shop(Script(calls(("pay", {})), says("paid")))

    @agent.tool_plain
    async def pay() -> str:
        assert perdure.current() is None
        return "receipt"

    assert (await agent.run("Go")).output == "paid"


async def test_an_agent_inside_a_step_is_part_of_that_step() -> None:
    agent = shop(Script(says("hello")))

    async def greet() -> str:
        return str((await agent.run("Go")).output)

    @workflow("ask")
    async def ask(step: Step) -> str:
        return await step("greet", greet)

    outcome = await run(ask)
    assert (outcome.output, [step.key for step in outcome.history]) == ("hello", ["greet"])


async def test_ids_of_the_agents_run_are_the_same_on_every_replay() -> None:
    agent, seen = shop(Script(says("hello"))), set()

    @workflow("ask")
    async def ask(step: Step) -> None:
        result = await agent.run("Go")
        seen.add((result.run_id, result.conversation_id))

    await explore_crashes(ask, always_replay=True, compare="shape")
    first = seen.copy()
    seen.clear()
    await run(ask)
    # Each exploration has one run per crash, and each run has ids of its own.
    assert len(first) > 1
    assert len(seen) == 1
    assert not seen & first


# --- Crashes


@pytest.mark.parametrize("mode", ["parallel", "parallel_ordered_events", "sequential"])
async def test_a_crash_repeats_only_what_was_not_recorded(mode: str) -> None:
    script = Script(
        calls(("pay", {"n": 1}), ("pay", {"n": 2})), lambda messages: says(f"{returned(messages)}")
    )
    agent = shop(script, parallel_tools=mode)

    @agent.tool_plain
    async def pay(n: int) -> str:
        # The second one ends first. No real time passes, in which a lease would be renewed.
        for _ in range(20 if n == 1 else 0):
            await asyncio.sleep(0)
        return f"receipt {n}"

    report = await explore_crashes(asking(agent), compare="shape")
    assert report.crashes == 12
    assert set(report.steps) == {"shop__model.request", PAY}
    if mode == "sequential":
        # In parallel, a crash after the record of one tool may cut off another.
        assert all("before" in where for each in report.repeats.values() for where in each)


async def test_a_run_that_is_replayed_after_every_record_has_the_same_output() -> None:
    script = Script(
        calls(("pay", {"n": 1}), ("pay", {"n": 2})), lambda messages: says(f"{returned(messages)}")
    )
    agent = shop(script)

    @agent.tool_plain
    async def pay(n: int) -> str:
        return f"receipt {n}"

    report = await explore_crashes(asking(agent), always_replay=True, compare="shape")
    assert report.crashes >= 30


async def test_results_belong_to_their_calls_when_tools_end_in_another_order() -> None:
    """Between two activations, the order in which parallel tools end is reversed."""
    script = Script(
        calls(("pay", {"n": 1}), ("pay", {"n": 2}), ("pay", {"n": 3})),
        lambda messages: says(f"{returned(messages)}"),
    )
    agent, started = shop(script, parallel_tools="parallel"), Counter[int]()
    crashed = asyncio.Event()

    @agent.tool_plain
    async def pay(n: int) -> int:
        started[n] += 1
        if not crashed.is_set() and n != 2:
            await asyncio.Event().wait()
        return n * 10

    definition, store, clock = asking(agent), MemoryStore(), TestClock()
    first = Runtime(store, workflows=[definition], clock=clock)
    running = asyncio.create_task(first.trigger(definition, run_id="1"))
    while started[2] == 0 or PAY not in str(await store.load("1")):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    crashed.set()
    second = Runtime(store, workflows=[definition], clock=clock)
    await clock.advance("5m")
    await second.sweep()
    outcome = await second.get_run("1")
    assert outcome is not None
    assert (outcome.output, started[2]) == ("[10, 20, 30]", 1)


async def test_records_are_found_when_the_library_starts_other_tasks() -> None:
    """As after an upgrade of pydantic-ai while a run waits for days."""
    script = Script(calls(("pay", {})), calls(("confirm", {})), says("paid"))
    tasks, paid = 0, 0

    class Upgrade(AbstractCapability[None]):
        async def wrap_run(self, ctx: RunContext[None], *, handler: Any) -> Any:
            for _ in range(tasks):
                await asyncio.create_task(asyncio.sleep(0))
            return await handler()

    agent: Agent[None, str] = Agent(
        script.model, name="shop", capabilities=[Upgrade(), PerdureDurability()]
    )

    @agent.tool_plain
    async def pay() -> None:
        nonlocal paid
        paid += 1

    @agent.tool_plain(metadata={"perdure": False})
    async def confirm() -> None:
        step = perdure.current()
        assert step is not None
        await step.sleep("think", "1d")

    definition, store, clock = asking(agent), MemoryStore(), TestClock()
    runtime = Runtime(store, workflows=[definition], clock=clock, suspend_after=0)
    assert (await runtime.trigger(definition, run_id="1")).status == "suspended"
    tasks = 3
    await clock.advance("2d")
    await Runtime(store, workflows=[definition], clock=clock, suspend_after=0).sweep()
    await clock.advance("2d")
    await Runtime(store, workflows=[definition], clock=clock, suspend_after=0).sweep()
    outcome = await runtime.get_run("1")
    assert outcome is not None
    assert (outcome.status, paid, script.asked) == ("completed", 1, {0: 1, 1: 1, 2: 1})


async def test_agents_in_one_gather_keep_their_records_apart() -> None:
    @workflow("ask")
    async def ask(step: Step) -> list[str]:
        agents = [shop(Script(calls(("pay", {"n": n})), says(f"paid {n}"))) for n in range(4)]
        for agent in agents:
            agent.tool_plain(pay)
        results = await asyncio.gather(*(agent.run("Go") for agent in agents))
        return [result.output for result in results]

    async def pay(n: int) -> int:
        return n

    outcome = await run(ask)
    assert outcome.output == [f"paid {n}" for n in range(4)]
    assert sorted(each["result"] for each in tool_values(outcome)) == [0, 1, 2, 3]
    explored = await explore_crashes(ask, compare="shape")
    assert explored.crashes >= 24


async def test_two_runs_of_an_agent_in_one_workflow_have_separate_records() -> None:
    script = Script(says("first"), says("second"))
    agent = shop(script)

    @workflow("ask")
    async def ask(step: Step) -> list[str]:
        one = await agent.run("Go", run_id="same")
        two = await agent.run("Go", run_id="same")
        three = await agent.run("On", message_history=two.all_messages())
        return [one.output, two.output, three.output]

    outcome = await run(ask)
    assert outcome.output == ["first", "first", "second"]
    assert len(outcome.history) == 3
    await explore_crashes(ask, compare="shape", always_replay=True)


# --- Failures and retries


async def test_a_model_retry_is_recorded_as_a_value() -> None:
    script = Script(calls(("pay", {"n": 0})), calls(("pay", {"n": 1})), says("paid"))
    agent, paid = shop(script, tool={"retry": 5}), []

    @agent.tool_plain
    async def pay(n: int) -> str:
        paid.append(n)
        if n == 0:
            raise ModelRetry("n must be positive")
        return "receipt"

    outcome = await run(asking(agent))
    assert (outcome.output, paid) == ("paid", [0, 1])
    assert [each["kind"] for each in tool_values(outcome)] == ["model_retry", "tool_return"]
    await explore_crashes(asking(agent), compare="shape")


@dataclass
class Down(Exception):
    service: str


async def test_a_tools_exception_is_caught_by_its_class_before_and_after_a_crash() -> None:
    agent = shop(Script(calls(("pay", {}))))

    @agent.tool_plain
    async def pay() -> None:
        raise Down("bank")

    @workflow("ask")
    async def ask(step: Step) -> str:
        try:
            await agent.run("Go")
        except Down as down:
            return f"{down.service} is down"
        return "paid"

    assert (await run(ask)).output == "bank is down"
    await explore_crashes(ask, compare="shape")


async def test_options_are_those_of_the_tool_then_of_all_tools() -> None:
    script = Script(calls(("pay", {}), ("ship", {})), says("done"))
    agent = shop(script, tool={"retry": Retry(2, delay=0)})
    attempts: Counter[str] = Counter()

    def fails(name: str, times: int) -> str:
        attempts[name] += 1
        if attempts[name] < times:
            raise Down(name)
        return name

    @agent.tool_plain(metadata={"perdure": {"retry": Retry(4, delay=0)}})
    async def pay() -> str:
        return fails("pay", 4)

    @agent.tool_plain
    async def ship() -> str:
        return fails("ship", 2)

    assert (await run(asking(agent))).output == "done"
    assert attempts == {"pay": 4, "ship": 2}


def http_error(status: int) -> Any:
    def answer(_: list[ModelMessage]) -> Any:
        raise ModelHTTPError(status, "gpt", body={"why": "?"})

    return answer


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (422, 1)])
async def test_a_request_that_the_provider_rejects_is_not_retried(
    status: int, attempts: int
) -> None:
    script = Script(http_error(status))
    agent = shop(script, model={"retry": 3})

    @workflow("ask")
    async def ask(step: Step) -> int:
        try:
            await agent.run("Go")
        except ModelHTTPError as error:
            return error.status_code
        return 0

    assert (await run(ask)).output == status
    assert script.asked[0] == attempts
    await explore_crashes(ask, compare="shape")


async def test_a_record_that_cannot_be_read_does_not_run_the_tool_again() -> None:
    agent, paid = shop(Script(calls(("pay", {})), says("paid"))), 0

    @agent.tool_plain
    async def pay() -> None:
        nonlocal paid
        paid += 1

    @workflow("ask")
    async def ask(step: Step) -> None:
        await agent.run("Go")
        await step.sleep("rest", "1d")

    clock = TestClock()
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[ask], clock=clock, suspend_after=0)
    await runtime.trigger(ask, run_id="1")
    snapshot: Any = await store.load("1")
    snapshot["steps"][PAY]["value"] = {"kind": "unheard of"}
    await store.save("1", snapshot)
    await clock.advance("2d")
    await runtime.sweep()
    failed = await runtime.get_run("1")
    assert failed is not None
    assert (failed.status, paid) == ("failed", 1)
    assert "is not a valid" in str(failed.error)


async def test_a_value_that_cannot_be_recorded_fails_clearly_and_is_not_retried() -> None:
    agent, attempts = shop(Script(calls(("make", {}))), tool={"retry": 3}), 0

    @agent.tool_plain
    async def make() -> Any:
        nonlocal attempts
        attempts += 1
        return object()

    failed = await run(asking(agent))
    assert (failed.status, attempts) == ("failed", 1)
    assert "cannot be recorded" in str(failed.error)


@pytest.mark.parametrize("options", [{"retries": 3}, "fast", {"retry": 0}, {1: 2}])
def test_bad_options_are_refused(options: Any) -> None:
    with pytest.raises(InvalidArgument):
        PerdureDurability(model=options)


def test_an_unknown_mode_of_parallel_tools_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'parallel' or"):
        PerdureDurability(parallel_tools=cast(Any, "fast"))


async def test_bad_options_of_a_tool_name_the_tool() -> None:
    agent = shop(Script(calls(("pay", {}))))

    @agent.tool_plain(metadata={"perdure": {"retries": 5}})
    async def pay() -> None: ...

    failed = await run(asking(agent))
    assert "of tool 'pay'" in str(failed.error)


# --- Approvals and waits


class Refund(BaseModel):
    approved: bool
    why: str = ""


def refunds(script: Script) -> tuple[Any, list[int]]:
    """Return a workflow whose agent asks before it pays back, and what it has paid back."""
    agent: Agent[None, str | DeferredToolRequests] = Agent(
        script.model,
        name="shop",
        output_type=[str, DeferredToolRequests],
        capabilities=[PerdureDurability()],
    )
    paid = []

    @agent.tool_plain(requires_approval=True)
    async def refund(amount: int) -> str:
        paid.append(amount)
        return f"refunded {amount}"

    @workflow("refunds")
    async def handle(step: Step) -> str:
        result = await agent.run("Refund 5 and 7")
        while isinstance(requests := result.output, DeferredToolRequests):
            answers = DeferredToolResults()
            for n, call in enumerate(requests.approvals):
                answer = await step.wait_for_event(f"ask {n}", f"approve {n}", returns=Refund)
                ok = answer is not None and answer.approved
                answers.approvals[call.tool_call_id] = ok or ToolDenied(
                    answer.why if answer else ""
                )
            result = await agent.run(
                message_history=result.all_messages(), deferred_tool_results=answers
            )
        return str(result.output)

    return handle, paid


def approval_script() -> Script:
    return Script(
        calls(("refund", {"amount": 5}), ("refund", {"amount": 7})),
        lambda messages: says(f"{returned(messages)}"),
    )


async def test_an_approval_is_awaited_without_memory_and_continues_elsewhere() -> None:
    script = approval_script()
    handle, paid = refunds(script)
    store = MemoryStore()
    first = Runtime(store, workflows=[handle], suspend_after=0)
    assert (await first.trigger(handle, run_id="1")).status == "waiting"
    await first.signal("1", "approve 0", Refund(approved=True))
    elsewhere = Runtime(store, workflows=[handle], suspend_after=0)
    await elsewhere.signal("1", "approve 1", Refund(approved=False, why="too much"))
    outcome = await elsewhere.get_run("1")
    assert outcome is not None
    assert outcome.output == "['refunded 5', 'too much']"
    assert (paid, script.asked) == ([5], {0: 1, 1: 1})


async def test_approvals_survive_every_crash() -> None:
    handle, _ = refunds(approval_script())
    events = {"approve 0": {"approved": True}, "approve 1": {"approved": False}}
    explored = await explore_crashes(handle, events=events, compare="shape")
    assert explored.crashes >= 16


async def test_a_tool_that_is_not_a_step_may_wait_and_call_steps() -> None:
    script = Script(calls(("ask", {}), ("pay", {})), lambda messages: says(f"{returned(messages)}"))
    agent, paid = shop(script), 0

    @agent.tool_plain(metadata={"perdure": False})
    async def ask() -> str:
        step = perdure.current()
        assert step is not None
        return str(await step.wait_for_event("answer", "answer", returns=str))

    @agent.tool_plain
    async def pay() -> str:
        nonlocal paid
        paid += 1
        return "receipt"

    store, definition = MemoryStore(), asking(agent)
    runtime = Runtime(store, workflows=[definition], suspend_after=0)
    assert (await runtime.trigger(definition, run_id="1")).status == "waiting"
    await Runtime(store, workflows=[definition]).signal("1", "answer", "yes")
    outcome = await runtime.get_run("1")
    assert outcome is not None
    assert (outcome.output, paid) == ("['yes', 'receipt']", 1)
    explored = await explore_crashes(definition, events={"answer": "yes"}, compare="shape")
    assert explored.crashes >= 12


async def test_a_step_inside_a_tool_that_is_a_step_is_refused() -> None:
    agent = shop(Script(calls(("ask", {}))))

    @agent.tool_plain
    async def ask() -> None:
        step = perdure.current()
        assert step is not None
        await step.sleep("wait", "1d")

    failed = await run(asking(agent))
    assert "inside" in str(failed.error)
    assert "metadata={'perdure': False}" in failed.traceback


# --- Kinds of tools, models and outputs


@dataclass
class Deps:
    tenant: str


class Parcel(BaseModel):
    city: str
    weight: float


async def test_dependencies_typed_arguments_and_structured_output() -> None:
    script = Script(
        calls(("track", {"parcel": {"city": "Ulm", "weight": 2.5}})),
        calls(("final_result", {"city": "Bonn", "weight": "heavy"})),
        calls(("final_result", {"city": "Bonn", "weight": 3})),
    )
    agent = Agent(
        script.model,
        name="shop",
        deps_type=Deps,
        output_type=Parcel,
        capabilities=[PerdureDurability()],
    )

    @agent.tool
    async def track(ctx: RunContext[Deps], parcel: Parcel) -> BinaryContent:
        return BinaryContent(f"{ctx.deps.tenant}, {parcel.city}".encode(), media_type="text/plain")

    @workflow("ask")
    async def ask(step: Step) -> Parcel:
        result = await agent.run("Go", deps=Deps("acme"))
        assert result.usage.requests == 3
        return result.output

    assert (await run(ask)).output == Parcel(city="Bonn", weight=3.0)
    await explore_crashes(ask, compare="shape")


async def test_a_dynamic_toolset_is_discovered_once() -> None:
    script, discovered = Script(calls(("pay", {})), says("paid")), 0

    async def pay() -> str:
        return "receipt"

    async def tools(ctx: RunContext[None]) -> AbstractToolset[None]:
        nonlocal discovered
        discovered += 1
        return FunctionToolset([pay])

    agent = Agent(
        script.model,
        name="shop",
        toolsets=[DynamicToolset(tools, id="tenant")],
        capabilities=[PerdureDurability()],
    )

    outcome = await run(asking(agent))
    assert outcome.output == "paid"
    assert "shop__dynamic_toolset__tenant.call_tool:pay" in [step.key for step in outcome.history]
    await explore_crashes(asking(agent), compare="shape")


async def test_tools_of_an_mcp_server_are_steps() -> None:
    server, paid = FastMCP("bank"), 0

    @server.tool
    def pay(amount: int) -> str:
        nonlocal paid
        paid += 1
        return f"paid {amount}"

    script = Script(calls(("pay", {"amount": 5})), lambda messages: says(f"{returned(messages)}"))
    agent = Agent(
        script.model,
        name="shop",
        toolsets=[MCPToolset(server, id="bank")],
        capabilities=[PerdureDurability()],
    )
    outcome = await run(asking(agent))
    assert (outcome.output, paid) == ("['paid 5']", 1)
    keys = [step.key for step in outcome.history]
    assert "shop__mcp_server__bank.call_tool" in keys
    assert "shop__mcp_server__bank.get_tools" in keys


async def test_toolsets_that_arrive_with_a_run_are_refused() -> None:
    agent = shop(Script(says("hello")))

    @workflow("ask")
    async def ask(step: Step) -> None:
        await agent.run("Go", toolsets=[FunctionToolset([print], id="late")])

    failed = await run(ask)
    assert failed.status == "failed"
    assert "UserError" in str(failed.error) or isinstance(failed.error, UserError)


async def test_a_registered_model_is_chosen_by_its_id() -> None:
    small, large = Script(says("small")), Script(says("large"))
    agent = shop(small, models={"large": large.model})

    @workflow("ask")
    async def ask(step: Step) -> list[str]:
        one = await agent.run("Go")
        other = await agent.run("Go", model="large")
        return [one.output, other.output]

    outcome = await run(ask)
    assert outcome.output == ["small", "large"]
    assert [step.key for step in outcome.history] == [
        "shop__model.request",
        "shop__model.request.large",
    ]


async def test_an_agent_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="unique `name`"):
        Agent(Script().model, capabilities=[PerdureDurability()])


# --- Streams and time


@pytest.mark.parametrize("mode", ["parallel_ordered_events", "sequential"])
async def test_each_event_is_handled_once(
    mode: Literal["parallel_ordered_events", "sequential"],
) -> None:
    script = Script(calls(("pay", {"n": 1}), ("pay", {"n": 2})), says("all paid"))
    results: list[Any] = []

    async def handle(_: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
        kind = FunctionToolResultEvent
        results.extend([event.part.content async for event in events if isinstance(event, kind)])

    agent = shop(script, event_stream_handler=handle, parallel_tools=mode)

    @agent.tool_plain
    async def pay(n: int) -> int:
        return n

    store, definition = MemoryStore(), asking(agent)
    runtime = Runtime(store, workflows=[definition], always_replay=True)
    await runtime.trigger(definition, run_id="1")
    while await runtime.sweep():
        pass
    outcome = await runtime.get_run("1")
    assert outcome is not None
    assert outcome.output == "all paid "
    assert results == [1, 2]


async def test_the_deadline_of_an_agents_run_counts_from_its_first_start() -> None:
    agent = shop(Script(says("hello")))

    @workflow("ask")
    async def ask(step: Step) -> str:
        return str((await agent.run("Go", timeout=60)).output)

    outcome = await run(ask)
    assert [step.key for step in outcome.history] == ["shop__run_start_time", "shop__model.request"]


async def test_a_cancelled_run_ends_while_a_tool_works() -> None:
    agent, started = shop(Script(calls(("pay", {})))), asyncio.Event()

    @agent.tool_plain
    async def pay() -> None:
        started.set()
        await asyncio.Event().wait()

    definition = asking(agent)
    runtime = Runtime(MemoryStore(), workflows=[definition])
    running = asyncio.create_task(runtime.trigger(definition, run_id="1"))
    await started.wait()
    await runtime.cancel("1")
    assert (await running).status == "cancelled"
