"""A user's own store: with five methods, `durable.run` works on it."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from perdure import Err, Ok, Runtime, Step, Workflow, durable, workflow
from perdure.clock import SystemClock
from perdure.errors import MissingAbility, StoreError
from perdure.keyvalue import MemoryKeyValue
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import RunSummary
from perdure.stores import keyvalue
from tests.guide.shop import Shop


class MyStore:
    """Stores snapshots as strings in a dict, as one would in any key-value service."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.times: dict[str, datetime] = {}
        self.down = False

    async def save(self, id: str, snapshot: Snapshot) -> None:
        if self.down:
            raise TimeoutError("no answer")
        self.texts[id] = json.dumps(snapshot)
        self.times[id] = SystemClock().now()

    async def load(self, id: str) -> Snapshot | None:
        text = self.texts.get(id)
        return json.loads(text) if text else None

    async def delete(self, id: str) -> None:
        self.texts.pop(id, None)

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        newest = sorted(self.texts, key=self.times.__getitem__, reverse=True)
        ids = [id for id in newest if id.startswith(prefix)]
        return [RunSummary(id, self.times[id]) for id in ids[:limit]]

    async def close(self) -> None: ...


async def checkout(step: Step, shop: Shop) -> str:
    user = await step("fetch_user", shop.fetch_user, "1")
    return str((await step("create_order", shop.create_order, user))["id"])


async def test_it_stores_snapshots(shop: Shop) -> None:
    """`save` and `load` are all that a workflow in this process needs."""
    store = MyStore()
    first = Workflow("w", shop)
    await first.run(checkout)
    await store.save("wf-1", first.snapshot())
    resumed = Workflow("w", shop, snapshot=await store.load("wf-1"))
    assert await resumed.run(checkout) == Ok("o-1")
    assert len(shop.calls) == 2


async def test_it_stores_durable_runs(shop: Shop) -> None:
    """Each step saves the snapshot before the function continues; a failed run can be resumed."""
    store = MyStore()
    shop.down.add("create_order")
    assert not (await durable.run(shop, checkout, id="c-1", store=store)).ok
    shop.down.clear()
    assert await durable.run(shop, checkout, id="c-1", store=store) == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order", "create_order"]


async def test_all_parallel_steps_are_saved(shop: Shop) -> None:
    """Saves do not overtake each other, so no finished step is lost."""
    store = MyStore()

    async def body(step: Step) -> None:
        await step.map("each", range(20), lambda n: n)
        raise ValueError("the end")

    await durable.run(shop, body, id="c-1", store=store)
    saved = await store.load("c-1")
    assert saved is not None
    assert len(saved["steps"]) == 20


async def test_a_store_that_fails_stops_the_run(shop: Shop) -> None:
    """The function never continues without durability: the next step does not start."""
    store = MyStore()

    async def body(step: Step, shop: Shop) -> Any:
        await step("fetch_user", shop.fetch_user, "1")
        store.down = True
        await step("fetch_posts", shop.fetch_posts, "1")
        await step("create_order", shop.create_order, {"id": "1"})

    result = await durable.run(shop, body, id="c-1", store=store)
    assert isinstance(result, Err)
    assert isinstance(result.error, StoreError)
    assert str(result.error) == "MyStore could not save run 'c-1': no answer"
    assert shop.calls == ["fetch_user", "fetch_posts"]


async def test_any_key_value_store_is_a_store(shop: Shop) -> None:
    """`keyvalue(kv)` turns any key-value store into one with durable runs, sleeps and events."""
    store = keyvalue(MemoryKeyValue())
    assert await durable.run(shop, checkout, id="c-1", store=store) == Ok("o-1")

    @workflow("approval")
    async def approval(step: Step) -> Any:
        return await step.wait_for_event("approval", "approved")

    runtime = Runtime(store, workflows=[approval])
    run = await runtime.trigger(approval)
    assert run.status == "waiting"
    signalled = await runtime.signal(run.id, "approved", "yes")
    assert signalled.run is not None
    assert signalled.run.output == "yes"


async def test_a_missing_capability_is_an_error(shop: Shop) -> None:
    """Events need an inbox, which this store does not declare."""

    async def body(step: Step) -> None:
        await step.wait_for_event("approval", "approved")

    result = await durable.run(shop, body, id="c-1", store=MyStore())
    assert isinstance(result, Err)
    assert isinstance(result.error, MissingAbility)
    assert "MyStore has no 'inbox' ability" in str(result.error)
