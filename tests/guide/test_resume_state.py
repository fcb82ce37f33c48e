"""Resume states: the finished steps of a run, collected by the user and stored as a string."""

import sqlite3
from typing import Any

import pytest

from perdure import (
    Ok,
    Result,
    ResumeState,
    ResumeStateCollector,
    StatePersistence,
    Step,
    Workflow,
    is_step_complete,
    parse_state,
    stringify_state,
)
from perdure.clock import Duration
from perdure.errors import StateFormatError
from perdure.keyvalue import MemoryKeyValue
from tests.guide.shop import Shop


async def user_and_posts(step: Step, shop: Shop) -> dict[str, Any]:
    user = await step("fetch_user", lambda: shop.fetch_user("1"), key="user:1")
    posts = await step("fetch_posts", lambda: shop.fetch_posts(user["id"]), key="posts:1")
    return {"user": user["name"], "posts": len(posts)}


async def collected(shop: Shop) -> ResumeState:
    collector = ResumeStateCollector()
    await Workflow("w", shop, on_event=collector.handle_event).run(user_and_posts)
    return collector.resume_state()


async def resumed(shop: Shop, state: Any) -> Result[Any, Any]:
    shop.calls.clear()
    return await Workflow("w", shop, resume_state=state).run(user_and_posts)


async def test_a_collector_gathers_the_results_of_steps(shop: Shop) -> None:
    collector = ResumeStateCollector()
    workflow = Workflow("w", shop, on_event=collector.handle_event)
    await workflow.run(user_and_posts)
    state = collector.resume_state()
    assert list(state.steps) == ["user:1", "posts:1"]


async def test_saving_and_resuming(shop: Shop) -> None:
    """`stringify_state` makes a string for any database, `parse_state` restores the state."""
    database = {"wf-123": stringify_state(await collected(shop), workflow_id="wf-123")}
    state = parse_state(database["wf-123"])
    assert await resumed(shop, state) == Ok({"user": "Ana", "posts": 1})
    assert shop.calls == []


async def test_result_and_state_together(shop: Shop) -> None:
    """`run_with_state` needs no collector, and returns the state even if the run failed."""
    shop.down.add("fetch_posts")
    result, state = await Workflow("w", shop).run_with_state(user_and_posts)
    assert not result.ok
    assert is_step_complete(state, "user:1")


async def test_a_state_per_run(shop: Shop) -> None:
    """The option belongs to the workflow or to one run; elsewhere it is an error."""
    state = await collected(shop)
    shop.calls.clear()
    await Workflow("w", shop).run(user_and_posts, resume_state=state)
    assert shop.calls == []


async def test_a_function_can_load_the_state_when_the_run_starts(shop: Shop) -> None:
    """A factory, async or not, is called once per run; `None` means that there is no state."""
    database = {"wf-123": stringify_state(await collected(shop))}

    async def load() -> ResumeState | None:
        saved = database.get("wf-123")
        return parse_state(saved) if saved else None

    assert await resumed(shop, load) == Ok({"user": "Ana", "posts": 1})
    assert shop.calls == []


async def test_state_persistence_stores_states_by_run_id(shop: Shop) -> None:
    """Any key-value store can be used."""
    persistence = StatePersistence(MemoryKeyValue(), "workflow:state:")
    await persistence.save("wf-123", await collected(shop), user_id="user-1")
    assert await persistence.list() == ["wf-123"]
    assert await resumed(shop, await persistence.load("wf-123")) == Ok({"user": "Ana", "posts": 1})
    assert await persistence.load("wf-404") is None


