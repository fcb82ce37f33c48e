"""Steps that are retried, and steps that take too long."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from perdure import Err, Ok, Retry, Step, StepTimeout, Timeout
from perdure.events import StepRetry, StepTimedOut
from perdure.testing import TestClock
from tests.unit.engine.bodies import NOW, advance_until_done, error_of, run, single, workflow


class TestRetry:
    async def test_a_failed_step_is_retried(self, clock: TestClock) -> None:
        """The delays are those of the `Retry`, and each retry is an event."""
        events: list[StepRetry] = []

        def listen(event: object) -> None:
            if isinstance(event, StepRetry):
                events.append(event)

        tries: list[datetime] = []

        async def flaky() -> int:
            tries.append(clock.now())
            if len(tries) < 4:
                raise ConnectionError(f"try {len(tries)}")
            return len(tries)

        retry = Retry(5, delay="1s", jitter=False)
        body = single(lambda step: step("flaky", flaky, retry=retry))
        first = workflow(clock=clock, on_event=listen)
        assert await advance_until_done(clock, first.run(body)) == Ok(4)
        assert [(at - NOW).total_seconds() for at in tries] == [0, 1, 3, 7]
        retries = [(event.attempt, event.attempts, event.delay.total_seconds()) for event in events]
        assert retries == [(1, 5, 1), (2, 5, 2), (3, 5, 4)]
        assert first.snapshot()["steps"]["flaky"]["attempts"] == 4

    async def test_a_step_whose_attempts_are_used_up_fails_with_the_last_error(self) -> None:
        """The errors of earlier attempts are not kept."""
        tries: list[int] = []

        async def fail() -> None:
            tries.append(1)
            raise ConnectionError(f"try {len(tries)}")

        body = single(lambda step: step("fail", fail, retry=Retry(3, delay=0)))
        assert str(error_of(await run(body))) == "try 3"

    async def test_retry_can_be_a_number_of_attempts(self, clock: TestClock) -> None:
        """`retry=2` makes two attempts."""
        tries: list[int] = []

        async def fail() -> None:
            tries.append(1)
            raise ConnectionError

        await advance_until_done(
            clock, run(single(lambda step: step("x", fail, retry=2)), clock=clock)
        )
        assert len(tries) == 2

    async def test_a_returned_err_is_retried(self) -> None:
        """It is a failure like a raised exception."""
        answers = [Err("BUSY"), Err("BUSY"), Ok(7)]
        body = single(lambda step: step("x", lambda: answers.pop(0), retry=Retry(3, delay=0)))
        assert await run(body) == Ok(7)

    async def test_retry_if_selects_the_errors_that_are_retried(self) -> None:
        """The first other failure is final."""
        tries: list[int] = []

        async def fail() -> None:
            tries.append(1)
            raise PermissionError if len(tries) == 2 else ConnectionError

        retry = Retry(5, delay=0, retry_if=lambda error: isinstance(error, ConnectionError))
        result = await run(single(lambda step: step("x", fail, retry=retry)))
        assert isinstance(error_of(result), PermissionError)
        assert len(tries) == 2

    async def test_the_attempt_is_known_to_the_function(self) -> None:
        """`step.attempt` counts from 1."""
        attempts: list[int] = []

        async def body(step: Step) -> None:
            async def flaky() -> None:
                attempts.append(step.attempt)
                if step.attempt < 3:
                    raise OSError

            await step("x", flaky, retry=Retry(3, delay=0))
            attempts.append(step.attempt)

        await run(body)
        assert attempts == [1, 2, 3, 1]


class TestTimeout:
    async def never(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def timed(self, clock: TestClock, timeout: Any, **options: Any) -> Any:
        body = single(lambda step: step("slow", self.never, timeout=timeout, **options))
        return await advance_until_done(clock, run(body, clock=clock))

    async def test_a_step_that_takes_too_long_fails(self, clock: TestClock) -> None:
        """The `StepTimeout` names the step; the time is that of the clock."""
        error = error_of(await self.timed(clock, "5s"))
        assert isinstance(error, StepTimeout)
        assert isinstance(error, TimeoutError)
        assert (error.step, error.seconds) == ("slow", 5)
        assert clock.now() - NOW == timedelta(seconds=5)

    async def test_a_step_that_ends_in_time_returns_its_value(self, clock: TestClock) -> None:
        """Its timer is cancelled."""
        body = single(lambda step: step("quick", lambda: 7, timeout=5))
        assert await run(body, clock=clock) == Ok(7)
        await asyncio.sleep(0)
        assert clock.sleepers == 0

    async def test_a_timeout_can_return_none(self, clock: TestClock) -> None:
        """`on_timeout="none"` does that."""
        assert await self.timed(clock, Timeout(5, on_timeout="none")) == Ok(None)

    async def test_a_timeout_can_be_another_error(self, clock: TestClock) -> None:
        """`on_timeout` is an exception, or a function of the `StepTimeout`."""
        result = await self.timed(clock, Timeout(5, on_timeout=KeyError("late")))
        assert isinstance(error_of(result), KeyError)
        assert isinstance(result.cause, StepTimeout)
        timeout = Timeout(5, on_timeout=lambda error: Err(error.step))
        assert await self.timed(clock, timeout) == Err("slow")

    async def test_each_attempt_has_its_own_timeout(self, clock: TestClock) -> None:
        """A timeout is a failure that is retried."""
        events: list[object] = []
        retry = Retry(3, delay="1s", backoff="fixed", jitter=False)
        body = single(lambda step: step("slow", self.never, timeout="5s", retry=retry))
        running = run(body, clock=clock, on_event=events.append)
        assert isinstance(error_of(await advance_until_done(clock, running)), StepTimeout)
        assert clock.now() - NOW == timedelta(seconds=17)
        assert [e.attempt for e in events if isinstance(e, StepTimedOut)] == [1, 2, 3]

    async def test_the_value_of_a_function_that_suppresses_its_cancellation_is_returned(
        self, clock: TestClock
    ) -> None:
        """The task has no pending cancellation afterwards."""

        async def stubborn() -> str:
            try:
                await self.never()
            except asyncio.CancelledError:
                return "late"
            return "never"

        async def body(step: Step) -> list[Any]:
            value = await step("slow", stubborn, timeout="5s")
            task = asyncio.current_task()
            assert task is not None
            return [value, task.cancelling()]

        assert await advance_until_done(clock, run(body, clock=clock)) == Ok(["late", 0])

    async def test_a_cancellation_from_outside_is_not_a_timeout(self, clock: TestClock) -> None:
        """It is raised as it is."""
        body = single(lambda step: step("slow", self.never, timeout="5s"))
        running = asyncio.ensure_future(run(body, clock=clock))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
