"""`Runtime`: named workflows on a store. A run can stop here and go on in another process."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from perdure import Cron, Runtime, Step, Worker, workflow
from perdure.errors import Cancelled, InvalidPayload, MissingAbility, RunNotFound
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
    """Create a user, let a day pass, and wait three days for an approval."""
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


async def test_a_run_rests_where_it_waits(runtime: Runtime) -> None:
    """`trigger` drives a run until it ends or waits; one that waits holds no memory, no task."""
    run = await runtime.trigger(welcome, {"email": "ana@example.com"})
    assert run.status == "suspended"
    assert run.run_id.startswith("welcome:")
    (wait,) = run.pending
    assert wait.wake_at == datetime(2030, 1, 2, tzinfo=UTC)


async def test_a_sweep_goes_on_with_what_is_due(runtime: Runtime, clock: TestClock) -> None:
    """Call it from a cron job, or let a `Worker` do it."""
    run = await runtime.trigger(welcome, Signup("ana@example.com"))
    assert await runtime.sweep() == []
    await clock.advance("1 day")
    (swept,) = await runtime.sweep(limit=100)
    assert (swept.run_id, swept.status) == (run.run_id, "waiting")


async def test_a_signal_wakes_a_run(runtime: Runtime, clock: TestClock) -> None:
    """Its payload is what the waiting line gets."""
    run = await runtime.trigger(welcome, {"email": "ana@example.com"})
    await clock.advance("1 day")
    await runtime.resume(run.run_id)
    assert await runtime.signal(run.run_id, "approved", {"by": "eva"})
    done = await runtime.get_run(run.run_id)
    assert done is not None
    assert (done.status, done.output) == ("completed", "ana approved by eva")


async def test_a_signal_may_come_early(runtime: Runtime, clock: TestClock) -> None:
    """It waits in the run's inbox; one that is sent twice counts once."""
    run = await runtime.trigger(welcome, {"email": "ana@example.com"})
    for _ in range(2):
        await runtime.signal(run.run_id, "approved", {"by": "eva"}, dedup_id="mail-1")
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
async def test_an_event_has_a_type(runtime: Runtime, payload: object) -> None:
    """`returns=` says what the payload is; it comes as that, whoever sent it."""
    run = await runtime.trigger(report)
    signalled = await runtime.signal(run.run_id, "approved", payload)
    assert signalled.run is not None
    assert signalled.run.output == "approved by eva"


async def test_an_event_that_does_not_fit_fails_the_run(runtime: Runtime) -> None:
    """The error says why. It is taken all the same: a retry waits for a better one."""
    run = await runtime.trigger(report)
    failed = (await runtime.signal(run.run_id, "approved", {"who": "eva"})).run
    assert failed is not None
    assert "the payload of event 'approved' does not fit step 'approval'" in str(failed.error)
    assert (await runtime.retry(run.run_id)).status == "waiting"


async def test_nobody_answers(runtime: Runtime, clock: TestClock) -> None:
    """When the time is over, the waiting line gets None."""
    run = await runtime.trigger(welcome, {"email": "ana@example.com"})
    await clock.advance(timedelta(days=1))
    assert len(await runtime.sweep()) == 1
    await clock.advance(timedelta(days=3))
    (swept,) = await runtime.sweep()
    assert (swept.run_id, swept.output) == (run.run_id, "ana not approved")


async def test_a_time_of_day(runtime: Runtime, clock: TestClock) -> None:
    """A sleep may end by a cron expression."""
    run = await runtime.trigger("digest")
    assert run.pending[0].wake_at == datetime(2030, 1, 1, 8, tzinfo=UTC)
    await clock.advance("8h")
    (swept,) = await runtime.sweep()
    assert swept.output == "sent"


async def test_another_process_goes_on(store: MemoryStore, clock: TestClock) -> None:
    """All it takes is the store and the same definitions."""
    first = Runtime(store, workflows=[welcome], clock=clock)
    run = await first.trigger(welcome, {"email": "ana@example.com"})
    await clock.advance("1 day")
    second = Runtime(store, workflows=[welcome], clock=clock)
    assert (await second.resume(run.run_id)).status == "waiting"


