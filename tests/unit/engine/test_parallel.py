"""Steps that run together: `all`, `map` and `race`."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from perdure import Ok, Step
from perdure.testing import TestClock
from tests.unit.engine.bodies import (
    advance_until_done,
    error_of,
    recorded_value,
    run,
    run_and_replay,
    single,
    workflow,
)


async def test_all_returns_values_by_name() -> None:
    """They are in the order of the names; each is a step of that name."""

    async def body(step: Step) -> dict[str, Any]:
        return await step.all({"b": lambda: 1, "a": lambda: asyncio.sleep(0, result=2)})

    first = workflow()
    assert list((await first.run(body)).unwrap().items()) == [("b", 1), ("a", 2)]
    assert set(first.snapshot()["steps"]) == {"a", "b"}


async def test_a_second_all_with_the_same_names_has_its_own_steps() -> None:
    """The names are numbered like the ids of steps."""

    def constant(n: int) -> Callable[[], int]:
        return lambda: n

    async def body(step: Step) -> list[Any]:
        return [await step.all({"a": constant(n)}) for n in (1, 2)]

    assert await run_and_replay(body) == (Ok([{"a": 1}, {"a": 2}]),) * 2


async def test_all_waits_for_every_step_before_it_fails() -> None:
    """Every step is recorded; then the first failure, in the order of the names, is raised."""

    async def slow() -> str:
        await asyncio.sleep(0.001)
        return "done"

    async def fail(message: str) -> None:
        raise ValueError(message)

    async def body(step: Step) -> Any:
        return await step.all(
            {"slow": slow, "first": lambda: fail("first"), "second": lambda: fail("second")}
        )

    first = workflow()
    assert str(error_of(await first.run(body))) == "first"
    assert recorded_value(first, "slow") == "done"


async def test_map_keeps_the_order_and_limits_concurrency() -> None:
    """Values are in the order of the items; at most `concurrency` steps run at once."""
    running = 0
    most = 0

    async def square(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (5 - n))
        running -= 1
        return n * n

    async def body(step: Step) -> list[int]:
        return await step.map("square", range(5), square, concurrency=2)

    assert await run_and_replay(body) == (Ok([0, 1, 4, 9, 16]),) * 2
    assert most == 2


async def test_map_of_no_items_returns_an_empty_list() -> None:
    """No step runs."""
    body = single(lambda step: step.map("x", [], lambda item: item))
    assert await run(body) == Ok([])


async def test_a_resumed_map_runs_only_the_failed_items_again() -> None:
    """The values of the others are read from their records."""
    calls: list[int] = []

    async def work(n: int) -> int:
        calls.append(n)
        if n == 1 and calls.count(1) == 1:
            raise ValueError("one")
        return n

    async def body(step: Step) -> list[int]:
        return await step.map("work", [0, 1, 2], work)

    first = workflow()
    assert isinstance(error_of(await first.run(body)), ValueError)
    completed = first.snapshot(include="completed")
    assert await workflow(snapshot=completed).run(body) == Ok([0, 1, 2])
    assert sorted(calls) == [0, 1, 1, 2]


async def test_race_returns_the_first_and_cancels_the_others(clock: TestClock) -> None:
    """The winner is recorded: a replay returns the same one without running anything."""
    cancelled: list[str] = []

    async def after(seconds: float, name: str) -> str:
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
