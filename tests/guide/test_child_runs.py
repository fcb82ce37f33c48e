"""Child runs: `step.call`, `step.start`, `step.result` and `step.map_runs`."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from perdure import Err, Ok, Queue, Result, Run, RunRef, Runtime, Step, Worker, durable, workflow
from perdure.errors import (
    Cancelled,
    InvalidArgument,
    InvalidPayload,
    PerdureError,
    RunConflict,
    RunFailed,
    RunNotFound,
    StepTimeout,
    TooDeep,
    UnknownWorkflow,
)
from perdure.runtime.definition import Definition
from perdure.store import Query
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock, explore_crashes


@dataclass
class Invoice:
    customer: str
    cents: int


@dataclass
class Receipt:
    cents: int


class Declined(Exception):
    """The bank declined the payment."""


async def charge(invoice: Invoice) -> Receipt:
    if invoice.cents <= 0:
        raise Declined(invoice.customer)
    return Receipt(invoice.cents)


@workflow("pay")
async def pay(step: Step, invoice: Invoice) -> Receipt:
    return await step("charge", charge, invoice)


@workflow("approve")
async def approve(step: Step) -> Result[str, str]:
    """Wait for an answer."""
    answer: str = await step.wait_for_event("answer", "answered")
    return Ok(answer) if answer != "no" else Err("refused")


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def runtime(store: MemoryStore, clock: TestClock) -> Runtime:
    return Runtime(store, workflows=[pay, approve], clock=clock)


async def work(runtime: Runtime) -> None:
    """Execute everything that is due, as workers on other machines would."""
    await Worker(runtime).run_until_idle()


async def run_of(
    runtime: Runtime, parent: Definition[Any, Any], payload: object = None, **options: Any
) -> Run:
    """Start a parent, let workers do everything that is due, and return the parent's state."""
    runtime.register(parent)
    await runtime.trigger(parent, payload, run_id="parent", wait=False, **options)
    await work(runtime)
    return await read(runtime, "parent")


async def read(runtime: Runtime, run_id: str) -> Run:
    run = await runtime.get_run(run_id)
    assert run is not None
    return run


async def test_a_call_returns_the_output_of_a_child(runtime: Runtime) -> None:
    """Payload and output have their types, as with a step."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> int:
        receipt = await step.call("pay", pay, invoice)
        return receipt.cents

    run = await run_of(runtime, order, Invoice("ana", 42))
    assert run.output == 42


async def test_a_parent_leaves_memory_while_it_waits(runtime: Runtime) -> None:
    """It is only a row in the database until its child ends."""

    @workflow("purchase")
    async def purchase(step: Step) -> str:
        return await step.call("approval", approve)

    run = await run_of(runtime, purchase)
    assert run.status == "waiting"
    await runtime.signal("parent/1/approval", "answered", "yes", wait=False)
    await work(runtime)
    assert await runtime.result("parent") == "yes"


async def test_a_child_is_an_ordinary_run(runtime: Runtime) -> None:
    """Its id consists of the parent's id, its generation and the call."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        return await step.call("pay", pay, invoice)

    await run_of(runtime, order, Invoice("ana", 42))
    child = await read(runtime, "parent/1/pay")
    assert (child.workflow, child.status, child.output) == ("pay", "completed", Receipt(42))
    assert [step.key for step in child.history] == ["charge"]


