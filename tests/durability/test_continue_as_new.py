"""`step.continue_as_new`: a run begins again with another payload, and stays small."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime, Step, Worker, Workflow, codec, workflow
from perdure.errors import InvalidPayload, PerdureError, RunConflict
from perdure.stores import sqlite
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock, explore_crashes
from tests.durability.test_laws import SlowStore

MakeRuntime = Callable[..., Runtime]


async def add(total: int, amount: int) -> int:
    return total + amount


@workflow("countdown")
async def countdown(step: Step, n: int) -> str:
    left = await step("subtract", add, n, -1)
    if left:
        await step.continue_as_new(left)
    return "liftoff"


async def test_a_run_continues_with_another_payload(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    """The records of earlier generations are gone."""
    run = await make_runtime(countdown).trigger(countdown, 5, run_id="c")
    assert (run.status, run.output, run.payload) == ("completed", "liftoff", 1)
    assert [step.key for step in run.history] == ["subtract"]
    snapshot = await store.load("c")
    assert snapshot is not None
    assert snapshot["metadata"]["generation"] == 5


async def test_a_repeated_trigger_finds_the_run(make_runtime: MakeRuntime) -> None:
    """It has the payload of the first generation."""
    runtime = make_runtime(countdown)
    await runtime.trigger(countdown, 5, run_id="c")
    run = await runtime.trigger(countdown, 5, run_id="c")
    assert (run.output, run.payload) == ("liftoff", 1)
    with pytest.raises(RunConflict):
        await runtime.trigger(countdown, 1, run_id="c")


async def test_nothing_after_the_call_runs(make_runtime: MakeRuntime) -> None:
    """Handlers of exceptions do not see it; `finally` runs, as at a suspension."""
    observations: list[str] = []

    @workflow("once")
    async def once(step: Step, again: bool) -> None:
        try:
            if again:
                await step.continue_as_new(False)
                observations.append("after")
        except Exception:  # noqa: BLE001  # that is the point
            observations.append("handler")
        finally:
            observations.append("finally")

    await make_runtime(once).trigger(once, True)
    assert observations == ["finally", "finally"]


async def test_idempotency_keys_belong_to_a_generation(make_runtime: MakeRuntime) -> None:
    """A monthly loop must not use one payment key twice."""
    keys: list[str] = []

    @workflow("monthly")
    async def monthly(step: Step, month: int) -> None:
        await step("pay", lambda: keys.append(step.idempotency_key))
        if month < 3:
            await step.continue_as_new(month + 1)

    await make_runtime(monthly).trigger(monthly, 1)
    assert len(set(keys)) == 3


async def test_no_event_is_lost_or_received_twice(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """Events wait in the inbox for the next generation."""

    @workflow("sum")
    async def total(step: Step, so_far: int) -> int:
        for number in range(3):
            amount = await step.wait_for_event(f"n{number}", "add")
            if amount is None:
                return so_far
            so_far += amount
        return await step.continue_as_new(so_far)

    runtime = make_runtime(total)
    run = await runtime.trigger(total, 0, run_id="sum")
    for amount in range(1, 21):
        await runtime.signal("sum", "add", amount, wait=False)
    result = await runtime.signal("sum", "add", None)
    run = result.run or run
    assert (run.status, run.output) == ("completed", 210)


async def test_an_event_that_a_race_did_not_use_is_kept() -> None:
    """It was consumed by a wait that lost the race: the next generation receives it."""

    @workflow("race")
    async def race(step: Step, so_far: list[Any]) -> list[Any]:
        if not so_far:
            winner, value = await step.race(
                "first",
                {
                    "event": lambda: step.wait_for_event("approval", "approved"),
                    "late": lambda: step.sleep("late", 0.2),
                },
            )
            await step.continue_as_new([winner, value])
        return [*so_far, await step.wait_for_event("again", "approved", timeout=1)]

    runtime = Runtime(SlowStore(0.1), workflows=[race], suspend_after=10)
    task = asyncio.create_task(runtime.trigger(race, [], run_id="r"))
    await asyncio.sleep(0.25)
    assert await runtime.signal("r", "approved", "by ana", wait=False)
    assert (await task).output in [["late", None, "by ana"], ["event", "by ana", None]]


async def test_every_crash_leaves_the_same_outcome() -> None:
    """Before and after each store call; no generation is skipped or repeated."""
    report = await explore_crashes(countdown, 3)
    assert report.crashes > 8


async def test_a_run_that_continues_is_cancelled_and_drained_like_any_other(
    store: MemoryStore, clock: TestClock
) -> None:
    """Such a run never ends on its own."""

    @workflow("forever")
    async def forever(step: Step, n: int) -> None:
        await step("count", add, n, 1)
        await step.continue_as_new(n + 1)

    runtime = Runtime(store, workflows=[forever], clock=clock)
    async with Worker(runtime, grace=0):
        await runtime.trigger(forever, 0, run_id="f", wait=False)
        while (run := await runtime.get_run("f")) is None or run.payload < 10:
            await asyncio.sleep(0)
    run = await runtime.get_run("f")
    assert run is not None
    assert not run.over
    assert (await runtime.cancel("f")).status == "cancelled"


async def test_the_payload_is_checked_where_it_is_passed(make_runtime: MakeRuntime) -> None:
    """The function can still handle the error."""

    @workflow("typed")
    async def typed(step: Step, n: int) -> str:
        try:
            await step.continue_as_new("seven")
        except InvalidPayload as error:
            return str(error)

    run = await make_runtime(typed).trigger(typed, 1)
    assert "payload of workflow 'typed' is not valid" in str(run.output)


async def test_a_step_of_another_branch_ends_first(make_runtime: MakeRuntime) -> None:
    """It is not interrupted, and the branch begins no other step."""
    finished_steps: list[str] = []

    @workflow("busy")
    async def busy(step: Step, again: bool) -> None:
        async def slow() -> None:
            await asyncio.sleep(0.01)
            finished_steps.append("slow")

        async def branch() -> None:
            await step("slow", slow)
            await step("next", lambda: finished_steps.append("next"))

        if again:
            working = asyncio.create_task(branch())
            await asyncio.sleep(0)
            await step.continue_as_new(False)
            await working

    run = await make_runtime(busy).trigger(busy, True)
    assert (run.status, finished_steps) == ("completed", ["slow"])


async def test_a_transaction_of_another_branch_is_rolled_back(tmp_path: Path) -> None:
    """Its record would not be in the next generation, so what it wrote must not be there either."""
    path = tmp_path / "bank.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE moves (n INTEGER)")
    has_written = asyncio.Event()

    async def move(connection: Any) -> None:
        await connection.execute("INSERT INTO moves VALUES (1)")
        has_written.set()
        await asyncio.sleep(0.05)

    @workflow("money")
    async def money(step: Step, again: bool) -> str:
        if again:
            working = asyncio.create_task(step.transaction("move", move))
            await has_written.wait()
            await step.continue_as_new(False)
            await working
        return "done"

    async with sqlite(path) as store:
        run = await Runtime(store, workflows=[money]).trigger(money, True)
    with closing(sqlite3.connect(path)) as database:
        moves = database.execute("SELECT n FROM moves").fetchall()
    assert (run.output, moves) == ("done", [])


class PausedLoads(MemoryStore):
    """A store that delays its answers about the run `child`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def load(self, id: str, /) -> Any:
        if id == "child":
            self.asked.set()
            await self.may_answer.wait()
        return await super().load(id)


