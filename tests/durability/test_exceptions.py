"""Exceptions are caught by their class before a crash and after it, without being declared."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from perdure import Err, Ok, Retry, Runtime, Step, StepError, durable, workflow
from perdure.runtime.definition import Definition
from perdure.stores import sqlite
from perdure.stores.memory import MemoryStore
from perdure.testing import explore_crashes
from tests.durability.conftest import MakeRuntime


class PaymentDeclined(Exception):
    """Takes other arguments than it passes to its base class, as many do."""

    def __init__(self, order: str, *, code: int) -> None:
        super().__init__(f"{order}: declined")
        self.code = code


class OutOfStock(Exception):
    pass


async def decline() -> None:
    try:
        raise ConnectionError("reset")
    except ConnectionError as error:
        declined = PaymentDeclined("order-1", code=51)
        declined.add_note("card ends in 42")
        raise declined from error


async def sell_out(*_: object) -> None:
    raise OutOfStock("none left")


async def count(step: Step) -> int:
    return await step("count", lambda: 1)


def describe(error: BaseException) -> list[Any]:
    notes = getattr(error, "__notes__", [])
    return [type(error).__name__, str(error), list(error.args), notes, repr(error.__cause__)]


@workflow("pay")
async def pay(step: Step) -> list[Any]:
    try:
        await step("pay", decline)
    except PaymentDeclined as error:
        return [error.code, *describe(error), await count(step)]
    return []


async def test_an_exception_is_caught_by_its_class(make_runtime: MakeRuntime) -> None:
    """With its message, arguments, attributes, notes and cause."""
    run = await make_runtime(pay).trigger(pay)
    text, cause = "order-1: declined", "ConnectionError('reset')"
    notes = ["card ends in 42"]
    assert run.output == [51, "PaymentDeclined", text, [text], notes, cause, 1]


@pytest.mark.parametrize("always_replay", [False, True])
async def test_it_is_caught_after_a_crash_at_any_store_call(always_replay: bool) -> None:
    report = await explore_crashes(pay, always_replay=always_replay)
    assert report.crashes


async def test_a_class_of_a_test_function_is_caught(make_runtime: MakeRuntime) -> None:
    """It is in the closures of both functions."""

    class Local(Exception):
        pass

    async def fail() -> None:
        raise Local("here")

    @workflow("local")
    async def local(step: Step) -> str:
        try:
            await step("fail", fail)
        except Local as error:
            await count(step)
            return f"caught {error}"
        return ""

    assert (await make_runtime(local).trigger(local)).output == "caught here"


async def test_a_class_that_only_the_step_has_is_caught_by_its_base_class(
    make_runtime: MakeRuntime,
) -> None:
    """As a driver's own error, of which the workflow knows only the base class."""

    def driver() -> Callable[[], Coroutine[Any, Any, None]]:
        class CardExpired(OutOfStock):
            pass

        async def fail() -> None:
            raise CardExpired("2024")

        return fail

    fail = driver()

    @workflow("base")
    async def base(step: Step) -> str:
        try:
            await step("fail", fail)
        except OutOfStock as error:
            await count(step)
            return type(error).__name__
        return ""

    assert (await make_runtime(base).trigger(base)).output == "CardExpired"


async def test_a_class_from_elsewhere_is_a_step_error_both_times(
    make_runtime: MakeRuntime,
) -> None:
    async def fail() -> None:
        raise type("Elsewhere", (Exception,), {})("far away")

    @workflow("elsewhere")
    async def elsewhere(step: Step) -> list[Any]:
        try:
            await step("fail", fail)
        except StepError as error:
            await count(step)
            return [error.name, error.message, "far away" in error.traceback, repr(error.__cause__)]
        return []

    run = await make_runtime(elsewhere).trigger(elsewhere)
    assert run.output == ["Elsewhere", "far away", True, "None"]


