"""Every possible crash, before and after every store call, for many shapes of workflow."""

import asyncio
import logging
from datetime import timedelta
from itertools import count, cycle
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from perdure import Cron, Err, Ok, Result, Retry, Run, Runtime, Step, durable, workflow
from perdure.errors import InvalidArgument
from perdure.runtime.definition import Definition
from perdure.stores import sqlite
from perdure.testing import CrashFound, explore_crashes


async def double(x: int) -> int:
    return x * 2


async def refuse(x: int) -> int:
    raise ValueError(f"no {x}")


@workflow("sequential")
async def sequential(step: Step, payload: int) -> int:
    a = await step("a", double, payload)
    b = await step("b", double, a)
    return await step("c", double, b)


@workflow("parallel")
async def parallel(step: Step, payload: int) -> list[int]:
    async def branch(start: int) -> int:
        first = await step("work", double, start)
        return await step("work", double, first)

    return list(await asyncio.gather(branch(payload), branch(payload + 1), branch(payload + 2)))


@workflow("group")
async def group(step: Step) -> list[int]:
    async with asyncio.TaskGroup() as tasks:
        ones = [tasks.create_task(step("one", double, n)) for n in range(3)]
    return [one.result() for one in ones]


@workflow("loop")
async def loop(step: Step) -> int:
    total = 0
    for n in range(4):
        total += await step("add", double, n)
    return total


@workflow("sleeps")
async def sleeps(step: Step) -> str:
    await step.sleep("nap", timedelta(days=1))
    await step("between", double, 1)
    await step.sleep("until nine", Cron("0 9 * * *", tz="Europe/Berlin"))
    return "rested"


@workflow("events")
async def events(step: Step) -> list[Any]:
    first = await step.wait_for_event("first", "go")
    await step("between", double, 2)
    late = await step.wait_for_event("never", "missing", timeout="2h")
    return [first, late]


@workflow("many waits")
async def many_waits(step: Step) -> list[Any]:
    waits = step.sleep("nap", "1h"), step.wait_for_event("go", "go")
    return list(await asyncio.gather(*waits, step("beside", double, 4)))


@workflow("race")
async def race(step: Step) -> tuple[str, Any]:
    return await step.race(
        "first",
        {
            "approved": lambda: step.wait_for_event("approval", "missing"),
            "late": lambda: step.sleep("limit", "3d"),
        },
    )


@workflow("retries")
async def retries(step: Step) -> int:
    async def flaky() -> int:
        if step.attempt < 3:
            raise ConnectionError("not yet")
        return step.attempt

    return await step("flaky", flaky, retry=Retry(attempts=3, delay="10s", jitter=False))


@workflow("caught")
async def caught(step: Step) -> str:
    try:
        await step("refused", refuse, 1)
    except ValueError as error:
        return await step("fallback", str.upper, str(error))
    return "unreachable"


@workflow("uncaught")
async def uncaught(step: Step) -> int:
    await step("fine", double, 1)
    return await step("refused", refuse, 2)


@workflow("returned error")
async def returned_error(step: Step) -> int:
    async def find() -> Err[str]:
        return Err("NOT_FOUND")

    return await step("find", find)


@workflow("all and map")
async def all_and_map(step: Step) -> tuple[dict[str, Any], list[int]]:
    both = await step.all({"x": lambda: double(1), "y": lambda: double(2)})
    mapped = await step.map("m", range(3), double, concurrency=2)
    return both, mapped


@workflow("calls at once")
async def calls_at_once(step: Step) -> tuple[Any, ...]:
    async def line(n: int) -> int:
        return await step("line", double, n) + await step("line", double, n)

    both = await step.all(step("x", double, 1), step.wait_for_event("go", "go"), line(3))
    return *both, await step.map("m", "ab", str.upper, key=str.title, on_error="collect")


@workflow("race of calls")
async def race_of_calls(step: Step) -> list[Any]:
    never = step.wait_for_event("a", "missing"), step.wait_for_event("b", "missing")
    late = await step.race("late", never[0], step.sleep("limit", "3d"), step.all(never[1]))
    missing, go = step.wait_for_event("c", "missing"), step.wait_for_event("go", "go")
    soon = await step.race("soon", step.race("inner", missing), go)
    return [late, soon, await step.wait_for_event("again", "go")]


