"""How a step fails: returned errors, exceptions before and after a replay, cancellation."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any

import pytest

from perdure import Err, Ok, Result, Step, StepError, StepFailed, StepTimeout
from tests.unit.engine.bodies import NOW, error_of, run, run_and_replay, single, workflow


@dataclass
class User:
    name: str
    since: datetime


class Color(Enum):
    RED = "red"


class PaymentDeclined(Exception):
    pass


async def test_a_returned_err_ends_the_run() -> None:
    """The run ends with the same `Err`: its error and its cause."""

    async def find(id: str) -> Result[str, str]:
        return Err("NOT_FOUND", {"id": id})

    async def body(step: Step) -> str:
        return await step("find", find, "7")

    assert await run_and_replay(body) == (Err("NOT_FOUND", {"id": "7"}),) * 2


async def test_a_returned_ok_is_unwrapped() -> None:
    """The workflow function gets the value."""
    body = single(lambda step: step("find", lambda: Ok({"id": 7})))
    assert await run_and_replay(body) == (Ok({"id": 7}), Ok({"id": 7}))


async def test_the_error_of_an_err_keeps_its_type() -> None:
    """The type comes from the function's return annotation, like that of the value."""

    async def find(id: str) -> Result[User, User | Color]:
        return Err(Color.RED if id == "red" else User(id, NOW))

    async def body(step: Step) -> list[Any]:
        errors = []
        for id in ("red", "Ana"):
            try:
                await step("find", find, id)
            except StepFailed as failed:
                errors.append(failed.error)
        return errors

    assert await run_and_replay(body) == (Ok([Color.RED, User("Ana", NOW)]),) * 2


async def test_an_error_that_cannot_be_restored_is_a_warning() -> None:
    """The warning names step and path; the function gets the error as it was recorded."""
    first = workflow()
    body = single(lambda step: step("find", lambda: Err({"user": User("Ana", NOW)})))
    result = await first.run(body)
    assert type(error_of(result)["user"]) is not User
    assert await workflow(snapshot=first.snapshot()).run(body) == result
    (warning,) = first.snapshot()["warnings"]
    assert (warning["stepId"], warning["path"][:5]) == ("find", "error")


async def test_an_err_can_be_caught() -> None:
    """It is raised as `StepFailed`, which has the step, the error and the cause."""

    async def body(step: Step) -> list[Any]:
        try:
            await step("find", lambda: Err("NOT_FOUND", ValueError("why")))
        except StepFailed as failed:
            cause = failed.cause
            return [failed.step, failed.error, type(cause).__name__, str(cause)]
        return []

    assert await run_and_replay(body) == (Ok(["find", "NOT_FOUND", "ValueError", "why"]),) * 2


async def test_a_stop_iteration_is_a_runtime_error() -> None:
    """This is the case in a thread and in place; a future cannot hold a `StopIteration`."""

    def first_of_none() -> Any:
        return next(iter([]))

    def call(fn: Callable[[], Any], step: Step) -> Awaitable[Any]:
        return step("x", fn)

    for fn in (first_of_none, lambda: next(iter([]))):
        error = error_of(await run(single(partial(call, fn))))
        assert isinstance(error, RuntimeError)


async def test_an_exception_ends_the_run() -> None:
    """An exception of the workflow function itself ends it too."""

    async def body(step: Step) -> None:
        await step("x", lambda: 1)
        raise LookupError("not found")

    result = await run(body)
    assert isinstance(error_of(result), LookupError)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("key", 2),
        FileNotFoundError(2, "no such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
        StepTimeout("x", 5),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_known_exception_is_the_same_after_a_replay(error: Exception) -> None:
    """Built-in classes and perdure's own keep their type, message and arguments."""

    async def body(step: Step) -> Any:
        try:
            await step("x", fail)
        except type(error) as caught:
            return [type(caught).__name__, str(caught), repr(caught.args)]

    async def fail() -> None:
        raise error

    first, second = await run_and_replay(body)
    assert first.unwrap() == second.unwrap()


async def test_an_unknown_exception_is_a_step_error_even_before_a_replay() -> None:
    """A class that cannot be restored after a crash is not raised before it either."""

    async def body(step: Step) -> Any:
        try:
            await step("pay", pay)
        except StepError as error:
            return [error.name, error.message]

    async def pay() -> None:
        raise type("Elsewhere", (Exception,), {})("no funds")

    first, second = await run_and_replay(body)
    assert first == second == Ok(["Elsewhere", "no funds"])


@pytest.mark.parametrize("where", ["step", "workflow"])
async def test_a_declared_exception_keeps_its_class(where: str) -> None:
    """`errors=` of the step or of the workflow names the classes that are restored."""
    on_step: dict[str, Any] = {"errors": [PaymentDeclined]} if where == "step" else {}
    on_workflow: dict[str, Any] = {"errors": [PaymentDeclined]} if where == "workflow" else {}

    async def body(step: Step) -> Any:
        await step("pay", pay, **on_step)

    async def pay() -> None:
        raise PaymentDeclined("no funds")

    for result in await run_and_replay(body, **on_workflow):
        assert isinstance(error_of(result), PaymentDeclined)
        assert error_of(result).args == ("no funds",)


async def test_the_cause_of_an_exception_is_kept() -> None:
    """`Err.cause` is the exception that it was raised from."""

    async def body(step: Step) -> Any:
        await step("pay", pay)

    async def pay() -> None:
        raise ValueError("top") from KeyError("below")

    for result in await run_and_replay(body):
        assert isinstance(result.cause, KeyError)


async def test_a_handled_failure_is_replayed() -> None:
    """A resumed run gets the recorded failure and takes the same path."""
    calls: list[str] = []

    async def charge(card: str) -> str:
        calls.append(card)
        if card == "first":
            raise ConnectionError("declined")
        return card

    async def body(step: Step) -> str:
        try:
            return await step("first", charge, "first")
        except ConnectionError:
            return await step("second", charge, "second")

    assert await run_and_replay(body) == (Ok("second"), Ok("second"))
    assert calls == ["first", "second"]


async def test_a_cancelled_step_is_not_a_failure() -> None:
    """Nothing is recorded for it."""

    async def body(step: Step) -> Any:
        async def never() -> None:
            await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(step("never", never))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    first = workflow()
    assert await first.run(body) == Ok(True)
    assert first.snapshot()["steps"] == {}