def moving(cls: type[Exception]) -> Definition[Any, Any]:
    """Return a workflow whose deployment has this class in scope."""

    async def fail() -> None:
        raise cls("gone")

    @workflow("moving")
    async def moved(step: Step) -> str:
        try:
            await step("fail", fail)
        except cls:
            await step.sleep("deploy", "1h")
            return "caught"
        return "done"

    return moved


async def test_a_class_that_a_deployment_moves_is_still_caught(make_runtime: MakeRuntime) -> None:
    before = type("Gone", (Exception,), {"__module__": "shop.old"})
    after = type("Gone", (Exception,), {"__module__": "shop.new"})
    definition = moving(before)
    run = await make_runtime(definition).trigger(definition, run_id="r")
    assert run.status == "suspended"
    later = make_runtime(moving(after))
    await later.clock.advance("1h")  # type: ignore[attr-defined]  # a TestClock
    (run,) = await later.sweep()
    assert run.output == "caught"


async def test_the_error_of_a_run_has_its_class(make_runtime: MakeRuntime) -> None:
    """So have the errors in its history. Their tracebacks are strings."""

    @workflow("fail")
    async def fail(step: Step) -> None:
        await step("before", lambda: 1)
        await step("pay", decline)

    runtime = make_runtime(fail)
    await runtime.trigger(fail, run_id="r")
    run = await runtime.get_run("r")
    assert run is not None
    assert isinstance(run.error, PaymentDeclined)
    assert run.error.code == 51
    before, paid = run.history
    assert (before.traceback, type(paid.error)) == ("", PaymentDeclined)
    for text in (run.traceback, paid.traceback):
        assert text.index("ConnectionError: reset") < text.index("direct cause")
        assert "in decline" in text


async def test_durable_run_returns_the_exception_itself(store: MemoryStore) -> None:
    """From the first call and from a replay of its records."""

    async def body(step: Step) -> None:
        await step("pay", decline)

    for _ in range(2):
        result = await durable.run({}, body, id="r", store=store, replay_errors=True)
        assert isinstance(result, Err)
        assert isinstance(result.error, PaymentDeclined)
        assert result.error.code == 51


async def test_a_transaction_fails_with_its_exception(tmp_path: Path) -> None:
    @workflow("reserve")
    async def reserve(step: Step) -> str:
        try:
            await step.transaction("reserve", sell_out)
        except OutOfStock as error:
            await count(step)
            return str(error)
        return ""

    async with sqlite(tmp_path / "runs.db") as store:
        for always_replay in (False, True):
            runtime = Runtime(store, workflows=[reserve], always_replay=always_replay)
            run = await runtime.trigger(reserve)
            while not run.over:
                (run,) = await runtime.sweep()
            assert run.output == "none left"


async def test_a_race_fails_with_the_exception_of_its_branch(make_runtime: MakeRuntime) -> None:
    @workflow("race")
    async def race(step: Step) -> str:
        try:
            await step.race("first", {"pay": lambda: step("pay", sell_out)})
        except OutOfStock as error:
            await count(step)
            return str(error)
        return ""

    assert (await make_runtime(race).trigger(race)).output == "none left"


async def test_except_star_catches_what_a_step_in_a_task_group_raised(
    make_runtime: MakeRuntime,
) -> None:
    @workflow("group")
    async def group(step: Step) -> list[str]:
        caught: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(step("pay", decline))
        except* OutOfStock:
            caught.append("never")
        except* PaymentDeclined as declined:
            caught += [str(error) for error in declined.exceptions]
        return [*caught, str(await count(step))]

    assert (await make_runtime(group).trigger(group)).output == ["order-1: declined", "1"]


