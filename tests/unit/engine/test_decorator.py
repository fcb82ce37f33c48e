"""Steps as plain calls: `@durable.step`, and `durable.current()`."""

import asyncio
import inspect
import sys
from functools import partial
from typing import Any

import pytest

from perdure import Err, Ok, Result, Retry, Step, Workflow, durable
from perdure.errors import DriftError, InvalidArgument, NestedStep, PerdureError, RunOver
from perdure.events import StepRetry, StepStart
from tests.unit.engine.bodies import Body, error_of, run, run_and_replay, single, workflow

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


@durable.step
async def charge(cents: int, *, currency: str = "EUR") -> str:
    calls.append((cents, currency))
    return f"{cents} {currency}"


@durable.step
async def book(seat: int, name: str = "Ana") -> str:
    calls.append((seat, name))
    return f"{seat} {name}"


@durable.step
async def find(id: int) -> Result[int, str]:
    calls.append(id)
    return Ok(id) if id else Err("NOT_FOUND", "cause")


class Shop:
    def __init__(self, currency: str) -> None:
        self.currency = currency

    @durable.step
    async def order(self, item: str) -> str:
        calls.append(item)
        return f"{item} in {self.currency}"


def body_of(*made: Any) -> Body:
    """Return a workflow function that calls functions in turn, each without arguments."""

    async def body(_: Step) -> list[Any]:
        return [await call() for call in made]

    return body


class TestCalls:
    async def test_a_call_in_a_run_is_a_step_named_after_the_function(self) -> None:
        """It answers a replay from its record."""
        first = workflow()
        assert await first.run(body_of(partial(charge, 5), partial(charge, 6))) == Ok(
            ["5 EUR", "6 EUR"]
        )
        assert list(first.snapshot()["steps"]) == ["charge", "charge#2"]
        again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        assert await again.run(body_of(partial(charge, 5))) == Ok(["5 EUR"])
        assert calls == [(5, "EUR"), (6, "EUR")]

    async def test_outside_a_run_it_is_the_function(self) -> None:
        """Nothing is recorded."""
        assert await charge(5, currency="USD") == "5 USD"
        assert await find(0) == Err("NOT_FOUND", "cause")

    async def test_a_name_can_be_given(self) -> None:
        """It is an id like any other."""
        named = durable.step(name="1/ü 'x' 🎈#2")(asyncio.sleep)
        assert await run_and_replay(body_of(partial(named, 0, "slept"))) == (Ok(["slept"]),) * 2

    async def test_options_are_those_of_a_step(self) -> None:
        """They are retries, a timeout, and errors."""
        events: list[Any] = []

        @durable.step(retry=Retry(2, delay=0), timeout="1m")
        async def flaky() -> int:
            calls.append(1)
            if len(calls) < 2:
                raise ConnectionError("not yet")
            return durable.current().attempt

        assert await run(body_of(flaky), on_event=events.append) == Ok([2])
        assert [type(each) for each in events if each.type.startswith("step_")][:2] == [
            StepStart,
            StepRetry,
        ]

    async def test_a_result_stays_a_result(self) -> None:
        """A function that is annotated with one returns it in a run too, also from a record."""
        body = body_of(partial(find, 1), partial(find, 0))
        assert await run_and_replay(body) == (Ok([Ok(1), Err("NOT_FOUND", "cause")]),) * 2
        assert calls == [1, 0]

    async def test_a_method_is_a_step(self) -> None:
        """An instance that is not data counts by its class when arguments are compared."""
        first = workflow()
        assert await first.run(body_of(partial(Shop("EUR").order, "tea"))) == Ok(["tea in EUR"])
        again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        assert await again.run(body_of(partial(Shop("USD").order, "tea"))) == Ok(["tea in EUR"])
        changed = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        error = error_of(await changed.run(body_of(partial(Shop("EUR").order, "coffee"))))
        assert isinstance(error, DriftError)

    async def test_a_call_inside_a_step_is_refused(self) -> None:
        """A step cannot contain steps, and the error names both."""
        body = single(lambda step: step("outer", lambda: charge(5), errors=[NestedStep]))
        error = error_of(await run(body))
        assert isinstance(error, NestedStep)
        assert (error.step, error.inside) == ("charge", "outer")
        assert calls == []

    async def test_a_call_by_code_that_outlives_its_run_is_refused(self) -> None:
        """It neither runs the function nor records anything."""
        leftover_tasks: list[asyncio.Task[Any]] = []

        async def late() -> str:
            await asyncio.sleep(0.01)
            return await charge(5)

        async def leave() -> None:
            leftover_tasks.append(asyncio.create_task(late()))

        await run(single(lambda step: step("leave", leave)))
        with pytest.raises(RunOver, match="has ended"):
            await leftover_tasks[0]


class TestArguments:
    @pytest.mark.parametrize(
        ("recorded", "asked"),
        [
            (partial(book, 5), partial(book, seat=5)),
            (partial(book, 5, "Bo"), partial(book, name="Bo", seat=5)),
            (partial(charge, 5, currency="USD"), partial(charge, currency="USD", cents=5)),
        ],
    )
    async def test_the_same_arguments_are_the_same_call(self, recorded: Any, asked: Any) -> None:
        """It does not matter how they are passed."""
        first = workflow()
        before = await first.run(body_of(recorded))
        again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        assert await again.run(body_of(asked)) == before
        assert len(calls) == 1

    @pytest.mark.parametrize(
        ("recorded", "asked"),
        [
            (partial(book, 5), partial(book, seat=6)),
            (partial(charge, 5, currency="USD"), partial(charge, 5, currency="EUR")),
            (partial(charge, 5), partial(charge, 5, currency="USD")),
        ],
    )
    async def test_other_arguments_are_drift(self, recorded: Any, asked: Any) -> None:
        """Keyword arguments count too."""
        first = workflow()
        await first.run(body_of(recorded))
        again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        assert isinstance(error_of(await again.run(body_of(asked))), DriftError)

    async def test_arguments_that_do_not_fit_raise_a_type_error(self) -> None:
        """As the call of the function does."""
        misfit: Any = book
        error = error_of(await run(body_of(lambda: misfit(chair=5))))
        assert isinstance(error, TypeError)


