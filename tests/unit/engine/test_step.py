"""How a step calls its function, what identifies the step, and which arguments are refused."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any

import pytest

from perdure import Ok, Retry, Step
from perdure.errors import InvalidArgument, InvalidDuration
from tests.unit.engine.bodies import error_of, run, run_and_replay, single, workflow


class TestCalling:
    async def test_a_function_is_called_with_its_arguments(self) -> None:
        """The step returns what the function returns."""

        async def add(a: int, b: int) -> int:
            return a + b

        assert await run(single(lambda step: step("add", add, 2, 3))) == Ok(5)

    async def test_a_lambda_is_called_in_place(self) -> None:
        """An awaitable that it returns is awaited."""

        async def add(a: int, b: int) -> int:
            return a + b

        assert await run(single(lambda step: step("add", lambda: add(2, 3)))) == Ok(5)
        thread = single(lambda step: step("thread", lambda: threading.get_ident() + 0))
        assert await run(thread) == Ok(threading.get_ident())

    async def test_a_sync_function_runs_in_a_thread(self) -> None:
        """It may block: the event loop continues in the meantime."""
        released = threading.Event()

        def block() -> int:
            assert released.wait(timeout=10)
            return threading.get_ident()

        async def body(step: Step) -> int:
            blocked = asyncio.ensure_future(step("block", block))
            await step("release", released.set)
            return await blocked

        assert (await run(body)).unwrap() != threading.get_ident()

    async def test_any_callable_can_be_called(self) -> None:
        """This includes methods, partials, classes and objects with `__call__`, sync or async."""

        class Greeter:
            async def greet(self, name: str) -> str:
                return f"hello {name}"

            async def __call__(self, name: str) -> str:
                return f"called {name}"

        async def body(step: Step) -> list[str]:
            greeter = Greeter()
            return [
                await step("method", greeter.greet, "a"),
                await step("partial", partial(greeter.greet, "b")),
                await step("object", greeter, "c"),
                await step("builtin", "d".upper),
                await step("class", str, "e"),
            ]

        assert await run(body) == Ok(["hello a", "hello b", "called c", "D", "e"])

    async def test_a_coroutine_object_is_refused(self) -> None:
        """The error says what to write instead."""

        async def fetch(id: str) -> str:
            return id

        call: Any = fetch("1")
        error = error_of(await run(single(lambda step: step("fetch", call))))
        assert isinstance(error, InvalidArgument)
        assert str(error).startswith("fn: expected a function, not a coroutine")
        assert "step('fetch', lambda: function(argument))" in str(error)

    async def test_a_generator_function_is_refused(self) -> None:
        """A step returns one value."""

        async def async_rows() -> Any:
            yield 1

        def rows() -> Any:
            yield 1

        def call_rows(fn: Callable[[], Any], step: Step) -> Awaitable[Any]:
            return step("rows", fn)

        for fn in (async_rows, rows):
            error = error_of(await run(single(partial(call_rows, fn))))
            assert isinstance(error, TypeError)

    async def test_an_id_is_any_string(self) -> None:
        """Members of a `StrEnum` and characters outside ASCII are allowed."""

        class Steps(StrEnum):
            FETCH = "fetch"

        async def body(step: Step) -> None:
            await step(Steps.FETCH, lambda: 1)
            await step("größe 😀", lambda: 2)

        first = workflow()
        await first.run(body)
        assert list(first.snapshot()["steps"]) == ["fetch", "größe 😀"]

    async def test_a_finished_step_is_not_called_again(self) -> None:
        """Its recorded value is returned."""
        calls: list[int] = []
        body = single(lambda step: step("x", lambda: calls.append(1)))
        assert await run_and_replay(body) == (Ok(None), Ok(None))
        assert calls == [1]


class TestKeys:
    async def test_calls_with_one_key_are_one_step(self) -> None:
        """A later call returns the recorded value, even if all are made concurrently."""
        calls: list[int] = []

        async def pay() -> int:
            await asyncio.sleep(0)
            calls.append(1)
            return len(calls)

        async def body(step: Step) -> list[int]:
            concurrent = [step(f"pay{n}", pay, key="payment:1") for n in range(3)]
            return [*await asyncio.gather(*concurrent), await step("again", pay, key="payment:1")]

        assert await run(body) == Ok([1, 1, 1, 1])

    async def test_a_key_whose_call_was_cancelled_is_called_by_the_next(self) -> None:
        """Of the calls that waited for it, one runs, and the others wait for that one."""
        calls: list[str] = []

        async def pay(name: str) -> str:
            calls.append(name)
            await asyncio.sleep(0.001)
            return name

        async def body(step: Step) -> list[str]:
            first, *others = [
                asyncio.ensure_future(step("pay", pay, name, key="k")) for name in "abc"
            ]
            await asyncio.sleep(0)
            first.cancel()
            return [await other for other in others]

        assert await run(body) == Ok(["b", "b"])
        assert calls == ["a", "b"]

    async def test_the_idempotency_key_identifies_the_step_and_the_run(self) -> None:
        """It is the same for every attempt and after a resume, and differs by step and by run."""
        keys: dict[str, list[str]] = {"a": [], "b": []}

        async def pay(step: Step, name: str) -> None:
            keys[name].append(step.idempotency_key)
            if len(keys["a"]) < 3:
                raise OSError("unavailable")

        async def body(step: Step) -> None:
            await step("a", lambda: pay(step, "a"), retry=Retry(2, delay=0))
            await step("b", lambda: pay(step, "b"))

        first = workflow()
        await first.run(body)
        completed = first.snapshot(include="completed")
        await workflow(snapshot=completed).run(body)
        assert len(keys["a"]) == 3
        assert len(set(keys["a"])) == 1
        await run(body)
        assert len({*keys["a"], *keys["b"]}) == 4


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda step: step("", lambda: 1), "id"),
        (lambda step: step(5, lambda: 1), "id"),
        (lambda step: step("\ud800", lambda: 1), "id"),
        (lambda step: step("x", lambda: 1, key="\ud800"), "key"),
        (lambda step: step("~", lambda: 1), "id"),
        (lambda step: step("~undo:x", lambda: 1), "id"),
        (lambda step: step("~é", lambda: 1), "id"),
        (lambda step: step("x", lambda: 1, key="~x"), "key"),
        (lambda step: step.sleep("~x", 1), "id"),
        (lambda step: step.wait_for_event("~x", "y"), "id"),
        (lambda step: step.wait_for_event("x", "~cancel"), "name"),
        (lambda step: step.wait_for_event("x", "\ud800"), "name"),
        (lambda step: step.all({"~a": lambda: 1}), "thunks"),
        (lambda step: step.map("~x", [1], lambda item: item), "id"),
        (lambda step: step.race("~x", {"a": lambda: 1}), "id"),
        (lambda step: step.race("x", {"~a": lambda: 1}), "thunks"),
        (lambda step: step.transaction("~x", print), "id"),
        (lambda step: step("x", 5), "fn"),
        (lambda step: step("x", None), "fn"),
        (lambda step: step("x", lambda: 1, key=""), "key"),
        (lambda step: step("x", lambda: 1, key=5), "key"),
        (lambda step: step("x", lambda: 1, ttl="soon"), "ttl"),
        (lambda step: step("x", lambda: 1, retry="often"), "retry"),
        (lambda step: step("x", lambda: 1, timeout=0), "timeout"),
        (lambda step: step("x", lambda: 1, errors=[5]), "errors"),
        (lambda step: step("x", lambda: 1, errors="ValueError"), "errors"),
        (lambda step: step.sleep("", 1), "id"),
        (lambda step: step.sleep("x", "soon"), "duration"),
        (lambda step: step.sleep("x", -1), "duration"),
        (lambda step: step.sleep("x", None), "duration"),
        (lambda step: step.sleep("x", timedelta.max), "duration"),
        (lambda step: step.wait_for_event("x", ""), "name"),
        (lambda step: step.wait_for_event("x", 5), "name"),
        (lambda step: step.wait_for_event("x", "y", timeout="soon"), "timeout"),
        (lambda step: step("x", pow, 2, exp=3), "exp"),
        (lambda step: step.all([lambda: 1]), "work[0]"),
        (lambda step: step.all([step("x", lambda: 1)]), "work[0]"),
        (lambda step: step.all(step("x", lambda: 1), 5), "work[1]"),
        (lambda step: step.all({"a": 5}), "thunks['a']"),
        (lambda step: step.all({5: lambda: 1}), "thunks[5]"),
        (lambda step: step.map("x", 5, lambda item: item), "items"),
        (lambda step: step.map("x", [1], 5), "fn"),
        (lambda step: step.map("x", [], 5), "fn"),
        (lambda step: step.map("", [1], lambda item: item), "id"),
        (lambda step: step.map("x", [1], lambda item: item, concurrency=0), "concurrency"),
        (lambda step: step.map("x", [1], lambda item: item, concurrency=True), "concurrency"),
        (lambda step: step.race("x", {}), "thunks"),
        (lambda step: step.map("x", [1], abs, key=lambda item: ""), "key"),
        (lambda step: step.map("x", [1], abs, key=lambda item: item), "key"),
        (lambda step: step.map("x", [], abs, key="id"), "key"),
        (lambda step: step.map("x", [1], abs, on_error="ignore"), "on_error"),
        (lambda step: step.map("x", [1], abs, retry="often"), "retry"),
        (lambda step: step.race("x", 5), "work[0]"),
        (lambda step: step.race("x"), "work"),
        (lambda step: step.race("x", asyncio.create_task(asyncio.sleep(0))), "work[0]"),
        (lambda step: step.race("", {"a": lambda: 1}), "id"),
        (lambda step: step.race("", step.sleep("nap", 1), asyncio.sleep(1)), "id"),
        (lambda step: step.transaction("x", 5), "fn"),
    ],
)  # fmt: skip
async def test_an_invalid_argument_is_named(call: Any, parameter: str) -> None:
    """The error starts with the parameter and what is expected."""
    error = error_of(await run(single(call)))
    assert isinstance(error, InvalidArgument)
    assert error.parameter == parameter
    assert str(error).startswith(f"{parameter}: expected ")
    assert isinstance(error, InvalidDuration) == (parameter in ("ttl", "timeout", "duration"))
