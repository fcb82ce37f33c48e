"""Retries that take hours, deadlines, and runs that never end."""

from perdure import Retry, Runtime, Step, workflow
from perdure.errors import DeadlinePassed
from perdure.stores import MemoryStore
from perdure.stores.memory import MemoryTransaction
from perdure.testing import TestClock


async def test_a_step_that_is_retried_in_an_hour_holds_nothing_in_memory() -> None:
    """The run is suspended, and says which attempt failed and why."""
    answers = iter([ConnectionError("closed"), "open"])

    async def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    @workflow("ask")
    async def ask_again(step: Step) -> str:
        return await step("ask", ask, retry=Retry(3, delay="1h", max_delay="1h", jitter=False))

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[ask_again], clock=clock)
    run = await runtime.trigger(ask_again)
    assert run.status == "suspended"
    assert (run.pending[0].attempt, run.pending[0].error) == (1, "ConnectionError: closed")
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert run.output == "open"


async def test_each_attempt_of_a_transaction_has_its_own() -> None:
    """What a failed attempt wrote is rolled back."""
    balances: list[int] = []

    async def debit(accounts: MemoryTransaction, amount: int) -> int:
        accounts["ana"] = accounts.get("ana", 100) - amount
        balances.append(accounts["ana"])
        if len(balances) == 1:
            raise ConnectionError("closed")
        return balances[-1]

    @workflow("pay")
    async def pay(step: Step) -> int:
        return await step.transaction("debit", debit, 5, retry=Retry(2, delay="1h"))

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[pay], clock=clock)
    assert (await runtime.trigger(pay)).status == "suspended"
    await clock.advance("2h")
    (run,) = await runtime.sweep()
    assert (run.output, balances) == (95, [95, 95])


async def test_a_run_fails_at_its_deadline() -> None:
    """It fails even while it waits."""

    @workflow("approve", deadline="3d")
    async def approve(step: Step) -> object:
        return await step.wait_for_event("approval", "approved")

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[approve], clock=clock)
    await runtime.trigger(approve)
    await clock.advance("3d")
    (run,) = await runtime.sweep()
    assert run.status == "failed"
    assert isinstance(run.error, DeadlinePassed)


async def test_a_loop_continues_as_new_to_stay_small() -> None:
    """The run begins again with the next payload, and without the records so far."""

    async def send(number: int) -> str:
        return f"invoice {number}"

    @workflow("invoices")
    async def invoices(step: Step, number: int) -> str:
        confirmation = await step("send", send, number)
        if number < 12:
            await step.continue_as_new(number + 1)
        return confirmation

    run = await Runtime(MemoryStore(), workflows=[invoices]).trigger(invoices, 1)
    assert (run.output, len(run.history)) == ("invoice 12", 1)
