"""Runs that are started by name: the first process that knows the workflow checks the payload."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure import Client, Queue, Runtime, Step, Worker, workflow
from perdure.errors import InvalidPayload
from perdure.operations import Operations
from perdure.stores import MemoryStore

NOON = datetime(2026, 11, 3, 12, tzinfo=UTC)


@dataclass
class Order:
    total: int
    at: datetime = NOON
    tags: set[str] = field(default_factory=set)


@workflow("order")
async def order(step: Step, payload: Order) -> str:
    await step.wait_for_event("paid", "paid")
    return repr(payload)


@workflow("count")
async def count(step: Step, payload: int = 3) -> int:
    return payload + 1


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def runtime(store: MemoryStore) -> Runtime:
    return Runtime(store, workflows=[order, count], suspend_after=0)


@pytest.mark.parametrize("payload", ["x", [1], {"a": 1}, 1.5])
async def test_a_payload_that_does_not_fit_fails_the_run(
    payload: Any, store: MemoryStore, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(store)
    await client.trigger("count", payload, run_id="c-1")
    await runtime.sweep()
    with pytest.raises(InvalidPayload, match="Expected `int`"):
        await runtime.result("c-1")
    assert "payload of workflow 'count' is not valid" in caplog.text


async def test_each_field_is_checked(store: MemoryStore, runtime: Runtime) -> None:
    await Client(store).trigger("order", {"at": "yesterday"}, run_id="o-1")
    [run] = await runtime.sweep()
    assert run.status == "failed"
    assert "total: missing" in str(run.error)
    assert "at: Invalid RFC3339" in str(run.error)


async def test_json_becomes_the_type_before_and_after_a_suspension(
    store: MemoryStore, runtime: Runtime
) -> None:
    payload = {"total": 7, "at": "2026-11-03T12:00:00Z", "tags": ["a"]}
    client = Client(store)
    await client.trigger("order", payload, run_id="o-1")
    [run] = await runtime.sweep()
    assert run.status == "waiting"
    await runtime.signal("o-1", "paid")
    assert await runtime.result("o-1") == repr(Order(7, NOON, {"a"}))
    assert (await client.trigger("order", payload, run_id="o-1")).status == "completed"


async def test_values_of_python_need_no_conversion(store: MemoryStore, runtime: Runtime) -> None:
    await Client(store).trigger("order", Order(7, NOON, {"a"}), run_id="o-1")
    await runtime.sweep()
    await runtime.signal("o-1", "paid")
    assert await runtime.result("o-1") == repr(Order(7, NOON, {"a"}))


async def test_without_a_payload_the_default_is_used(store: MemoryStore, runtime: Runtime) -> None:
    await Client(store).trigger("count", run_id="c-1")
    await runtime.sweep()
    assert await runtime.result("c-1") == 4


async def test_a_payload_that_an_operator_enters_is_checked(
    store: MemoryStore, runtime: Runtime
) -> None:
    await runtime.trigger(order, Order(7), run_id="o-1", wait=False)
    operations = Operations(store)
    await operations.edit_payload("o-1", {"total": "seven"}, by="ana", why="test")
    await operations.fork("o-1", new_id="o-2", payload={"total": 8}, by="ana", why="test")
    runs = {run.id: run for run in await runtime.sweep()}
    assert "total: Expected `int`" in str(runs["o-1"].error)
    assert runs["o-2"].status == "waiting"


async def test_a_key_that_cannot_be_computed_stops_no_other_run(store: MemoryStore) -> None:
    emails = Queue("emails", concurrency=5)

    @workflow("send", queue=emails, key=lambda message: message["tenant"])
    async def send(step: Step, message: dict[str, str]) -> str:
        return message["tenant"]

    for run_id, payload in (("bad", "x"), ("good", {"tenant": "acme"})):
        await Client(store).trigger("send", payload, run_id=run_id)
    async with Runtime(store, workflows=[send]) as runtime, Worker(runtime):
        assert await runtime.result("good", timeout="10s") == "acme"
        with pytest.raises(InvalidPayload):
            await runtime.result("bad", timeout="10s")
