"""The behaviour of the runtime, with and without a replay after every step."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from perdure import Cron, Err, Retry, Runtime, Step, workflow
from perdure.errors import Cancelled, InvalidPayload, RunNotFound, UnknownWorkflow, VersionMismatch
from perdure.store import Delivery, Grant, LeaseRequest
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

MakeRuntime = Callable[..., Runtime]


@dataclass
class Signup:
    email: str
    age: int = 18


@pytest.fixture
def effects() -> list[str]:
    return []


async def test_a_run_sleeps_waits_and_ends(
    make_runtime: MakeRuntime, clock: TestClock, effects: list[str]
) -> None:
    """A step, a sleep of a day, an approval, and the end."""

    async def create(email: str) -> str:
        effects.append(email)
        return "user-1"

    @workflow("welcome")
    async def welcome(step: Step, payload: Signup) -> str:
        user = await step("create", create, payload.email)
        await step.sleep("settle", timedelta(days=1))
        answer = await step.wait_for_event("approval", "approved", timeout="3d")
        return f"{user} by {answer['by']}"

    runtime = make_runtime(welcome)
    run = await runtime.trigger("welcome", {"email": "a@b.c"})
    assert run.status == "suspended"
    assert await runtime.sweep() == []
    await clock.advance("1d")
    (run,) = await make_runtime(welcome).sweep()
    assert run.status == "waiting"
    signalled = await make_runtime(welcome).signal(run.id, "approved", {"by": "ana"})
    assert signalled.run is not None
    assert (signalled.run.status, signalled.run.output) == ("completed", "user-1 by ana")
    assert effects == ["a@b.c"]


async def test_a_signal_before_the_wait_is_stored(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("early")
    async def early(step: Step) -> Any:
        await step.sleep("nap", "1h")
        return await step.wait_for_event("go", "go")

    runtime = make_runtime(early)
    run = await runtime.trigger(early)
    assert (await runtime.signal(run.id, "go", 7)).delivery is Delivery.DELIVERED
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert (run.status, run.output) == ("completed", 7)


async def test_a_signal_to_a_run_that_another_process_owns_is_stored(
    make_runtime: MakeRuntime, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("owned")
    async def owned(step: Step) -> Any:
        return await step.wait_for_event("go", "go")

    runtime = make_runtime(owned)
    run = await runtime.trigger(owned)
    (grant,) = await store.acquire([LeaseRequest(run.id, "other", timedelta(seconds=30))])
    assert isinstance(grant, Grant)
    signalled = await runtime.signal(run.id, "go", "hello")
    assert signalled.delivery is Delivery.DELIVERED
    assert signalled.run is not None
    assert not signalled.run.over
    await clock.advance("31s")
    (run,) = await runtime.sweep()
    assert run.output == "hello"


async def test_a_signal_sent_twice_with_one_dedup_id_counts_once(make_runtime: MakeRuntime) -> None:
    """The second one is a duplicate, even after the first was consumed."""

    @workflow("twice")
    async def twice(step: Step) -> list[Any]:
        return [await step.wait_for_event("one", "go"), await step.wait_for_event("two", "go")]

    runtime = make_runtime(twice)
    run = await runtime.trigger(twice)
    await runtime.signal(run.id, "go", 1, dedup_id="x")
    again = await runtime.signal(run.id, "go", 1, dedup_id="x")
    assert again.delivery is Delivery.DUPLICATE
    last = await runtime.signal(run.id, "go", 2, dedup_id="y")
    assert last.run is not None
    assert last.run.output == [1, 2]


async def test_a_signal_to_an_unknown_or_finished_run_is_reported(
    make_runtime: MakeRuntime,
) -> None:
    """Nothing is dropped silently."""

    @workflow("short")
    async def short(step: Step) -> int:
        return 1

    runtime = make_runtime(short)
    assert (await runtime.signal("unknown", "go")).delivery is Delivery.UNKNOWN
    run = await runtime.trigger(short)
    assert (await runtime.signal(run.id, "go")).delivery is Delivery.OVER


async def test_a_wait_that_times_out_returns_none(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("late")
    async def late(step: Step) -> Any:
        return await step.wait_for_event("go", "go", timeout="3d")

    runtime = make_runtime(late)
    await runtime.trigger(late)
    await clock.advance("3d")
    (run,) = await runtime.sweep()
    assert (run.status, run.output) == ("completed", None)


async def test_suspension_cannot_be_swallowed(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """`except Exception` does not catch it, and `finally` blocks are executed."""
    unwound: list[str] = []

    @workflow("greedy")
    async def greedy(step: Step) -> str:
        try:
            await step.sleep("nap", "1d")
        except Exception:  # noqa: BLE001
            return "swallowed"
        finally:
            unwound.append("finally")
        return "slept"

    runtime = make_runtime(greedy)
    assert (await runtime.trigger(greedy)).status == "suspended"
    assert unwound
    await clock.advance("1d")
    (run,) = await runtime.sweep()
    assert run.output == "slept"


async def test_a_handler_of_all_exceptions_does_not_prevent_suspension(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """What a function does after it swallowed the suspension has no effect."""

    @workflow("stubborn")
    async def stubborn(step: Step) -> str:
        try:
            await step.sleep("nap", "1d")
        except BaseException:  # noqa: BLE001
            return "swallowed"
        return "slept"

    runtime = make_runtime(stubborn)
    assert (await runtime.trigger(stubborn)).status == "suspended"
    await clock.advance("1d")
    (run,) = await runtime.sweep()
    assert run.output == "slept"


async def test_a_sleeping_branch_does_not_interrupt_the_step_beside_it(
    make_runtime: MakeRuntime, clock: TestClock, effects: list[str]
) -> None:
    """The run is suspended when every branch waits, and finished work is recorded first."""

    async def slow() -> str:
        for _ in range(30):
            await asyncio.sleep(0)
        effects.append("slow")
        return "done"

    @workflow("beside")
    async def beside(step: Step) -> list[Any]:
        return list(await asyncio.gather(step.sleep("nap", "1d"), step("slow", slow)))

    runtime = make_runtime(beside)
    assert (await runtime.trigger(beside)).status == "suspended"
    assert effects == ["slow"]
    await clock.advance("1d")
    (run,) = await runtime.sweep()
    assert run.output == [None, "done"]
    assert effects == ["slow"]


async def test_a_branch_that_a_callback_is_about_to_start_is_not_cut_off(
    make_runtime: MakeRuntime, clock: TestClock, effects: list[str]
) -> None:
    """The run has one branch, which waits; the callback that starts another one is scheduled."""

    @workflow("late")
    async def late(step: Step) -> str:
        loop = asyncio.get_running_loop()
        started: asyncio.Future[asyncio.Task[None]] = loop.create_future()
        call = step("log", effects.append, "logged")
        loop.call_soon(loop.call_soon, lambda: started.set_result(loop.create_task(call)))
        await step.sleep("day", "1d")
        await (await started)
        return "done"

    runtime = make_runtime(late)
    run = await runtime.trigger("late")
    assert run.status == "suspended"
    assert effects == ["logged"]
    await clock.advance("1d")
    (run,) = await runtime.sweep()
    assert run.output == "done"
    assert effects == ["logged"]


async def test_code_between_steps_is_not_interrupted_by_a_sleeping_branch(
    store: MemoryStore, clock: TestClock, effects: list[str]
) -> None:
    """A branch that awaits something else for a short time is not cancelled."""

    async def note(text: str) -> None:
        effects.append(text)

    @workflow("between")
    async def between(step: Step) -> None:
        async def busy() -> None:
            for _ in range(5):
                await clock.sleep(0.5)
            await step("after", note, "after")

        await asyncio.gather(step.sleep("nap", "1d"), busy())

    runtime = Runtime(store, workflows=[between], clock=clock, suspend_after=1)
    trigger = asyncio.ensure_future(runtime.trigger(between))
    while not trigger.done():
        await clock.advance(0.1)
    run = await trigger
    assert (run.status, effects) == ("suspended", ["after"])


async def test_a_run_that_awaits_something_unknown_is_suspended_after_a_while(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the place, and the await is repeated."""
    starts: list[str] = []

    @workflow("stuck")
    async def stuck(step: Step) -> None:
        async def elsewhere() -> None:
            starts.append("elsewhere")
            await asyncio.get_running_loop().create_future()

        unknown = asyncio.create_task(elsewhere())
        await step.sleep("nap", "1d")
        await asyncio.sleep(0)
        unknown.cancel()

    runtime = Runtime(store, workflows=[stuck], clock=clock, suspend_after=1)
    trigger = asyncio.ensure_future(runtime.trigger(stuck))
    while not trigger.done():
        await clock.advance(0.1)
    assert (await trigger).status == "suspended"
    await clock.advance("1d")
    (run,) = await runtime.sweep()
    assert (run.status, starts) == ("completed", ["elsewhere", "elsewhere"])
    [message] = [r.getMessage() for r in caplog.records if "does not recognize" in r.getMessage()]
    assert run.id in message
    assert "elsewhere" in message
    assert "test_runtime.py" in message