@durable.step
async def charge(cents: int, *, currency: str = "EUR") -> str:
    return f"{cents} {currency}"


@durable.step(retry=Retry(attempts=3, delay="10s", jitter=False), name="find")
async def find_later(n: int) -> Result[int, str]:
    return Ok(n) if durable.current().attempt == 3 else Err("NOT_YET")


@workflow("plain calls")
async def plain_calls(step: Step) -> list[Any]:
    return [await charge(1), await charge(2, currency="USD"), await find_later(3)]


@workflow("plain calls at once")
async def plain_calls_at_once(step: Step) -> list[Any]:
    gathered = await asyncio.gather(charge(1), charge(2))
    async with asyncio.TaskGroup() as tasks:
        grouped = [tasks.create_task(charge(n)) for n in (3, 4)]
    return [*gathered, *(task.result() for task in grouped), *await step.all(charge(5), charge(6))]


@workflow("plain calls in a map and a race")
async def plain_calls_in_others(step: Step) -> list[Any]:
    mapped = await step.map("each", [1, 2], charge)
    return [*mapped, *await step.race("r", charge(3), step.wait_for_event("never", "missing"))]


SHAPES: list[Definition[Any, Any]] = [
    sequential, parallel, group, loop, sleeps, events, many_waits, race, retries, caught,
    uncaught, returned_error, all_and_map, calls_at_once, race_of_calls, plain_calls,
    plain_calls_at_once, plain_calls_in_others,
]  # fmt: skip