class TestTogether:
    async def test_in_all_gather_and_task_groups(self) -> None:
        """Each call has a record of its own."""

        async def body(step: Step) -> Any:
            one = await step.all(charge(1), book(1), find(0))
            two = await asyncio.gather(charge(2), charge(3))
            async with asyncio.TaskGroup() as group:
                three = [group.create_task(charge(n)) for n in (4, 5)]
            return one, two, [task.result() for task in three]

        first, again = await run_and_replay(body)
        assert first == again
        assert len(calls) == 7

    async def test_in_a_race(self) -> None:
        """The record of the winner is known: it is a single call."""
        first = workflow()
        body = single(lambda step: step.race("r", find(1), step.sleep("late", 60)))
        assert await first.run(body) == Ok((0, Ok(1)))
        assert first.snapshot()["steps"]["r"].get("value") == {"winner": 0, "record": "find"}
        assert await workflow(snapshot=first.snapshot()).run(body) == Ok((0, Ok(1)))

    async def test_as_the_function_of_a_step(self) -> None:
        """The step calls the decorated function: it is not a step inside a step."""
        shop = Shop("EUR")

        async def body(step: Step) -> Any:
            return [
                await step("pay", charge, 5),
                await step("in dollars", partial(charge, currency="USD"), 5),
                await step("order", shop.order, "tea"),
                await step.map("each", [1, 2], charge),
                await step.all({"a": partial(charge, 7)}),
            ]

        first, again = await run_and_replay(body)
        assert first == again
        assert first.unwrap()[1:3] == ["5 USD", "tea in EUR"]
        assert len(calls) == 6

    async def test_its_options_are_the_defaults_of_such_a_step(self) -> None:
        """Those of the call win."""

        @durable.step(retry=Retry(3, delay=0))
        async def failing(n: int) -> int:
            calls.append(n)
            raise ConnectionError(str(n))

        await run(single(lambda step: step("three times", failing, 3)))
        await run(single(lambda step: step("once", failing, 1, retry=1)))
        await run(single(lambda step: step.map("twice", [2], failing, retry=Retry(2, delay=0))))
        assert calls == [3, 3, 3, 1, 2, 2]


class TestDecorator:
    def test_the_function_can_be_recognized(self) -> None:
        """Frameworks look at its name, its signature and whether it is async."""
        assert (charge.__name__, charge.__doc__) == ("charge", None)
        assert list(inspect.signature(charge).parameters) == ["cents", "currency"]
        recognise = inspect if sys.version_info >= (3, 12) else asyncio
        assert recognise.iscoroutinefunction(charge)

    @pytest.mark.parametrize("fn", [abs, lambda: 1, 5, charge], ids=["sync", "lambda", "5", "step"])
    def test_only_an_async_function_becomes_a_step(self, fn: Any) -> None:
        """The error says what to do with another one."""
        with pytest.raises(InvalidArgument, match=r"make it async, or call it with step\(…\)"):
            durable.step(fn)

    @pytest.mark.parametrize(
        "options",
        [{"name": ""}, {"name": "~x"}, {"name": 5}, {"retry": 0}, {"timeout": 0}, {"errors": [5]}],
        ids=str,
    )
    def test_invalid_options_are_refused_where_they_are_written(self, options: Any) -> None:
        """The error names the option."""
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            durable.step(**options)

    def test_a_function_without_a_name_needs_one(self) -> None:
        """A partial has none."""
        with pytest.raises(InvalidArgument, match="name"):
            durable.step(partial(asyncio.sleep, 0))


class TestCurrent:
    async def test_it_is_the_handle_of_the_run(self) -> None:
        """In the function, in branches, and in the functions of steps, also in threads."""

        async def body(step: Step) -> list[bool]:
            async def ask() -> bool:
                return durable.current() is step

            def ask_in_a_thread() -> bool:
                return durable.current() is step

            own = await ask()
            branches = await asyncio.gather(ask(), asyncio.create_task(ask()))
            race = await step.race("r", ask())
            return [own, *branches, race[1], await step("a", ask), await step("b", ask_in_a_thread)]

        assert await run(body) == Ok([True] * 6)

    async def test_each_run_has_its_own(self) -> None:
        """A run inside a step of another one, too."""

        async def inner(step: Step) -> bool:
            return durable.current() is step

        async def outer(step: Step) -> list[Any]:
            inside = await step("inner", lambda: Workflow("inner").run(inner))
            return [inside, durable.current() is step]

        assert await run(outer) == Ok([True, True])

    async def test_outside_a_run_it_raises(self) -> None:
        """The error says where to call it."""
        with pytest.raises(PerdureError, match="outside a run"):
            durable.current()

    async def test_listeners_are_outside(self) -> None:
        """They are called beside the run."""
        errors: list[BaseException] = []

        def listen(_: object) -> None:
            with pytest.raises(PerdureError) as caught:
                durable.current()
            errors.append(caught.value)

        await run(body_of(partial(charge, 5)), on_event=listen)
        assert errors
