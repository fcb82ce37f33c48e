"""Agents of the OpenAI Agents SDK that survive crashes: model requests and tool calls are steps.

result = await DurableRunner(model={"retry": 3}).run(agent, "Where is my parcel?")   # in a workflow
"""

import copy
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from perdure.engine.current import current
from perdure.engine.step import Step
from perdure.errors import CodecError, InvalidArgument, MissingDependency, PerdureError
from perdure.integrations._agent_calls import (
    AgentCalls,
    StepOptions,
    check_options,
    raise_refusal,
)

try:
    import openai
    from agents import (
        Agent,
        CodeInterpreterTool,
        FileSearchTool,
        FunctionTool,
        Handoff,
        HostedMCPTool,
        ImageGenerationTool,
        Model,
        ModelProvider,
        ModelResponse,
        RunConfig,
        Runner,
        RunResult,
        RunState,
        TContext,
        Tool,
        ToolOutputFileContent,
        ToolOutputImage,
        ToolOutputText,
        WebSearchTool,
        exceptions,
    )
    from agents.tool_context import ToolContext
    from pydantic import BaseModel, TypeAdapter, ValidationError
except ImportError as error:
    raise MissingDependency("openai-agents>=0.24", "openai-agents") from error

__all__ = ["DurableRunner", "StepOptions"]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, exceptions.AgentsException)


# Executed by the provider, inside a model request.
_HOSTED_TOOLS = (
    CodeInterpreterTool,
    FileSearchTool,
    HostedMCPTool,
    ImageGenerationTool,
    WebSearchTool,
)
_OUTPUTS = (ToolOutputFileContent, ToolOutputImage, ToolOutputText)
_RESPONSE = TypeAdapter(ModelResponse)
_STRUCTURED_OUTPUT: TypeAdapter[Any] = TypeAdapter(
    list[ToolOutputText | ToolOutputImage | ToolOutputFileContent]
)

_ERRORS: tuple[type[BaseException], ...] = (
    # Accessing its other names may load much of the package.
    *(getattr(openai, name) for name in openai.__all__ if name.endswith("Error")),
    *(value for value in vars(exceptions).values() if _is_error(value)),
)
_FINAL = (
    CodecError,
    exceptions.UserError,
    openai.AuthenticationError,
    openai.BadRequestError,
    openai.NotFoundError,
    openai.PermissionDeniedError,
    openai.UnprocessableEntityError,
)


class DurableRunner:
    """Runs agents inside a workflow: each model request and each call of a function tool is a step.

    `model` and `tool` are the options of these steps. Outside a run, and inside the function of a
    step, agents run as with the SDK's own `Runner`.

    Function tools and tools that the provider executes are recorded. In a workflow, an agent with
    other tools or with MCP servers is rejected, since their effects would be repeated on each
    replay.
    """

    def __init__(
        self, *, model: StepOptions | None = None, tool: StepOptions | None = None
    ) -> None:
        self._model = check_options(model, "model")
        self._tool = check_options(tool, "tool")

    async def run(
        self,
        starting_agent: Agent[TContext],
        input: str | list[Any] | RunState[TContext],
        *,
        run_config: RunConfig | None = None,
        session: None = None,
        **options: Any,
    ) -> RunResult:
        """Run an agent until its final output, or until it asks for approvals.

        The arguments are those of `Runner.run`. In a workflow, a `session` is rejected: pass
        `result.to_input_list()` of the previous run as the input instead.
        """
        step = current()
        if step is None or step.executing is not None:
            options = {**options, "session": session, "run_config": run_config}
            return await Runner.run(starting_agent, input, **options)
        if session is not None:
            hint = "What it contains may change before a replay. Pass result.to_input_list()"
            raise InvalidArgument("session", session, "no session in a workflow", hint)
        token = _CALLS.set(_Calls(step, starting_agent.name))
        try:
            durable = _Converter(self._model, self._tool)
            config = durable.config(run_config or RunConfig())
            agent = durable.agent(starting_agent)
            return await Runner.run(agent, input, run_config=config, **options)
        finally:
            _CALLS.reset(token)


class _Calls:
    """The calls of one run of an agent, and the place of each tool call in it."""

    def __init__(self, step: Step, agent: str) -> None:
        self.steps = AgentCalls(step, agent)
        self._places: dict[str, str] = {}

    def add(self, response: ModelResponse) -> None:
        """Number the tool calls of a response: their ids are random, their order is recorded."""
        for item in response.output:
            if (call_id := getattr(item, "call_id", None)) is not None:
                self._places[call_id] = f"call {len(self._places) + 1}"

    def place_of(self, call_id: str) -> str:
        """Return the place of a tool call or, if it was approved later, its recorded id."""
        return self._places.get(call_id, call_id)


_CALLS: ContextVar[_Calls | None] = ContextVar("perdure_openai_agent_calls", default=None)


def _calls() -> _Calls | None:
    """Return the calls of the current agent; `None` inside a step, and outside a run."""
    step = current()
    return None if step is None or step.executing is not None else _CALLS.get()


