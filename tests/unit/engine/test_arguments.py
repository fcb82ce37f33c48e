"""`Runtime(record_arguments=)`: which arguments of a step people can see afterwards."""

from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.engine.arguments import record_of
from perdure.errors import InvalidArgument
from perdure.insights import Insights, to_json
from perdure.stores.memory import MemoryStore


@dataclass
class Card:
    owner: str
    card_number: str


async def charge(card: Card, cents: int, note: str) -> str:
    return "receipt"


async def refuse(card: Card) -> None:
    raise ValueError("declined")


@workflow("order")
async def order(step: Step) -> None:
    card = Card("ana", "4111")
    await step("charge", charge, card, 4200, "x" * 1000)
    await step("free", lambda: 1)
    await step("refuse", refuse, card)


async def arguments_of(record_arguments: Any, step: str) -> Any:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[order], record_arguments=record_arguments)
    await runtime.trigger(order, run_id="run")
    return (await Insights(store).step("run", step)).arguments


async def test_a_preview_replaces_what_is_too_large_by_its_size() -> None:
    arguments = await arguments_of("preview", "charge")
    assert arguments[1:] == [4200, "… 1,002 bytes"]
    assert "ana" in str(arguments[0])


async def test_secrets_are_redacted() -> None:
    arguments = await arguments_of("full", "charge")
    assert "4111" not in str(arguments)
    assert arguments[2] == "x" * 1000


async def test_an_export_contains_no_secret() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[order], record_arguments="full").trigger(order, run_id="run")
    assert "4111" not in str(to_json(await Insights(store).export("run")))


async def test_a_failed_step_has_its_arguments() -> None:
    assert "ana" in str(await arguments_of("preview", "refuse"))


async def test_nothing_is_recorded_by_default_or_without_arguments() -> None:
    assert await arguments_of("off", "charge") is None
    assert await arguments_of("full", "free") is None


async def test_an_argument_that_cannot_be_encoded_is_named_by_its_class() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert record_of([1, deep], "full") == [1, "… list"]


async def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="record_arguments: expected 'off', 'preview'"):
        Runtime(MemoryStore(), record_arguments="all")  # type: ignore[arg-type]