class SqliteKeyValue:
    """A user's own key-value store with five methods."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:")
        self._db.execute("CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    async def get(self, key: str, /) -> str | None:
        row = self._db.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        self._db.execute("REPLACE INTO state VALUES (?, ?)", (key, value))

    async def delete(self, key: str, /) -> bool:
        return self._db.execute("DELETE FROM state WHERE key = ?", (key,)).rowcount > 0

    async def exists(self, key: str, /) -> bool:
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        rows = self._db.execute("SELECT key FROM state WHERE key GLOB ?", (pattern,))
        return [str(key) for (key,) in rows]

    def close(self) -> None:
        self._db.close()


async def test_a_custom_key_value_store(shop: Shop) -> None:
    """Any object with get, set, delete, exists and keys can be used."""
    kv = SqliteKeyValue()
    persistence = StatePersistence(kv)
    await persistence.save("wf-123", await collected(shop))
    assert await resumed(shop, await persistence.load("wf-123")) == Ok({"user": "Ana", "posts": 1})
    assert await persistence.delete("wf-123")
    kv.close()


async def test_is_step_complete(shop: Shop) -> None:
    """It can be called before anything runs; without a state, no step is complete."""
    persistence = StatePersistence(MemoryKeyValue())
    assert not is_step_complete(await persistence.load("wf-123"), "user:1")
    await persistence.save("wf-123", await collected(shop))
    assert is_step_complete(await persistence.load("wf-123"), "user:1")


async def test_recovering_from_a_crash(shop: Shop) -> None:
    """Save after each important step; the next process continues from the last save."""
    persistence = StatePersistence(MemoryKeyValue())
    collector = ResumeStateCollector()

    async def with_checkpoints(step: Step, shop: Shop) -> dict[str, Any]:
        user = await step("fetch_user", lambda: shop.fetch_user("1"), key="user:1")
        await persistence.save("wf-123", collector.resume_state())
        posts = await step("fetch_posts", lambda: shop.fetch_posts("1"), key="posts:1")
        return {"user": user["name"], "posts": len(posts)}

    async def process() -> Result[Any, Any]:
        state = await persistence.load("wf-123")
        workflow = Workflow("w", shop, on_event=collector.handle_event)
        return await workflow.run(with_checkpoints, resume_state=state)

    shop.down.add("fetch_posts")
    assert not (await process()).ok
    shop.down.clear()
    collector.clear()
    assert await process() == Ok({"user": "Ana", "posts": 1})
    assert shop.calls == ["fetch_user", "fetch_posts", "fetch_posts"]
    assert list(collector.resume_state().steps) == ["user:1", "posts:1"]


async def test_failures_are_part_of_the_state(shop: Shop) -> None:
    """They are replayed too, unless they are removed."""
    shop.down.add("fetch_posts")
    state = await collected(shop)
    shop.down.clear()
    assert not (await resumed(shop, state)).ok
    successes = {key: entry for key, entry in state.steps.items() if entry.result.ok}
    assert (await resumed(shop, ResumeState(successes))).ok


async def test_a_snapshot_is_not_a_resume_state(shop: Shop) -> None:
    """Passing one for the other is an error that says so."""
    workflow = Workflow("w", shop)
    await workflow.run(user_and_posts)
    with pytest.raises(StateFormatError, match="pass it as snapshot="):
        await Workflow("w", shop).run(user_and_posts, resume_state=workflow.snapshot())  # type: ignore[arg-type]


async def test_a_complete_program(shop: Shop) -> None:
    """Load, run with a checkpoint after each step, save: a program that can crash anywhere."""
    persistence = StatePersistence(MemoryKeyValue())

    async def run_with_recovery(workflow_id: str) -> Result[Any, Any]:
        collector = ResumeStateCollector()

        async def purchase(step: Step, shop: Shop) -> Any:
            user = await step("fetch_user", shop.fetch_user, "1", key="user:1")
            await persistence.save(workflow_id, collector.resume_state())
            payment = await step("pay", shop.process_payment, user["id"], 100, key="payment:1")
            await persistence.save(workflow_id, collector.resume_state())
            await step("confirm", shop.send_confirmation, user["email"], payment["id"])
            return payment["id"]

        workflow = Workflow("purchase", shop, on_event=collector.handle_event)
        state = await persistence.load(workflow_id)
        result = await workflow.run(purchase, resume_state=state)
        if result.ok:
            await persistence.save(workflow_id, collector.resume_state())
        return result

    shop.down.add("send_confirmation")
    assert not (await run_with_recovery("wf-1")).ok
    shop.down.clear()
    assert await run_with_recovery("wf-1") == Ok("p-1")
    assert shop.calls.count("process_payment") == 1
