"""Steps: a workflow is an async function, and its effects on the outside world are steps."""

import asyncio
from typing import Any

import pytest

from perdure import Err, Ok, Result, Retry, Step, StepFailed, StepTimeout, Workflow
from perdure.testing import TestClock
from tests.guide.shop import Shop


async def checkout(step: Step, shop: Shop) -> dict[str, Any]:
    user = await step("fetch_user", shop.fetch_user, "123", key="user:123")
    return await step("create_order", lambda: shop.create_order(user), key="order:1")


async def find_user(id: str) -> Result[str, str]:
    return Ok("Ana") if id == "1" else Err("NOT_FOUND")


async def test_a_workflow_runs_a_function(shop: Shop) -> None:
    """The function gets `step` and its dependencies; its value is returned as `Ok`."""
    workflow = Workflow("checkout", shop)
    result = await workflow.run(checkout)
    assert result == Ok({"id": "o-1", "user": "123"})
    assert shop.calls == ["fetch_user", "create_order"]


async def test_results_can_be_matched(shop: Shop) -> None:
    """A failed run returns `Err(error, cause)`; it does not raise."""
    shop.down.add("create_order")
    match await Workflow("checkout", shop).run(checkout):
        case Ok(order):
            pytest.fail(f"there is no order {order}")
        case Err(ConnectionError() as error):
            assert str(error) == "create_order is down"


async def test_a_step_is_a_function_and_its_arguments() -> None:
    """`step(id, function, *arguments)` returns the value, whether or not the function is async."""

    def total(prices: list[int]) -> int:
        return sum(prices)

    async def body(step: Step) -> int:
        return await step("total", total, [1, 2, 3])

    assert await Workflow("w").run(body) == Ok(6)


async def test_a_step_can_be_a_lambda(shop: Shop) -> None:
    """`step(id, lambda: …)` is the other form: pass the call, not its result."""

    async def body(step: Step) -> str:
        user = await step("fetch_user", lambda: shop.fetch_user("1"))
        return str(user["name"])

    assert await Workflow("w").run(body) == Ok("Ana")


async def test_a_returned_err_ends_the_run() -> None:
    """A function that returns `Err` fails its step, and the run ends with that error."""

    async def body(step: Step) -> str:
        return await step("find", find_user, "999")

    assert await Workflow("w").run(body) == Err("NOT_FOUND")


async def test_the_function_may_handle_a_failure() -> None:
    """A returned `Err` is raised as `StepFailed`, an exception as itself."""

    async def body(step: Step) -> str:
        try:
            return await step("find", find_user, "999")
        except StepFailed as failed:
            return f"no user: {failed.error}"

    assert await Workflow("w").run(body) == Ok("no user: NOT_FOUND")


async def test_a_step_can_be_retried(shop: Shop) -> None:
    """`retry=` sets how often, and how long to wait in between."""
    shop.down.add("fetch_user")

    async def repair() -> None:
        while len(shop.calls) < 2:
            await asyncio.sleep(0)
        shop.down.clear()

    async def body(step: Step) -> str:
        retry = Retry(3, backoff="fixed", delay="1ms")
        return str((await step("fetch_user", shop.fetch_user, "1", retry=retry))["name"])

    result, _ = await asyncio.gather(Workflow("w").run(body), repair())
    assert result == Ok("Ana")
    assert len(shop.calls) == 3


async def test_a_service_can_recognize_a_repeated_call() -> None:
    """`step.idempotency_key` is the same for each attempt of a step, and for no other step."""
    keys: list[str] = []

    async def charge(step: Step) -> None:
        keys.append(step.idempotency_key)
        if len(keys) == 1:
            raise ConnectionError("no answer")

    async def body(step: Step) -> None:
        await step("charge", charge, step, retry=Retry(attempts=2, delay=0))
        await step("tip", charge, step)

    assert (await Workflow("w").run(body)).ok
    first, again, tip = keys
    assert first == again != tip
    assert len(tip) == 32


async def test_a_step_can_have_a_timeout(clock: TestClock) -> None:
    """`timeout=` fails a step that takes longer; with a test clock it takes no real time."""

    async def body(step: Step) -> None:
        await step("slow", lambda: clock.sleep(3600), timeout="5s")

    running = asyncio.ensure_future(Workflow("w", clock=clock).run(body))
    await clock.advance("5s")
    match await running:
        case Err(StepTimeout() as error):
            assert str(error) == "step 'slow' did not finish within 5s"
        case other:
            pytest.fail(f"{other}")


async def test_steps_can_run_in_parallel(shop: Shop) -> None:
    """`step.all` runs named steps, `step.map` one step for each item."""

    async def body(step: Step) -> Any:
        both = await step.all({"user": lambda: shop.fetch_user("1"), "now": lambda: "noon"})
        posts = await step.map("posts", ["1", "2", "3"], shop.fetch_posts, concurrency=2)
        return [both["user"]["name"], both["now"], [found[0]["by"] for found in posts]]

    assert await Workflow("w").run(body) == Ok(["Ana", "noon", ["1", "2", "3"]])


async def test_a_race_returns_the_first_branch(clock: TestClock) -> None:
    """`step.race` returns the name and the value of the branch that finishes first."""

    async def body(step: Step) -> Any:
        return await step.race(
            "quickest",
            {"answer": lambda: clock.sleep(60), "give_up": lambda: step.sleep("patience", "5s")},
        )

    running = asyncio.ensure_future(Workflow("w", clock=clock).run(body))
    await clock.advance("5s")
    assert await running == Ok(("give_up", None))


async def test_plain_asyncio_works_too(shop: Shop) -> None:
    """`gather`, `TaskGroup` and `create_task` create branches of the run."""

    async def body(step: Step) -> list[str]:
        async def name_of(id: str) -> str:
            user = await step("fetch_user", shop.fetch_user, id)
            return f"{user['name']} {user['id']}"

        return list(await asyncio.gather(name_of("1"), name_of("2")))

    workflow = Workflow("w")
    assert await workflow.run(body) == Ok(["Ana 1", "Ana 2"])
    assert await Workflow("w", snapshot=workflow.snapshot()).run(body) == Ok(["Ana 1", "Ana 2"])
    assert len(shop.calls) == 2
