"""`Runtime`: named workflows on a store. A run can stop here and continue in another process."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from perdure import Cron, Runtime, Step, Worker, workflow
from perdure.errors import (
    Cancelled,
    InvalidArgument,
    InvalidPayload,
    MissingAbility,
    RunNotFound,
)
from perdure.events import Event
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.guide.shop import Shop
from tests.guide.test_own_store import MyStore


@dataclass
class Signup:
    email: str
    plan: str = "free"


@workflow("welcome", version=1)
async def welcome(step: Step, payload: Signup) -> str:
    """Create a user, wait a day, and wait three days for an approval."""
    user = await step("create-user", create_user, payload.email)
    await step.sleep("settle", timedelta(days=1))
    approval = await step.wait_for_event("approval", "approved", timeout="3d")
    return f"{user} approved by {approval['by']}" if approval else f"{user} not approved"


async def create_user(email: str) -> str:
    return email.partition("@")[0]


@workflow("digest")
async def digest(step: Step) -> str:
    """Wait for nine in the morning, in Berlin."""
    await step.sleep("morning", Cron("0 9 * * *", tz="Europe/Berlin"))
    return "sent"


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def runtime(store: MemoryStore, clock: TestClock) -> Runtime:
    return Runtime(store, workflows=[welcome, digest], clock=clock)


async def test_a_run_is_suspended_while_it_waits(runtime: Runtime) -> None:
    """`trigger` executes a run until it ends or waits. A waiting run uses no memory and no task."""
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    assert run.status == "suspended"
    assert run.id.startswith("welcome:")
    (wait,) = run.pending
    assert wait.wake_at == datetime(2030, 1, 2, tzinfo=UTC)


async def test_a_sweep_continues_due_runs(runtime: Runtime, clock: TestClock) -> None:
    """Call it from a cron job, or let a `Worker` do it."""
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    assert await runtime.sweep() == []
    await clock.advance("1 day")
    (swept,) = await runtime.sweep(limit=100)
    assert (swept.id, swept.status) == (run.id, "waiting")


async def test_a_signal_continues_a_run(runtime: Runtime, clock: TestClock) -> None:
    """Its payload is the result of the wait."""
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    await clock.advance("1 day")
    await runtime.resume(run.id)
    assert await runtime.signal(run.id, "approved", {"by": "eva"})
    outcome = await runtime.get_run(run.id)
    assert outcome is not None
    assert (outcome.status, outcome.output) == ("completed", "ana approved by eva")


async def test_a_signal_may_be_sent_early(runtime: Runtime, clock: TestClock) -> None:
    """It waits in the run's inbox; one that is sent twice counts once."""
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    for _ in range(2):
        await runtime.signal(run.id, "approved", {"by": "eva"}, dedup_id="mail-1")
    await clock.advance("1 day")
    (swept,) = await runtime.sweep()
    assert swept.output == "ana approved by eva"


@dataclass
class Approval:
    by: str


@workflow("report")
async def report(step: Step) -> str:
    approval = await step.wait_for_event("approval", "approved", returns=Approval)
    return f"approved by {approval.by}" if approval else "not approved"


@pytest.mark.parametrize("payload", [{"by": "eva"}, Approval("eva")])
async def test_an_event_can_have_a_type(runtime: Runtime, payload: object) -> None:
    """`returns=` is the type of the payload."""
    run = await runtime.trigger(report)
    signalled = await runtime.signal(run.id, "approved", payload)
    assert signalled.run is not None
    assert signalled.run.output == "approved by eva"


async def test_an_event_of_the_wrong_type_fails_the_run(runtime: Runtime) -> None:
    """The error says why. The event is consumed: a retry waits for the next one."""
    run = await runtime.trigger(report)
    failed = (await runtime.signal(run.id, "approved", {"who": "eva"})).run
    assert failed is not None
    assert "the payload of event 'approved' does not fit step 'approval'" in str(failed.error)
    assert (await runtime.retry(run.id)).status == "waiting"


async def test_a_wait_that_times_out_returns_none(runtime: Runtime, clock: TestClock) -> None:
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    await clock.advance(timedelta(days=1))
    assert len(await runtime.sweep()) == 1
    await clock.advance(timedelta(days=3))
    (swept,) = await runtime.sweep()
    assert (swept.id, swept.output) == (run.id, "ana not approved")


async def test_a_sleep_can_end_by_a_cron_expression(runtime: Runtime, clock: TestClock) -> None:
    run = await runtime.trigger("digest")
    assert run.pending[0].wake_at == datetime(2030, 1, 1, 8, tzinfo=UTC)
    await clock.advance("8h")
    (swept,) = await runtime.sweep()
    assert swept.output == "sent"


