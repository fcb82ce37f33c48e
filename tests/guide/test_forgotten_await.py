"""A forgotten `await`: the run fails before anything else happens, and says which step it was."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from perdure import Err, Ok, Runtime, Step, Workflow, durable, workflow
from perdure.errors import CodecError, InvalidArgument, NotAwaited
from perdure.runtime.run import Run
from perdure.stores import MemoryStore

Function = Callable[[Any], Coroutine[Any, Any, Any]]

NEVER_AWAITED = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
shipped: list[str] = []


@pytest.fixture(autouse=True)
def nothing_is_shipped() -> Iterator[None]:
    shipped.clear()
    yield
    # A traceback may keep a coroutine that was never awaited, and Python warns when it is freed.
    gc.collect()


async def charge(cents: int) -> str:
    return f"receipt for {cents}"


async def ship(receipt: object) -> str:
    shipped.append(str(receipt))
    return "parcel 7"


@durable.step
async def pay(cents: int) -> str:
    return await charge(cents)


async def run_of(fn: Function) -> Run[Any]:
    return await Runtime(MemoryStore()).trigger(workflow("order")(fn), run_id="order-1")


async def test_the_run_fails_before_the_next_step() -> None:
    """Nothing is shipped that was not paid for. The error names the step and the line."""

    async def order(step: Any) -> str:
        step("charge", charge, 4200)
        return str(await step("ship", ship, "no receipt"))

    with pytest.warns(RuntimeWarning, match="coroutine 'step \"charge\"' was never awaited"):
        run = await run_of(order)
    assert shipped == []
    assert isinstance(run.error, NotAwaited)
    assert run.error.step == "charge"
    line = order.__code__.co_firstlineno + 1
    assert f"'charge' was called without `await` ({__file__}:{line})" in str(run.error)


@NEVER_AWAITED
async def test_the_run_can_be_retried_with_the_corrected_code() -> None:
    """What was recorded before the mistake is not repeated."""

    async def order(step: Any) -> str:
        receipt = await step("charge", charge, 4200)
        step("ship", ship, receipt)
        return str(receipt)

    async def corrected(step: Step) -> str:
        receipt = await step("charge", charge, 4200)
        await step("ship", ship, receipt)
        return receipt

    store = MemoryStore()
    run = await Runtime(store).trigger(workflow("order")(order), run_id="order-1")
    assert (run.status, shipped) == ("failed", [])

    definition = workflow("order")(corrected)
    runtime = Runtime(store, workflows=[definition], on_definition_change="ignore")
    assert (await runtime.retry("order-1")).output == "receipt for 4200"
    assert shipped == ["receipt for 4200"]


async def no_sleep(step: Any) -> None:
    step.sleep("settle", "7d")


async def no_event(step: Any) -> None:
    step.wait_for_event("settle", "paid")


async def no_transaction(step: Any) -> None:
    step.transaction("settle", ship)


async def no_plain_call(step: Any) -> None:
    call: Any = pay
    call(4200)


async def no_key(step: Any) -> None:
    step("settle", charge, 1, key="settle")


async def no_race(step: Any) -> None:
    step.race("settle", step.sleep("a", 1), step.sleep("b", 2))


async def no_loop(step: Any) -> None:
    for cents in (1, 2):
        step("settle", charge, cents)


async def no_condition(step: Any) -> None:
    if step("settle", charge, 0):
        await step("ship", ship, "unpaid")


async def no_negation(step: Any) -> None:
    if not step("settle", charge, 0):
        return


@NEVER_AWAITED
@pytest.mark.parametrize(
    "fn",
    [
        no_sleep,
        no_event,
        no_transaction,
        no_plain_call,
        no_key,
        no_race,
        no_loop,
        no_condition,
        no_negation,
    ],
)
async def test_every_kind_of_call_is_noticed(fn: Function) -> None:
    run = await run_of(fn)
    assert isinstance(run.error, NotAwaited)
    assert run.error.step == ("pay" if fn is no_plain_call else "settle")
    assert (run.history, shipped) == ((), [])


@NEVER_AWAITED
async def test_several_calls_at_once() -> None:
    async def order(step: Any) -> None:
        step.all(step("charge", charge, 1), step("ship", ship, ""))

    run = await run_of(order)
    assert isinstance(run.error, NotAwaited)
    assert run.error.step == "step.all"


@NEVER_AWAITED
async def test_in_a_branch() -> None:
    async def branch(step: Any) -> None:
        step("charge", charge, 1)
        await step("ship", ship, "no receipt")

    async def order(step: Any) -> None:
        await asyncio.gather(branch(step), branch(step))

    run = await run_of(order)
    assert isinstance(run.error, NotAwaited)
    assert shipped == []


@NEVER_AWAITED
async def test_without_a_store() -> None:
    async def order(step: Any) -> str:
        step("charge", charge, 4200)
        return str(await step("ship", ship, "no receipt"))

    match await Workflow("order").run(order):
        case Err(NotAwaited() as error):
            assert (error.step, shipped) == ("charge", [])
        case other:
            pytest.fail(f"the result is {other}")


async def test_a_step_that_is_returned() -> None:
    async def order(step: Any) -> Any:
        return step("charge", charge, 4200)

    run = await run_of(order)
    assert isinstance(run.error, NotAwaited)
    assert run.error.step == "charge"


@NEVER_AWAITED
async def test_a_step_in_the_output() -> None:
    async def order(step: Any) -> Any:
        return {"receipt": step("charge", charge, 4200)}

    run = await run_of(order)
    assert isinstance(run.error, CodecError)
    assert "it contains a coroutine: an `await` is missing (at output.receipt)" in str(run.error)


@NEVER_AWAITED
async def test_a_coroutine_in_an_error_is_recorded_as_a_failure() -> None:
    """The step is executed once, and the run ends."""
    executions = 0

    async def refuse() -> Any:
        nonlocal executions
        executions += 1
        return Err(charge(1))

    async def order(step: Any) -> Any:
        try:
            await step("refuse", refuse)
        except CodecError:
            await step.sleep("settle", 0.01)
        return Err(charge(2))

    run = await run_of(order)
    assert (run.status, executions) == ("failed", 1)
    assert [record.ok for record in run.history] == [False, True]
    assert isinstance(run.error, CodecError)


@NEVER_AWAITED
async def test_a_step_in_the_value_of_another() -> None:
    async def order(step: Any) -> Any:
        return await step("both", lambda: [charge(1)])

    run = await run_of(order)
    assert "the value of step 'both' cannot be recorded: it contains a coroutine" in str(run.error)


@NEVER_AWAITED
async def test_a_step_as_the_argument_of_another() -> None:
    """Its value would be a coroutine, and the step would run inside the other one or never."""

    async def order(step: Any) -> Any:
        receipt = step("charge", charge, 4200)
        return await step("ship", ship, receipt)

    run = await run_of(order)
    assert isinstance(run.error, InvalidArgument)
    assert "An `await` is missing" in str(run.error)
    assert shipped == []


@NEVER_AWAITED
async def test_a_call_that_an_exception_left_behind_was_not_forgotten() -> None:
    """Python warns about it too, but the function has handled the exception."""

    def price() -> int:
        raise ValueError("no price")

    async def order(step: Any) -> Any:
        try:
            await step.all(step("ship", ship, ""), step("charge", charge, price()))
        except ValueError:
            return await step("decline", charge, 0)

    run = await run_of(order)
    assert run.output == "receipt for 0"


@NEVER_AWAITED
async def test_a_call_that_a_loop_did_not_reach_was_not_forgotten() -> None:
    """The list of calls is freed where the loop ends, which is not where one of them was made."""

    async def order(step: Any) -> Any:
        for call in [step("first", charge, 1), step("second", charge, 2)]:
            if await call:
                break
        for call in [step("third", charge, 3), step("fourth", charge, 4)]:
            return await call
        return None

    run = await run_of(order)
    assert run.output == "receipt for 3"


@NEVER_AWAITED
async def test_a_call_in_a_failed_branch_was_not_forgotten() -> None:
    """Its exception, with the frame of the branch, is freed with the result of `gather`."""

    async def branch(step: Any, cents: int) -> Any:
        calls = [step("charge", charge, cents), step("ship", ship, "")]
        if cents > 1:
            raise ValueError("too much")
        return await asyncio.gather(*calls)

    async def order(step: Any) -> Any:
        await asyncio.gather(branch(step, 1), branch(step, 2), return_exceptions=True)
        return await step("settle", charge, 3)

    run = await run_of(order)
    assert run.output == "receipt for 3"


@NEVER_AWAITED
async def test_a_call_of_a_branch_that_was_cancelled_was_not_forgotten() -> None:
    """The task of the second one is cancelled before it starts."""

    async def fail() -> None:
        raise ValueError("no price")

    async def patiently(call: Coroutine[Any, Any, str]) -> str:
        return await call

    async def order(step: Any) -> Any:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                tasks.create_task(patiently(step("charge", charge, 1))).cancel()
        except* ValueError:
            pass
        return await step("decline", charge, 0)

    run = await run_of(order)
    assert run.output == "receipt for 0"


@NEVER_AWAITED
@pytest.mark.parametrize("kind", ["step", "step.sleep", "step.all", "step.call"])
async def test_a_call_that_another_run_discards_stops_its_own_run(kind: str) -> None:
    """The code of one run frees what another one has called without `await`."""
    calls: list[Any] = []
    called, discarded = asyncio.Event(), asyncio.Event()

    async def first(step: Any) -> Any:
        match kind:
            case "step":
                calls.append(step("charge", charge, 4200))
            case "step.sleep":
                calls.append(step.sleep("charge", "7d"))
            case "step.all":
                calls.append(step.all())
            case _:
                calls.append(step.call("charge", workflow("second")(second)))
        called.set()
        await discarded.wait()
        return await step("ship", ship, "no receipt")

    async def second(step: Any) -> Any:
        await called.wait()
        calls.pop()
        discarded.set()
        return await step("settle", charge, 3)

    runtime = Runtime(MemoryStore())
    definitions = (workflow("first")(first), workflow("second")(second))
    one, two = await asyncio.gather(*map(runtime.trigger, definitions))
    assert two.output == "receipt for 3"
    assert (one.status, shipped) == ("failed", [])
    assert isinstance(one.error, NotAwaited)
    assert one.error.step == ("step.all" if kind == "step.all" else "charge")
    assert __file__ in one.error.place


@NEVER_AWAITED
async def test_a_call_that_is_discarded_after_its_run_stops_no_other_run() -> None:
    calls: list[Any] = []

    async def first(step: Any) -> str:
        calls.append(step("charge", charge, 4200))
        return "done"

    async def second(step: Any) -> Any:
        calls.pop()
        return await step("settle", charge, 3)

    assert (await run_of(first)).output == "done"
    assert (await run_of(second)).output == "receipt for 3"


@NEVER_AWAITED
async def test_a_call_that_another_thread_discards_stops_no_run() -> None:
    """A run may only be stopped in its own event loop."""
    calls: list[Any] = []

    async def first(step: Any) -> Any:
        calls.append(step("charge", charge, 4200))
        other = Workflow("second").run(second)
        assert await asyncio.to_thread(asyncio.run, other) == Ok("receipt for 3")
        return await step("ship", ship, "receipt")

    async def second(step: Any) -> Any:
        calls.pop()
        return await step("settle", charge, 3)

    assert (await run_of(first)).output == "parcel 7"


async def test_a_task_that_is_not_awaited_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """It is cancelled when the function returns, as documented; the log names its step."""

    async def never(cents: int) -> None:
        await asyncio.Event().wait()

    async def order(step: Any) -> str:
        started = asyncio.create_task(step("charge", never, 4200))
        await step("ship", ship, "no receipt")
        waiting = asyncio.create_task(step("log", ship, "log"))
        return f"{started.done()} {waiting.done()}"

    run = await run_of(order)
    assert (run.output, shipped) == ("False False", ["no receipt"])
    assert "returned before these steps have ended: 'charge', 'log'. They are" in caplog.text


async def test_a_wait_that_is_not_awaited_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A branch may wait for an event that the function then no longer needs."""

    async def order(step: Any) -> str:
        task = asyncio.create_task(step.wait_for_event("cancel", "cancel"))
        await step("ship", ship, "receipt")
        return f"{task.done()}"

    run = await run_of(order)
    assert (run.output, caplog.text) == ("False", "")
