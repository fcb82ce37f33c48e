"""Declared types: what a lambda returns is restored with its class."""

from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Ok, Runtime, Step, Workflow, durable, workflow
from perdure.stores import MemoryStore
from perdure.testing import TestClock, explore_crashes


@dataclass
class Item:
    sku: str


@dataclass
class Order:
    id: int
    items: list[Item]


ORDER = Order(7, [Item("apple")])


async def total(step: Step) -> int:
    """Load an order by a lambda, and work with it after a sleep."""
    orders: Any = await step("load", lambda: {"all": [ORDER]})
    await step.sleep("nap", "1h")
    first = orders["all"][0]
    assert isinstance(first, Order)
    assert isinstance(first.items[0], Item)
    return len(first.items)


async def test_a_value_of_a_declared_class_survives_every_crash() -> None:
    declared = workflow("total", types=[Order])(total)
    await explore_crashes(declared)


async def test_a_run_that_is_replayed_after_every_step_sees_its_classes(clock: TestClock) -> None:
    declared = workflow("total", types=[Order])(total)
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[declared], clock=clock, always_replay=True)
    await runtime.trigger(declared, run_id="t")
    for _ in range(5):
        await runtime.sweep()
        await clock.advance("1h")
    run = await runtime.get_run("t")
    assert run is not None
    assert run.output == 1


async def test_types_can_be_declared_for_a_durable_function() -> None:
    store = MemoryStore()

    async def body(step: Step) -> Any:
        return await step("load", lambda: [ORDER])

    for _ in range(2):
        result = await durable.run(None, body, id="d", store=store, types=[Order], keep=True)
        assert result == Ok([ORDER])


async def test_the_result_of_an_idempotency_key_is_of_a_declared_class() -> None:
    store = MemoryStore()

    async def body(step: Step) -> Any:
        return [ORDER]

    for id in ("first", "second"):
        result = await durable.run(
            None, body, id=id, store=store, types=[Order], idempotency_key="k"
        )
        assert result == Ok([ORDER])


async def test_types_can_be_declared_for_a_workflow_in_this_process() -> None:
    async def body(step: Step) -> Any:
        return await step("load", lambda: ORDER)

    first = Workflow("w", types=[Order])
    assert await first.run(body) == Ok(ORDER)
    assert await Workflow("w", types=[Order], snapshot=first.snapshot()).run(body) == Ok(ORDER)


async def test_the_annotations_of_the_function_declare_their_classes() -> None:
    @workflow("annotated")
    async def annotated(step: Step, payload: Order) -> list[Item]:
        order = await step("load", lambda: payload)
        assert isinstance(order, Order)
        return order.items

    run = await Runtime(MemoryStore(), workflows=[annotated]).trigger(annotated, ORDER)
    assert run.output == [Item("apple")]


async def test_the_output_of_a_run_is_of_a_declared_class() -> None:
    @workflow("output", types=[Order])
    async def output(step: Step) -> Any:
        return {"order": ORDER}

    store = MemoryStore()
    await Runtime(store, workflows=[output]).trigger(output, run_id="o")
    run = await Runtime(store, workflows=[output]).get_run("o")
    assert run is not None
    assert run.output == {"order": ORDER}


async def test_a_process_without_the_workflow_sees_the_fields() -> None:
    @workflow("output", types=[Order])
    async def output(step: Step) -> Any:
        return await step("load", lambda: ORDER)

    store = MemoryStore()
    await Runtime(store, workflows=[output]).trigger(output, run_id="o")
    run = await Runtime(store).get_run("o")
    assert run is not None
    fields = {"id": 7, "items": [{"sku": "apple"}]}
    assert (run.output, run.history[0].value) == (fields, fields)


async def test_the_warning_names_the_class_the_step_and_what_to_write(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(step: Step) -> Any:
        return await step("load", lambda: Item("apple"))

    await Workflow("w").run(body)
    (record,) = [each for each in caplog.records if "load" in each.message]
    assert "step 'load': value (Item) cannot be restored exactly" in record.message
    assert "returns=Item" in record.message
    assert "types=[Item]" in record.message


async def test_the_warning_suggests_no_type_if_none_can_restore_the_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(step: Step) -> Any:
        return await step("open", lambda: {"file": object()})

    await Workflow("w").run(body)
    (record,) = [each for each in caplog.records if "open" in each.message]
    assert "value.file (object) cannot be restored exactly" in record.message
    assert "types=" not in record.message