async def test_a_group_that_a_step_raises_has_its_members(make_runtime: MakeRuntime) -> None:
    """Nested ones too."""

    async def fail() -> None:
        inner = ExceptionGroup("inner", [OutOfStock("none left"), ValueError("odd")])
        raise ExceptionGroup("outer", [inner, PaymentDeclined("order-1", code=51)])

    @workflow("group")
    async def group(step: Step) -> list[Any]:
        caught: list[Any] = []
        try:
            await step("fail", fail)
        except* OutOfStock as outer:
            caught.append(repr(outer))
        except* PaymentDeclined as outer:
            caught += [error.code for error in outer.exceptions if hasattr(error, "code")]
        except* ValueError as outer:
            caught.append(str(outer.message))
        await count(step)
        return caught

    run = await make_runtime(group).trigger(group)
    nested = "ExceptionGroup('inner', [OutOfStock('none left')])"
    assert run.output == [f"ExceptionGroup('outer', [{nested}])", 51, "outer"]


async def test_a_retry_heals_a_run_that_ended_with_a_group(make_runtime: MakeRuntime) -> None:
    """Exactly the steps among its members run again."""
    ran: list[str] = []
    broken = True

    async def work(name: str) -> str:
        ran.append(name)
        if broken and name != "fine":
            raise OutOfStock(name)
        return name

    @workflow("group")
    async def group(step: Step) -> list[str]:
        await step("fine", work, "fine")
        first = await asyncio.gather(
            step("a", work, "a"), step("b", work, "b"), return_exceptions=True
        )
        if errors := [error for error in first if isinstance(error, Exception)]:
            raise ExceptionGroup("both", errors)
        return [str(value) for value in first]

    runtime = make_runtime(group)
    run = await runtime.trigger(group, run_id="r")
    assert isinstance(run.error, ExceptionGroup)
    assert [type(error) for error in run.error.exceptions] == [OutOfStock, OutOfStock]
    broken, ran[:] = False, []
    run = await runtime.retry("r")
    assert (run.output, sorted(ran)) == (["a", "b"], ["a", "b"])


async def test_what_an_exception_loses_is_logged(
    make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    """The function sees the same exception before and after a crash, without the lost attribute."""

    class Refused(Exception):
        def __init__(self, response: Callable[..., object]) -> None:
            super().__init__("refused")
            self.response = response

    async def fail() -> None:
        raise Refused(print)

    @workflow("lossy")
    async def lossy(step: Step) -> bool:
        try:
            await step("ask", fail)
        except Refused as error:
            await count(step)
            return hasattr(error, "response")
        return True

    assert (await make_runtime(lossy).trigger(lossy)).output is False
    assert "step 'ask': exception.response cannot be restored exactly" in caplog.text
    assert "Raise an exception in the step whose attributes are plain data" in caplog.text


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.ERROR]


async def test_a_failed_run_is_logged_with_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("shop")
    async def shop(step: Step) -> None:
        await step("pay", decline, retry=Retry(3, delay=0))

    await Runtime(MemoryStore(), workflows=[shop]).trigger(shop, run_id="o-1")
    [record] = errors_in(caplog)
    message = record.getMessage()
    assert "run 'o-1' of workflow 'shop' failed at step 'pay' (attempt 3)" in message
    assert "in decline" in caplog.text


async def test_a_run_that_fails_after_a_replay_is_logged_with_the_original_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exception was raised in another activation, of which only the text is left."""

    @workflow("shop")
    async def shop(step: Step) -> None:
        try:
            await step("pay", decline)
        finally:
            await asyncio.sleep(0)

    runtime = Runtime(MemoryStore(), workflows=[shop], always_replay=True)
    run = await runtime.trigger(shop, run_id="o-1")
    while not run.over:
        (run,) = await runtime.sweep()
    [record] = errors_in(caplog)
    assert "in decline" in record.getMessage()
    assert "ConnectionError: reset" in record.getMessage()
    assert "in decline" in run.traceback


async def test_durable_run_logs_no_failure(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It returns the error to its caller."""

    async def body(step: Step) -> None:
        await step("pay", decline)

    assert not (await durable.run({}, body, id="r", store=store)).ok
    assert errors_in(caplog) == []
    assert await durable.run({}, count, id="s", store=store) == Ok(1)
