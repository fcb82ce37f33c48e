"""Subscribing: get each finished step as it happens, with the snapshot at that time."""

from typing import Any

from perdure import Ok, Step, Workflow, is_step_complete
from perdure.stores import MemoryStore
from tests.guide.shop import Shop


async def user_and_posts(step: Step, shop: Shop) -> int:
    user = await step("fetch_user", shop.fetch_user, "1", key="user:1")
    return len(await step("fetch_posts", shop.fetch_posts, user["id"], key="posts:1"))


async def test_saving_after_each_step(shop: Shop) -> None:
    """A listener may save the snapshot; `flush` waits until it has."""
    store = MemoryStore()
    workflow = Workflow("w", shop)

    async def save(event: Any) -> None:
        if event.type == "step_complete":
            await store.save("wf-123", event.snapshot)

    unsubscribe = workflow.subscribe(save, mode="async")
    shop.down.add("fetch_posts")
    await workflow.run(user_and_posts)
    await workflow.flush()
    unsubscribe()
    saved = await store.load("wf-123")
    assert saved is not None
    assert saved["steps"]["user:1"]["ok"]


async def test_a_sync_listener_is_called_before_the_function_continues(shop: Shop) -> None:
    """Keep it fast."""
    workflow = Workflow("w", shop)
    events: list[str] = []
    workflow.subscribe(lambda event: events.append(event.step_id or event.type))
    assert await workflow.run(user_and_posts) == Ok(1)
    assert events == ["user:1", "posts:1", "workflow_complete"]


async def test_bursts_can_be_coalesced(shop: Shop) -> None:
    """`coalesce="latest"` skips events of a burst, but never the last one."""
    workflow = Workflow("w", shop)
    events: list[str] = []
    workflow.subscribe(
        lambda event: events.append(event.step_id or event.type), mode="async", coalesce="latest"
    )

    async def burst(step: Step) -> None:
        await step.all({f"step-{n}": lambda: None for n in range(100)})

    await workflow.run(burst)
    await workflow.flush()
    assert events == ["step-99", "workflow_complete"]


async def test_on_event_receives_all_events(shop: Shop) -> None:
    """It includes starts, retries, timeouts and cache hits."""
    events: list[Any] = []
    await Workflow("w", shop, on_event=events.append).run(user_and_posts)
    assert [event.type for event in events] == [
        "workflow_start",
        "step_start", "step_success", "step_complete",
        "step_start", "step_success", "step_complete",
        "workflow_success",
    ]  # fmt: skip
    completed = [event.key for event in events if is_step_complete(event)]
    assert completed == ["user:1", "posts:1"]
    # The start of a step has the same key as its end.
    assert [event.key for event in events if event.type == "step_start"] == completed
