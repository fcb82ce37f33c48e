"""Agents of pydantic-ai that survive crashes: model requests and tool calls become steps.

agent = Agent("openai:gpt-5", name="support", capabilities=[PerdureDurability(model={"retry": 3})])
result = await agent.run("Where is my parcel?")     # inside a workflow function

Outside a run the capability changes nothing.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Literal, TypeAlias, get_args

from perdure.engine.current import current
from perdure.engine.step import Step
from perdure.errors import CodecError, InvalidArgument, MissingDependency, NestedStep, PerdureError
from perdure.integrations._agent_calls import AgentCalls, StepOptions, check_options

try:
    import anyio
    from pydantic import ValidationError
    from pydantic_ai import exceptions
    from pydantic_ai.agent import Agent, EventStreamHandler
    from pydantic_ai.capabilities.abstract import WrapRunHandler
    from pydantic_ai.durable_exec import (
        JSON_CODEC,
        BaseDurabilityCapability,
        DurabilityCodec,
        DurabilityEngineSpec,
        DurableOperationId,
        JournalCallableOperationBackend,
        RoleBasedOperationConfig,
        ToolsetKind,
        conversation_id_from_run_id,
    )
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import Model
    from pydantic_ai.run import AgentRunResult
    from pydantic_ai.tools import AgentDepsT, RunContext
except ImportError as error:
    raise MissingDependency("pydantic-ai-slim>=2.66", "pydantic-ai") from error

__all__ = ["PerdureDurability", "StepOptions"]

ParallelTools: TypeAlias = Literal["parallel", "parallel_ordered_events", "sequential"]

_METADATA = "perdure"
_NESTED_HINT = (
    f"A tool that calls steps or waits must not be a step: metadata={{{_METADATA!r}: False}}"
)
_KINDS: frozenset[ToolsetKind] = frozenset({"function", "mcp", "dynamic"})

_ERRORS = tuple(
    value
    for value in vars(exceptions).values()
    if isinstance(value, type) and issubclass(value, Exception)
)
"""Errors of model requests keep their class in the record, because fallbacks depend on it."""

_FINAL = (
    CodecError,
    exceptions.ModelRequestRejectedError,
    exceptions.UsageLimitExceeded,
    exceptions.UserError,
)
"""Errors after which another attempt of the same request cannot succeed."""

_TRANSIENT = frozenset({408, 409, 425, 429})
"""The 4xx statuses after which a retry may succeed."""


_CALLS: ContextVar[AgentCalls | None] = ContextVar("perdure_agent_calls", default=None)
"""The calls of the agent run that the calling code belongs to."""

_AGENT_RUN: ContextVar[tuple[str | None, AgentCalls | None]] = ContextVar(
    "perdure_begun_agent", default=(None, None)
)
"""The id of the agent run that this task has begun, and its calls."""


class _RecordCodec(DurabilityCodec):
    """Pydantic's JSON, but with a separate error for unreadable records.

    A `ValidationError` of a record would look like bad arguments from the model: pydantic-ai would
    ask the model again, and run the tool a second time.
    """

    def dump(self, tp: Any, value: Any) -> Any:
        return JSON_CODEC.dump(tp, value)

    def load(self, tp: Any, payload: Any) -> Any:
        try:
            return JSON_CODEC.load(tp, payload)
        except ValidationError as error:
            name = getattr(tp, "__name__", tp)
            raise CodecError(f"a record of the agent is not a valid {name}: {error}") from error


def _unwritable(error: Exception) -> CodecError:
    hint = "return values that pydantic can write as JSON"
    return CodecError(f"a value of the agent cannot be recorded: {error}; {hint}")


class _StepBackend(JournalCallableOperationBackend[StepOptions]):
    """Runs each operation of an agent as a step of the current run."""

    def __init__(
        self, agent_name: str, model_id: str | None, config: RoleBasedOperationConfig[StepOptions]
    ) -> None:
        super().__init__(agent_name=agent_name, default_model_id=model_id, config=config)
        self._agent_name = agent_name

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: StepOptions,
    ) -> object:
        # Not set until the agent run has begun.
        calls = _CALLS.get() or AgentCalls(_workflow_step(), self._agent_name)
        try:
            return await calls.perform(
                name,
                body,
                options=config,
                is_final=_is_final,
                errors=_ERRORS,
                tool_call=_place_of_tool_call(cache_key),
            )
        except NestedStep as error:
            error.add_note(_NESTED_HINT)
            raise


class PerdureDurability(BaseDurabilityCapability[AgentDepsT]):
    """Records the model requests and tool calls of an agent as steps of the current run.

    `model`, `tool` and `event` are the options of the steps for model requests, tool calls and
    calls of the event stream handler. A tool can have its own options in its metadata:
    `metadata={"perdure": {"retry": 5}}`; with `{"perdure": False}` it is not a step but part of the
    workflow function, and may itself call steps and wait.

    The names of the steps contain the agent's `name` and the ids of its toolsets: changing them
    while runs are open is a change of the workflow. `models` are additional models by id, for
    `agent.run(model=…)`. `parallel_tools` is how several tool calls of one response are executed;
    with `"parallel"`, events are in the order of completion.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="perdure",
        durable_unit_noun="step",
        durable_container_noun="workflow",
        codec=_RecordCodec(),
        serialization_failure=_unwritable,
        wrapped_toolset_kinds=_KINDS,
        unsupported_runtime_toolset_kinds=_KINDS,
        toolset_lifecycles={
            "function": "enter-always",
            "mcp": "enter-in-durable-unit",
            "dynamic": "enter-never",
        },
        tool_config_key=_METADATA,
    )

    def __init__(
        self,
        *,
        model: StepOptions | None = None,
        tool: StepOptions | None = None,
        event: StepOptions | None = None,
        models: Mapping[str, Model] | None = None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
        parallel_tools: ParallelTools = "parallel_ordered_events",
        name: str | None = None,
    ) -> None:
        super().__init__(models=models, event_stream_handler=event_stream_handler, name=name)
        self._model_options = check_options(model, "model")
        self._tool_options = check_options(tool, "tool")
        self._event_options = check_options(event, "event")
        if parallel_tools not in get_args(ParallelTools):
            modes = " or ".join(map(repr, get_args(ParallelTools)))
            raise InvalidArgument("parallel_tools", parallel_tools, modes)
        self._parallel_tools: ParallelTools = parallel_tools

    @property
    def in_durable_context(self) -> bool:
        """Whether this is the workflow's own code, and not code inside a step."""
        step = current()
        return step is not None and step.executing is None

    def get_durable_operation_backend(self) -> _StepBackend:
        """Return the backend that runs the operations of this agent as steps."""
        config = RoleBasedOperationConfig[StepOptions](
            model=self._model_options,
            event=self._event_options,
            capability=StepOptions(),
            tool=self._tool_options,
            resolve_tool=self._options_of_tool,
        )
        return _StepBackend(self.name, self.default_model_id, config)

    def _options_of_tool(
        self, operation_id: DurableOperationId, tool: object | None, tool_name: str
    ) -> StepOptions | Literal[False]:
        definition = getattr(tool, "tool_def", None)
        options = (getattr(definition, "metadata", None) or {}).get(_METADATA)
        if options is False:
            return False
        own = check_options(options, f"metadata[{_METADATA!r}] of tool {tool_name!r}")
        return {**self._tool_options, **own}

    def get_default_run_id(self) -> str | None:
        """Return an id that is the same on every replay."""
        return str(_workflow_step().uuid()) if self.in_durable_context else None

    def get_default_conversation_id(self, run_id: str) -> str | None:
        """Return an id that is the same on every replay."""
        if not self.in_durable_context:
            return None
        # pydantic-ai calls this in the task that runs the agent, but its hooks in other tasks.
        _AGENT_RUN.set((run_id, AgentCalls(_workflow_step(), self.name)))
        return conversation_id_from_run_id(run_id)

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        """Return the recorded start time for the `timeout=` of `agent.run`."""
        if not self.in_durable_context:
            return None
        return await _workflow_step().now(f"{self.name}__run_start_time")

    async def wrap_run(
        self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler
    ) -> AgentRunResult[Any]:
        """Run tools as configured, and make the agent's own delays durable sleeps."""
        agent = self.agent
        if agent is None or not self.in_durable_context:
            return await handler()
        token = _CALLS.set(self._calls_of(ctx.run_id))
        try:
            with (
                agent.parallel_tool_call_execution_mode(self._parallel_tools),
                Agent.using_sleep(self._sleep),
            ):
                return await handler()
        finally:
            _CALLS.reset(token)

    def _calls_of(self, run_id: str | None) -> AgentCalls:
        begun_id, calls = _AGENT_RUN.get()
        is_ours = begun_id == run_id and calls is not None
        return calls if is_ours and calls else AgentCalls(_workflow_step(), self.name)

    async def _sleep(self, seconds: float) -> None:
        # An agent that runs inside a step inherits this function from the outer agent.
        if self.in_durable_context:
            await _workflow_step().sleep(f"{self.name}__sleep", max(seconds, 0))
        else:
            await anyio.sleep(max(seconds, 0))


def _workflow_step() -> Step:
    step = current()
    if step is None:
        raise PerdureError("the run that this agent belongs to has ended")
    return step


def _is_final(error: Exception) -> bool:
    """Return whether a retry is useless: the request was rejected, or the code is wrong."""
    if isinstance(error, exceptions.ModelHTTPError) and error.status_code not in _TRANSIENT:
        return 400 <= error.status_code < 500
    return isinstance(error, _FINAL)


def _place_of_tool_call(cache_key: tuple[object, ...]) -> str:
    """Return the place in the conversation of an operation's tool call, or "".

    The id of the call is avoided where possible: pydantic-ai generates a random id if the provider
    has none, and providers repeat ids.
    """
    context = next((part for part in cache_key if isinstance(part, RunContext)), None)
    if context is None or not context.tool_call_id:
        return ""
    call_ids = [
        part.tool_call_id
        for message in context.messages
        if isinstance(message, ModelResponse)
        for part in message.tool_calls
    ]
    call_ids.reverse()
    if context.tool_call_id not in call_ids:
        return context.tool_call_id
    return f"call {len(call_ids) - call_ids.index(context.tool_call_id)}"
