"""Workflows as tools, over fastmcp's client in memory."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgspec
import pytest
from fastmcp import Client as McpClient
from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from pydantic import BaseModel

from perdure import Client, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument
from perdure.integrations.mcp import add_run_tools
from perdure.stores import MemoryStore


@dataclass
class Refund:
    order: str
    amount: int
    reason: str = ""


@workflow("refund")
async def refund(step: Step, payload: Refund) -> Refund:
    """Pay money back, after a person has approved it."""
    step.report(progress=0.5, note="asking")
    approved = await step.wait_for_event("approval", "approved", timeout="7d", returns=bool)
    return Refund(payload.order, payload.amount if approved else 0)


class Query(BaseModel):
    day: date
    city: str = "Ulm"


@workflow("weather report")
async def weather(step: Step, query: Query) -> str:
    return f"{query.city} on {query.day:%d.%m.}"


class Parcel(msgspec.Struct):
    number: str


@workflow("track")
async def track(step: Step, parcel: Parcel) -> str:
    return parcel.number


@workflow("tick")
async def tick(step: Step) -> None: ...


@workflow("secret")
async def secret(step: Step) -> str:
    return "hidden"


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    workflows: list[Any] = [refund, weather, track, tick, secret]
    async with Runtime(MemoryStore(), workflows=workflows, suspend_after=0) as runtime:
        yield runtime


@pytest.fixture
async def mcp(runtime: Runtime) -> AsyncIterator[McpClient[Any]]:
    server: FastMCP[Any] = FastMCP("shop")
    add_run_tools(server, runtime, [refund, weather, track, tick])
    async with McpClient(server) as client:
        yield client


async def call(mcp: McpClient[Any], tool: str, **arguments: Any) -> dict[str, Any]:
    result = await mcp.call_tool(tool, arguments)
    assert result.structured_content is not None
    return result.structured_content


async def work(runtime: Runtime) -> None:
    await Worker(runtime).run_until_idle()


async def test_a_tool_has_the_schema_and_docstring_of_its_workflow(mcp: McpClient[Any]) -> None:
    tools = {tool.name: tool for tool in await mcp.list_tools()}
    assert {*tools} == {
        "start_refund",
        "start_weather_report",
        "start_track",
        "start_tick",
        "run_status",
        "send_event",
    }
    assert "after a person has approved it" in (tools["start_refund"].description or "")
    hints = tools["run_status"].annotations
    assert hints is not None
    assert hints.read_only_hint is True
    schema = tools["start_refund"].input_schema
    payload = str(schema)
    assert all(name in payload for name in ("order", "amount", "reason", "run_id"))
    assert schema["required"] == ["payload"]
    assert "payload" not in tools["start_tick"].input_schema["properties"]


async def test_a_run_is_started_asked_for_and_sent_an_event(
    mcp: McpClient[Any], runtime: Runtime
) -> None:
    payload = {"order": "7", "amount": 5}
    started = await call(mcp, "start_refund", payload=payload, run_id="r")
    assert started == {"run_id": "r", "workflow": "refund", "status": "queued"}
    await work(runtime)
    waiting = await call(mcp, "run_status", run_id="r")
    assert (waiting["status"], waiting["waiting_for"]) == ("waiting", ["approved"])
    assert (waiting["progress"], waiting["note"]) == (0.5, "asking")
    assert "wakes_at" in waiting
    receipt = await call(
        mcp, "send_event", run_id="r", event="approved", payload=True, dedup_id="1"
    )
    again = await call(mcp, "send_event", run_id="r", event="approved", payload=True, dedup_id="1")
    assert (receipt["delivery"], again["delivery"]) == ("delivered", "duplicate")
    await work(runtime)
    status = await call(mcp, "run_status", run_id="r")
    assert status["output"] == {"order": "7", "amount": 5, "reason": ""}


async def test_payloads_are_converted_and_defaults_are_kept(
    mcp: McpClient[Any], runtime: Runtime
) -> None:
    started = await call(mcp, "start_weather_report", payload={"day": "2030-01-02"})
    struct = await call(mcp, "start_track", payload={"number": "9"})
    await call(mcp, "start_tick")
    await work(runtime)
    status = await call(mcp, "run_status", run_id=started["run_id"])
    tracked = await call(mcp, "run_status", run_id=struct["run_id"])
    assert (status["output"], tracked["output"]) == ("Ulm on 02.01.", "9")


async def test_an_id_starts_one_run(mcp: McpClient[Any], runtime: Runtime) -> None:
    for _ in range(2):
        await call(mcp, "start_refund", payload={"order": "7", "amount": 5}, run_id="r")
    with pytest.raises(ToolError, match="another workflow or payload") as refused:
        await call(mcp, "start_refund", payload={"order": "8", "amount": 5}, run_id="r")
    assert "order" not in str(refused.value)  # what the first caller sent
    assert len(await runtime.list_runs()) == 1


async def test_bad_arguments_are_explained(mcp: McpClient[Any]) -> None:
    with pytest.raises(ToolError, match="amount"):
        await call(mcp, "start_refund", payload={"order": "7"})
    with pytest.raises(ToolError, match="number"):
        await call(mcp, "start_track", payload={})
    with pytest.raises(ToolError, match="unknown"):
        await call(mcp, "run_status", run_id="unknown")
    with pytest.raises(ToolError):
        await call(mcp, "start_tick", run_id="~reserved")


async def test_runs_of_other_workflows_are_not_seen(mcp: McpClient[Any], runtime: Runtime) -> None:
    await runtime.trigger(secret, run_id="s")
    for tool, more in (("run_status", {}), ("send_event", {"event": "x"})):
        with pytest.raises(ToolError, match="There is no run 's'"):
            await call(mcp, tool, run_id="s", **more)
    with pytest.raises(ToolError) as refused:
        await call(mcp, "start_tick", run_id="s")
    assert "secret" not in str(refused.value)


async def test_a_failed_run_says_why(mcp: McpClient[Any], runtime: Runtime) -> None:
    @workflow("fail")
    async def fail(step: Step) -> None:
        raise ValueError("no stock")

    server: FastMCP[Any] = FastMCP("other")
    add_run_tools(server, runtime, [fail], prefix="shop_")
    async with McpClient(server) as client:
        started = await call(client, "shop_start_fail")
        await work(runtime)
        status = await call(client, "shop_run_status", run_id=started["run_id"])
    assert (status["status"], status["error"]) == ("failed", "no stock")


def test_workflows_whose_tools_have_the_same_name_are_refused() -> None:
    @workflow("weather-report!")
    async def one(step: Step) -> None: ...

    @workflow("weather-report?")
    async def other(step: Step) -> None: ...

    with pytest.raises(InvalidArgument, match="differ as tools"):
        add_run_tools(FastMCP("x"), Client(MemoryStore()), [one, other])
