"""What one step does: how its function is called, tried again and timed, and what comes of it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from perdure import Cron, Err, Ok, Result, Retry, Step, StepError, StepFailed, StepTimeout, Timeout
from perdure import Workflow as InProcess
from perdure.errors import (
    CodecError,
    DriftError,
    InvalidArgument,
    InvalidDuration,
    MissingAbility,
    PerdureError,
)
from perdure.events import StepRetry, StepTimedOut
from perdure.testing import TestClock

Body = Callable[[Step], Awaitable[Any]]

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def workflow(**options: Any) -> InProcess[Any]:
    return InProcess("steps", **options)


async def once(body: Body, **options: Any) -> Any:
    return await workflow(**options).run(body)


async def twice(body: Body, **options: Any) -> tuple[Any, Any]:
    """What a body gives, and what it gives again from its own snapshot."""
    first = workflow(**options)
    result = await first.run(body)
    return result, await workflow(snapshot=first.snapshot(), **options).run(body)


def single(call: Callable[[Step], Awaitable[Any]]) -> Body:
    """A workflow function of one call."""

    async def body(step: Step) -> Any:
        return await call(step)

    return body


def error_of(result: Result[Any, Any]) -> Any:
    assert isinstance(result, Err), result
    return result.error


async def moved(clock: TestClock, running: Awaitable[Any], by: str = "1s") -> Any:
    """Move the clock until the task is done, and give what it gives."""
    task = asyncio.ensure_future(running)
    while not task.done():
        await clock.advance(by)
    return task.result()


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@dataclass
class User:
    name: str
    since: datetime


class Color(Enum):
    RED = "red"


class PaymentDeclined(Exception):
    pass


class TestCalling:
    async def test_a_function_and_its_arguments(self) -> None:
        """The step gives what the function gives for these arguments."""

        async def add(a: int, b: int) -> int:
            return a + b

        assert await once(single(lambda step: step("add", add, 2, 3))) == Ok(5)

    async def test_a_thunk(self) -> None:
        """A lambda is called in place, and what it returns is awaited if it can be."""

        async def add(a: int, b: int) -> int:
            return a + b

        here = threading.get_ident()
        assert await once(single(lambda step: step("add", lambda: add(2, 3)))) == Ok(5)
        where = single(lambda step: step("where", lambda: threading.get_ident() + 0))
        assert await once(where) == Ok(here)

    async def test_a_sync_function_runs_in_a_thread(self) -> None:
        """It may block: the event loop goes on meanwhile."""
        released = threading.Event()

        def block() -> int:
            assert released.wait(timeout=10)
            return threading.get_ident()

        async def body(step: Step) -> int:
            blocked = asyncio.ensure_future(step("block", block))
            await step("release", released.set)
            return await blocked

        assert (await once(body)).unwrap() != threading.get_ident()

    async def test_anything_callable_will_do(self) -> None:
        """Methods, partials and objects with `__call__`, sync or async."""

        class Greeter:
            async def greet(self, name: str) -> str:
                return f"hello {name}"

            async def __call__(self, name: str) -> str:
                return f"called {name}"

        async def body(step: Step) -> list[str]:
            greeter = Greeter()
            return [
                await step("method", greeter.greet, "a"),
                await step("partial", partial(greeter.greet, "b")),
                await step("object", greeter, "c"),
                await step("builtin", "d".upper),
                await step("class", str, "e"),
            ]

        assert await once(body) == Ok(["hello a", "hello b", "called c", "D", "e"])

    async def test_a_coroutine_object_explains_thunks(self) -> None:
        """Passing what a call gave, and not the function, says what to write instead."""

        async def fetch(id: str) -> str:
            return id

        error = error_of(await once(single(lambda step: step("fetch", fetch("1")))))
        assert isinstance(error, InvalidArgument)
        assert str(error).startswith("fn: expected a function, not the coroutine")
        assert "step('fetch', lambda: function(argument))" in str(error)

    async def test_a_generator_is_refused(self) -> None:
        """A step gives one value."""

        async def async_rows() -> Any:
            yield 1

        def rows() -> Any:
            yield 1

        for fn in (async_rows, rows):
            error = error_of(await once(single(lambda step, fn=fn: step("rows", fn))))
            assert isinstance(error, InvalidArgument)

    async def test_names_may_be_of_any_alphabet_and_of_an_enum(self) -> None:
        """A text is a text."""

        class Steps(StrEnum):
            FETCH = "fetch"

        async def body(step: Step) -> None:
            await step(Steps.FETCH, lambda: 1)
            await step("größe 😀", lambda: 2)

        first = workflow()
        await first.run(body)
        assert list(first.snapshot()["steps"]) == ["fetch", "größe 😀"]

    async def test_a_finished_step_is_not_called_again(self) -> None:
        """It answers from its record."""
        calls: list[int] = []
        body = single(lambda step: step("x", lambda: calls.append(1)))
        assert await twice(body) == (Ok(None), Ok(None))
        assert calls == [1]


class TestKeys:
    async def test_a_key_is_one_identity(self) -> None:
        """Used twice it answers from its record, also when all are called at once."""
        calls: list[int] = []

        async def pay() -> int:
            await asyncio.sleep(0)
            calls.append(1)
            return len(calls)

        async def body(step: Step) -> list[int]:
            at_once = [step(f"pay{n}", pay, key="payment:1") for n in range(3)]
            return [*await asyncio.gather(*at_once), await step("again", pay, key="payment:1")]

        assert await once(body) == Ok([1, 1, 1, 1])

    async def test_a_key_whose_call_was_given_up_is_free_again(self) -> None:
        """Of those that waited for it, one goes on, and the others wait for that one."""
        calls: list[str] = []

        async def pay(name: str) -> str:
            calls.append(name)
            await asyncio.sleep(0.001)
            return name

        async def body(step: Step) -> list[str]:
            first, *others = [
                asyncio.ensure_future(step("pay", pay, name, key="k")) for name in "abc"
            ]
            await asyncio.sleep(0)
            first.cancel()
            return [await other for other in others]

        assert await once(body) == Ok(["b", "b"])
        assert calls == ["a", "b"]

    async def test_inside_a_step_there_is_an_idempotency_key(self) -> None:
        """The same for every attempt and after a resume, another for each step and each run."""
        seen: dict[str, list[str]] = {"a": [], "b": []}

        async def pay(step: Step, name: str) -> None:
            seen[name].append(step.idempotency_key)
            if len(seen["a"]) < 3:
                raise OSError("away")

        async def body(step: Step) -> None:
            await step("a", lambda: pay(step, "a"), retry=Retry(2, delay=0))
            await step("b", lambda: pay(step, "b"))

        first = workflow()
        await first.run(body)
        completed = first.snapshot(include="completed")
        await workflow(snapshot=completed).run(body)
        assert len(seen["a"]) == 3
        assert len(set(seen["a"])) == 1
        await once(body)
        assert len({*seen["a"], *seen["b"]}) == 4

    async def test_outside_a_step_there_is_none(self) -> None:
        """The error says where to ask."""

        async def body(step: Step) -> str:
            return step.idempotency_key

        assert "inside the step's function" in str(error_of(await once(body)))


class TestFailures:
    async def test_a_returned_err_ends_the_run(self) -> None:
        """As itself: error and cause are those that the step gave."""

        async def find(id: str) -> Result[str, str]:
            return Err("NOT_FOUND", {"id": id})

        async def body(step: Step) -> str:
            return await step("find", find, "7")

        assert await twice(body) == (Err("NOT_FOUND", {"id": "7"}),) * 2

    async def test_a_returned_ok_is_unwrapped(self) -> None:
        """The function gets the value."""
        body = single(lambda step: step("find", lambda: Ok({"id": 7})))
        assert await twice(body) == (Ok({"id": 7}), Ok({"id": 7}))

    async def test_the_error_of_an_err_has_its_type(self) -> None:
        """The function's return annotation says it, as it says the type of the value."""

        async def find(id: str) -> Result[User, User | Color]:
            return Err(Color.RED if id == "red" else User(id, NOW))

        async def body(step: Step) -> list[Any]:
            errors = []
            for id in ("red", "Ana"):
                try:
                    await step("find", find, id)
                except StepFailed as failed:
                    errors.append(failed.error)
            return errors

        assert await twice(body) == (Ok([Color.RED, User("Ana", NOW)]),) * 2

    async def test_an_error_that_cannot_come_back_is_a_warning(self) -> None:
        """With the step and the place, and the function sees what was recorded."""
        first = workflow()
        body = single(lambda step: step("find", lambda: Err({"user": User("Ana", NOW)})))
        result = await first.run(body)
        assert type(error_of(result)["user"]) is not User
        assert await workflow(snapshot=first.snapshot()).run(body) == result
        (warning,) = first.snapshot()["warnings"]
        assert (warning["stepId"], warning["path"][:5]) == ("find", "error")

    async def test_an_err_can_be_caught(self) -> None:
        """It is raised as `StepFailed`, which holds the step, the error and the cause."""

        async def body(step: Step) -> list[Any]:
            try:
                await step("find", lambda: Err("NOT_FOUND", ValueError("why")))
            except StepFailed as failed:
                cause = failed.cause
                return [failed.step, failed.error, type(cause).__name__, str(cause)]
            return []

        assert await twice(body) == (Ok(["find", "NOT_FOUND", "ValueError", "why"]),) * 2

    async def test_a_stop_iteration_does_not_hang(self) -> None:
        """In a thread or in place, it is an error like any other."""

        def first_of_none() -> Any:
            return next(iter([]))

        for fn in (first_of_none, lambda: next(iter([]))):
            error = error_of(await once(single(lambda step, fn=fn: step("x", fn))))
            assert isinstance(error, RuntimeError)

    async def test_an_exception_ends_the_run(self) -> None:
        """Also one that the function raises itself."""

        async def body(step: Step) -> None:
            await step("x", lambda: 1)
            raise LookupError("nothing there")

        result = await once(body)
        assert isinstance(error_of(result), LookupError)

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("bad"),
            KeyError("key", 2),
            FileNotFoundError(2, "no such file", "a.txt"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
            ExceptionGroup("two", [ValueError("a"), TypeError("b")]),
            StepTimeout("x", 5),
        ],
        ids=lambda error: type(error).__name__,
    )
    async def test_a_known_exception_is_itself_before_and_after(self, error: Exception) -> None:
        """Python's own classes and perdure's come back as themselves, with what they hold."""

        async def body(step: Step) -> Any:
            try:
                await step("x", fail)
            except type(error) as seen:
                return [type(seen).__name__, str(seen), repr(seen.args)]

        async def fail() -> None:
            raise error

        first, second = await twice(body)
        assert first.unwrap() == second.unwrap()

    async def test_an_unknown_exception_is_a_step_error_from_the_start(self) -> None:
        """A class that cannot come back after a crash is not seen before it either."""

        async def body(step: Step) -> Any:
            try:
                await step("pay", pay)
            except StepError as error:
                return [error.name, error.message]

        async def pay() -> None:
            raise PaymentDeclined("no funds")

        name = f"{PaymentDeclined.__module__}.PaymentDeclined"
        first, second = await twice(body)
        assert first == second
        assert first.unwrap()[0] in (name, "PaymentDeclined")
        assert first.unwrap()[1] == "no funds"

    @pytest.mark.parametrize("where", ["step", "workflow"])
    async def test_a_declared_exception_is_itself(self, where: str) -> None:
        """`errors=` on the step or on the workflow names the classes that come back."""
        on_step: dict[str, Any] = {"errors": [PaymentDeclined]} if where == "step" else {}
        on_workflow: dict[str, Any] = {"errors": [PaymentDeclined]} if where == "workflow" else {}

        async def body(step: Step) -> Any:
            await step("pay", pay, **on_step)

        async def pay() -> None:
            raise PaymentDeclined("no funds")

        for result in await twice(body, **on_workflow):
            assert isinstance(error_of(result), PaymentDeclined)
            assert error_of(result).args == ("no funds",)

    async def test_causes_come_along(self) -> None:
        """`Err.cause` is what the exception was raised from."""

        async def body(step: Step) -> Any:
            await step("pay", pay)

        async def pay() -> None:
            raise ValueError("top") from KeyError("below")

        for result in await twice(body):
            assert isinstance(result.cause, KeyError)

    async def test_a_failure_that_was_dealt_with_stays_so(self) -> None:
        """A resumed run sees the recorded failure and goes the same way."""
        calls: list[str] = []

        async def charge(card: str) -> str:
            calls.append(card)
            if card == "first":
                raise ConnectionError("declined")
            return card

        async def body(step: Step) -> str:
            try:
                return await step("first", charge, "first")
            except ConnectionError:
                return await step("second", charge, "second")

        assert await twice(body) == (Ok("second"), Ok("second"))
        assert calls == ["first", "second"]

    async def test_cancelling_inside_a_step_is_no_failure(self) -> None:
        """Nothing is recorded of a step that was cancelled."""

        async def body(step: Step) -> Any:
            async def never() -> None:
                await asyncio.get_running_loop().create_future()

            task = asyncio.ensure_future(step("never", never))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

        first = workflow()
        assert await first.run(body) == Ok(True)
        assert first.snapshot()["steps"] == {}


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            None, True, 1.5, "text", [1, [2]], {"a": {"b": None}}, NOW, NOW.date(), NOW.time(),
            timedelta(days=1, microseconds=1), Decimal("1.10"), UUID(int=5), b"\xff", {1, 2},
            frozenset({"a"}), (1, (2, 3)), {1: "a"}, {"~datetime": "x"}, 2**70, float("inf"),
            {"when": [NOW, (NOW,)]}, "\x00\ud800",
        ],
        ids=repr,
    )  # fmt: skip
    async def test_values_come_back_as_they_were(self, value: Any) -> None:
        """Types that JSON lacks too, without a warning."""
        body = single(lambda step: step("x", lambda: value))
        first = workflow()
        assert await first.run(body) == Ok(value)
        again = await workflow(snapshot=first.snapshot()).run(body)
        assert again == Ok(value)
        assert type(again.unwrap()) is type(value)
        assert "warnings" not in first.snapshot()

    @pytest.mark.parametrize("how", ["annotation", "returns"])
    async def test_classes_come_back_by_their_type(self, how: str) -> None:
        """The function's return annotation says it, or `returns=`."""
        user = User("Ana", NOW)

        async def fetch() -> User:
            return user

        async def body(step: Step) -> User:
            if how == "annotation":
                return await step("user", fetch)
            return await step("user", lambda: asyncio.sleep(0, user), returns=User)

        assert await twice(body) == (Ok(user), Ok(user))

    async def test_what_cannot_come_back_is_seen_so_the_first_time(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A warning names the step and the place, in the log and in the snapshot."""
        body = single(lambda step: step("user", lambda: {"user": User("Ana", NOW)}))
        first = workflow()
        seen = (await first.run(body)).unwrap()
        assert type(seen["user"]) is not User
        assert await workflow(snapshot=first.snapshot()).run(body) == Ok(seen)
        (warning,) = first.snapshot()["warnings"]
        assert (warning["type"], warning["stepId"]) == ("lossy_value", "user")
        assert warning["path"].startswith("value")
        assert "'user'" in caplog.text

    async def test_what_cannot_be_recorded_at_all_breaks_the_run(self) -> None:
        """The error names the step; no later step runs, whatever the function catches."""
        calls: list[str] = []
        nested: list[Any] = []
        for _ in range(2000):
            nested = [nested]

        async def body(step: Step) -> str:
            try:
                await step("deep", lambda: nested)
            except CodecError:
                await step("after", lambda: calls.append("after"))
            return "went on"

        error = error_of(await once(body))
        assert isinstance(error, CodecError)
        assert "'deep'" in str(error)
        assert calls == []

    async def test_changing_a_value_changes_no_record(self) -> None:
        """What the function does to a value it got stays in its hands, also on replay."""

        async def body(step: Step) -> Any:
            found = await step("found", lambda: {"items": [1]})
            found["items"].append(2)
            found["more"] = True
            return found

        first = workflow()
        await first.run(body)
        second = workflow(snapshot=first.snapshot())
        assert await second.run(body) == Ok({"items": [1, 2], "more": True})
        for ran in (first, second):
            assert ran.snapshot()["steps"]["found"]["value"] == {"items": [1]}

    async def test_changing_a_snapshot_changes_no_run(self) -> None:
        """A snapshot that was given out, or passed in, is a copy."""
        body = single(lambda step: step("x", lambda: [1]))
        first = workflow()
        await first.run(body)
        taken = first.snapshot()
        second = workflow(snapshot=taken)
        await second.run(body)
        taken["steps"]["x"]["value"].append(2)
        assert first.snapshot()["steps"]["x"]["value"] == [1]
        assert second.snapshot()["steps"]["x"]["value"] == [1]


class TestRetry:
    async def test_failures_are_tried_again(self, clock: TestClock) -> None:
        """With the waits that the retry says, and news of each."""
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
        assert await moved(clock, first.run(body)) == Ok(4)
        assert [(moment - NOW).total_seconds() for moment in tries] == [0, 1, 3, 7]
        told = [(event.attempt, event.attempts, event.delay.total_seconds()) for event in events]
        assert told == [(1, 5, 1), (2, 5, 2), (3, 5, 4)]
        assert first.snapshot()["steps"]["flaky"]["attempts"] == 4

    async def test_the_last_failure_counts(self) -> None:
        """When all attempts are used up, the step has failed with the last one."""
        tries: list[int] = []

        async def fail() -> None:
            tries.append(1)
            raise ConnectionError(f"try {len(tries)}")

        body = single(lambda step: step("fail", fail, retry=Retry(3, delay=0)))
        assert str(error_of(await once(body))) == "try 3"

    async def test_a_number_is_so_many_attempts(self, clock: TestClock) -> None:
        """`retry=2` tries twice."""
        tries: list[int] = []

        async def fail() -> None:
            tries.append(1)
            raise ConnectionError

        await moved(clock, once(single(lambda step: step("x", fail, retry=2)), clock=clock))
        assert len(tries) == 2

    async def test_a_returned_err_is_tried_again_too(self) -> None:
        """It is a failure like a raised one."""
        answers = [Err("BUSY"), Err("BUSY"), Ok(7)]
        body = single(lambda step: step("x", lambda: answers.pop(0), retry=Retry(3, delay=0)))
        assert await once(body) == Ok(7)

    async def test_retry_if_says_which(self) -> None:
        """Other failures are final at once."""
        tries: list[int] = []

        async def fail() -> None:
            tries.append(1)
            raise PermissionError if len(tries) == 2 else ConnectionError

        retry = Retry(5, delay=0, retry_if=lambda error: isinstance(error, ConnectionError))
        result = await once(single(lambda step: step("x", fail, retry=retry)))
        assert isinstance(error_of(result), PermissionError)
        assert len(tries) == 2

    async def test_the_function_knows_its_attempt(self) -> None:
        """`step.attempt` counts from 1."""
        seen: list[int] = []

        async def body(step: Step) -> None:
            async def flaky() -> None:
                seen.append(step.attempt)
                if step.attempt < 3:
                    raise OSError

            await step("x", flaky, retry=Retry(3, delay=0))
            seen.append(step.attempt)

        await once(body)
        assert seen == [1, 2, 3, 1]


class TestTimeout:
    async def never(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def timed(self, clock: TestClock, timeout: Any, **options: Any) -> Any:
        body = single(lambda step: step("slow", self.never, timeout=timeout, **options))
        return await moved(clock, once(body, clock=clock))

    async def test_a_step_that_takes_too_long_fails(self, clock: TestClock) -> None:
        """With a `StepTimeout` that names it, when its time by the clock is over."""
        error = error_of(await self.timed(clock, "5s"))
        assert isinstance(error, StepTimeout)
        assert isinstance(error, TimeoutError)
        assert (error.step, error.seconds) == ("slow", 5)
        assert clock.now() - NOW == timedelta(seconds=5)

    async def test_a_step_in_time_gives_its_value(self, clock: TestClock) -> None:
        """And nothing is left waiting."""
        body = single(lambda step: step("quick", lambda: 7, timeout=5))
        assert await once(body, clock=clock) == Ok(7)
        await asyncio.sleep(0)
        assert clock.sleepers == 0

    async def test_it_can_give_nothing(self, clock: TestClock) -> None:
        """`on_timeout="none"` makes it None."""
        assert await self.timed(clock, Timeout(5, on_timeout="none")) == Ok(None)

    async def test_it_can_be_another_error(self, clock: TestClock) -> None:
        """An exception of the user's, or what a function makes of the `StepTimeout`."""
        result = await self.timed(clock, Timeout(5, on_timeout=KeyError("late")))
        assert isinstance(error_of(result), KeyError)
        assert isinstance(result.cause, StepTimeout)
        gives = Timeout(5, on_timeout=lambda late: Err(late.step))
        assert await self.timed(clock, gives) == Err("slow")

    async def test_each_attempt_has_its_time(self, clock: TestClock) -> None:
        """A time-out is a failure that is tried again."""
        events: list[object] = []
        retry = Retry(3, delay="1s", backoff="fixed", jitter=False)
        body = single(lambda step: step("slow", self.never, timeout="5s", retry=retry))
        running = once(body, clock=clock, on_event=events.append)
        assert isinstance(error_of(await moved(clock, running)), StepTimeout)
        assert clock.now() - NOW == timedelta(seconds=17)
        assert [e.attempt for e in events if isinstance(e, StepTimedOut)] == [1, 2, 3]

    async def test_a_function_that_will_not_be_cancelled_gives_its_value(
        self, clock: TestClock
    ) -> None:
        """And the task is as it was: no cancellation is left in it."""

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

        assert await moved(clock, once(body, clock=clock)) == Ok(["late", 0])

    async def test_cancelling_from_outside_is_no_timeout(self, clock: TestClock) -> None:
        """It comes out as it is."""
        body = single(lambda step: step("slow", self.never, timeout="5s"))
        running = asyncio.ensure_future(once(body, clock=clock))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


class TestSleep:
    async def test_it_waits_by_the_clock(self, clock: TestClock) -> None:
        """A duration as a timedelta, seconds or text; a day in a moment."""

        async def body(step: Step) -> float:
            await step.sleep("a", timedelta(days=1))
            await step.sleep("b", 5)
            await step.sleep("c", "1h30m")
            return (clock.now() - NOW).total_seconds()

        result = await moved(clock, once(body, clock=clock), by="5s")
        assert result == Ok(86400 + 5 + 5400)

    async def test_it_waits_for_a_time_of_day(self, clock: TestClock) -> None:
        """`Cron` gives the next time, in a time zone."""

        async def body(step: Step) -> str:
            await step.sleep("morning", Cron("0 9 * * *", tz="Europe/Berlin"))
            return clock.now().isoformat()

        result = await moved(clock, once(body, clock=clock), by="10m")
        assert result == Ok("2030-01-01T08:00:00+00:00")

    async def test_it_is_spent_once(self, clock: TestClock) -> None:
        """A sleep that is over is not slept again, and one that was begun keeps its end."""

        async def body(step: Step) -> str:
            await step.sleep("first", "1h")
            await step.sleep("second", "1h")
            return clock.now().isoformat()

        first = workflow(clock=clock)
        running = asyncio.ensure_future(first.run(body))
        await clock.advance("90m")
        snapshot = first.snapshot()
        running.cancel()
        await asyncio.wait([running])
        second = workflow(clock=clock, snapshot=snapshot).run(body)
        assert await moved(clock, second, by="1m") == Ok("2030-01-01T02:00:00+00:00")

    async def test_events_need_a_store(self) -> None:
        """In this process alone there is nobody to send one; the error says what is missing."""
        error = error_of(await once(single(lambda step: step.wait_for_event("ok", "approved"))))
        assert isinstance(error, MissingAbility)
        assert "inbox" in str(error)
        assert "step.wait_for_event('ok')" in str(error)


class TestTogether:
    async def test_all_gives_values_by_name(self) -> None:
        """In the order of the names; each is a step of that name."""

        async def body(step: Step) -> dict[str, Any]:
            return await step.all({"b": lambda: 1, "a": lambda: asyncio.sleep(0, result=2)})

        first = workflow()
        assert list((await first.run(body)).unwrap().items()) == [("b", 1), ("a", 2)]
        assert set(first.snapshot()["steps"]) == {"a", "b"}

    async def test_all_twice_are_other_steps(self) -> None:
        """The names count like ids."""

        async def body(step: Step) -> list[Any]:
            return [await step.all({"a": lambda n=n: n}) for n in (1, 2)]

        assert await twice(body) == (Ok([{"a": 1}, {"a": 2}]),) * 2

    async def test_all_finishes_before_it_fails(self) -> None:
        """What runs beside a failure is recorded; then the first failure by name is raised."""

        async def slow() -> str:
            await asyncio.sleep(0.001)
            return "done"

        async def fail(why: str) -> None:
            raise ValueError(why)

        async def body(step: Step) -> Any:
            return await step.all(
                {"slow": slow, "first": lambda: fail("first"), "second": lambda: fail("second")}
            )

        first = workflow()
        assert str(error_of(await first.run(body))) == "first"
        assert first.snapshot()["steps"]["slow"]["value"] == "done"

    async def test_map_keeps_the_order_and_the_limit(self) -> None:
        """Values come in the items' order, and never more than `concurrency` at once."""
        running = 0
        most = 0

        async def square(n: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001 * (5 - n))
            running -= 1
            return n * n

        async def body(step: Step) -> list[int]:
            return await step.map("square", range(5), square, concurrency=2)

        assert await twice(body) == (Ok([0, 1, 4, 9, 16]),) * 2
        assert most == 2

    async def test_map_of_nothing(self) -> None:
        """Gives nothing."""
        body = single(lambda step: step.map("x", [], lambda item: item))
        assert await once(body) == Ok([])

    async def test_map_runs_again_only_what_failed(self) -> None:
        """The items that were done answer from their records."""
        calls: list[int] = []

        async def work(n: int) -> int:
            calls.append(n)
            if n == 1 and calls.count(1) == 1:
                raise ValueError("one")
            return n

        async def body(step: Step) -> list[int]:
            return await step.map("work", [0, 1, 2], work)

        first = workflow()
        assert isinstance(error_of(await first.run(body)), ValueError)
        done = first.snapshot(include="completed")
        assert await workflow(snapshot=done).run(body) == Ok([0, 1, 2])
        assert sorted(calls) == [0, 1, 1, 2]

    async def test_race_gives_the_first_and_cancels_the_others(self, clock: TestClock) -> None:
        """The winner is recorded: a replay gives the same one without running anything."""
        cancelled: list[str] = []

        async def after(seconds: float, name: str) -> str:
            try:
                await clock.sleep(seconds)
            except asyncio.CancelledError:
                cancelled.append(name)
                raise
            return name

        async def body(step: Step) -> Any:
            return await step.race(
                "race",
                {name: lambda n=n, name=name: after(n, name) for n, name in enumerate("xba")},
            )

        first = workflow(clock=clock)
        assert await moved(clock, first.run(body)) == Ok(("x", "x"))
        assert cancelled == ["b", "a"]
        assert await workflow(snapshot=first.snapshot()).run(body) == Ok(("x", "x"))

    async def test_the_branches_of_a_race_may_call_steps(self, clock: TestClock) -> None:
        """A step against the time is the usual race."""

        async def body(step: Step) -> Any:
            async def work() -> str:
                return await step("work", lambda: clock.sleep(10))

            return await step.race("limit", {"work": work, "late": lambda: step.sleep("nap", 5)})

        first = workflow(clock=clock)
        assert await moved(clock, first.run(body)) == Ok(("late", None))
        assert "work" not in first.snapshot()["steps"]
        second = workflow(snapshot=first.snapshot(), on_unknown_steps="error")
        assert await second.run(body) == Ok(("late", None))

    async def test_a_race_that_fails_first_fails(self, clock: TestClock) -> None:
        """First to finish, not first to succeed."""

        async def fail() -> None:
            raise ValueError("first")

        async def body(step: Step) -> Any:
            return await step.race("race", {"slow": lambda: clock.sleep(5), "fail": fail})

        assert str(error_of(await moved(clock, once(body, clock=clock)))) == "first"


class TestDrift:
    async def drifted(self, before: Body, after: Body) -> DriftError:
        first = workflow()
        await first.run(before)
        calls: list[int] = []
        resumed = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        error = error_of(await resumed.run(after))
        assert isinstance(error, DriftError)
        assert calls == []
        assert resumed.snapshot()["steps"] == first.snapshot()["steps"]
        return error

    async def test_other_arguments_are_refused(self) -> None:
        """The error says the step, what was recorded and what was asked; nothing runs."""

        async def fetch(id: str) -> str:
            return id

        error = await self.drifted(
            single(lambda step: step("fetch", fetch, "1")),
            single(lambda step: step("fetch", fetch, "2")),
        )
        assert error.step == "fetch"
        assert error.recorded != error.asked
        for word in ("'fetch'", error.recorded, error.asked, "key="):
            assert word in str(error)

    async def test_another_kind_of_step_is_refused(self, clock: TestClock) -> None:
        """A sleep does not answer for a step."""
        error = await self.drifted(
            single(lambda step: step("x", lambda: 1)), single(lambda step: step.sleep("x", 0))
        )
        assert (error.recorded, error.asked) == ("step", "sleep")

    async def test_a_swap_is_refused(self) -> None:
        """Two calls of one id that changed places do not get each other's values."""

        async def double(n: int) -> int:
            return 2 * n

        def calls(*numbers: int) -> Body:
            async def body(step: Step) -> list[int]:
                return [await step("double", double, n) for n in numbers]

            return body

        await self.drifted(calls(1, 2), calls(2, 1))

    async def test_a_drift_cannot_be_caught_away(self) -> None:
        """No later step runs, and the run ends with it."""

        async def fetch(id: str) -> str:
            return id

        async def after(step: Step) -> str:
            try:
                return await step("fetch", fetch, "2")
            except PerdureError:
                return await step("other", fetch, "3")

        await self.drifted(single(lambda step: step("fetch", fetch, "1")), after)

    async def test_a_thunk_has_no_arguments_to_compare(self) -> None:
        """Its id is all there is; what it closes over may differ."""

        def returning(value: int) -> Body:
            return single(lambda step: step("x", lambda: value))

        first = workflow()
        await first.run(returning(1))
        again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        assert await again.run(returning(2)) == Ok(1)

    async def test_a_key_is_the_identity_and_arguments_do_not_count(self) -> None:
        """`key=` is the user's word that it is the same call."""

        async def fetch(id: str) -> str:
            return id

        def keyed(id: str) -> Body:
            return single(lambda step: step("fetch", fetch, id, key="user"))

        first = workflow()
        await first.run(keyed("1"))
        again = workflow(snapshot=first.snapshot(), on_definition_change="ignore")
        assert await again.run(keyed("2")) == Ok("1")


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda step: step("", lambda: 1), "id"),
        (lambda step: step(5, lambda: 1), "id"),
        (lambda step: step("\ud800", lambda: 1), "id"),
        (lambda step: step("x", lambda: 1, key="\ud800"), "key"),
        (lambda step: step("x", 5), "fn"),
        (lambda step: step("x", None), "fn"),
        (lambda step: step("x", lambda: 1, key=""), "key"),
        (lambda step: step("x", lambda: 1, key=5), "key"),
        (lambda step: step("x", lambda: 1, ttl="soon"), "ttl"),
        (lambda step: step("x", lambda: 1, retry="often"), "retry"),
        (lambda step: step("x", lambda: 1, timeout=0), "timeout"),
        (lambda step: step("x", lambda: 1, errors=[5]), "errors"),
        (lambda step: step("x", lambda: 1, errors="ValueError"), "errors"),
        (lambda step: step.sleep("", 1), "id"),
        (lambda step: step.sleep("x", "soon"), "duration"),
        (lambda step: step.sleep("x", -1), "duration"),
        (lambda step: step.sleep("x", None), "duration"),
        (lambda step: step.sleep("x", timedelta.max), "duration"),
        (lambda step: step.wait_for_event("x", ""), "name"),
        (lambda step: step.wait_for_event("x", 5), "name"),
        (lambda step: step.wait_for_event("x", "y", timeout="soon"), "timeout"),
        (lambda step: step.all([lambda: 1]), "thunks"),
        (lambda step: step.all({"a": 5}), "thunks['a']"),
        (lambda step: step.all({5: lambda: 1}), "thunks[5]"),
        (lambda step: step.map("x", 5, lambda item: item), "items"),
        (lambda step: step.map("x", [1], 5), "fn"),
        (lambda step: step.map("x", [], 5), "fn"),
        (lambda step: step.map("", [1], lambda item: item), "id"),
        (lambda step: step.map("x", [1], lambda item: item, concurrency=0), "concurrency"),
        (lambda step: step.map("x", [1], lambda item: item, concurrency=True), "concurrency"),
        (lambda step: step.race("x", {}), "thunks"),
        (lambda step: step.race("x", 5), "thunks"),
        (lambda step: step.race("", {"a": lambda: 1}), "id"),
        (lambda step: step.transaction("x", 5), "fn"),
    ],
)  # fmt: skip
async def test_bad_calls(call: Any, parameter: str) -> None:
    """Each parameter that cannot be used is named, with what came."""
    error = error_of(await once(single(call)))
    assert isinstance(error, InvalidArgument)
    assert error.parameter == parameter
    assert str(error).startswith(f"{parameter}: expected ")
    assert isinstance(error, InvalidDuration) == (parameter in ("ttl", "timeout", "duration"))
