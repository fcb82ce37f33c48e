"""Workflows as tools of an MCP server, for language models that start and watch runs.

server = FastMCP("shop")
add_run_tools(server, Client("postgresql://db/shop"), [refund])
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import CodecError, InvalidArgument, MissingDependency, PerdureError, RunNotFound
from perdure.integrations._messages import public_message
from perdure.runtime.client import Client
from perdure.runtime.definition import Definition
from perdure.runtime.run import Run
from perdure.runtime.starter import Starter
from perdure.validation import check_prefix

try:
    from fastmcp import FastMCP
    from fastmcp.exceptions import ToolError
    from fastmcp.tools import Tool
    from mcp.types import ToolAnnotations
    from pydantic import Field, PydanticSchemaGenerationError, TypeAdapter
except ImportError as error:
    raise MissingDependency("fastmcp>=4", "mcp") from error

__all__ = ["add_run_tools"]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_NAME = 64

_RUN_ID = Field(
    description="An id for the new run. A second start with the same id returns the first run."
)
_KNOWN_RUN = Field(description="The id of a run, as the tool that started it returned it.")
_EVENT = Field(description="The name of the event, for example one of waiting_for.")
_DEDUP_ID = Field(description="A second event of the run with this id is ignored.")


def add_run_tools(
    server: FastMCP[Any],
    client: Client,
    workflows: Iterable[Definition[Any, Any]],
    *,
    prefix: str = "",
) -> None:
    """Add a tool `start_…` for each workflow, and the tools `run_status` and `send_event`.

    A start tool has the schema of the workflow's payload, and the docstring of its function. It
    creates a run for a worker and returns at once. The other two tools see only runs of these
    workflows. The names of all tools begin with `prefix`.
    """
    tools = _RunTools(client, {each.name: each for each in workflows})
    check_prefix(prefix)
    names: set[str] = set()
    for definition in tools.workflows.values():
        client.register(definition)
        name = _name(f"{prefix}start_{definition.name}")
        if name in names:
            raise InvalidArgument("workflows", definition, f"names that differ as tools: {name!r}")
        names.add(name)
        server.add_tool(tools.start_tool(definition, name))
    server.add_tool(
        Tool.from_function(
            tools.run_status,
            name=_name(f"{prefix}run_status"),
            annotations=ToolAnnotations(read_only_hint=True),
        )
    )
    server.add_tool(Tool.from_function(tools.send_event, name=_name(f"{prefix}send_event")))


class _RunTools:
    """The implementation of the tools, for the runs of some workflows."""

    def __init__(self, client: Client, workflows: Mapping[str, Definition[Any, Any]]) -> None:
        self.client = client
        self.workflows = workflows

    def start_tool(self, definition: Definition[Any, Any], name: str) -> Tool:
        """Return the tool that starts runs of a workflow."""
        description = definition.__doc__ or f"Start a run of the workflow {definition.name!r}."
        hint = "\n\nReturns at once; ask for the result with run_status."
        return Tool.from_function(
            self._starter(definition), name=name, description=description.strip() + hint
        )

    def _starter(self, definition: Definition[Any, Any]) -> Callable[..., Awaitable[Any]]:
        async def start(payload: Any = None, run_id: str | None = None) -> dict[str, Any]:
            try:
                # Even with a Runtime, which would otherwise wait until the run ends.
                run = await Starter.trigger(self.client, definition, payload, run_id=run_id)
            except PerdureError as error:
                raise ToolError(public_message(error)) from error
            return self._describe(run)

        keyword = Parameter.KEYWORD_ONLY
        optional = Annotated[str | None, _RUN_ID]
        parameters = [Parameter("run_id", keyword, default=None, annotation=optional)]
        if definition.takes_payload:
            annotation = _annotation(definition)
            default = Parameter.empty if _is_required(definition) else None
            payload = Parameter("payload", keyword, default=default, annotation=annotation)
            parameters.insert(0, payload)
        # Read by inspect to generate the schema of the tool.
        vars(start)["__signature__"] = Signature(parameters, return_annotation=dict[str, Any])
        start.__annotations__ = {each.name: each.annotation for each in parameters}
        return start

    async def run_status(self, run_id: Annotated[str, _KNOWN_RUN]) -> dict[str, Any]:
        """Return the status of a run, its output or error, its progress, and what it waits for."""
        return self._describe(await self._find(run_id))

    async def send_event(
        self,
        run_id: Annotated[str, _KNOWN_RUN],
        event: Annotated[str, _EVENT],
        payload: Any = None,
        dedup_id: Annotated[str | None, _DEDUP_ID] = None,
    ) -> dict[str, Any]:
        """Send an event to a run that waits for it, or will. A worker then continues the run."""
        await self._find(run_id)
        try:
            # Not the method of a Runtime, which would continue the run here.
            result = await Client.signal(self.client, run_id, event, payload, dedup_id=dedup_id)
        except PerdureError as error:
            raise ToolError(public_message(error)) from error
        return {"run_id": run_id, "delivery": result.delivery.value}

    async def _find(self, run_id: str) -> Run:
        try:
            run = await self.client.get_run(run_id)
        except PerdureError as error:
            raise ToolError(public_message(error)) from error
        if run is None or run.workflow not in self.workflows:
            # The model must not learn whether a run of another workflow exists.
            raise ToolError(public_message(RunNotFound(run_id)))
        return run

    def _describe(self, run: Run) -> dict[str, Any]:
        """Return a description of a run for a model, as JSON."""
        times = [wait.wake_at for wait in run.pending if wait.wake_at is not None]
        facts: dict[str, Any] = {
            "error": None if run.error is None else str(run.error),
            "progress": run.progress,
            "note": run.note or None,
            "waiting_for": [wait.event for wait in run.pending if wait.event] or None,
            "wakes_at": isoformat(min(times)) if times else None,
        }
        known_facts = {name: fact for name, fact in facts.items() if fact is not None}
        if run.status == "completed":
            known_facts["output"] = _as_json(run.output, self.workflows[run.workflow or ""])
        return {"run_id": run.id, "workflow": run.workflow, "status": run.status, **known_facts}


def _as_json(output: object, definition: Definition[Any, Any]) -> Any:
    try:
        return codec.encode(output, codec.return_type(definition.fn))
    except CodecError:
        # The output was stored, so it is a value whose type the annotation does not describe.
        return str(output)


def _annotation(definition: Definition[Any, Any]) -> Any:
    """Return the type of the payload; `Any` if pydantic cannot describe it."""
    if definition.payload_type is None:
        return Any
    try:
        TypeAdapter(definition.payload_type)
    except PydanticSchemaGenerationError:
        # The fields are checked when the run is started.
        return Any
    return definition.payload_type


def _is_required(definition: Definition[Any, Any]) -> bool:
    try:
        definition.encode_payload(None)
    except PerdureError:
        return True
    return False


def _name(text: str) -> str:
    """Return a tool name that every client accepts."""
    return _NOT_IN_NAMES.sub("_", text)[:_MAX_NAME]