async def test_a_child_that_is_being_started_is_not_left_behind() -> None:
    """The next generation does not know it, and could not cancel it."""
    store = PausedLoads()

    @workflow("parent")
    async def parent(step: Step, generation: int) -> None:
        async def continue_meanwhile() -> None:
            await store.asked.wait()
            asyncio.get_running_loop().call_soon(store.may_answer.set)
            await step.continue_as_new(generation + 1)

        if generation == 1:
            start = step.start("start", countdown, 1, run_id="child")
            await asyncio.gather(start, continue_meanwhile())

    run = await Runtime(store, workflows=[parent, countdown]).trigger(parent, 1, run_id="p")
    assert (run.status, run.payload) == ("completed", 2)
    assert await store.load("child") is None


async def test_a_workflow_without_a_store_says_what_is_missing() -> None:
    """There is nothing to begin again."""

    async def again(step: Step) -> None:
        await step.continue_as_new()

    result = await Workflow("again", {}).run(again)
    with pytest.raises(PerdureError, match="needs a Runtime"):
        result.unwrap()


async def test_each_generation_costs_the_same(store: MemoryStore, clock: TestClock) -> None:
    """Three writes and the same number of bytes, however many came before."""
    counted = FaultyStore(store)
    runtime = Runtime(counted, workflows=[countdown], clock=clock)
    await runtime.trigger(countdown, 9, run_id="few")
    few = len(counted.calls)
    await runtime.trigger(countdown, 99, run_id="many")
    assert len(counted.calls) - few == 11 * few
    sizes = [len(codec.dumps(await store.load(run_id))) for run_id in ("few", "many")]
    assert sizes[1] - sizes[0] < 10, "only the numbers have more digits"
