"""Events of a run: the event stream, and subscriptions to steps with the snapshot."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from perdure import Err, Ok, Retry, Step, Workflow, durable, is_step_complete
from perdure.events import (
    Event,
    StepComplete,
    StepFailure,
    StepStart,
    WorkflowCancelled,
    WorkflowError,
    WorkflowSuccess,
)
from perdure.store import Entry, Verdict
from perdure.stores import MemoryStore
from perdure.testing import TestClock

Body = Callable[[Step], Awaitable[Any]]


async def abc(step: Step) -> str:
    """A step, then two at once, then the end."""
    await step("a", lambda: 1)
    await asyncio.gather(step("b", lambda: 2), step("c", lambda: 3))
    return "end"


async def burst(step: Step) -> None:
    """Four steps at once."""
    await asyncio.gather(*(step(id, lambda: None) for id in "abcd"))


async def failing(step: Step) -> None:
    await step("a", lambda: 1)
    await step("b", lambda: Err("NOPE"))


def names(events: list[Any]) -> list[str]:
    """Return a name for each event: the key of a step, the type of an end."""
    return [event.step_id or event.type.removeprefix("workflow_") for event in events]


async def received(body: Body, **how: Any) -> list[str]:
    """Run the function and return the names of the events that a subscriber receives."""
    workflow = Workflow("w")
    events: list[Any] = []
    workflow.subscribe(events.append, **how)
    await workflow.run(body)
    await workflow.flush()
    return names(events)


async def types_of(body: Body, **options: Any) -> list[str]:
    """Run the function and return the types of all events, those of steps with their keys."""
    events: list[Any] = []
    await Workflow("w", on_event=events.append, **options).run(body)
    return [f"{e.type} {e.key}" if hasattr(e, "key") else e.type for e in events]


class TestSubscribe:
    @pytest.mark.parametrize(
        ("how", "of_abc", "of_burst"),
        [
            ({}, ["a", "b", "c", "complete"], ["a", "b", "c", "d", "complete"]),
            (
                {"mode": "async"},
                ["a", "b", "c", "complete"],
                ["a", "b", "c", "d", "complete"],
            ),
            ({"mode": "async", "coalesce": "latest"}, ["a", "c", "complete"], ["d", "complete"]),
        ],
        ids=["sync", "async", "latest"],
    )
    async def test_which_events_a_subscriber_receives(
        self, how: dict[str, Any], of_abc: list[str], of_burst: list[str]
    ) -> None:
        """Every event in order; with `latest`, the last of a burst, and always the end."""
        assert await received(abc, **how) == of_abc
        assert await received(burst, **how) == of_burst

    async def test_sync_listeners_are_called_before_the_function_continues(self) -> None:
        """Async listeners are called later."""
        workflow = Workflow("w")
        at_once: list[Any] = []
        later: list[Any] = []
        workflow.subscribe(at_once.append)
        workflow.subscribe(later.append, mode="async")

        async def body(step: Step) -> list[int]:
            await step("a", lambda: 1)
            return [len(at_once), len(later)]

        assert await workflow.run(body) == Ok([1, 0])
        await workflow.flush()
        assert names(later) == ["a", "complete"]

    async def test_an_event_has_the_snapshot_of_its_time(self) -> None:
        """With the steps so far; each access returns a copy."""
        workflow = Workflow("w")
        events: list[Any] = []
        workflow.subscribe(events.append)
        await workflow.run(abc)
        assert [list(event.snapshot["steps"]) for event in events] == [
            ["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c"],
        ]  # fmt: skip
        states = [event.snapshot["execution"]["status"] for event in events]
        assert states == ["running", "running", "running", "completed"]
        events[0].snapshot["steps"].clear()
        assert list(events[0].snapshot["steps"]) == ["a"]

    async def test_the_snapshot_of_a_running_workflow_names_the_last_step(self) -> None:
        """`currentStepId` is present until the run ends."""
        workflow = Workflow("w")
        events: list[Any] = []
        workflow.subscribe(events.append)
        await workflow.run(abc)
        current = [event.snapshot["execution"].get("currentStepId") for event in events]
        assert current == ["a", "b", "c", None]

    async def test_a_failed_step_and_run_are_published(self) -> None:
        """The failed step is complete, and the end is `workflow_error`."""
        assert await received(failing) == ["a", "b", "error"]

    async def test_replayed_steps_are_not_published_again(self) -> None:
        """A resumed run publishes only new steps."""
        first = Workflow("w")
        await first.run(abc)
        resumed = Workflow("w", snapshot=first.snapshot())
        events: list[Any] = []
        resumed.subscribe(events.append)
        await resumed.run(abc)
        assert names(events) == ["complete"]

    async def test_the_end_of_a_cancelled_run_is_published(self) -> None:
        """As `workflow_cancelled`, even after a burst."""
        workflow = Workflow("w")
        events: list[Any] = []
        workflow.subscribe(events.append, mode="async", coalesce="latest")

        async def body(step: Step) -> None:
            await burst(step)
            await asyncio.get_running_loop().create_future()

        running = asyncio.ensure_future(workflow.run(body))
        for _ in range(10):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await workflow.flush()
        assert names(events) == ["d", "cancelled"]
        assert len(events[-1].snapshot["steps"]) == 4

    async def test_an_async_listener_receives_one_event_at_a_time(self) -> None:
        """In order, however long it takes; `flush` waits for the last."""
        workflow = Workflow("w")
        log: list[str] = []

        async def slow(event: Any) -> None:
            log.append(f"<{names([event])[0]}")
            await asyncio.sleep(0.001)
            log.append(">")

        workflow.subscribe(slow, mode="async")
        await workflow.run(abc)
        await workflow.flush()
        assert "".join(log) == "<a><b><c><complete>"

    async def test_a_slow_listener_with_latest_skips_to_the_last_event(self) -> None:
        """While it is busy, only the last event is queued; the end is never skipped."""
        workflow = Workflow("w")
        log: list[str] = []

        async def slow(event: Any) -> None:
            log.extend(names([event]))
            await asyncio.sleep(0.005)

        async def body(step: Step) -> None:
            for id in "abcdef":
                await step(id, lambda: asyncio.sleep(0))

        workflow.subscribe(slow, mode="async", coalesce="latest")
        await workflow.run(body)
        await workflow.run(body)
        await workflow.flush()
        assert log.count("complete") == 2
        assert log[-1] == "complete"
        assert len(log) < 14

    @pytest.mark.parametrize("mode", ["sync", "async"])
    async def test_a_failing_listener_does_not_affect_the_run(
        self, mode: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its exception is logged; the run and other listeners continue."""
        workflow = Workflow("w")
        events: list[Any] = []

        def fail(event: object) -> None:
            raise ValueError("a bad listener")

        async def fail_later(event: object) -> None:
            raise ValueError("a bad async listener")

        workflow.subscribe(fail, mode=mode)
        workflow.subscribe(fail_later, mode=mode)
        workflow.subscribe(events.append, mode=mode)
        assert await workflow.run(abc) == Ok("end")
        await workflow.flush()
        assert len(events) == 4
        assert "a bad listener" in caplog.text
        assert "a bad async listener" in caplog.text

    async def test_listeners_are_called_in_order_of_subscription(self) -> None:
        """Until they unsubscribe."""
        workflow = Workflow("w")
        log: list[str] = []
        stop = workflow.subscribe(lambda event: log.append("1"))
        workflow.subscribe(lambda event: log.append("2"))
        await workflow.run(failing)
        stop()
        stop()
        await workflow.run(failing)
        assert "".join(log) == "121212" + "222"

    async def test_a_listener_may_unsubscribe_itself(self) -> None:
        """Even while it is being called."""
        workflow = Workflow("w")
        events: list[Any] = []

        def first_only(event: Any) -> None:
            events.append(event)
            stop()

        stop = workflow.subscribe(first_only)
        await workflow.run(abc)
        assert names(events) == ["a"]

    async def test_flush_without_events_returns(self) -> None:
        """There is nothing to wait for."""
        await Workflow("w").flush()


