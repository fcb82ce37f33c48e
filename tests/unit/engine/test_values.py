"""What a step returns: the value as it was recorded."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from perdure import Ok, Step
from perdure.errors import CodecError
from tests.unit.engine.bodies import (
    NOW,
    error_of,
    recorded_value,
    run,
    run_and_replay,
    single,
    workflow,
)


@dataclass
class User:
    name: str
    since: datetime


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1.5, "text", [1, [2]], {"a": {"b": None}}, NOW, NOW.date(), NOW.time(),
        timedelta(days=1, microseconds=1), Decimal("1.10"), UUID(int=5), b"\xff", {1, 2},
        frozenset({"a"}), (1, (2, 3)), {1: "a"}, {"~datetime": "x"}, 2**70, float("inf"),
        {"when": [NOW, (NOW,)]}, "\x00\ud800",
    ],
    ids=repr,
)  # fmt: skip
async def test_a_value_is_the_same_after_a_replay(value: Any) -> None:
    """This includes types that JSON lacks; there is no warning."""
    body = single(lambda step: step("x", lambda: value))
    first = workflow()
    assert await first.run(body) == Ok(value)
    again = await workflow(snapshot=first.snapshot()).run(body)
    assert again == Ok(value)
    assert type(again.unwrap()) is type(value)
    assert "warnings" not in first.snapshot()


@pytest.mark.parametrize("how", ["annotation", "returns"])
async def test_an_instance_is_restored_by_its_type(how: str) -> None:
    """The type comes from the function's return annotation or from `returns=`."""
    user = User("Ana", NOW)

    async def fetch() -> User:
        return user

    async def body(step: Step) -> User:
        if how == "annotation":
            return await step("user", fetch)
        return await step("user", lambda: asyncio.sleep(0, user), returns=User)

    assert await run_and_replay(body) == (Ok(user), Ok(user))


async def test_a_value_that_cannot_be_restored_is_changed_even_before_a_replay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names the step and the path, in the log and in the snapshot."""
    body = single(lambda step: step("user", lambda: {"user": User("Ana", NOW)}))
    first = workflow()
    value = (await first.run(body)).unwrap()
    assert type(value["user"]) is not User
    assert await workflow(snapshot=first.snapshot()).run(body) == Ok(value)
    (warning,) = first.snapshot()["warnings"]
    assert (warning["type"], warning["stepId"]) == ("lossy_value", "user")
    assert warning["path"].startswith("value")
    assert "'user'" in caplog.text


async def test_a_value_that_cannot_be_recorded_ends_the_run() -> None:
    """The error names the step; no later step runs, whatever the function catches."""
    calls: list[str] = []
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]

    async def body(step: Step) -> str:
        try:
            await step("deep", lambda: nested)
        except CodecError:
            await step("after", lambda: calls.append("after"))
        return "continued"

    error = error_of(await run(body))
    assert isinstance(error, CodecError)
    assert "'deep'" in str(error)
    assert calls == []


async def test_changing_a_value_does_not_change_its_record() -> None:
    """The workflow function owns the value it got, on a replay too."""

    async def body(step: Step) -> Any:
        value: dict[str, Any] = await step("x", lambda: {"items": [1]})
        value["items"].append(2)
        value["more"] = True
        return value

    first = workflow()
    await first.run(body)
    second = workflow(snapshot=first.snapshot())
    assert await second.run(body) == Ok({"items": [1, 2], "more": True})
    for replayed in (first, second):
        assert recorded_value(replayed, "x") == {"items": [1]}


async def test_changing_a_snapshot_does_not_change_a_run() -> None:
    """A snapshot that was returned or passed in is a copy."""
    body = single(lambda step: step("x", lambda: [1]))
    first = workflow()
    await first.run(body)
    snapshot: Any = first.snapshot()
    second = workflow(snapshot=snapshot)
    await second.run(body)
    snapshot["steps"]["x"]["value"].append(2)
    assert recorded_value(first, "x") == [1]
    assert recorded_value(second, "x") == [1]