async def test_a_run_is_started_now_and_awaited_later(runtime: Runtime) -> None:
    """`step.start` returns a reference, which can be stored and passed on."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        ref = await step.start("pay", pay, invoice)
        assert ref == RunRef("parent/1/pay", "pay", cancels=True)
        await step("reserve", lambda: None)
        return await step.result("paid", ref)

    run = await run_of(runtime, order, Invoice("ana", 42))
    assert run.output == Receipt(42)


async def test_a_child_can_start_later(runtime: Runtime, clock: TestClock) -> None:
    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        ref = await step.start("pay", pay, invoice, delay="1d")
        return await step.result("paid", ref)

    run = await run_of(runtime, order, Invoice("ana", 42))
    assert run.status == "waiting"
    await clock.advance("1d")
    await work(runtime)
    assert await runtime.result("parent") == Receipt(42)


async def test_the_result_of_any_run_can_be_awaited(runtime: Runtime) -> None:
    """This includes a run that this run has not started, whether it has ended or not."""

    @workflow("bookkeeping")
    async def bookkeeping(step: Step, run_ids: list[str]) -> int:
        receipts = [await step.result("paid", each, returns=Receipt) for each in run_ids]
        return sum(receipt.cents for receipt in receipts)

    await runtime.trigger(pay, Invoice("ana", 1), run_id="ended")
    await runtime.trigger(pay, Invoice("bob", 2), run_id="queued", delay="1s")
    runtime.register(bookkeeping)
    await runtime.trigger(bookkeeping, ["ended", "queued"], run_id="parent")
    assert isinstance(runtime.clock, TestClock)
    await runtime.clock.advance("1s")
    await work(runtime)
    assert await runtime.result("parent") == 3


async def test_the_result_of_an_unknown_run_is_an_error(runtime: Runtime) -> None:
    @workflow("lost")
    async def lost(step: Step) -> str:
        with pytest.raises(RunFailed) as raised:
            await step.result("found", "no such run")
        return type(raised.value.__cause__).__name__

    assert (await run_of(runtime, lost)).output == RunNotFound.__name__


async def test_a_wait_for_a_run_can_time_out(runtime: Runtime, clock: TestClock) -> None:
    """The run continues."""

    @workflow("impatient")
    async def impatient(step: Step) -> str:
        ref = await step.start("approval", approve, on_parent_end="abandon")
        try:
            return await step.result("approved", ref, timeout="1h")
        except StepTimeout:
            return "too late"

    await run_of(runtime, impatient)
    await clock.advance("1h")
    await work(runtime)
    assert await runtime.result("parent") == "too late"
    assert (await read(runtime, "parent/1/approval")).status == "waiting"


async def test_calls_are_awaited_together(runtime: Runtime) -> None:
    """With `step.all`, `step.race`, `asyncio.gather` or a `TaskGroup`."""

    @workflow("bills")
    async def bills(step: Step, invoices: list[Invoice]) -> int:
        calls = [step.call(f"pay {each.customer}", pay, each) for each in invoices]
        return sum(receipt.cents for receipt in await asyncio.gather(*calls))

    run = await run_of(runtime, bills, [Invoice("ana", 1), Invoice("bob", 2)])
    assert run.output == 3


async def test_a_workflow_is_mapped_over_items(runtime: Runtime) -> None:
    """The outputs are in the order of the items."""

    @workflow("bills")
    async def bills(step: Step, invoices: list[Invoice]) -> list[int]:
        receipts = await step.map_runs("pay", pay, invoices)
        return [receipt.cents for receipt in receipts]

    run = await run_of(runtime, bills, [Invoice("ana", cents) for cents in (3, 1, 2)])
    assert run.output == [3, 1, 2]
    assert (await read(runtime, "parent/1/pay/2")).output == Receipt(2)


async def test_a_failure_among_many_is_raised_when_all_have_ended(runtime: Runtime) -> None:
    @workflow("bills")
    async def bills(step: Step, invoices: list[Invoice]) -> None:
        await step.map_runs("pay", pay, invoices)

    run = await run_of(runtime, bills, [Invoice("ana", 0), Invoice("bob", 1)])
    assert str(run.error) == "run 'parent/1/pay/0' of workflow 'pay' failed: Declined: ana"
    assert (await read(runtime, "parent/1/pay/1")).status == "completed"


@pytest.mark.parametrize(
    ("tolerate", "status"), [(None, "completed"), (1, "completed"), (0, "failed")]
)
async def test_failures_can_be_collected_and_tolerated(
    runtime: Runtime, tolerate: int | None, status: str
) -> None:
    """`Ok` or `Err` for each item; more failures than are tolerated are an error."""

    @workflow("bills")
    async def bills(step: Step, invoices: list[Invoice]) -> list[bool]:
        results = await step.map_runs("pay", pay, invoices, on_error="collect", tolerate=tolerate)
        return [result.ok for result in results]

    run = await run_of(runtime, bills, [Invoice("ana", 0), Invoice("bob", 1)])
    assert run.status == status
    assert run.output in (None, [False, True])


async def test_retrying_a_parent_retries_those_of_many_that_failed(runtime: Runtime) -> None:
    paid: list[int] = []
    bank_is_open: list[bool] = []

    async def transfer(number: int) -> int:
        if number == 1 and not bank_is_open:
            raise ConnectionError
        paid.append(number)
        return number

    @workflow("transfer")
    async def transfers(step: Step, number: int) -> int:
        return await step("transfer", transfer, number)

    @workflow("bills")
    async def bills(step: Step) -> list[int]:
        return await step.map_runs("pay", transfers, range(3))

    runtime.register(transfers)
    assert (await run_of(runtime, bills)).status == "failed"
    bank_is_open.append(True)
    await runtime.retry("parent", wait=False)
    await work(runtime)
    assert await runtime.result("parent") == [0, 1, 2]
    assert sorted(paid) == [0, 1, 2]


async def test_the_failure_of_a_child_has_its_exception_as_the_cause(runtime: Runtime) -> None:
    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> str:
        try:
            await step.call("pay", pay, invoice)
        except RunFailed as failed:
            return f"{failed.run_id} failed with {failed.__cause__!r}"
        return "paid"

    run = await run_of(runtime, order, Invoice("ana", 0))
    assert run.output == "parent/1/pay failed with Declined('ana')"


async def test_an_error_that_a_child_returns_is_in_run_failed(runtime: Runtime) -> None:
    @workflow("purchase")
    async def purchase(step: Step) -> str:
        try:
            return await step.call("approval", approve)
        except RunFailed as failed:
            return f"it was {failed.error}"

    await run_of(runtime, purchase)
    await runtime.signal("parent/1/approval", "answered", "no", wait=False)
    await work(runtime)
    assert await runtime.result("parent") == "it was refused"


async def test_a_parent_that_does_not_catch_it_fails(runtime: Runtime) -> None:
    """The result of the parent has the exception of the child as its cause."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        return await step.call("pay", pay, invoice)

    assert (await run_of(runtime, order, Invoice("ana", 0))).status == "failed"
    with pytest.raises(RunFailed, match="run 'parent/1/pay' of workflow 'pay' failed") as raised:
        await runtime.result("parent")
    assert isinstance(raised.value.__cause__, Declined)


