"""What is recorded of an agent of pydantic-ai besides requests and plain tools."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_ai import Agent, FunctionToolset, ModelRetry, RunContext
from pydantic_ai.capabilities import AbstractCapability, durable_operation
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.toolsets import AbstractToolset, DynamicToolset, ExternalToolset

from perdure import Ok, Run, Runtime, Step, Workflow, workflow
from perdure.integrations.pydantic_ai import PerdureDurability
from perdure.stores import MemoryStore
from perdure.testing import TestClock, explore_crashes
from tests.integrations.agents import Script, calls, returned, says

TIME = re.compile(r"timestamp=datetime\.datetime\(.*?\.utc\)")


def shop(
    script: Script, *capabilities: AbstractCapability[Any], toolsets: Any = (), **options: Any
) -> Agent[None, Any]:
    return Agent(
        script.model,
        name="shop",
        toolsets=toolsets,
        capabilities=[*capabilities, PerdureDurability(**options)],
    )


def asking(agent: Agent[None, Any]) -> Any:
    @workflow("ask")
    async def ask(step: Step) -> Any:
        return (await agent.run("Go")).output

    return ask


async def run(definition: Any) -> Run:
    return await Runtime(MemoryStore(), workflows=[definition]).trigger(definition, run_id="1")


def keys_of(outcome: Run) -> list[str]:
    return [step.key for step in outcome.history]


# --- Streams


async def test_a_streamed_response_is_recorded() -> None:
    agent = shop(Script(says("hello Ana")))

    @workflow("ask")
    async def ask(step: Step) -> str:
        async with agent.run_stream("Go") as result:
            return str(await result.get_output())

    outcome = await run(ask)
    assert (outcome.output, keys_of(outcome)) == ("hello Ana ", ["shop__model.request_stream"])
    explored = await explore_crashes(ask, always_replay=True, compare="shape")
    assert set(explored.steps) == {"shop__model.request_stream"}


async def test_a_replay_streams_the_same_events() -> None:
    script = Script(calls(("pay", {})), says("paid"))
    agent, streams = shop(script), list[list[str]]()

    @agent.tool_plain
    async def pay() -> str:
        return "receipt"

    @workflow("ask")
    async def ask(step: Step) -> str:
        async with agent.run_stream_events("Go") as stream:
            # The time of a message is when the agent received it.
            streams.append([TIME.sub("", repr(event)) async for event in stream])
        await step.sleep("night", "8h")
        return "done"

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[ask], clock=clock)
    await runtime.trigger(ask)
    await clock.advance("8h")
    (outcome,) = await runtime.sweep()
    assert outcome.output == "done"
    first, replayed = streams
    assert len(first) > 4
    assert replayed == first
    assert script.asked == {0: 1, 1: 1}


async def test_cancelling_a_suspended_response_is_recorded() -> None:
    """The provider works on a response in the background, and the next request fails."""
    cancelled = list[ModelResponse]()

    class Background(FunctionModel):
        async def cancel_suspended_response(self, response: ModelResponse) -> None:
            cancelled.append(response)

    def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        if any(getattr(message, "state", "") == "suspended" for message in messages):
            raise ConnectionError("no answer")
        return ModelResponse(parts=[TextPart("part")], state="suspended")

    agent: Agent[None, Any] = Agent(
        Background(answer), name="shop", capabilities=[PerdureDurability()]
    )
    failed = await run(asking(agent))
    assert isinstance(failed.error, ConnectionError)
    assert keys_of(failed)[-1] == "shop__model.cancel_suspended_response"
    assert [response.state for response in cancelled] == ["suspended"]


# --- Operations of capabilities, failures, models


async def test_an_operation_of_another_capability_is_a_step() -> None:
    noted = list[str]()

    class Notes(AbstractCapability[Any]):
        id = "notes"

        async def before_run(self, ctx: RunContext[Any]) -> None:
            await self.note(ctx, "started")

        @durable_operation("note")
        async def note(self, ctx: RunContext[Any], text: str) -> None:
            noted.append(text)

    agent = shop(Script(says("hello")), Notes())
    outcome = await run(asking(agent))
    assert keys_of(outcome) == ["shop__capability__notes.note", "shop__model.request"]
    assert noted == ["started"]
    await explore_crashes(asking(agent), compare="shape")


async def test_retrying_a_run_repeats_the_tool_that_failed_and_no_request() -> None:
    script, attempts = Script(calls(("pay", {})), says("paid")), 0
    agent = shop(script)

    @agent.tool_plain
    async def pay() -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ConnectionError("the bank is down")
        return "receipt"

    definition = asking(agent)
    runtime = Runtime(MemoryStore(), workflows=[definition])
    failed = await runtime.trigger(definition, run_id="1")
    assert isinstance(failed.error, ConnectionError)
    outcome = await runtime.retry("1")
    assert (outcome.output, attempts, script.asked) == ("paid", 2, {0: 1, 1: 1})


async def test_ids_of_models_may_look_like_numbered_steps() -> None:
    one, two = Script(says("one")), Script(says("two"))
    agent = shop(Script(), models={"x": one.model, "x#2": two.model})

    @workflow("ask")
    async def ask(step: Step) -> list[str]:
        return [(await agent.run("Go", model=model)).output for model in ("x", "x", "x#2")]

    assert (await run(ask)).output == ["one", "one", "two"]
    await explore_crashes(ask, compare="shape")


async def test_the_format_of_records_does_not_change() -> None:
    """The names and the format of records are stored data."""
    script = Script(calls(("pay", {})), lambda messages: says(f"{returned(messages)}"))
    agent = shop(script)

    @agent.tool_plain
    async def pay() -> str:
        raise AssertionError("it is recorded")

    async def body(step: Step) -> str:
        return str((await agent.run("Go")).output)

    call = {"tool_name": "pay", "args": {}, "tool_call_id": "1", "part_kind": "tool-call"}
    response = {"parts": [call], "kind": "response", "timestamp": "2026-11-17T12:00:00Z"}
    receipt = {"result": "receipt", "kind": "tool_return"}
    tool = "shop__function_toolset__<agent>.call_tool:pay"
    snapshot: Any = {
        "formatVersion": 1,
        "workflowName": "ask",
        "steps": {
            "shop__model.request": {"ok": True, "value": response, "branch": "~agent:shop"},
            tool: {"ok": True, "value": receipt, "branch": "~agent:shop/call 1"},
        },
        "execution": {"status": "running", "lastUpdated": "2026-11-17T12:00:00.000Z"},
    }
    assert await Workflow("ask", snapshot=snapshot).run(body) == Ok("['receipt']")
    assert script.asked == {1: 1}


# --- Toolsets


async def double(n: int) -> int:
    return n * 2


async def refuse(n: int) -> int:
    raise ModelRetry(f"not {n}")


def dynamic(*tools: Callable[..., Any], **options: Any) -> DynamicToolset[Any]:
    def build(_: RunContext[Any]) -> AbstractToolset[Any]:
        toolset = FunctionToolset[Any](instructions=options.get("instructions"))
        for tool in tools:
            toolset.add_function(tool, metadata=options.get("metadata"))
        return toolset

    return DynamicToolset(build, id=options.get("id", "tenant"))


async def test_the_model_corrects_arguments_for_a_dynamic_tool() -> None:
    script = Script(
        calls(("double", {"n": "many"})),
        lambda messages: calls(("double", {"n": len(returned(messages))})),  # one complaint
        lambda messages: says(f"{returned(messages)}"),
    )
    definition = asking(shop(script, toolsets=[dynamic(double)]))
    assert (await run(definition)).output == "[2]"
    await explore_crashes(definition, compare="shape")


async def test_a_model_retry_of_a_dynamic_tool_is_recorded_as_a_value() -> None:
    script = Script(calls(("refuse", {"n": 1})), says("sorry"))
    definition = asking(shop(script, toolsets=[dynamic(refuse)]))
    outcome = await run(definition)
    [record] = [step for step in outcome.history if step.key.endswith("call_tool:refuse")]
    assert (outcome.output, record.ok) == ("sorry", True)
    assert record.value == {"message": "not 1", "kind": "model_retry"}


async def test_a_dynamic_tool_can_be_excluded_from_steps() -> None:
    script = Script(calls(("double", {"n": 3})), lambda messages: says(f"{returned(messages)}"))
    toolset = dynamic(double, metadata={"perdure": False})
    outcome = await run(asking(shop(script, toolsets=[toolset])))
    assert outcome.output == "[6]"
    assert not any("call_tool" in key for key in keys_of(outcome))


async def test_instructions_of_a_dynamic_toolset_reach_the_model_on_a_replay() -> None:
    observations = list[str | None]()

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        observations.append(info.instructions)
        n = sum(isinstance(message, ModelResponse) for message in messages)
        return [calls(("double", {"n": 3})), says("done")][n]

    agent: Agent[None, Any] = Agent(
        FunctionModel(answer),
        name="shop",
        toolsets=[dynamic(double, instructions="Be brief.")],
        capabilities=[PerdureDurability()],
    )
    definition = asking(agent)
    runtime = Runtime(MemoryStore(), workflows=[definition], always_replay=True)
    await runtime.trigger(definition, run_id="1")
    while await runtime.sweep():
        pass
    outcome = await runtime.get_run("1")
    assert outcome is not None
    assert (outcome.output, observations) == ("done", ["Be brief.", "Be brief."])


async def test_a_toolset_that_executes_nothing_may_arrive_with_a_run() -> None:
    agent = shop(Script(says("hello")))

    @workflow("ask")
    async def ask(step: Step) -> Any:
        return (await agent.run("Go", toolsets=[ExternalToolset([])])).output

    assert (await run(ask)).output == "hello"


@pytest.mark.parametrize(
    ("toolsets", "reason"),
    [
        ([FunctionToolset([double])], "unique `id`"),
        ([dynamic(double, id=None)], "unique `id`"),
        ([FunctionToolset([double], id="a"), FunctionToolset([refuse], id="a")], "same `id`"),
    ],
)
def test_toolsets_need_ids_of_their_own(toolsets: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        shop(Script(), toolsets=toolsets)