async def test_payloads_are_checked(runtime: Runtime) -> None:
    """Before anything is written, naming each field that does not fit."""
    with pytest.raises(InvalidPayload, match="email: missing"):
        await runtime.trigger(welcome, {"plan": "pro"})
    assert await runtime.list_runs() == []


async def test_a_payload_may_have_a_default(runtime: Runtime) -> None:
    """It is recorded with the run, like one that was given."""

    @workflow("statistics")
    async def statistics(step: Step, days: int = 7) -> str:
        return f"{days} days"

    run = await runtime.trigger(statistics)
    assert (run.payload, run.output) == (7, "7 days")


async def test_an_id_of_ones_own(runtime: Runtime) -> None:
    """Triggering it again gives the run that is there."""
    first = await runtime.trigger(welcome, {"email": "ana@example.com"}, run_id="signup-1")
    again = await runtime.trigger(welcome, {"email": "ana@example.com"}, run_id="signup-1")
    assert first.run_id == again.run_id == "signup-1"
    assert len(await runtime.list_runs(workflow="welcome", status="suspended")) == 1


async def test_looking_at_a_run(runtime: Runtime) -> None:
    """`get_run` gives its whole history; an unknown one is None, and cannot be resumed."""
    run = await runtime.trigger(welcome, {"email": "ana@example.com"})
    found = await runtime.get_run(run.run_id)
    assert found is not None
    assert [(line.key, line.kind, line.value) for line in found.history] == [
        ("create-user", "step", "ana")
    ]
    assert await runtime.get_run("nobody") is None
    with pytest.raises(RunNotFound, match="'nobody'"):
        await runtime.resume("nobody")


async def test_cancelling(runtime: Runtime) -> None:
    """A run ends where it is, with the reason."""
    run = await runtime.trigger(welcome, {"email": "ana@example.com"})
    cancelled = await runtime.cancel(run.run_id, reason="changed their mind")
    assert cancelled.status == "cancelled"
    assert isinstance(cancelled.error, Cancelled)
    assert cancelled.error.reason == "changed their mind"


async def test_trying_again(runtime: Runtime, shop: Shop) -> None:
    """A failed run keeps what it finished; `retry` goes on with the step that failed."""

    @workflow("purchase")
    async def purchase(step: Step) -> str:
        user = await step("fetch_user", shop.fetch_user, "1")
        return str((await step("pay", shop.process_payment, user["id"], 100))["id"])

    shop.down.add("process_payment")
    failed = await runtime.trigger(purchase)
    assert (failed.status, str(failed.error)) == ("failed", "process_payment is down")
    shop.down.clear()
    assert (await runtime.retry(failed.run_id)).output == "p-1"
    assert shop.calls == ["fetch_user", "process_payment", "process_payment"]


async def test_hearing_of_it(store: MemoryStore, clock: TestClock) -> None:
    """`on_event` hears of every run; `flush` waits until an async listener has dealt with it."""
    heard: list[str] = []

    async def listen(event: Event) -> None:
        await asyncio.sleep(0)
        heard.append(event.type)

    runtime = Runtime(store, workflows=[welcome], clock=clock, on_event=listen)
    await runtime.trigger(welcome, {"email": "ana@example.com"})
    await runtime.flush()
    assert heard == [
        "workflow_start",
        "step_start", "persist_success", "step_success", "step_complete",
        "workflow_suspended",
    ]  # fmt: skip


async def test_a_worker() -> None:
    """It claims what is due, in as many processes as there are, and drains when it is told."""
    runtime = Runtime(MemoryStore(), workflows=[welcome])
    run = await runtime.trigger(welcome, {"email": "ana@example.com"}, wait=False)
    assert run.status == "running"
    async with Worker(runtime, concurrency=10, poll=0.01):
        while run.status == "running":
            await asyncio.sleep(0.01)
            run = await runtime.get_run(run.run_id) or run
    assert run.status == "suspended"


async def test_a_store_must_be_able_to(clock: TestClock) -> None:
    """A runtime needs leases and a schedule; a store without them is refused by name."""
    with pytest.raises(MissingAbility, match="MyStore has no 'journal' ability"):
        Runtime(MyStore(), workflows=[welcome], clock=clock)