async def test_retrying_a_parent_retries_the_child_on_which_it_failed(runtime: Runtime) -> None:
    """It is the same run, and its successful steps do not run again."""
    bookings, bank_is_open = [1], [False]

    async def transfer() -> str:
        if not bank_is_open[0]:
            raise ConnectionError
        return "transferred"

    @workflow("transfer")
    async def transfers(step: Step) -> str:
        await step("book", lambda: bookings.append(1))
        return await step("transfer", transfer)

    @workflow("order")
    async def order(step: Step) -> str:
        return await step.call("pay", transfers)

    runtime.register(transfers)
    assert (await run_of(runtime, order)).status == "failed"
    bank_is_open[0] = True
    await runtime.retry("parent", wait=False)
    await work(runtime)
    assert await runtime.result("parent") == "transferred"
    assert len(bookings) == 2


async def test_a_failure_that_was_handled_is_not_retried(
    runtime: Runtime, clock: TestClock
) -> None:
    """As with steps: a retry continues what ended the run."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> str:
        try:
            await step.call("pay", pay, invoice)
        except RunFailed:
            return await step("give up", give_up)
        return "paid"

    async def give_up() -> str:
        raise ConnectionError

    await run_of(runtime, order, Invoice("ana", 0))
    before = await read(runtime, "parent/1/pay")
    await clock.advance("1h")
    await runtime.retry("parent", wait=False)
    await work(runtime)
    assert (await read(runtime, "parent/1/pay")).updated_at == before.updated_at


@pytest.mark.parametrize(
    ("on_parent_end", "status"), [("cancel", "cancelled"), ("abandon", "waiting")]
)
async def test_children_end_with_their_parent_unless_they_are_abandoned(
    runtime: Runtime, on_parent_end: Any, status: str
) -> None:
    @workflow("campaign")
    async def campaign(step: Step) -> None:
        await step.start("approval", approve, on_parent_end=on_parent_end)

    assert (await run_of(runtime, campaign)).status == "completed"
    assert (await read(runtime, "parent/1/approval")).status == status


async def test_cancelling_a_parent_cancels_its_children(runtime: Runtime) -> None:
    """And their children, and so on."""

    @workflow("purchase")
    async def purchase(step: Step) -> str:
        return await step.call("approval", approve)

    @workflow("project")
    async def project(step: Step) -> str:
        return await step.call("purchase", purchase)

    runtime.register(purchase)
    await run_of(runtime, project)
    await runtime.cancel("parent", reason="no budget")
    await work(runtime)
    for run_id in ("parent", "parent/1/purchase", "parent/1/purchase/1/approval"):
        assert (await read(runtime, run_id)).status == "cancelled"


async def test_a_cancelled_child_is_a_failure_for_its_parent(runtime: Runtime) -> None:
    @workflow("purchase")
    async def purchase(step: Step) -> str:
        with pytest.raises(RunFailed) as raised:
            await step.call("approval", approve)
        return type(raised.value.__cause__).__name__

    await run_of(runtime, purchase)
    await runtime.cancel("parent/1/approval")
    await work(runtime)
    assert await runtime.result("parent") == Cancelled.__name__


async def test_the_child_of_a_branch_that_loses_a_race_is_cancelled(
    runtime: Runtime, clock: TestClock
) -> None:
    @workflow("purchase")
    async def purchase(step: Step) -> int:
        waits = step.call("approval", approve), step.sleep("patience", "1d")
        winner, _ = await step.race("answer", *waits)
        return winner

    await run_of(runtime, purchase)
    await clock.advance("1d")
    await work(runtime)
    assert await runtime.result("parent") == 1
    assert (await read(runtime, "parent/1/approval")).status == "cancelled"


async def test_a_child_has_tags_and_inherits_those_that_are_named(runtime: Runtime) -> None:
    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        return await step.call("pay", pay, invoice, tags={"kind": "card"}, inherit=["customer"])

    await run_of(runtime, order, Invoice("ana", 1), tags={"customer": "ana", "shop": "7"})
    child = await read(runtime, "parent/1/pay")
    assert child.tags == {"customer": "ana", "kind": "card"}


@pytest.mark.parametrize(("own", "expected"), [("2h", "1h"), ("10m", "10m"), (None, "1h")])
async def test_the_earlier_deadline_of_parent_and_child_counts(
    runtime: Runtime, clock: TestClock, own: str | None, expected: str
) -> None:
    @workflow("purchase")
    async def purchase(step: Step) -> str:
        return await step.call("approval", approve, deadline=own)

    began = clock.now()
    await run_of(runtime, purchase, deadline="1h")
    minutes = {"1h": 60, "10m": 10}[expected]
    child = await read(runtime, "parent/1/approval")
    assert child.deadline == began + timedelta(minutes=minutes)


async def test_a_run_knows_its_children_and_they_are_found(
    runtime: Runtime, store: MemoryStore
) -> None:
    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        return await step.call("pay", pay, invoice)

    parent = await run_of(runtime, order, Invoice("ana", 1))
    assert parent.children == ("parent/1/pay",)
    assert (await read(runtime, "parent/1/pay")).parent == "parent"
    page = await store.search(Query(tags=("~parent=parent",)), 50)
    assert [run.id for run in page.runs] == ["parent/1/pay"]
    assert [run.id for run in await runtime.list_runs(prefix="parent/")] == ["parent/1/pay"]


async def test_an_id_of_your_own_joins_a_run_with_the_same_payload(runtime: Runtime) -> None:
    """Two parents then wait for one run."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        return await step.call("pay", pay, invoice, run_id="invoice-1")

    await runtime.trigger(pay, Invoice("ana", 1), run_id="invoice-1", wait=False)
    assert (await run_of(runtime, order, Invoice("ana", 1))).output == Receipt(1)