async def test_a_run_that_waits_but_keeps_working_is_logged_once(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot leave memory. The warning names the task, its function and what it awaits."""

    @workflow("poll")
    async def polling(step: Step) -> None:
        async def poll() -> None:
            while True:
                await clock.sleep(0.1)

        polls = asyncio.create_task(poll())
        await step.sleep("nap", "1m")
        polls.cancel()

    runtime = Runtime(store, workflows=[polling], clock=clock, suspend_after=1)
    trigger = asyncio.ensure_future(runtime.trigger(polling, run_id="r"))
    while not trigger.done():
        await clock.advance(0.05)
    assert (await trigger).status == "completed"
    [message] = [r.getMessage() for r in caplog.records if "stays in memory" in r.getMessage()]
    assert all(part in message for part in ("'r'", ".poll)", "TestClock.sleep", "step.sleep"))


async def test_parallel_waits_suspend_together_and_end_one_by_one(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """This holds for `gather` and for a `TaskGroup`."""

    @workflow("waits")
    async def waits(step: Step) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            one = group.create_task(step.wait_for_event("one", "one"))
            two = group.create_task(step.sleep("two", "1h"))
        three, _ = await asyncio.gather(
            step.wait_for_event("three", "three"), step.sleep("four", "1h")
        )
        return [one.result(), two.result(), three]

    runtime = make_runtime(waits)
    run = await runtime.trigger(waits)
    assert {(wait.id, wait.event) for wait in run.pending} == {("one", "one"), ("two", None)}
    await runtime.signal(run.id, "one", 1)
    await clock.advance("1h")
    await runtime.sweep()
    await clock.advance("1h")
    await runtime.sweep()
    last = await runtime.signal(run.id, "three", 3)
    assert last.run is not None
    assert last.run.output == [1, None, 3]


@pytest.mark.parametrize("winner", ["approved", "late"])
async def test_a_wait_raced_against_a_sleep(
    make_runtime: MakeRuntime, clock: TestClock, winner: str
) -> None:
    """The first one wins, and the other is cancelled."""

    @workflow("raced")
    async def raced(step: Step) -> tuple[str, Any]:
        return await step.race(
            "first",
            {
                "approved": lambda: step.wait_for_event("approval", "approved"),
                "late": lambda: step.sleep("limit", "3d"),
            },
        )

    runtime = make_runtime(raced)
    run = await runtime.trigger(raced)
    assert len(run.pending) == 2
    if winner == "approved":
        await runtime.signal(run.id, "approved", True)
    else:
        await clock.advance("3d")
        await runtime.sweep()
    ended = await runtime.get_run(run.id)
    assert ended is not None
    assert ended.output is not None
    assert ended.output[0] == winner
    assert ended.pending == ()


async def test_a_cron_sleep_ends_at_the_local_time_across_dst(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """Nine o'clock in Berlin is another UTC hour after the change."""
    await clock.advance(datetime(2030, 3, 30, 12, tzinfo=UTC) - clock.now())

    @workflow("morning")
    async def morning(step: Step) -> None:
        await step.sleep("nine", Cron("0 9 * * *", tz="Europe/Berlin"))

    run = await make_runtime(morning).trigger(morning)
    assert run.pending[0].wake_at == datetime(2030, 3, 31, 7, tzinfo=UTC)


async def test_a_second_trigger_with_the_same_id_returns_the_same_run(
    make_runtime: MakeRuntime, effects: list[str]
) -> None:
    async def note() -> None:
        effects.append("ran")

    @workflow("once")
    async def once(step: Step) -> str:
        await step("note", note)
        return "done"

    runtime = make_runtime(once)
    first = await runtime.trigger(once, run_id="order-7")
    second = await runtime.trigger(once, run_id="order-7")
    assert first == second
    assert effects == ["ran"]


async def test_a_trigger_without_waiting_leaves_the_run_for_a_worker(
    make_runtime: MakeRuntime, effects: list[str]
) -> None:
    """The run is durable, and due at once."""

    @workflow("queued")
    async def queued(step: Step) -> str:
        effects.append("ran")
        return "done"

    runtime = make_runtime(queued)
    run = await runtime.trigger(queued, wait=False)
    assert (run.status, effects) == ("queued", [])
    (run,) = await runtime.sweep()
    assert run.output == "done"


async def test_a_failed_run_is_retried_from_the_step_that_failed(
    make_runtime: MakeRuntime, effects: list[str]
) -> None:
    """Finished steps do not run again; the failed one does."""
    broken = True

    async def first() -> None:
        effects.append("first")

    async def second() -> str:
        effects.append("second")
        if broken:
            raise ConnectionError("down")
        return "up"

    @workflow("shaky")
    async def shaky(step: Step) -> str:
        await step("first", first)
        return await step("second", second)

    runtime = make_runtime(shaky)
    run = await runtime.trigger(shaky)
    assert run.status == "failed"
    assert isinstance(run.error, ConnectionError)
    broken = False
    run = await runtime.retry(run.id)
    assert (run.status, run.output) == ("completed", "up")
    assert effects == ["first", "second", "second"]


async def test_a_returned_err_is_the_error_of_the_run(make_runtime: MakeRuntime) -> None:
    """This holds for an `Err` from a step and from the function."""

    @workflow("typed failure")
    async def typed(step: Step) -> Any:
        return Err({"code": "NOT_FOUND"})

    run = await make_runtime(typed).trigger(typed)
    assert (run.status, run.error) == ("failed", {"code": "NOT_FOUND"})


async def test_cancel_ends_a_suspended_run(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """It is not executed when its wake time comes."""

    @workflow("doomed")
    async def doomed(step: Step) -> None:
        await step.sleep("nap", "1d")

    runtime = make_runtime(doomed)
    run = await runtime.trigger(doomed)
    run = await runtime.cancel(run.id, reason="not needed")
    assert run.status == "cancelled"
    assert isinstance(run.error, Cancelled)
    await clock.advance("2d")
    assert await runtime.sweep() == []
    assert (await runtime.resume(run.id)).status == "cancelled"


async def test_cancel_reaches_a_run_that_another_process_owns(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """Its owner sees the request with its next renewal at the latest."""

    @workflow("busy")
    async def busy(step: Step) -> None:
        await step("long", lambda: clock.sleep(3600))

    runtime, other = make_runtime(busy), make_runtime(busy, lease_ttl="31s")
    driving = asyncio.ensure_future(runtime.trigger(busy, run_id="busy"))
    for _ in range(20):
        await asyncio.sleep(0)
    await other.cancel("busy", reason="enough")
    await clock.advance("15s")
    run = await driving
    assert run.status == "cancelled"


@pytest.mark.parametrize("payload", [{"email": 5}, {"age": "x"}, {"email": "a", "age": []}, 7])
async def test_an_invalid_payload_is_refused_before_anything_is_written(
    make_runtime: MakeRuntime, store: MemoryStore, payload: Any
) -> None:
    """The error names each field, and no run is created."""

    @workflow("typed")
    async def typed(step: Step, payload: Signup) -> None:
        raise AssertionError("not called")

    with pytest.raises(InvalidPayload, match=r"payload of workflow 'typed'"):
        await make_runtime(typed).trigger(typed, payload)
    assert list(await store.list()) == []


class Struct(msgspec.Struct):
    n: int


class Model(pydantic.BaseModel):
    n: int


class Typed(TypedDict):
    n: int


@pytest.mark.parametrize("kind", [Struct, Model, Typed])
async def test_payloads_are_passed_as_instances_of_their_type(
    make_runtime: MakeRuntime, kind: Any
) -> None:
    """This holds for a struct, a pydantic model and a TypedDict."""
    observations: list[Any] = []

    async def body(step: Step, payload: Any) -> int:
        observations.append(payload)
        return await step("n", lambda: 1)

    body.__annotations__["payload"] = kind
    definition = workflow("kinds")(body)
    await make_runtime(definition).trigger(definition, {"n": 3})
    assert observations[0] == kind(n=3)


async def test_an_unknown_workflow_and_an_unknown_run_are_errors(make_runtime: MakeRuntime) -> None:
    """The errors say what is missing and what to do."""
    runtime = make_runtime()
    with pytest.raises(UnknownWorkflow, match="no workflow 'x' is registered"):
        await runtime.trigger("x")
    with pytest.raises(RunNotFound, match="there is no run 'y'"):
        await runtime.resume("y")
    assert await runtime.get_run("y") is None


async def test_a_run_of_an_old_version_needs_its_definition_or_a_migration(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """It is refused, or executed by the old definition, or migrated."""

    @workflow("v", version=1)
    async def old(step: Step) -> str:
        await step.sleep("nap", "1d")
        return "old"

    def migrate(snapshot: Any, version: int) -> Any:
        return snapshot

    @workflow("v", version=2)
    async def new(step: Step) -> str:
        return "new"

    @workflow("v", version=2, migrate=migrate)
    async def migrating(step: Step) -> str:
        await step.sleep("nap", "1d")
        return "migrated"

    run = await make_runtime(old).trigger(old)
    await clock.advance("1d")
    with pytest.raises(VersionMismatch, match="Register the old definition"):
        await make_runtime(new).resume(run.id)
    await clock.advance("1m")
    assert (await make_runtime(migrating).resume(run.id)).output == "migrated"


async def test_a_run_continues_with_the_version_that_started_it(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    @workflow("v", version=1)
    async def old(step: Step) -> str:
        await step.sleep("nap", "1d")
        return "old"

    @workflow("v", version=2)
    async def new(step: Step) -> str:
        return "new"

    run = await make_runtime(old).trigger(old)
    await clock.advance("1d")
    assert (await make_runtime(old, new).resume(run.id)).output == "old"


async def test_the_idempotency_key_is_the_same_for_every_attempt(make_runtime: MakeRuntime) -> None:
    keys: list[str] = []
    broken = True

    @workflow("pay")
    async def pay(step: Step) -> str:
        async def charge() -> str:
            keys.append(step.idempotency_key)
            if broken:
                raise ConnectionError
            return "paid"

        return await step("charge", charge)

    runtime = make_runtime(pay)
    run = await runtime.trigger(pay)
    broken = False
    await runtime.retry(run.id)
    assert len(keys) == 2
    assert keys[0] == keys[1]


async def test_the_history_contains_times_and_attempts(make_runtime: MakeRuntime) -> None:
    """`get_run` returns when each step ran, how long and how often."""

    async def flaky() -> int:
        if len(tries) < 2:
            tries.append(1)
            raise ConnectionError
        return 5

    tries: list[int] = []

    @workflow("persistent")
    async def persistent(step: Step) -> int:
        return await step("flaky", flaky, retry=Retry(attempts=3, delay=0))

    run = await make_runtime(persistent).trigger(persistent)
    (line,) = run.history
    assert (line.key, line.ok, line.value, line.attempts) == ("flaky", True, 5, 3)
    assert line.at is not None


async def test_one_bad_run_does_not_block_the_others(
    make_runtime: MakeRuntime, store: MemoryStore
) -> None:
    """A run that cannot be continued is delayed, and the sweep continues."""

    @workflow("fine")
    async def fine(step: Step) -> str:
        return "ok"

    @workflow("gone", version=1)
    async def delete(step: Step) -> None: ...

    @workflow("gone", version=2)
    async def other(step: Step) -> None: ...

    await make_runtime(delete).trigger(delete, run_id="a-bad", wait=False)
    runtime = make_runtime(fine, other)
    await runtime.trigger(fine, run_id="b-good", wait=False)
    runs = await runtime.sweep()
    assert [run.id for run in runs] == ["b-good"]
    supports = runtime.registry.supported_versions
    assert list(await store.due(runtime.clock.now(), 10, supports=supports)) == []
