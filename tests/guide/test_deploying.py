"""Changing the code of workflows whose runs are under way."""

from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import CodecError
from perdure.runtime.definition import Definition
from perdure.stores import MemoryStore
from perdure.testing import replay_snapshot


async def charge(order: int) -> str:
    return f"charged {order}"


async def check(order: int) -> bool:
    return True


@workflow("order")
async def before(step: Step, order: int) -> str:
    receipt = await step("charge", charge, order)
    await step.wait_for_event("shipped", "shipped")
    return receipt


@workflow("order")
async def after(step: Step, order: int) -> str:
    if step.patched("check-first"):
        await step("check", check, order)
    receipt = await step("charge", charge, order)
    await step.wait_for_event("shipped", "shipped")
    return receipt


async def test_a_run_that_was_past_a_patch_keeps_the_old_code() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[before]).trigger(before, 1, run_id="old")
    runtime = Runtime(store, workflows=[after], on_definition_change="ignore")
    await runtime.trigger(after, 2, run_id="new")
    old, new = [(await runtime.signal(id, "shipped")).run for id in ("old", "new")]
    assert old is not None
    assert new is not None
    assert [step.key for step in old.history] == ["charge", "shipped"]
    assert [step.key for step in new.history] == ["check", "charge", "shipped"]


async def test_stored_runs_are_replayed_before_a_deployment() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[before]).trigger(before, 1, run_id="old")
    snapshot = await store.load("old")
    assert snapshot is not None
    replay = await replay_snapshot(after, snapshot)
    assert (replay.fits, replay.next) == (True, ("shipped",))


async def test_live_runs_are_counted_by_version() -> None:
    @workflow("order", version=2)
    async def second(step: Step, order: int) -> str:
        await step.wait_for_event("shipped", "shipped")
        return "shipped"

    runtime = Runtime(MemoryStore(), workflows=[before, second])
    await Runtime(runtime.store, workflows=[before]).trigger(before, 1)
    await runtime.trigger(second, 2)
    assert (await runtime.versions("order")).totals == {1: 1, 2: 1}


@dataclass
class Customer:
    name: str
    phone: str = ""


@dataclass
class NewCustomer:
    """The same class, later: `phone` was removed, and `email` was added."""

    name: str
    email: str = "none"


@dataclass
class RenamedCustomer:
    full_name: str


def greeting(customer: type[Any]) -> Definition[Any, Any]:
    """Return a workflow whose payload, and the value of whose step, are of this class."""

    async def load() -> Any:
        return customer("Ana")

    load.__annotations__["return"] = customer

    async def greet(step: Step, payload: Any) -> str:
        loaded = await step("load", load)
        await step.wait_for_event("go", "go")
        return f"{loaded} {payload}"

    greet.__annotations__["payload"] = customer
    return workflow("greet")(greet)


async def test_fields_may_be_added_with_a_default_and_removed() -> None:
    store = MemoryStore()
    await Runtime(store).trigger(greeting(Customer), Customer("Ana", "1"), run_id="ana")

    runtime = Runtime(store, workflows=[greeting(NewCustomer)], on_definition_change="ignore")
    run = (await runtime.signal("ana", "go")).run
    assert run is not None
    customer = "NewCustomer(name='Ana', email='none')"
    assert run.output == f"{customer} {customer}"


async def test_a_renamed_field_of_a_payload_leaves_the_run_as_it_is() -> None:
    """Code that has the old name can still continue it."""
    store = MemoryStore()
    old = greeting(Customer)
    await Runtime(store).trigger(old, Customer("Ana"), run_id="ana")

    renamed = Runtime(store, workflows=[greeting(RenamedCustomer)], on_definition_change="ignore")
    with pytest.raises(CodecError, match="stored payload of workflow 'greet' no longer fits"):
        await renamed.signal("ana", "go")

    run = await Runtime(store, workflows=[old]).resume("ana")
    assert run.status == "completed"