async def test_an_id_that_another_run_has_is_a_conflict(runtime: Runtime) -> None:
    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> str:
        with pytest.raises(RunFailed, match="its payload is") as raised:
            await step.call("pay", pay, invoice, run_id="invoice-1")
        return type(raised.value.__cause__).__name__

    await runtime.trigger(pay, Invoice("bob", 2), run_id="invoice-1", wait=False)
    assert (await run_of(runtime, order, Invoice("ana", 1))).output == RunConflict.__name__


async def test_a_run_that_others_started_does_not_end_with_this_one(runtime: Runtime) -> None:
    @workflow("campaign")
    async def campaign(step: Step) -> None:
        await step.start("approval", approve, run_id="approval-1")

    await runtime.trigger(approve, run_id="approval-1")
    assert (await run_of(runtime, campaign)).status == "completed"
    assert (await read(runtime, "approval-1")).status == "waiting"


async def test_the_message_names_the_run_that_failed_first(runtime: Runtime) -> None:
    """The causes name all runs in between."""

    @workflow("nested")
    async def nested(step: Step, depth: int) -> None:
        if depth == 0:
            raise Declined("bob")
        await step.call("n", nested, depth - 1)

    run = await run_of(runtime, nested, 3)
    last = "run 'parent/1/n/1/n/1/n' of workflow 'nested' failed: Declined: bob"
    assert str(run.error) == f"run 'parent/1/n' of workflow 'nested' failed: {last}"


async def test_recursion_has_a_limit(runtime: Runtime) -> None:
    """A run has at most 100 ancestors."""

    @workflow("endless")
    async def endless(step: Step, depth: int) -> int:
        try:
            return await step.call("n", endless, depth + 1)
        except TooDeep:
            return depth

    assert (await run_of(runtime, endless, 0)).output == 100


