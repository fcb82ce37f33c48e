"""Steps that run together: `step.all` and `step.map`."""

import asyncio
from collections.abc import Callable
from typing import Any

from perdure import Err, Ok, Result, Retry, Step
from perdure.errors import DriftError, NestedStep
from tests.unit.engine.bodies import (
    Body,
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


async def test_all_returns_a_tuple_in_the_order_of_its_arguments() -> None:
    """A call of a step is recorded where the call was made, not in the branch that awaits it."""

    async def body(step: Step) -> Any:
        return await step.all(step("slow", asyncio.sleep, 0.001, "slow"), step("quick", str, 1))

    first = workflow()
    assert await first.run(body) == Ok(("slow", "1"))
    assert {record.get("branch") for record in first.snapshot()["steps"].values()} == {None}


async def test_all_accepts_coroutines_that_call_several_steps() -> None:
    """Each runs in a branch, so that they may use the same ids."""

    async def line(step: Step, name: str) -> list[str]:
        return [await step(id, lambda: name) for id in ("load", "save")]

    async def body(step: Step) -> Any:
        return await step.all(*(line(step, name) for name in "ab"))

    assert await run_and_replay(body) == (Ok((["a", "a"], ["b", "b"])),) * 2


async def test_all_of_nothing_is_an_empty_tuple() -> None:
    """A list of calls may be empty."""
    assert await run(single(lambda step: step.all())) == Ok(())


async def test_all_raises_the_first_failure_in_the_order_of_its_arguments() -> None:
    """Every other step is finished and recorded first."""

    async def fail(seconds: float, message: str) -> None:
        await asyncio.sleep(seconds)
        raise ValueError(message)

    async def body(step: Step) -> Any:
        later = step("later", fail, 0.002, "first in order")
        slow = step("slow", asyncio.sleep, 0.005, "done")
        return await step.all(later, step("sooner", fail, 0, "first in time"), slow)

    first = workflow()
    assert str(error_of(await first.run(body))) == "first in order"
    assert recorded_value(first, "slow") == "done"


async def test_all_accepts_tasks_and_futures() -> None:
    """They are awaited like everything else."""

    async def body(step: Step) -> Any:
        task = asyncio.create_task(step("task", lambda: 1))
        future = asyncio.gather(step("a", lambda: 2), step("b", lambda: 3))
        return await step.all(task, future, step("own", lambda: 4))

    assert await run_and_replay(body) == (Ok((1, [2, 3], 4)),) * 2


async def test_all_inside_a_step_is_refused() -> None:
    """The coroutines that it was given are closed."""

    async def body(step: Step) -> Any:
        async def inside() -> Any:
            return await step.all(asyncio.sleep(0))

        return await step("outer", inside, errors=[NestedStep])

    assert isinstance(error_of(await run(body)), NestedStep)


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


async def test_a_map_applies_its_options_to_each_step() -> None:
    """Each item is tried again by itself."""
    tries: list[int] = []

    async def flaky(n: int) -> int:
        tries.append(n)
        if tries.count(n) < 2:
            raise ConnectionError("not yet")
        return n

    async def body(step: Step) -> list[int]:
        return await step.map("flaky", [1, 2], flaky, retry=Retry(2, delay=0), timeout="1m")

    assert await run(body) == Ok([1, 2])
    assert sorted(tries) == [1, 1, 2, 2]


async def test_a_key_names_the_record_of_an_item() -> None:
    """Records are found again when items change places and others are added."""
    fetched: list[str] = []

    async def fetch(page: str) -> str:
        fetched.append(page)
        return page.upper()

    def pages(*names: str) -> Body:
        return single(lambda step: step.map("page", names, fetch, key=lambda name: f"/{name}"))

    first = workflow()
    assert await first.run(pages("a", "b")) == Ok(["A", "B"])
    assert set(first.snapshot()["steps"]) == {"page[/a]", "page[/b]"}
    again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
    assert await again.run(pages("c", "b", "a")) == Ok(["C", "B", "A"])
    assert fetched == ["a", "b", "c"]


async def test_items_with_one_key_have_a_record_each() -> None:
    """They are numbered like calls with one id."""
    body = single(lambda step: step.map("x", [1, 2], lambda n: n, key=lambda _: "same"))
    assert await run_and_replay(body) == (Ok([1, 2]),) * 2


async def test_a_map_finishes_what_it_started_before_it_fails() -> None:
    """After a failure no other item is started; the first failure, in item order, is raised."""
    finished: list[int] = []

    async def work(n: int) -> int:
        await asyncio.sleep((0.01, 0.001, 0.01)[n])
        finished.append(n)
        if n < 2:
            raise ValueError(str(n))
        return n

    async def body(step: Step) -> list[int]:
        return await step.map("work", [0, 1, 2, 3, 4], work, concurrency=3)

    first = workflow()
    assert str(error_of(await first.run(body))) == "0"
    assert sorted(finished) == [0, 1, 2]
    assert set(first.snapshot()["steps"]) == {"work[0]", "work[1]", "work[2]"}


async def test_a_replayed_map_starts_nothing_after_a_failure_that_was_handled() -> None:
    """The function has already acted on the failure."""
    started: list[int] = []

    async def work(n: int) -> int:
        started.append(n)
        await asyncio.sleep(0.001 if n == 1 else 0.01)
        if n == 1:
            raise ValueError("one")
        return n

    async def body(step: Step) -> str:
        try:
            await step.map("work", range(10), work, concurrency=3)
        except ValueError:
            await step("refund", lambda: None)
        return "handled"

    first = workflow()
    assert await first.run(body) == Ok("handled")
    again = workflow(snapshot=first.snapshot(), on_unknown_steps="error")
    assert await again.run(body) == Ok("handled")
    assert started == [0, 1, 2]


async def test_a_map_can_collect_failures() -> None:
    """Everything runs; a returned `Err` and a raised exception are both an `Err`."""

    async def check(n: int) -> Result[int, str]:
        if n == 1:
            raise ValueError("one")
        return Err("zero") if n == 0 else Ok(n)

    async def body(step: Step) -> list[str]:
        results = await step.map("check", range(3), check, concurrency=1, on_error="collect")
        return [repr(result) for result in results]

    expected = ["Err('zero')", "Err(ValueError('one'))", "Ok(2)"]
    assert await run_and_replay(body) == (Ok(expected),) * 2


async def test_a_map_does_not_collect_what_breaks_the_run() -> None:
    """Drift is raised, not returned as a result."""
    collected: list[Any] = []

    def numbers(*items: int) -> Body:
        async def body(step: Step) -> None:
            collected.append(await step.map("n", items, abs, on_error="collect"))

        return body

    first = workflow()
    await first.run(numbers(1, 2))
    again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
    assert isinstance(error_of(await again.run(numbers(1, 3))), DriftError)
    assert collected == [[Ok(1), Ok(2)]]
