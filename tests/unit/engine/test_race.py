"""Races: the first branch to finish wins, the winner is recorded, and a replay starts only it."""

import asyncio
from functools import partial
from typing import Any

import pytest

from perdure import Ok, Step, Workflow
from perdure.errors import DriftError
from perdure.testing import TestClock
from tests.unit.engine.bodies import (
    Body,
    advance_until_done,
    error_of,
    recorded_value,
    run,
    run_and_replay,
    single,
    workflow,
)


async def test_race_returns_the_first_and_cancels_the_others(clock: TestClock) -> None:
    """The winner is recorded: a replay starts the same one, and no other."""
    cancelled: list[str] = []
    started: list[str] = []

    async def after(seconds: float, name: str) -> str:
        started.append(name)
        try:
            await clock.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise
        return name

    async def body(step: Step) -> Any:
        return await step.race(
            "race",
            {name: partial(after, n, name) for n, name in enumerate("xba")},
        )

    first = workflow(clock=clock)
    assert await advance_until_done(clock, first.run(body)) == Ok(("x", "x"))
    assert cancelled == ["b", "a"]
    assert await workflow(snapshot=first.snapshot()).run(body) == Ok(("x", "x"))
    assert started == ["x", "b", "a", "x"]


async def test_the_branches_of_a_race_may_call_steps(clock: TestClock) -> None:
    """A step against a sleep is the usual race."""

    async def body(step: Step) -> Any:
        async def work() -> None:
            await step("work", lambda: clock.sleep(10))

        return await step.race("limit", {"work": work, "late": lambda: step.sleep("nap", 5)})

    first = workflow(clock=clock)
    assert await advance_until_done(clock, first.run(body)) == Ok(("late", None))
    assert "work" not in first.snapshot()["steps"]
    second = workflow(snapshot=first.snapshot(), on_unknown_steps="error")
    assert await second.run(body) == Ok(("late", None))


async def test_a_race_fails_if_the_first_branch_to_finish_fails(clock: TestClock) -> None:
    """The winner is the first to finish, not the first to succeed."""

    async def fail() -> None:
        raise ValueError("first")

    async def body(step: Step) -> Any:
        return await step.race("race", {"slow": lambda: clock.sleep(5), "fail": fail})

    assert str(error_of(await advance_until_done(clock, run(body, clock=clock)))) == "first"


async def test_a_race_of_calls_returns_the_index_and_the_value() -> None:
    """The losers' coroutines are closed when a replay does not start them."""
    ran: list[str] = []

    async def work(name: str, seconds: float) -> str:
        ran.append(name)
        await asyncio.sleep(seconds)
        return name

    async def body(step: Step) -> tuple[int, str]:
        slow, quick = step("slow", work, "slow", 1), step("quick", work, "quick", 0)
        return await step.race("first", slow, quick)

    assert await run_and_replay(body) == (Ok((1, "quick")),) * 2
    assert ran == ["slow", "quick"]


async def test_a_race_records_the_winner_and_where_its_value_is() -> None:
    """The value is in the record of the step, and only there."""

    async def body(step: Step) -> Any:
        by_index = await step.race("a", step("x", str, "secret"), step.sleep("nap", 60))
        by_name = await step.race("b", {"only": lambda: step("x", str, "secret")})
        return by_index, by_name

    first = workflow()
    assert await first.run(body) == Ok(((0, "secret"), ("only", "secret")))
    assert recorded_value(first, "a") == {"winner": 0, "record": "x"}
    assert recorded_value(first, "b") == {"winner": "only", "record": "x#2"}


async def test_the_branches_of_a_race_may_be_coroutines_that_call_steps() -> None:
    """Such a branch has no record of its own; its steps answer a replay."""
    ran: list[str] = []

    async def line(step: Step, name: str, seconds: float) -> str:
        await step("wait", asyncio.sleep, seconds)
        await step("note", ran.append, name)
        return name

    async def body(step: Step) -> Any:
        return await step.race("first", line(step, "a", 1), line(step, "b", 0))

    first = workflow()
    assert await first.run(body) == Ok((1, "b"))
    assert recorded_value(first, "first") == {"winner": 1}
    again = workflow(snapshot=first.snapshot(), on_unknown_steps="error")
    assert await again.run(body) == Ok((1, "b"))
    assert ran == ["b"]


async def test_a_race_as_an_argument_of_a_race(clock: TestClock) -> None:
    """What a loser contains is closed with it, and its records are not missed by a replay."""

    async def body(step: Step) -> Any:
        inner = step.race("inner", step.sleep("a", 60), asyncio.wait_for(step.sleep("b", 60), 90))
        both = step.all(step("c", lambda: 1), step.sleep("d", 60), step.map("e", [1], str))
        return await step.race("outer", inner, both, step.sleep("late", 5))

    first = workflow(clock=clock)
    assert await advance_until_done(clock, first.run(body)) == Ok((2, None))
    assert set(first.snapshot()["steps"]) == {"c", "e[0]", "late", "outer"}
    again = workflow(snapshot=first.snapshot(), on_unknown_steps="error")
    assert await again.run(body) == Ok((2, None))


async def test_awaitables_that_are_not_coroutines_may_race() -> None:
    """An object with `__await__` has not started before it is awaited."""

    class Answer:
        def __await__(self) -> Any:
            return asyncio.sleep(0, result=42).__await__()

    body = single(lambda step: step.race("first", Answer(), step.sleep("late", 60)))
    assert await run_and_replay(body) == (Ok((0, 42)),) * 2


@pytest.mark.parametrize("names", ["bc", "b"])
async def test_a_race_whose_winner_is_gone_is_drift(names: str) -> None:
    """The error names the winner and the branches of now."""

    def among(names: str) -> Body:
        thunks = {name: partial(asyncio.sleep, n, name) for n, name in enumerate(names)}
        return single(lambda step: step.race("first", thunks))

    first = workflow()
    assert await first.run(among("ab")) == Ok(("a", "a"))
    again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
    error = error_of(await again.run(among(names)))
    assert isinstance(error, DriftError)
    assert error.recorded == "'a'"


async def test_a_race_of_names_and_a_race_of_calls_are_different() -> None:
    """The name `"0"` is not the index 0."""
    first = workflow()
    assert await first.run(single(lambda step: step.race("r", {"0": lambda: 1}))) == Ok(("0", 1))
    again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
    calls = single(lambda step: step.race("r", step("x", lambda: 1)))
    assert isinstance(error_of(await again.run(calls)), DriftError)


async def test_a_failed_race_is_replayed_without_its_branches() -> None:
    """The coroutines of all branches are closed."""

    async def fail() -> None:
        raise ValueError("declined")

    async def body(step: Step) -> str:
        try:
            await step.race("r", step("pay", fail), step.sleep("late", 60))
        except ValueError as error:
            return str(error)
        return "unreachable"

    assert await run_and_replay(body) == (Ok("declined"),) * 2


async def test_a_cancelled_race_cancels_its_branches() -> None:
    """None of their steps is recorded."""

    async def body(step: Step) -> str:
        try:
            async with asyncio.timeout(0.001):
                await step.race("r", step("a", asyncio.sleep, 60), step("b", asyncio.sleep, 60))
        except TimeoutError:
            return "late"
        return "unreachable"

    first = Workflow("w")
    assert await first.run(body) == Ok("late")
    assert first.snapshot()["steps"] == {}