async def test_a_wrong_call_is_refused_where_it_is_made(runtime: Runtime) -> None:
    """Nothing is written, and the run could continue."""
    misuse: Any = "kill"

    @workflow("wrong")
    async def wrong(step: Step) -> None:
        with pytest.raises(UnknownWorkflow, match="no workflow 'unknown' is registered here"):
            await step.call("pay", "unknown")
        with pytest.raises(InvalidPayload):
            await step.call("pay", pay, misuse)
        with pytest.raises(InvalidArgument, match="this one cannot wait for its own end"):
            await step.result("own", "parent")
        with pytest.raises(InvalidArgument, match="on_parent_end"):
            await step.start("pay", approve, on_parent_end=misuse)

    assert (await run_of(runtime, wrong)).status == "completed"


async def test_a_run_without_a_runtime_has_no_children() -> None:
    async def order(step: Step) -> Receipt:
        return await step.call("pay", pay, Invoice("ana", 1))

    with pytest.raises(PerdureError, match=r"step\.call needs a Runtime"):
        (await durable.run({}, order, id="order-1", store=MemoryStore())).unwrap()


async def test_a_call_costs_seven_writes(clock: TestClock) -> None:
    """Besides those of its own steps and a claim: the child's end comes with the parent's lease."""

    @workflow("idle")
    async def idle(step: Step) -> None: ...

    @workflow("order")
    async def order(step: Step) -> None:
        await step.call("idle", idle)

    async def writes(each: Definition[Any, Any]) -> int:
        store = FaultyStore(MemoryStore(clock=clock))
        runtime = Runtime(store, workflows=[idle], clock=clock)
        await run_of(runtime, each)
        return sum(call.verb in ("append", "enqueue", "send_and_claim") for call in store.calls)

    assert await writes(order) - await writes(idle) == 7


async def test_no_crash_changes_the_outcome_of_parent_or_child() -> None:
    """`explore_crashes` crashes all runs that a workflow starts, at every store call."""

    @workflow("order")
    async def order(step: Step, invoice: Invoice) -> Receipt:
        return await step.call("pay", pay, invoice)

    report = await explore_crashes(order, Invoice("ana", 42), workflows=[pay])
    assert report.crashes > 20
    assert set(report.doubled) == {"charge"}


async def test_no_crash_changes_the_outcome_of_many_children_in_a_queue() -> None:
    """Their permits are store calls too."""

    @workflow("email", queue=Queue("emails", concurrency=1), key=lambda to: to[0])
    async def email(step: Step, to: str) -> str:
        return await step("send", lambda: to)

    @workflow("newsletter")
    async def newsletter(step: Step) -> list[str]:
        return await step.map_runs("emails", email, ["ana", "bob", "bea"])

    report = await explore_crashes(newsletter, workflows=[email])
    assert report.crashes > 50
    assert set(report.doubled) == {"send"}


async def test_children_keep_to_the_limits_of_their_queue() -> None:
    """However many are started at once, and by whatever parent."""
    active: list[str] = []
    most = 0

    async def send(to: str) -> None:
        nonlocal most
        active.append(to)
        most = max(most, len(active))
        await asyncio.sleep(0.001)
        active.remove(to)

    @workflow("email", queue=Queue("emails", concurrency=2), key=lambda to: to[0])
    async def email(step: Step, to: str) -> None:
        await step("send", send, to)

    @workflow("newsletter")
    async def newsletter(step: Step) -> int:
        await step.call("first", email, "ana")
        return len(await step.map_runs("emails", email, ["bob", "eva", "bea", "udo"]))

    runtime = Runtime(MemoryStore(), workflows=[email])
    assert (await run_of(runtime, newsletter)).output == 4
    assert most == 2


async def test_the_duration_of_a_call_is_how_long_the_run_waited(clock: TestClock) -> None:
    """In other activations, too: nothing of the parent is in memory while it waits."""

    @workflow("rest")
    async def rest(step: Step, hours: int) -> None:
        await step.sleep("rest", timedelta(hours=hours))

    @workflow("day")
    async def day(step: Step) -> None:
        await step.call("call", rest, 1)
        await step.map_runs("map", rest, [1, 2])
        await step.result("result", await step.start("start", rest, 3))

    runtime = Runtime(MemoryStore(clock=clock), workflows=[rest, day], clock=clock)
    await runtime.trigger(day, run_id="day-1")
    for _ in range(7):
        await Worker(runtime).run_until_idle()
        await clock.advance("1h")
    run = await runtime.get_run("day-1")
    assert run is not None
    hours = {each.key: each.duration for each in run.history if each.duration}
    assert hours == {
        "call": timedelta(hours=1),
        "map": timedelta(hours=2),
        "result": timedelta(hours=3),
    }
