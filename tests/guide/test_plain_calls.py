"""Steps as plain calls: functions that are steps wherever a run calls them."""

from collections.abc import Iterator

import pytest

from perdure import Ok, Runtime, Step, Workflow, durable, workflow
from perdure.errors import NestedStep
from perdure.stores import MemoryStore
from perdure.testing import explore_crashes

charged: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_charged() -> Iterator[None]:
    yield
    charged.clear()


@durable.step(retry=3)
async def charge(cents: int, *, currency: str = "EUR") -> str:
    charged.append(cents)
    return f"{cents} {currency}"


async def pay(order: int) -> str:
    """A plain function: it needs no handle."""
    return await charge(order * 100, currency="USD")


@workflow("checkout")
async def checkout(step: Step, order: int) -> str:
    return await pay(order)


async def test_a_call_in_a_run_is_a_step() -> None:
    """It is named after the function."""
    run = await Runtime(MemoryStore(), workflows=[checkout]).trigger(checkout, 7)
    assert run.output == "700 USD"
    assert [step.key for step in run.history] == ["charge"]


async def test_a_recorded_call_does_not_run_again() -> None:
    """A crash at any time changes nothing."""
    report = await explore_crashes(checkout, 7)
    assert set(report.doubled) <= {"charge"}


async def test_outside_a_run_it_is_an_ordinary_function() -> None:
    """Nothing is recorded."""
    assert await charge(5) == "5 EUR"
    assert await charge(5) == "5 EUR"
    assert charged == [5, 5]


async def test_a_step_cannot_contain_a_step() -> None:
    """The error names both."""

    async def body(step: Step) -> str:
        return await step("outer", lambda: charge(5), errors=[NestedStep])

    with pytest.raises(NestedStep, match="'charge' was called inside the function of step 'outer'"):
        (await Workflow("w").run(body)).unwrap()


async def test_the_handle_of_the_run_can_be_looked_up() -> None:
    """In any function that a run calls."""

    async def nap() -> str:
        await durable.current().sleep("nap", 0.001)
        return durable.current().run_id

    async def body(step: Step) -> bool:
        return await nap() == step.run_id

    assert await Workflow("w").run(body) == Ok(True)
