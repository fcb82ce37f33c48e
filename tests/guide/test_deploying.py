"""Changing the code of workflows whose runs are under way."""

from perdure import Runtime, Step, workflow
from perdure.stores import MemoryStore
from perdure.testing import replay_snapshot


async def charge(order: int) -> str:
    return f"charged {order}"


async def check(order: int) -> bool:
    return True


@workflow("order")
async def before(step: Step, order: int) -> str:
    receipt = await step("charge", charge, order)
    await step.wait_for_event("shipped", "shipped")
    return receipt


@workflow("order")
async def after(step: Step, order: int) -> str:
    if step.patched("check-first"):
        await step("check", check, order)
    receipt = await step("charge", charge, order)
    await step.wait_for_event("shipped", "shipped")
    return receipt


async def test_a_run_that_was_past_a_patch_keeps_the_old_code() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[before]).trigger(before, 1, run_id="old")
    runtime = Runtime(store, workflows=[after], on_definition_change="ignore")
    await runtime.trigger(after, 2, run_id="new")
    old, new = [(await runtime.signal(id, "shipped")).run for id in ("old", "new")]
    assert old is not None
    assert new is not None
    assert [step.key for step in old.history] == ["charge", "shipped"]
    assert [step.key for step in new.history] == ["check", "charge", "shipped"]


async def test_stored_runs_are_replayed_before_a_deployment() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[before]).trigger(before, 1, run_id="old")
    snapshot = await store.load("old")
    assert snapshot is not None
    replay = await replay_snapshot(after, snapshot)
    assert (replay.fits, replay.next) == (True, ("shipped",))


async def test_live_runs_are_counted_by_version() -> None:
    @workflow("order", version=2)
    async def second(step: Step, order: int) -> str:
        await step.wait_for_event("shipped", "shipped")
        return "shipped"

    runtime = Runtime(MemoryStore(), workflows=[before, second])
    await Runtime(runtime.store, workflows=[before]).trigger(before, 1)
    await runtime.trigger(second, 2)
    assert (await runtime.versions("order")).totals == {1: 1, 2: 1}
