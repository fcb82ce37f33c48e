"""Long delays between the attempts of a step: the run leaves memory, and the count survives."""

import asyncio
import gc
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure import Err, Ok, Retry, Runtime, Step, Worker, Workflow, durable, workflow
from perdure.durable.host import RunHost
from perdure.engine.execution import Execution
from perdure.engine.history import History
from perdure.events import Event, StepRetry
from perdure.stores import sqlite
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock, explore_crashes

MakeRuntime = Callable[..., Runtime]

HOURLY = Retry(4, backoff="fixed", delay="1h", max_delay="1h", jitter=False)


class Flaky:
    """A service that fails for the first calls."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts: list[int] = []

    def workflow(self, retry: Retry = HOURLY) -> Any:
        async def call(step: Step) -> str:
            self.attempts.append(step.attempt)
            if len(self.attempts) <= self.failures:
                raise ConnectionError(f"refused {len(self.attempts)}")
            return "done"

        @workflow("call")
        async def call_service(step: Step) -> str:
            return await step("call", lambda: call(step), retry=retry)

        return call_service


async def test_a_long_delay_suspends_the_run_and_shows_why(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """The attempt, its error and the time of the next attempt are in `run.pending`."""
    flaky = Flaky(1)
    run = await make_runtime(flaky.workflow()).trigger("call")
    assert run.status == "suspended"
    (wait,) = run.pending
    assert (wait.id, wait.attempt, wait.error) == ("call", 1, "ConnectionError: refused 1")
    assert wait.wake_at == clock.now() + timedelta(hours=1)


async def test_another_process_continues_the_count(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """A deployment does not start it again."""
    flaky = Flaky(2)
    run = await make_runtime(flaky.workflow()).trigger("call")
    for _ in range(2):
        await clock.advance("1h")
        (run,) = await make_runtime(flaky.workflow()).sweep()
    assert flaky.attempts == [1, 2, 3]
    assert (run.output, run.history[0].attempts, run.pending) == ("done", 3, ())


async def test_the_last_attempt_fails_the_step(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """However many processes the attempts were made in."""
    flaky = Flaky(9)
    run = await make_runtime(flaky.workflow()).trigger("call")
    while not run.over:
        await clock.advance("1h")
        (run,) = await make_runtime(flaky.workflow()).sweep()
    assert flaky.attempts == [1, 2, 3, 4]
    assert str(run.error) == "refused 4"


async def test_a_short_delay_is_spent_in_memory(make_runtime: MakeRuntime) -> None:
    """The run ends without being suspended."""
    flaky = Flaky(2)
    retry = Retry(3, backoff="fixed", delay=0, max_delay=0, jitter=False)
    run = await make_runtime(flaky.workflow(retry)).trigger("call")
    assert (run.output, flaky.attempts) == ("done", [1, 2, 3])


async def test_a_crash_during_an_attempt_repeats_that_attempt(
    store: MemoryStore, clock: TestClock
) -> None:
    """The delay before it is over and not waited for again."""
    flaky = Flaky(1)
    await Runtime(store, workflows=[flaky.workflow()], clock=clock).trigger("call", run_id="r")
    await clock.advance("1h")
    hanging: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @workflow("call")
    async def hang(step: Step) -> None:
        await step("call", lambda: hanging, retry=HOURLY)

    task = asyncio.ensure_future(Runtime(store, workflows=[hang], clock=clock).sweep())
    await clock.advance(1)
    task.cancel()
    await asyncio.wait([task])
    (run,) = await Runtime(store, workflows=[flaky.workflow()], clock=clock).sweep()
    assert (run.output, flaky.attempts) == ("done", [1, 2])


async def test_a_wait_for_an_attempt_ends_with_its_branch(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """A race that the other branch wins leaves no wait behind."""
    flaky = Flaky(9)

    @workflow("race")
    async def race(step: Step) -> str:
        call = flaky.workflow()
        winner, _ = await step.race(
            "first", {"call": lambda: call(step), "late": lambda: step.sleep("late", "10m")}
        )
        await step.sleep("after", "1d")
        return winner

    run = await make_runtime(race).trigger(race)
    assert {wait.id for wait in run.pending} == {"first>/call/call", "first>/late/late"}
    await clock.advance("10m")
    (run,) = await make_runtime(race).sweep()
    assert [wait.id for wait in run.pending] == ["after"]


async def test_a_thousand_waiting_runs_hold_nothing(store: MemoryStore, clock: TestClock) -> None:
    """The worker has all its slots for other runs, and nothing of the waiting ones in memory."""
    kinds = (Execution, History, RunHost)
    # What earlier tests have left stays where it is as long as it is referred to here.
    before = [item for item in gc.get_objects() if type(item) in kinds]
    flaky = Flaky(1000)
    runtime = Runtime(store, workflows=[flaky.workflow()], clock=clock)
    async with Worker(runtime, concurrency=20) as worker:
        for number in range(1000):
            await runtime.trigger("call", run_id=f"run-{number}", wait=False)
        while len(flaky.attempts) < 1000 or worker.running:
            await clock.advance(1)
        assert (await store.stats()).by_status == {"suspended": 1000}
        gc.collect()
        live_objects = [item for item in gc.get_objects() if type(item) in kinds]
        assert (worker.running, len(live_objects)) == (0, len(before))


async def test_every_crash_leaves_the_same_outcome() -> None:
    """Before and after each store call, with attempts in between."""
    failures = {"left": 2}

    async def call() -> str:
        if failures["left"]:
            failures["left"] -= 1
            raise ConnectionError("refused")
        failures["left"] = 2
        return "done"

    @workflow("call")
    async def call_service(step: Step) -> str:
        return await step("call", call, retry=Retry(9, delay="1h", max_delay="1d", jitter=False))

    def same(clean: Any, survived: Any) -> None:
        assert survived.output == clean.output == "done"

    report = await explore_crashes(call_service, compare=same)
    assert report.crashes > 4


async def test_durable_run_continues_the_count(clock: TestClock) -> None:
    """It stays in memory, but a crash does not start the count again."""
    store, attempts = MemoryStore(clock=clock), list[int]()

    async def call(step: Step) -> str:
        async def attempt() -> str:
            attempts.append(step.attempt)
            if len(attempts) < 3:
                raise ConnectionError("refused")
            return "done"

        return await step("call", attempt, retry=HOURLY)

    task = asyncio.ensure_future(durable.run({}, call, id="a", store=store, clock=clock))
    await clock.advance("90m")
    task.cancel()
    await asyncio.wait([task])
    await clock.advance("90m")
    assert await durable.run({}, call, id="a", store=store, clock=clock) == Ok("done")
    assert attempts == [1, 2, 3]


async def test_a_workflow_in_this_process_keeps_the_count_in_its_snapshot() -> None:
    """A snapshot that was taken during a delay contains the wait."""
    clock, flaky = TestClock(), Flaky(1)
    first = Workflow("call", {}, clock=clock)
    task = asyncio.ensure_future(first.run(flaky.workflow().fn))
    await clock.advance("10m")
    snapshot = first.snapshot()
    task.cancel()
    await asyncio.wait([task])
    await clock.advance("50m")
    second = Workflow("call", {}, snapshot=snapshot, clock=clock)
    assert await second.run(flaky.workflow().fn) == Ok("done")
    assert flaky.attempts == [1, 2]


async def test_each_attempt_of_a_transaction_has_its_own(tmp_path: Path) -> None:
    """What a failed attempt wrote is rolled back."""
    path, retries = tmp_path / "bank.db", list[Event]()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE moves (n INTEGER)")

    async def move(connection: Any, amount: int) -> int | Err[str]:
        await connection.execute("INSERT INTO moves VALUES (?)", (amount,))
        if len(retries) < 2:
            if not retries:
                raise TimeoutError("locked")
            return Err("conflict")
        return amount

    @workflow("move")
    async def money(step: Step) -> Any:
        return await step.transaction("move", move, 7, retry=Retry(3, delay=0, jitter=False))

    async with sqlite(path) as store:
        keep = lambda event: retries.append(event) if isinstance(event, StepRetry) else None  # noqa: E731
        run = await Runtime(store, workflows=[money], on_event=keep).trigger(money)
    assert (run.output, run.history[0].attempts) == (7, 3)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT n FROM moves").fetchall() == [(7,)]
