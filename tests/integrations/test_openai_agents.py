"""Agents of the OpenAI Agents SDK as parts of runs, with a model that follows a script."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from agents import (
    Agent,
    FunctionTool,
    Model,
    ModelResponse,
    RunConfig,
    RunHooks,
    SQLiteSession,
    ToolOutputText,
    Usage,
    function_tool,
    handoff,
)
from agents.testing import assistant_message, function_call
from agents.tool import LocalShellTool
from openai import BadRequestError, InternalServerError

import perdure
from perdure import Run, Runtime, Step, workflow
from perdure.integrations.openai_agents import DurableRunner
from perdure.stores import MemoryStore
from perdure.testing import explore_crashes

QUIET = RunConfig(tracing_disabled=True)


class Script(Model):
    """A model whose answer depends on how many items the conversation has from it."""

    def __init__(self, *turns: Callable[[], Any]) -> None:
        self.turns = turns
        self.asked: Counter[int] = Counter()

    async def get_response(self, *_: Any, **options: Any) -> ModelResponse:
        input = options["input"]
        items = [] if isinstance(input, str) else input
        turn = len({each["n"] for each in map(turn_of, items) if each})
        self.asked[turn] += 1
        output = self.turns[turn]()
        return ModelResponse(output=output, usage=Usage(requests=1), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def turn_of(item: Any) -> dict[str, str] | None:
    """Return the turn of the model that an item comes from, which is in its call id."""
    call_id = item.get("call_id", "")
    return {"n": call_id.split(":")[0]} if call_id and item["type"] == "function_call" else None


def calls(turn: int, *tools: tuple[str, dict[str, Any]]) -> Callable[[], Any]:
    return lambda: [
        function_call(name, arguments, call_id=f"{turn}:{uuid4()}") for name, arguments in tools
    ]


def says(text: str) -> Callable[[], Any]:
    return lambda: [assistant_message(text)]


paid: list[int] = []


@function_tool
async def pay(amount: int) -> str:
    paid.append(amount)
    return f"receipt {amount}"


@pytest.fixture(autouse=True)
def _nothing_paid() -> None:
    paid.clear()


def asking(agent: Agent[Any], **options: Any) -> Any:
    @workflow("ask")
    async def ask(step: Step) -> str:
        result = await DurableRunner(**options).run(agent, "Go", run_config=QUIET)
        return str(result.final_output)

    return ask


async def run(definition: Any) -> Run:
    return await Runtime(MemoryStore(), workflows=[definition]).trigger(definition, run_id="1")


def shop(script: Script, *tools: Any) -> Agent[Any]:
    return Agent("shop", model=script, tools=list(tools) or [pay])


async def test_requests_and_tool_calls_are_steps_with_pinned_names() -> None:
    script = Script(calls(0, ("pay", {"amount": 1}), ("pay", {"amount": 2})), says("paid"))
    outcome = await run(asking(shop(script)))
    assert (outcome.output, sorted(paid)) == ("paid", [1, 2])
    assert [(step.key, step.branch) for step in outcome.history] == [
        ("shop__model.request", "~agent:shop"),
        ("shop__call_tool:pay", "~agent:shop/call 1"),
        ("shop__call_tool:pay#2", "~agent:shop/call 2"),
        ("shop__model.request#2", "~agent:shop"),
    ]


@pytest.mark.parametrize("always_replay", [False, True])
async def test_a_crash_repeats_only_what_was_not_recorded(always_replay: bool) -> None:
    script = Script(calls(0, ("pay", {"amount": 1}), ("pay", {"amount": 2})), says("paid"))
    explored = await explore_crashes(
        asking(shop(script)), compare="shape", always_replay=always_replay
    )
    assert explored.crashes >= 12


async def test_a_response_is_restored_from_its_record_unchanged() -> None:
    response = ModelResponse(
        output=[*calls(0, ("pay", {"amount": 1}))(), assistant_message("hello")],
        usage=Usage(requests=1, input_tokens=5),
        response_id="r",
    )
    observations: list[ModelResponse] = []

    class Fixed(Script):
        async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
            return response

    class Stop(Exception):
        pass

    @function_tool(failure_error_function=None)
    async def pay(amount: int) -> str:
        raise Stop

    @workflow("ask")
    async def ask(step: Step) -> None:
        hooks = Remember(observations)
        runner = DurableRunner()
        await runner.run(shop(Fixed(), pay), "Go", run_config=QUIET, hooks=hooks)

    assert (await run(ask)).status == "failed"
    assert observations == [response]
    assert observations[0].to_input_items() == response.to_input_items()


class Remember(RunHooks[Any]):
    def __init__(self, observations: list[ModelResponse]) -> None:
        self.seen = observations

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        self.seen.append(response)


async def test_outside_a_run_nothing_changes() -> None:
    script = Script(calls(0, ("pay", {"amount": 1})), says("paid"))
    result = await DurableRunner().run(shop(script), "Go", run_config=QUIET)
    assert (result.final_output, paid) == ("paid", [1])


async def test_an_agent_inside_a_step_is_part_of_that_step() -> None:
    script = Script(calls(0, ("pay", {"amount": 1})), says("paid"))

    async def ask() -> str:
        return str((await DurableRunner().run(shop(script), "Go", run_config=QUIET)).final_output)

    @workflow("ask")
    async def outer(step: Step) -> str:
        return await step("ask", ask)

    outcome = await run(outer)
    assert (outcome.output, [step.key for step in outcome.history]) == ("paid", ["ask"])


async def test_agents_that_are_handed_over_to_are_recorded_too() -> None:
    """In a circle, by an agent and by a Handoff."""
    billing = Agent("billing", model=Script(says("?"), says("?"), says("billed")), tools=[pay])
    sales: Agent[Any] = Agent(
        "sales", model=Script(says("?"), calls(1, ("transfer_to_billing", {}))), handoffs=[billing]
    )
    billing.handoffs = [sales]
    first = Agent(
        "first", model=Script(calls(0, ("transfer_to_sales", {}))), handoffs=[handoff(sales)]
    )
    outcome = await run(asking(first))
    assert (outcome.output, outcome.error) == ("billed", None)
    assert [step.key for step in outcome.history] == [
        "first__model.request",
        "sales__model.request",
        "billing__model.request",
    ]


async def test_models_by_name_and_of_the_configuration_are_recorded() -> None:
    script = Script(says("hello"))

    class Provider(type(QUIET.model_provider)):  # type: ignore[misc]
        def get_model(self, model_name: str | None) -> Model:
            return script

    @workflow("ask")
    async def ask(step: Step) -> None:
        agent: Agent[Any] = Agent("shop", model="gpt-x")
        named = RunConfig(tracing_disabled=True, model_provider=Provider())
        await DurableRunner().run(agent, "Go", run_config=named)
        config = RunConfig(tracing_disabled=True, model=script)
        await DurableRunner().run(agent, "Go", run_config=config)

    outcome = await run(ask)
    assert [(step.key, step.branch) for step in outcome.history] == [
        ("gpt-x__model.request", "~agent:shop"),
        ("run__model.request", "~agent:shop#2"),
    ]


async def test_structured_output_of_a_tool_keeps_its_type() -> None:
    @function_tool
    async def look() -> ToolOutputText:
        return ToolOutputText(text="seen")

    @function_tool
    async def count() -> dict[str, int]:
        return {"parcels": 2}

    script = Script(calls(0, ("look", {}), ("count", {})), says("done"))

    @workflow("ask")
    async def ask(step: Step) -> list[Any]:
        agent = shop(script, look, count)
        result = await DurableRunner().run(agent, "Go", run_config=QUIET)
        items: list[Any] = [each for each in result.new_items if "call_output" in each.type]
        outputs = [item.output for item in items]
        assert outputs == [ToolOutputText(text="seen"), {"parcels": 2}]
        inputs: list[Any] = result.to_input_list()
        return [item["output"] for item in inputs if "output" in item]

    outcome = await run(ask)
    assert outcome.error is None
    await explore_crashes(ask, compare="shape")


class Down(Exception):
    pass


async def test_retries_of_tools_and_models() -> None:
    attempts: Counter[str] = Counter()

    @function_tool(failure_error_function=None)
    async def flaky() -> str:
        attempts["tool"] += 1
        if attempts["tool"] < 3:
            raise Down
        return "up"

    def answer() -> Any:
        attempts["model"] += 1
        if attempts["model"] < 2:
            raise Down
        return calls(0, ("flaky", {}))()

    agent = shop(Script(answer, says("done")), flaky)
    outcome = await run(asking(agent, model={"retry": 2}, tool={"retry": 3}))
    assert (outcome.output, attempts) == ("done", {"tool": 3, "model": 2})


def provider_error(kind: Any, status: int) -> Any:
    import httpx

    def answer() -> Any:
        request = httpx.Request("POST", "http://localhost")
        raise kind("no", response=httpx.Response(status, request=request), body=None)

    return answer


@pytest.mark.parametrize(
    ("kind", "status", "attempts"), [(BadRequestError, 400, 1), (InternalServerError, 500, 3)]
)
async def test_a_request_that_the_provider_rejects_is_not_retried(
    kind: Any, status: int, attempts: int
) -> None:
    script = Script(provider_error(kind, status))

    @workflow("ask")
    async def ask(step: Step) -> str:
        try:
            await DurableRunner(model={"retry": 3}).run(shop(script), "Go", run_config=QUIET)
        except kind as error:
            return type(error).__name__
        return "answered"

    assert (await run(ask)).output == kind.__name__
    assert script.asked[0] == attempts
    await explore_crashes(ask, compare="shape")


@function_tool(needs_approval=True)
async def refund(amount: int) -> str:
    paid.append(amount)
    return f"refunded {amount}"


def refunds(script: Script) -> Any:
    agent = shop(script, refund)

    @workflow("refunds")
    async def handle(step: Step) -> str:
        runner = DurableRunner()
        result = await runner.run(agent, "Refund 5 and 7", run_config=QUIET)
        while result.interruptions:
            state = result.to_state()
            for n, item in enumerate(result.interruptions):
                if await step.wait_for_event(f"ask {n}", f"approve {n}", returns=bool):
                    state.approve(item)
                else:
                    state.reject(item)
            result = await runner.run(agent, state, run_config=QUIET)
        return str(result.final_output)

    return handle


def refund_script() -> Script:
    tool_calls = calls(0, ("refund", {"amount": 5}), ("refund", {"amount": 7}))
    return Script(tool_calls, says("done"))


async def test_an_approval_is_awaited_without_memory_and_continues_elsewhere() -> None:
    script, store = refund_script(), MemoryStore()
    handle = refunds(script)
    first = Runtime(store, workflows=[handle], suspend_after=0)
    assert (await first.trigger(handle, run_id="1")).status == "waiting"
    await first.signal("1", "approve 0", True)
    elsewhere = Runtime(store, workflows=[handle], suspend_after=0)
    await elsewhere.signal("1", "approve 1", False)
    outcome = await elsewhere.get_run("1")
    assert outcome is not None
    assert (outcome.output, paid, script.asked) == ("done", [5], {0: 1, 1: 1})


async def test_approvals_survive_every_crash() -> None:
    events = {"approve 0": True, "approve 1": False}

    def same_but_for_ids(clean: Run, survived: Run) -> None:
        assert clean.output == "done"
        assert (clean.status, clean.output) == (survived.status, survived.output)
        assert [step.key for step in clean.history] == [step.key for step in survived.history]

    handle = refunds(refund_script())
    explored = await explore_crashes(handle, events=events, compare=same_but_for_ids)
    assert explored.crashes >= 14


async def test_agents_in_one_gather_keep_their_records_apart() -> None:
    @workflow("ask")
    async def ask(step: Step) -> list[str]:
        agents = [
            shop(Script(calls(0, ("pay", {"amount": n})), says(f"paid {n}"))) for n in range(3)
        ]
        runner = DurableRunner()
        results = await asyncio.gather(
            *(runner.run(agent, "Go", run_config=QUIET) for agent in agents)
        )
        return [str(result.final_output) for result in results]

    assert (await run(ask)).output == ["paid 0", "paid 1", "paid 2"]
    await explore_crashes(ask, compare="shape")


async def test_what_cannot_be_recorded_is_refused(tmp_path: Any) -> None:
    script = Script(says("hello"))

    @workflow("shell")
    async def shell(step: Step) -> None:
        tool = LocalShellTool(executor=lambda _: "")
        await DurableRunner().run(shop(script, tool), "Go", run_config=QUIET)

    @workflow("session")
    async def session(step: Step) -> None:
        memory: Any = SQLiteSession("1")
        await DurableRunner().run(shop(script), "Go", session=memory)

    assert "LocalShellTool" in str((await run(shell)).error)
    assert "to_input_list" in str((await run(session)).error)


async def test_a_step_inside_a_tool_fails_the_run() -> None:
    """The SDK tells the model about errors of tools; a mistake in the code is not for the model."""
    called = 0

    @function_tool
    async def ask() -> None:
        nonlocal called
        called += 1
        step = perdure.current()
        assert step is not None
        await step.sleep("wait", "1d")

    agent = shop(Script(calls(0, ("ask", {})), says("done")), ask)
    failed = await run(asking(agent, tool={"retry": 3}))
    assert "inside the function of step 'shop__call_tool:ask'" in str(failed.error)
    assert (failed.status, called) == ("failed", 1)


async def test_converting_an_agent_leaves_it_as_it_was() -> None:
    agent = shop(Script(calls(0, ("pay", {"amount": 1})), says("paid")))
    before = (agent.model, list(agent.tools))
    await run(asking(agent))
    assert (agent.model, agent.tools) == before
    assert isinstance(agent.tools[0], FunctionTool)
