"""Time, ids and randomness: a replay sees the same values."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Err, Runtime, Step, durable, workflow
from perdure.errors import InvalidArgument
from perdure.snapshot import Snapshot
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock, explore_crashes

SECOND = timedelta(seconds=1)


@workflow("draw")
async def draw(step: Step) -> list[str]:
    """Return a time, a random number and two UUIDs, and sleep in between."""
    began = await step.now()
    number = step.random()
    await step.sleep("nap", "1h")
    ended = await step.now("ended")
    return [str(ended - began), str(number), str(step.uuid()), str(step.uuid("order"))]


async def finished(clock: TestClock, **options: Any) -> list[str]:
    """Return the output of a run that was suspended and resumed."""
    runtime = Runtime(MemoryStore(clock=clock), workflows=[draw], clock=clock, **options)
    await runtime.trigger(draw, run_id="d-1")
    for _ in range(20):
        await clock.advance("1h")
        await runtime.sweep()
    run = await runtime.get_run("d-1")
    assert run is not None
    assert run.status == "completed", run
    assert run.output is not None
    output: list[str] = run.output
    return output


async def test_now_is_the_time_of_the_first_call(clock: TestClock) -> None:
    """The run resumes an hour later, and `began` is still the time at which it began."""
    assert (await finished(clock))[0] == "1:00:00"


async def test_now_is_an_aware_time_in_utc(clock: TestClock) -> None:
    async def body(step: Step) -> datetime:
        return await step.now()

    store = MemoryStore(clock=clock)
    now = (await durable.run(None, body, id="n", store=store, clock=clock)).unwrap()
    assert (now, now.tzinfo) == (datetime(2030, 1, 1, tzinfo=UTC), UTC)


async def test_a_run_that_is_replayed_after_every_step_sees_the_same_values(
    clock: TestClock,
) -> None:
    output = await finished(clock, always_replay=True)
    assert len(set(output)) == 4


async def test_a_crash_anywhere_changes_no_value() -> None:
    """Each explored run has its own seed, so the values drawn from it are not compared."""

    @workflow("once")
    async def once(step: Step) -> None:
        drawn = [step.random(), str(step.uuid())]
        assert await step("record", lambda: drawn) == drawn

    await explore_crashes(once, compare="shape")


async def test_random_numbers_and_uuids_write_nothing() -> None:
    async def body(step: Step) -> None:
        for _ in range(10):
            step.random()
            step.uuid()

    store = FaultyStore(MemoryStore())
    await durable.run(None, body, id="r", store=store)
    assert [call.verb for call in store.calls] == ["acquire", "append"]


async def test_each_run_has_its_own_values(clock: TestClock) -> None:
    assert set((await finished(clock))[1:]).isdisjoint((await finished(clock))[1:])


async def test_a_retry_after_a_failure_sees_the_same_uuid() -> None:
    store, observations = MemoryStore(), []

    async def body(step: Step) -> None:
        observations.append(step.uuid())
        await step("fail", lambda: 1 / 0)

    await durable.run(None, body, id="f", store=store)
    await durable.run(None, body, id="f", store=store)
    assert observations[0] == observations[1]


async def test_sleep_until_wakes_at_the_time(clock: TestClock) -> None:
    @workflow("opening")
    async def opening(step: Step, payload: datetime) -> str:
        await step.sleep_until("opening", payload)
        return str(await step.now())

    opens = clock.now() + timedelta(days=3)
    runtime = Runtime(MemoryStore(clock=clock), workflows=[opening], clock=clock)
    run = await runtime.trigger(opening, opens, run_id="o")
    assert (run.status, run.pending[0].wake_at) == ("suspended", opens)
    await clock.advance(timedelta(days=3) - SECOND)
    assert await runtime.sweep() == []
    await clock.advance(SECOND)
    (run,) = await runtime.sweep()
    assert run.output == str(opens)


@pytest.mark.parametrize("ago", [timedelta(0), timedelta(days=1000)])
async def test_a_time_that_is_past_is_recorded_without_a_wait(
    clock: TestClock, ago: timedelta
) -> None:
    async def body(step: Step) -> None:
        await step.sleep_until("past", clock.now() - ago)

    store = MemoryStore(clock=clock)
    await durable.run(None, body, id="p", store=store, clock=clock, keep=True)
    stored: Snapshot | None = await store.load("p")
    assert stored is not None
    assert stored["steps"]["past"]["kind"] == "sleep"


@pytest.mark.parametrize("time", [datetime(2030, 1, 1), "2030-01-01T00:00:00Z", 5, None])
async def test_sleep_until_needs_a_time_with_its_zone(time: Any) -> None:
    async def body(step: Step) -> None:
        await step.sleep_until("never", time)

    result = await durable.run(None, body, id="t", store=MemoryStore())
    assert isinstance(result, Err)
    assert isinstance(result.error, InvalidArgument)
    assert "a datetime with a time zone" in str(result.error)