@pytest.mark.parametrize("always_replay", [False, True], ids=["straight", "always_replay"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_a_crash_at_any_store_call_changes_nothing(
    shape: Definition[Any, Any], always_replay: bool
) -> None:
    """The run ends as it would have ended without the crash."""
    payload = 3 if shape.takes_payload else None
    report = await explore_crashes(
        shape, payload, events={"go": {"by": "ana"}}, always_replay=always_replay
    )
    assert report.crashes > 4


async def test_items_of_a_map_may_end_in_any_order() -> None:
    """Those with keys of their own are recorded in one branch."""
    turn = cycle([1, 0, 0, 1])

    async def wait_in_turn(item: str) -> str:
        for _ in range(next(turn)):
            await asyncio.sleep(0)
        return item

    @workflow("map")
    async def mapped(step: Step) -> list[str]:
        return await step.map("m", "ab", wait_in_turn, key=str)

    assert (await explore_crashes(mapped)).crashes > 4


@workflow("transactional")
async def transactional(step: Step) -> int:
    async def pay(connection: Any, amount: int) -> int:
        await connection.execute("CREATE TABLE IF NOT EXISTS paid (amount INTEGER)")
        await connection.execute("INSERT INTO paid VALUES (?)", (amount,))
        ((count,),) = await connection.fetchall("SELECT COUNT(*) FROM paid")
        return int(count)

    before = await step("before", double, 1)
    paid = await step.transaction("pay", pay, before)
    return await step("after", double, paid)


async def test_a_crash_never_repeats_a_committed_transaction() -> None:
    """Its writes and its record are stored together or not at all: there is one row after any
    crash.
    """
    async with sqlite(":memory:") as store:
        run = await Runtime(store, workflows=[transactional]).trigger(transactional)
        assert run.output == 2
    report = await explore_crashes(
        transactional, store=lambda clock: sqlite(":memory:", clock=clock)
    )
    report.assert_once("pay")
    assert set(report.doubled) == {"before", "after"}


async def test_the_report_names_steps_that_ran_twice() -> None:
    """A crash between a step's work and its record makes a plain step run again."""
    report = await explore_crashes(sequential, 1)
    assert report.doubled == {"a": 1, "b": 1, "c": 1}
    assert report.repeats["b"] == ["a crash before store call 3 of 5 (append)"]


async def test_parallel_calls_of_one_id_are_not_counted_as_repeats() -> None:
    """Six calls have the id `work`. Each runs again after one crash, and none after the others."""
    report = await explore_crashes(parallel, 3)
    assert report.doubled == {"work": 6}


async def test_a_step_that_lost_a_race_is_not_counted() -> None:
    """It is cancelled with and without a crash."""

    @workflow("raced")
    async def raced(step: Step) -> tuple[str, Any]:
        slow = asyncio.Event()
        return await step.race(
            "first", {"slow": lambda: step("slow", slow.wait), "quick": lambda: double(1)}
        )

    report = await explore_crashes(raced)
    assert "slow" in report.steps
    assert report.doubled == {}


async def test_assert_once_names_the_crashes_after_which_a_step_ran_again() -> None:
    """A plain step is only guaranteed to run at least once."""
    report = await explore_crashes(sequential, 1)
    with pytest.raises(AssertionError) as raised:
        report.assert_once("b")
    assert str(raised.value) == (
        "step 'b' ran again after\n  a crash before store call 3 of 5 (append)"
    )


async def test_assert_once_refuses_a_step_that_never_ran() -> None:
    """A misspelt id is an error."""
    report = await explore_crashes(sequential, 1)
    with pytest.raises(InvalidArgument, match="'a', 'b', 'c'"):
        report.assert_once("charge")


async def test_a_workflow_that_is_not_deterministic_is_found() -> None:
    """A result that differs after a crash is reported."""
    lives = count()

    @workflow("forgetful")
    async def forgetful(step: Step) -> list[int]:
        await step("a", double, 1)
        return [*range(1000), next(lives)]

    with pytest.raises(CrashFound, match="before store call 1 of 3") as raised:
        await explore_crashes(forgetful)
    lines = str(raised.value).splitlines()
    assert [line for line in lines[3:] if line[0] in "+-"] == [
        "-    output:  997, 998, 999, 0]",
        "+    output:  997, 998, 999, 1]",
    ]
    assert max(map(len, lines)) <= 100


async def test_a_long_diff_is_shortened() -> None:
    lives = count()

    @workflow("growing")
    async def growing(step: Step) -> list[list[int]]:
        life = next(lives)
        return [[life] * 30] * 1000

    with pytest.raises(CrashFound, match=r"… and \d+ more lines$") as raised:
        await explore_crashes(growing)
    assert len(str(raised.value).splitlines()) == 22


@workflow("stamped")
async def stamped(step: Step) -> str:
    return await step("stamp", lambda: str(uuid4()))


async def test_comparing_the_shape_ignores_values() -> None:
    """A step that returns the time or a new id is still deterministic."""
    with pytest.raises(CrashFound, match="stamp"):
        await explore_crashes(stamped)
    report = await explore_crashes(stamped, compare="shape")
    assert report.doubled == {"stamp": 1}


async def test_comparing_the_shape_finds_other_steps() -> None:
    """Another step, another branch or another outcome is a different shape."""
    lives = count()

    @workflow("moody")
    async def moody(step: Step) -> None:
        await step(f"step {next(lives)}", double, 1)

    with pytest.raises(CrashFound, match="step 0"):
        await explore_crashes(moody, compare="shape")


async def test_a_function_can_compare_both_runs() -> None:
    """Its error is reported with the crash."""
    observations: list[tuple[object, object]] = []

    def compare(clean: Run, survived: Run) -> None:
        observations.append((clean.output, survived.output))
        assert clean.output == survived.output, "another stamp"

    with pytest.raises(CrashFound, match=r"after a crash before store call 1 .*: another stamp"):
        await explore_crashes(stamped, compare=compare)
    assert len(observations) == 1


async def test_an_unknown_comparison_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="shape"):
        await explore_crashes(stamped, compare="all")  # type: ignore[arg-type]


async def test_simulated_crashes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of lines about simulated crashes would hide an unexpected one."""
    await explore_crashes(many_waits, events={"go": 1})
    assert caplog.records == []


async def test_a_warning_that_occurs_without_a_crash_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not repeated for each simulated crash."""

    @workflow("lossy")
    async def lossy(step: Step) -> object:
        return await step("lossy", lambda: SimpleNamespace(a=1))

    await explore_crashes(lossy)
    assert len([record for record in caplog.records if "lossy" in record.getMessage()]) == 1


async def test_an_error_that_only_a_crash_causes_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("perdure.runtime")
    lives = count()

    @workflow("complaining")
    async def complaining(step: Step) -> None:
        if next(lives) == 2:
            logger.error("something else is wrong")
        await step("a", double, 1)

    await explore_crashes(complaining)
    assert [record.getMessage() for record in caplog.records] == ["something else is wrong"]