class _Converter:
    """Replaces the models and tools of agents with recorded ones."""

    def __init__(self, model: StepOptions, tool: StepOptions) -> None:
        self._model = model
        self._tool = tool
        # Agents may hand off to each other in a circle.
        self._agents: dict[int, Agent[Any]] = {}

    def config(self, config: RunConfig) -> RunConfig:
        """Return a configuration whose models are recorded."""
        model = config.model
        return dataclasses.replace(
            config,
            model=self._recorded_model(model, "run") if isinstance(model, Model) else model,
            model_provider=_DurableProvider(config.model_provider, self._model),
        )

    def agent(self, agent: Agent[Any]) -> Agent[Any]:
        """Return a recorded copy of an agent, and of the agents it can hand off to."""
        if (existing_copy := self._agents.get(id(agent))) is not None:
            return existing_copy
        if agent.mcp_servers:
            raise _unsupported_agent(agent, "MCP servers")
        durable = self._agents[id(agent)] = copy.copy(agent)
        if isinstance(agent.model, Model):
            durable.model = self._recorded_model(agent.model, agent.name)
        durable.tools = [self._recorded_tool(agent, tool) for tool in agent.tools]
        durable.handoffs = [self._handoff(each) for each in agent.handoffs]
        return durable

    def _recorded_model(self, model: Model, name: str) -> Model:
        return (
            model if isinstance(model, _DurableModel) else _DurableModel(model, name, self._model)
        )

    def _handoff(self, handoff: Agent[Any] | Handoff[Any, Any]) -> Agent[Any] | Handoff[Any, Any]:
        if isinstance(handoff, Agent):
            return self.agent(handoff)
        choose = handoff.on_invoke_handoff

        async def invoke(*arguments: Any) -> Agent[Any]:
            return self.agent(await choose(*arguments))

        return dataclasses.replace(handoff, on_invoke_handoff=invoke)

    def _recorded_tool(self, agent: Agent[Any], tool: Tool) -> Tool:
        if isinstance(tool, _HOSTED_TOOLS):
            return tool
        if not isinstance(tool, FunctionTool):
            raise _unsupported_agent(agent, f"the tool {tool.name!r} ({type(tool).__name__})")
        invoke = tool.on_invoke_tool
        if isinstance(invoke, partial) and invoke.func is _call_tool:
            return tool
        durable = copy.copy(tool)
        # The function is bound to the copy, so that is what it is called with.
        durable.on_invoke_tool = partial(
            _call_tool, durable.on_invoke_tool, f"{agent.name}__call_tool:{tool.name}", self._tool
        )
        return durable


def _unsupported_agent(agent: Agent[Any], what: str) -> InvalidArgument:
    hint = "Wrap what it does in a function tool, which is recorded"
    expected = f"an agent without {what}, whose effects would be repeated on each replay"
    return InvalidArgument("agent", agent.name, expected, hint)


class _DurableProvider(ModelProvider):
    """Finds models by name, and records their requests."""

    def __init__(self, provider: ModelProvider, options: StepOptions) -> None:
        self._provider = provider
        self._options = options

    def get_model(self, model_name: str | None) -> Model:
        model = self._provider.get_model(model_name)
        return _DurableModel(model, model_name or "default", self._options)

    async def aclose(self) -> None:
        await self._provider.aclose()


class _DurableModel(Model):
    """A model whose requests are steps."""

    def __init__(self, model: Model, name: str, options: StepOptions) -> None:
        self._inner = model
        self._name = name
        self._options = options

    async def get_response(self, *arguments: Any, **options: Any) -> ModelResponse:
        calls = _calls()
        if calls is None:
            return await self._inner.get_response(*arguments, **options)
        record = await calls.steps.perform(
            f"{self._name}__model.request",
            partial(self._request, arguments, options),
            options=self._options,
            is_final=_is_final,
            errors=_ERRORS,
        )
        response = _read(_RESPONSE, record)
        calls.add(response)
        return cast(ModelResponse, response)

    async def _request(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        response = await self._inner.get_response(*arguments, **options)
        # As the provider wrote it: some names differ, and unset fields must stay unset.
        return _RESPONSE.dump_python(response, mode="json", by_alias=True, exclude_unset=True)

    def stream_response(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        if _calls() is not None:
            raise PerdureError("a streamed response cannot be recorded: use DurableRunner.run")
        return self._inner.stream_response(*arguments, **options)

    def get_retry_advice(self, request: Any) -> Any:
        return self._inner.get_retry_advice(request)

    async def close(self) -> None:
        await self._inner.close()


async def _call_tool(
    invoke: Any, name: str, options: StepOptions, context: ToolContext[Any], arguments: str
) -> Any:
    calls = _calls()
    if calls is None:
        return await invoke(context, arguments)
    record = await calls.steps.perform(
        name,
        partial(_invoke, invoke, context, arguments),
        options=options,
        is_final=_is_final,
        errors=_ERRORS,
        tool_call=calls.place_of(context.tool_call_id),
    )
    if not isinstance(record, dict) or record.keys() != {"outputs", "is_list"}:
        return record["value"]
    outputs = _read(_STRUCTURED_OUTPUT, record["outputs"])
    return outputs if record["is_list"] else outputs[0]


async def _invoke(invoke: Any, context: ToolContext[Any], arguments: str) -> Any:
    """Call a tool and return its output as it is recorded."""
    output = await invoke(context, arguments)
    raise_refusal()
    outputs: Sequence[Any] = output if isinstance(output, list) else [output]
    if outputs and all(isinstance(each, _OUTPUTS) for each in outputs):
        data = [cast(BaseModel, each).model_dump(mode="json") for each in outputs]
        return {"outputs": data, "is_list": isinstance(output, list)}
    return {"value": output}


def _read(adapter: TypeAdapter[Any], data: Any) -> Any:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        raise CodecError(f"a record of the agent cannot be read: {error}") from error


def _is_final(error: Exception) -> bool:
    """Return whether a retry is useless: the request was rejected, or the code is wrong."""
    return isinstance(error, _FINAL)
