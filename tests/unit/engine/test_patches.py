"""`step.patched`: whether a branch has been past a place with the old code."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Ok, Step
from perdure.errors import InvalidArgument, PerdureError
from perdure.snapshot import Snapshot
from tests.unit.engine.bodies import error_of, run, single, workflow


async def return_value(value: object = None) -> object:
    return value


Body = Callable[[Step], Awaitable[Any]]


async def recorded_by(body: Body) -> Snapshot:
    """Return the snapshot of a run of the old code that has not ended: its outcome is dropped."""
    old = workflow()
    await old.run(body)
    snapshot = old.snapshot()
    snapshot["execution"] = {"status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z"}
    return snapshot


async def test_a_run_that_begins_with_the_new_code_is_patched() -> None:
    async def body(step: Step) -> tuple[bool, bool]:
        first = step.patched("check")
        await step("a", return_value)
        return first, step.patched("check")

    assert await run(body) == Ok((True, True))


async def test_a_run_that_was_past_the_place_is_not_patched() -> None:
    async def body(step: Step) -> bool:
        is_new = step.patched("check")
        await step("a", return_value)
        return is_new

    old = await recorded_by(single(lambda step: step("a", return_value)))
    assert await run(body, snapshot=old) == Ok(value=False)


async def test_a_run_that_has_not_come_to_the_place_is_patched() -> None:
    async def body(step: Step) -> bool:
        await step("a", return_value)
        return step.patched("check")

    old = await recorded_by(single(lambda step: step("a", return_value)))
    assert await run(body, snapshot=old) == Ok(value=True)


async def test_the_answer_does_not_change_when_the_records_ahead_are_passed() -> None:
    async def body(step: Step) -> tuple[bool, bool, bool]:
        before = step.patched("check")
        await step("a", return_value)
        return before, step.patched("check"), step.patched("another")

    old = await recorded_by(single(lambda step: step("a", return_value)))
    first = workflow(snapshot=old)
    assert await first.run(body) == Ok((False, False, True))
    assert await run(body, snapshot=first.snapshot()) == Ok((False, False, True))
    assert await run(body, snapshot=first.snapshot(metadata={"user": 1})) == Ok(
        (False, False, True)
    )


async def test_the_second_call_of_a_step_is_ahead_of_the_first() -> None:
    async def loop(step: Step) -> list[bool]:
        answers = []
        for n in range(3):
            answers.append(step.patched(f"check {n}"))
            await step("a", return_value)
        return answers

    async def twice(step: Step) -> None:
        await step("a", return_value)
        await step("a", return_value)

    assert await run(loop, snapshot=await recorded_by(twice)) == Ok([False, False, True])


async def test_each_branch_has_an_answer_of_its_own() -> None:
    """What another branch has recorded says nothing about this one."""

    async def part(step: Step, name: str) -> bool:
        is_new = step.patched("check")
        await step(name, return_value)
        return is_new

    async def old(step: Step) -> None:
        await asyncio.gather(asyncio.sleep(0), part_of(step))

    async def part_of(step: Step) -> None:
        await step("b", return_value)

    async def body(step: Step) -> tuple[Any, ...]:
        return *await asyncio.gather(part(step, "a"), part(step, "b")), step.patched("check")

    assert await run(body, snapshot=await recorded_by(old)) == Ok((True, False, True))


async def test_a_branch_that_is_yet_to_be_created_is_ahead() -> None:
    async def part(step: Step) -> None:
        await step("a", return_value)

    async def body(step: Step) -> tuple[bool, bool]:
        before = step.patched("before")
        await asyncio.gather(part(step))
        return before, step.patched("after")

    async def old(step: Step) -> None:
        await asyncio.gather(part(step))

    assert await run(body, snapshot=await recorded_by(old)) == Ok((False, True))


@pytest.mark.parametrize("id", ["pages", "5", "a/b", "x>"])
async def test_the_items_of_a_map_are_ahead_until_it_is_called(id: str) -> None:
    async def body(step: Step) -> tuple[bool, bool]:
        before = step.patched("before")
        await step.map(id, [1, 2], return_value)
        return before, step.patched("after")

    old = await recorded_by(single(lambda step: step.map(id, [1, 2], return_value)))
    assert await run(body, snapshot=old) == Ok((False, True))


@pytest.mark.parametrize("id", ["first", "5", "a/b"])
async def test_branches_that_lost_a_race_do_not_count(id: str) -> None:
    async def slow(step: Step) -> None:
        await step("lost", return_value)
        await asyncio.Event().wait()

    async def fast(step: Step) -> None:
        await step("x", return_value)
        await step("won", return_value)

    async def body(step: Step) -> tuple[bool, bool]:
        before = step.patched("before")
        await step.race(id, {"slow": lambda: slow(step), "fast": lambda: fast(step)})
        return before, step.patched("after")

    async def old(step: Step) -> None:
        await step.race(id, {"slow": lambda: slow(step), "fast": lambda: fast(step)})

    snapshot = await recorded_by(old)
    assert "lost" in snapshot["steps"]
    assert await run(body, snapshot=snapshot) == Ok((False, True))


async def test_a_race_that_is_not_decided_is_ahead() -> None:
    async def part(step: Step) -> None:
        await step("a", return_value)

    async def body(step: Step) -> bool:
        is_new = step.patched("check")
        await step.race("r", {"only": lambda: part(step)})
        return is_new

    async def old(step: Step) -> None:
        await step.race("r", {"only": lambda: part(step)})

    snapshot = await recorded_by(old)
    del snapshot["steps"]["r"]
    assert await run(body, snapshot=snapshot) == Ok(value=False)


async def test_an_explicit_key_is_ahead_of_the_branch_that_used_it() -> None:
    async def part(step: Step) -> bool:
        is_new = step.patched("check")
        await step("a", return_value, key="k")
        return is_new

    async def other(step: Step) -> bool:
        return step.patched("check")

    async def body(step: Step) -> tuple[Any, ...]:
        both = asyncio.gather(part(step), other(step))
        return step.patched("check"), *await both

    async def old(step: Step) -> None:
        await asyncio.gather(step_in(step))

    async def step_in(step: Step) -> None:
        await step("a", return_value, key="k")

    assert await run(body, snapshot=await recorded_by(old)) == Ok((True, False, True))


async def test_the_records_of_another_writer_are_ahead_until_they_are_asked_for() -> None:
    async def body(step: Step) -> tuple[bool, bool]:
        before = step.patched("before")
        await step("a", return_value)
        return before, step.patched("after")

    snapshot = await recorded_by(single(lambda step: asyncio.sleep(0)))
    snapshot["steps"]["a"] = {"ok": True, "value": 1}
    assert await run(body, snapshot=snapshot) == Ok((False, True))


async def test_a_patch_that_was_removed_leaves_a_harmless_record() -> None:
    async def patched(step: Step) -> None:
        assert step.patched("check")
        await step("a", return_value, 1)

    old = await recorded_by(patched)
    assert await run(single(lambda step: step("a", return_value, 1)), snapshot=old) == Ok(1)


@pytest.mark.parametrize("id", ["", "~check", 7])
async def test_a_bad_id_is_refused(id: Any) -> None:
    async def body(step: Step) -> bool:
        return step.patched(id)

    assert isinstance(error_of(await run(body)), InvalidArgument)


async def test_a_patch_inside_a_step_is_refused() -> None:
    async def body(step: Step) -> bool:
        return await step("a", lambda: step.patched("check"))

    error = error_of(await run(body))
    assert isinstance(error, PerdureError)
    assert "inside the function of step 'a'" in str(error)


@pytest.mark.parametrize("id", ["check", "a/b", "5", "ü🎉", "x" * 512])
async def test_ids_of_every_kind_are_kept_apart(id: str) -> None:
    async def body(step: Step) -> tuple[bool, bool]:
        is_new = step.patched(id)
        await step("a", return_value)
        return is_new, step.patched(id + "2")

    old = await recorded_by(single(lambda step: step("a", return_value)))
    assert await run(body, snapshot=old) == Ok((False, True))


async def test_asking_for_each_of_many_items_takes_linear_time() -> None:
    async def body(step: Step) -> int:
        answers = 0
        for n in range(3000):
            answers += step.patched(f"check {n}")
            await step(f"s{n}", return_value)
        return answers

    async def old(step: Step) -> None:
        for n in range(2999):
            await step(f"s{n}", return_value)

    async with asyncio.timeout(20):
        assert await run(body, snapshot=await recorded_by(old)) == Ok(1)