class TestStream:
    async def test_the_order_of_the_events_of_a_step(self) -> None:
        """Start, success, complete; before and after them those of the run."""

        async def body(step: Step) -> None:
            await step("a", lambda: 1)
            await step("b", lambda: Err("NOPE"))

        assert await types_of(body) == [
            "workflow_start",
            "step_start a", "step_success a", "step_complete a",
            "step_start b", "step_error b", "step_complete b",
            "workflow_error",
        ]  # fmt: skip

    async def test_cache_hits_and_misses_are_published(self) -> None:
        """A miss before the step starts; a hit instead of it."""

        async def body(step: Step) -> None:
            await step("a", lambda: 1, key="k")

        cache: dict[str, Any] = {}
        assert await types_of(body, cache=cache) == [
            "workflow_start",
            "step_cache_miss k", "step_start k", "step_success k", "step_complete k",
            "workflow_success",
        ]  # fmt: skip
        assert await types_of(body, cache=cache) == [
            "workflow_start", "step_cache_hit k", "workflow_success",
        ]  # fmt: skip

    async def test_retries_and_timeouts_are_published(self) -> None:
        """For each failed attempt, before the next one."""
        tries: list[int] = []

        async def flaky() -> None:
            tries.append(1)
            if len(tries) == 1:
                await asyncio.get_running_loop().create_future()

        async def body(step: Step) -> None:
            await step("a", flaky, retry=Retry(2, delay=0), timeout="1s")

        clock = TestClock()
        running = asyncio.ensure_future(types_of(body, clock=clock))
        await clock.advance("1s")
        assert await running == [
            "workflow_start",
            "step_start a", "step_timeout a", "step_retry a", "step_success a", "step_complete a",
            "workflow_success",
        ]  # fmt: skip

    async def test_the_attributes_of_events(self) -> None:
        """Workflow, run and time; a step's id and key; results and durations."""
        clock = TestClock()
        events: list[Event] = []
        workflow = Workflow("orders", on_event=events.append, clock=clock)

        async def body(step: Step) -> str:
            await step("slow", lambda: clock.sleep(2), key="k")
            return "done"

        running = asyncio.ensure_future(workflow.run(body))
        await clock.advance("2s")
        await running
        assert {event.workflow for event in events} == {"orders"}
        assert len({event.run_id for event in events}) == 1
        complete, success = events[-2:]
        assert isinstance(complete, StepComplete)
        assert (complete.step, complete.key, complete.result) == ("slow", "k", Ok(None))
        assert complete.duration.total_seconds() == 2
        assert isinstance(success, WorkflowSuccess)
        assert success.duration.total_seconds() == 2
        assert success.at == clock.now()

    async def test_the_duration_of_a_step_is_that_of_its_record(self) -> None:
        """The time that the store takes to write it is not part of it."""
        clock = TestClock()
        events: list[Event] = []

        class SlowStore(MemoryStore):
            async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
                await clock.sleep(5)
                return await super().append(entries)

        async def body(step: Step, deps: object) -> None:
            await step("a", lambda: clock.sleep(2))

        store = SlowStore(clock=clock)
        running = asyncio.ensure_future(
            durable.run(None, body, id="order-1", store=store, clock=clock, on_event=events.append)
        )
        for _ in range(20):
            await clock.advance("1s")
        await running
        (complete,) = [event for event in events if isinstance(event, StepComplete)]
        assert complete.duration.total_seconds() == 2

    async def test_failures_have_their_origin(self) -> None:
        """Returned or raised, with the error that the function sees."""
        events: list[Any] = []

        async def fail() -> None:
            raise ValueError("raised")

        async def body(step: Step) -> None:
            try:
                await step("raised", fail)
            except ValueError:
                await step("returned", lambda: Err("NOPE"))

        await Workflow("w", on_event=events.append).run(body)
        completes = [event for event in events if is_step_complete(event)]
        assert [event.origin for event in completes] == ["throw", "result"]
        failures = [event.error for event in events if isinstance(event, StepFailure)]
        assert [str(error) for error in failures] == ["raised", "NOPE"]
        (ended,) = (event for event in events if isinstance(event, WorkflowError))
        assert ended.error == "NOPE"

    async def test_a_cancellation_has_its_reason_and_the_last_step(self) -> None:
        """The message of `cancel`, and the last finished step."""
        events: list[Any] = []

        async def body(step: Step) -> None:
            await step("a", lambda: 1)
            await asyncio.get_running_loop().create_future()

        running = asyncio.ensure_future(Workflow("w", on_event=events.append).run(body))
        await asyncio.sleep(0)
        running.cancel("shutting down")
        with pytest.raises(asyncio.CancelledError):
            await running
        (cancelled,) = (event for event in events if isinstance(event, WorkflowCancelled))
        assert (cancelled.reason, cancelled.last_step) == ("shutting down", "a")

    async def test_on_event_may_be_async_and_may_fail(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It runs concurrently with the workflow; `flush` waits for it."""
        received: list[str] = []

        async def listen(event: Event) -> None:
            await asyncio.sleep(0)
            received.append(event.type)
            raise ValueError("a bad listener")

        workflow = Workflow("w", on_event=listen)
        assert await workflow.run(abc) == Ok("end")
        await workflow.flush()
        assert received[0] == "workflow_start"
        assert received[-1] == "workflow_success"
        assert "a bad listener" in caplog.text

    async def test_the_listener_of_a_run_replaces_that_of_the_workflow(self) -> None:
        first: list[Any] = []
        second: list[Any] = []
        workflow = Workflow("w", on_event=first.append)
        await workflow.run(abc, on_event=second.append)
        assert (len(first), len(second) > 0) == (0, True)

    async def test_the_start_and_the_end_of_a_step_have_the_same_key(self) -> None:
        """It is the key of the record, for keyed steps, repeated ids, branches and races too."""
        events: list[Any] = []

        async def fail() -> None:
            raise ValueError("no")

        async def line(step: Step) -> None:
            await step("x", lambda: 1)
            await step("x", lambda: 2)
            await step("k", lambda: 3)

        async def body(step: Step) -> None:
            await asyncio.gather(line(step), line(step))
            await step.all(step("keyed", lambda: 4, key="k"), step("a", lambda: 5))
            await step.map("x", [1, 2], abs)
            await step.race("x", {"only": lambda: step("x", lambda: 6)})
            await step("x", fail)

        workflow = Workflow("w", on_event=events.append)
        await workflow.run(body)
        started = [event.key for event in events if isinstance(event, StepStart)]
        ended = [event.key for event in events if isinstance(event, StepComplete)]
        assert sorted(started) == sorted(ended) == sorted(workflow.snapshot()["steps"])
        assert len(started) == len(set(started)) == 13