async def test_another_process_can_continue_a_run(store: MemoryStore, clock: TestClock) -> None:
    """It needs only the store and the same definitions."""
    first = Runtime(store, workflows=[welcome], clock=clock)
    run = await first.trigger(welcome, Signup("ana@example.com"))
    await clock.advance("1 day")
    second = Runtime(store, workflows=[welcome], clock=clock)
    assert (await second.resume(run.id)).status == "waiting"


async def test_payloads_are_validated(runtime: Runtime) -> None:
    """This happens before anything is written, and the error names each invalid field."""
    with pytest.raises(InvalidPayload, match="email: missing"):
        await runtime.trigger("welcome", {"plan": "pro"})
    assert await runtime.list_runs() == []


async def test_a_payload_may_have_a_default(runtime: Runtime) -> None:
    """It is recorded with the run, like a payload that was passed."""

    @workflow("statistics")
    async def statistics(step: Step, days: int = 7) -> str:
        return f"{days} days"

    run = await runtime.trigger(statistics)
    assert (run.payload, run.output) == (7, "7 days")


async def test_a_run_can_have_your_own_id(runtime: Runtime) -> None:
    """A second trigger returns the existing run."""
    first = await runtime.trigger(welcome, Signup("ana@example.com"), run_id="signup-1")
    again = await runtime.trigger(welcome, Signup("ana@example.com"), run_id="signup-1")
    assert first.id == again.id == "signup-1"
    assert len(await runtime.list_runs(workflow="welcome", status="suspended")) == 1


async def test_names_that_begin_with_a_tilde_are_reserved(runtime: Runtime) -> None:
    """For perdure itself: ids, names of workflows and events, ids and keys of steps."""
    with pytest.raises(InvalidArgument, match="run_id: expected a name that does not begin with"):
        await runtime.trigger(digest, run_id="~mine")
    run = await runtime.trigger(digest)
    with pytest.raises(InvalidArgument, match="event: expected a name that does not begin with"):
        await runtime.signal(run.id, "~cancel")
    with pytest.raises(InvalidArgument, match="name: expected a name that does not begin with"):
        workflow("~digest")


async def test_get_run_returns_the_whole_history(runtime: Runtime) -> None:
    """An unknown run is `None`, and cannot be resumed."""
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    stored = await runtime.get_run(run.id)
    assert stored is not None
    assert [(line.key, line.kind, line.value) for line in stored.history] == [
        ("create-user", "step", "ana")
    ]
    assert await runtime.get_run("unknown") is None
    with pytest.raises(RunNotFound, match="'unknown'"):
        await runtime.resume("unknown")


async def test_a_run_can_be_cancelled_with_a_reason(runtime: Runtime) -> None:
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    cancelled = await runtime.cancel(run.id, reason="changed their mind")
    assert cancelled.status == "cancelled"
    assert isinstance(cancelled.error, Cancelled)
    assert cancelled.error.reason == "changed their mind"


async def test_a_failed_run_can_be_retried(runtime: Runtime, shop: Shop) -> None:
    """It keeps its finished steps; `retry` continues with the step that failed."""

    @workflow("purchase")
    async def purchase(step: Step) -> str:
        user = await step("fetch_user", shop.fetch_user, "1")
        return str((await step("pay", shop.process_payment, user["id"], 100))["id"])

    shop.down.add("process_payment")
    failed = await runtime.trigger(purchase)
    assert (failed.status, str(failed.error)) == ("failed", "process_payment is down")
    shop.down.clear()
    assert (await runtime.retry(failed.id)).output == "p-1"
    assert shop.calls == ["fetch_user", "process_payment", "process_payment"]


async def test_on_event_receives_the_events_of_all_runs(
    store: MemoryStore, clock: TestClock
) -> None:
    """`flush` waits until async listeners have finished."""
    events: list[str] = []

    async def listen(event: Event) -> None:
        await asyncio.sleep(0)
        events.append(event.type)

    runtime = Runtime(store, workflows=[welcome], clock=clock, on_event=listen)
    await runtime.trigger(welcome, Signup("ana@example.com"))
    await runtime.flush()
    assert events == [
        "workflow_start",
        "step_start", "persist_success", "step_success", "step_complete",
        "workflow_suspended",
    ]  # fmt: skip


async def test_a_worker_executes_due_runs() -> None:
    """It claims what is due, in any number of processes, and drains when it is stopped."""
    runtime = Runtime(MemoryStore(), workflows=[welcome])
    run = await runtime.trigger(welcome, Signup("ana@example.com"), wait=False)
    assert run.status == "queued"
    async with Worker(runtime, concurrency=10, poll=0.01):
        while run.status in ("queued", "running"):
            await asyncio.sleep(0.01)
            run = await runtime.get_run(run.id) or run
    assert run.status == "suspended"


async def test_a_runtime_needs_leases_and_a_schedule(clock: TestClock) -> None:
    """A store without them is refused, and the error names what is missing."""
    with pytest.raises(MissingAbility, match="MyStore has no 'journal' ability"):
        Runtime(MyStore(), workflows=[welcome], clock=clock)
