"""Parallel work: several steps at once, the same for many items, and the first of several."""

from typing import Any

import pytest

from perdure import Err, Ok, Retry, Runtime, Step, Workflow, workflow
from perdure.errors import InvalidArgument
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.guide.shop import Shop


async def test_all_returns_the_values_of_several_calls(shop: Shop) -> None:
    """They run concurrently, and are returned in the order of the calls."""

    async def body(step: Step) -> str:
        user, posts = await step.all(
            step("user", shop.fetch_user, "1"), step("posts", shop.fetch_posts, "1")
        )
        return f"{user['name']}: {posts[0]['title']}"

    assert await Workflow("w").run(body) == Ok("Ana: Hello")


async def test_all_finishes_everything_before_it_raises(shop: Shop) -> None:
    """Finished work is recorded, so that the next attempt does not repeat it."""
    shop.down.add("fetch_user")

    async def body(step: Step) -> Any:
        return await step.all(
            step("user", shop.fetch_user, "1"), step("posts", shop.fetch_posts, "1")
        )

    wf = Workflow("w")
    assert isinstance(await wf.run(body), Err)
    shop.down.clear()
    result = await wf.run(body, snapshot=wf.snapshot(include="completed"))
    assert result.ok
    assert shop.calls.count("fetch_posts") == 1


async def test_all_can_take_functions_that_call_several_steps(shop: Shop) -> None:
    """Each runs in a branch: both use the same ids."""

    async def buy(step: Step, id: str) -> Any:
        user = await step("user", shop.fetch_user, id)
        return (await step("order", shop.create_order, user))["user"]

    async def body(step: Step) -> tuple[Any, ...]:
        return await step.all(buy(step, "1"), buy(step, "2"))

    assert await Workflow("w").run(body) == Ok(("1", "2"))


async def test_map_runs_a_step_for_each_item(shop: Shop) -> None:
    """Each item is retried on its own, and named by its key."""

    async def body(step: Step) -> list[Any]:
        ids = ["7", "8"]
        users = await step.map("user", ids, shop.fetch_user, retry=Retry(2), key=lambda id: id)
        return [user["id"] for user in users]

    wf = Workflow("w")
    assert await wf.run(body) == Ok(["7", "8"])
    assert list(wf.snapshot()["steps"]) == ["user[7]", "user[8]"]


async def test_map_can_collect_failures(shop: Shop) -> None:
    """Every item is tried, and has an `Ok` or an `Err`."""

    async def half(n: int) -> int:
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n // 2

    async def body(step: Step) -> list[str]:
        results = await step.map("half", [2, 3], half, on_error="collect")
        return [str(result.error) if isinstance(result, Err) else "fine" for result in results]

    assert await Workflow("w").run(body) == Ok(["fine", "3 is odd"])


@pytest.mark.parametrize(("shipped", "index"), [(True, 0), (False, 1)])
async def test_the_first_of_several_wins(clock: TestClock, shipped: bool, index: int) -> None:
    """A wait against a sleep: the other one is cancelled."""

    @workflow("delivery")
    async def delivery(step: Step) -> tuple[int, Any]:
        return await step.race(
            "ship", step.wait_for_event("shipped", "shipped"), step.sleep("late", "3d")
        )

    runtime = Runtime(MemoryStore(clock=clock), workflows=[delivery], clock=clock)
    await runtime.trigger(delivery, run_id="order-1")
    if shipped:
        await runtime.signal("order-1", "shipped", "P-1")
    await clock.advance("3d")
    await runtime.sweep()
    run = await runtime.get_run("order-1")
    assert run is not None
    assert run.output == (index, "P-1" if shipped else None)


async def test_a_mistaken_keyword_argument_is_explained() -> None:
    """Keyword arguments of the function are passed with `partial`."""

    async def pay(cents: int, currency: str) -> str:
        return f"{cents} {currency}"

    async def body(step: Any) -> Any:
        return await step("pay", pay, 42, currency="EUR")

    result = await Workflow("w").run(body)
    assert isinstance(result, Err)
    assert isinstance(result.error, InvalidArgument)
    assert "partial(pay, currency=…)" in str(result.error)
