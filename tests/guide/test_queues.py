"""Queues and limits: how many runs are under way at once, or start per period."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from perdure import Limit, Limits, Queue, Rate, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument
from perdure.events import StepStart
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import TestClock, explore_crashes


@dataclass
class Email:
    tenant: str
    number: int


class Office:
    """Counts how many messages are sent at once, and in which order."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.sent: list[tuple[str, int]] = []

    async def send(self, tenant: str, number: int) -> None:
        self.sent.append((tenant, number))
        for name in ("", tenant):
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])
        await asyncio.sleep(0.002)
        for name in ("", tenant):
            self.now[name] -= 1


async def test_a_queue_limits_how_many_runs_are_driven_at_once() -> None:
    office = Office()

    @workflow("send", queue=Queue("emails", concurrency=3))
    async def send(step: Step, number: int) -> None:
        await step("send", office.send, "acme", number)

    runtime = Runtime(MemoryStore(), workflows=[send])
    await runtime.trigger_many(send, range(20))
    await asyncio.gather(*(Worker(runtime).run_until_idle() for _ in range(3)))
    assert office.most[""] == 3
    assert office.sent == [("acme", number) for number in range(20)]


async def test_each_key_has_a_limit_of_its_own_and_keys_take_turns() -> None:
    office = Office()
    emails = Queue("emails", concurrency=4, per_key=Limits(concurrency=2))

    @workflow("send", queue=emails, key=lambda email: email.tenant)
    async def send(step: Step, email: Email) -> None:
        await step("send", office.send, email.tenant, email.number)

    runtime = Runtime(MemoryStore(), workflows=[send])
    messages = [Email("big", n) for n in range(30)] + [Email("small", n) for n in range(5)]
    await runtime.trigger_many(send, messages)
    await Worker(runtime).run_until_idle()
    assert office.most == {"": 4, "big": 2, "small": 2}
    assert [each for each in office.sent if each[0] == "small"] == [("small", n) for n in range(5)]
    assert office.sent.index(("small", 4)) < 15


async def test_a_rate_limits_how_many_runs_start_in_a_period() -> None:
    clock = TestClock()
    started: list[datetime] = []

    @workflow("send", queue=Queue("emails", rate=Rate(5, per="1m")))
    async def send(step: Step, number: int) -> None:
        started.append(clock.now())

    runtime = Runtime(MemoryStore(clock=clock), workflows=[send], clock=clock)
    await runtime.trigger_many(send, range(12))
    await clock.run(Worker(runtime).run_until_idle())
    assert len(started) == 12
    gaps = [later - earlier for earlier, later in zip(started, started[5:], strict=False)]
    assert min(gaps) >= timedelta(minutes=1)


async def test_a_key_must_be_a_string() -> None:
    @workflow("send", queue=Queue("emails"), key=lambda number: number)
    async def send(step: Step, number: int) -> None: ...

    runtime = Runtime(MemoryStore(), workflows=[send])
    with pytest.raises(InvalidArgument, match="key: expected a string, got 7"):
        await runtime.trigger(send, 7, wait=False)


async def test_a_limit_applies_to_steps_of_all_runs() -> None:
    office = Office()
    api = Limit("api", 2)

    @workflow("ask")
    async def ask(step: Step, number: int) -> None:
        await step("ask", office.send, "acme", number, limit=api)

    runtime = Runtime(MemoryStore(), workflows=[ask])
    await asyncio.gather(*(runtime.trigger(ask, number) for number in range(10)))
    assert office.most[""] == 2
    assert len(office.sent) == 10


async def test_a_step_may_cost_several_units_of_a_limit() -> None:
    clock = TestClock()
    times: list[float] = []
    tokens = Limit("tokens", 100_000, per="1m")

    @workflow("ask")
    async def ask(step: Step, number: int) -> None:
        await step("ask", lambda: times.append(clock.monotonic()), limit=tokens.cost(30_000))

    runtime = Runtime(MemoryStore(clock=clock), workflows=[ask], clock=clock)
    await clock.run(asyncio.gather(*(runtime.trigger(ask, number) for number in range(7))))
    assert len(times) == 7
    assert times[2] < 1
    assert 60 <= times[3] < 61
    assert 120 <= times[6] < 122


async def test_an_operator_pauses_a_queue_and_changes_its_limit() -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    operations, insights = Operations(store, clock=clock), Insights(store, clock=clock)
    running: list[int] = []

    @workflow("send", queue=Queue("emails", concurrency=1))
    async def send(step: Step, number: int) -> None:
        running.append(number)
        await step("send", clock.sleep, 60)

    runtime = Runtime(store, workflows=[send], clock=clock)
    await runtime.trigger_many(send, range(5))
    await operations.pause_queue("emails", by="ana", why="provider is down")
    async with Worker(runtime, grace=0):
        await clock.advance(15)
        (_, row) = await insights.queues()
        assert (row.name, row.due, row.leased, row.paused) == ("emails", 5, 0, True)
        assert row.paused_reason == "provider is down"
        await operations.unpause_queue("emails", by="ana")
        await operations.set_limit("emails", 3, by="ana", why="provider is back")
        await clock.advance(15)
        assert running == [0, 1, 2]
        (_, row) = await insights.queues()
        (limit,) = row.limits
        assert (row.due, row.leased) == (2, 3)
        assert (limit.of, limit.n, limit.declared, limit.in_use) == ("concurrency", 3, 1, 3)


async def test_a_queue_shows_its_keys() -> None:
    store = MemoryStore()

    @workflow("send", queue=Queue("emails"), key=lambda tenant: tenant)
    async def send(step: Step, tenant: str) -> None: ...

    await Runtime(store, workflows=[send]).trigger_many(send, ["a/b", "c", "c"])
    (_, row) = await Insights(store).queues()
    assert [(each.key, each.due) for each in row.keys] == [("a/b", 1), ("c", 2)]


async def test_a_run_in_a_queue_is_left_to_workers() -> None:
    """`trigger`, `resume`, `retry` and `signal` do not let it overtake others."""

    @workflow("send", queue=Queue("emails", concurrency=1))
    async def send(step: Step) -> str:
        return str(await step.wait_for_event("go", "go"))

    runtime = Runtime(MemoryStore(), workflows=[send])
    run = await runtime.trigger(send, run_id="a")
    assert run.status == "queued"
    assert (await runtime.resume("a")).status == "queued"
    await runtime.sweep()
    await runtime.signal("a", "go", "now")
    [run] = await runtime.sweep()
    assert run.output == "now"


async def test_a_sweep_keeps_to_the_limits() -> None:
    office = Office()

    @workflow("send", queue=Queue("emails", concurrency=2))
    async def send(step: Step, number: int) -> None:
        await step("send", office.send, "acme", number)

    runtime = Runtime(MemoryStore(), workflows=[send])
    await runtime.trigger_many(send, range(7))
    assert len(await runtime.sweep(limit=5)) == 5
    assert len(await runtime.sweep()) == 2
    assert office.most[""] == 2


async def test_a_worker_may_serve_some_queues_only() -> None:
    finished_keys: list[str] = []

    @workflow("send", queue=Queue("emails"))
    async def send(step: Step) -> None:
        finished_keys.append("send")

    @workflow("plain")
    async def plain(step: Step) -> None:
        finished_keys.append("plain")

    runtime = Runtime(MemoryStore(), workflows=[send, plain])
    await runtime.trigger(send, wait=False)
    await runtime.trigger(plain, wait=False)
    await Worker(runtime, queues=["emails"]).run_until_idle()
    assert finished_keys == ["send"]
    await Worker(runtime, queues=["emails", ""]).run_until_idle()
    assert finished_keys == ["send", "plain"]


async def test_a_worker_warns_of_a_queue_that_no_workflow_declares(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @workflow("send", queue=Queue("emails"))
    async def send(step: Step) -> None: ...

    runtime = Runtime(MemoryStore(), workflows=[send])
    await Worker(runtime, queues=["emails", ""]).run_until_idle()
    assert caplog.messages == []
    await Worker(runtime, queues=["emials"]).run_until_idle()
    assert caplog.messages == [
        "no workflow here declares the queue 'emials': its runs have no limits"
    ]


async def test_a_priority_puts_a_run_ahead_of_others() -> None:
    order: list[int] = []

    @workflow("send", queue=Queue("emails", concurrency=1), priority=1)
    async def send(step: Step, number: int) -> None:
        order.append(number)

    runtime = Runtime(MemoryStore(), workflows=[send])
    for number, priority in enumerate([None, 0, 5, None]):
        await runtime.trigger(send, number, priority=priority)
    await Worker(runtime).run_until_idle()
    assert order == [2, 0, 3, 1]


async def test_a_run_that_has_waited_for_longer_overtakes_a_higher_priority() -> None:
    """A level is a day: nothing waits forever."""
    clock = TestClock()
    order: list[str] = []

    @workflow("send", queue=Queue("emails"))
    async def send(step: Step, name: str) -> None:
        order.append(name)

    runtime = Runtime(MemoryStore(clock=clock), workflows=[send], clock=clock)
    await runtime.trigger(send, "old")
    await clock.advance("23h")
    await runtime.trigger(send, "a level higher, after 23 hours", priority=1)
    await clock.advance("2h")
    await runtime.trigger(send, "a level higher, after 25 hours", priority=1)
    await Worker(runtime, concurrency=1).run_until_idle()
    assert order == ["a level higher, after 23 hours", "old", "a level higher, after 25 hours"]


@pytest.mark.parametrize("concurrency", [1, 30])
async def test_without_fairness_the_run_that_was_created_first_starts_first(
    concurrency: int,
) -> None:
    """However many keys there are."""
    order: list[int] = []

    @workflow("send", queue=Queue("emails", fair=False), key=lambda number: str(number * 7 % 150))
    async def send(step: Step, number: int) -> None:
        order.append(number)

    runtime = Runtime(MemoryStore(), workflows=[send])
    await runtime.trigger_many(send, range(300))
    await Worker(runtime, concurrency=concurrency).run_until_idle()
    assert order == list(range(300))


async def test_without_fairness_a_key_at_its_limit_lets_others_pass() -> None:
    office = Office()

    @workflow(
        "send",
        queue=Queue("emails", fair=False, per_key=Limits(concurrency=1)),
        key=lambda email: email.tenant,
    )
    async def send(step: Step, email: Email) -> None:
        await step("send", office.send, email.tenant, email.number)

    runtime = Runtime(MemoryStore(), workflows=[send])
    emails = [Email("acme", number) for number in range(5)] + [Email("hooli", 0)]
    await runtime.trigger_many(send, emails)
    await Worker(runtime).run_until_idle()
    assert office.sent[:2] == [("acme", 0), ("hooli", 0)]
    assert [number for tenant, number in office.sent if tenant == "acme"] == list(range(5))
    assert office.most["acme"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Queue("emails", concurrency=0), "concurrency: expected an int >= 1, got 0"),
        (lambda: Queue("a/b"), "name: expected a name of at most 100 characters without"),
        (lambda: Queue("~a"), "name: expected a name that does not begin with"),
        (lambda: Rate(5, per=0), "per: expected a positive duration, got 0"),
        (lambda: Rate(-1, per="1m"), "n: expected an int >= 1, got -1"),
        (lambda: Limit("tokens", 10).cost(11), "units: expected at most 10, the limit 'tokens'"),
        (lambda: Worker(Runtime(), queues="emails"), "queues: expected a list of names of queues"),
        (lambda: Worker(Runtime(), queues=[]), "queues: .* would do nothing"),
        (lambda: workflow("a", key=lambda payload: "b"), "key: expected no key without queue="),
        (lambda: workflow("a", queue="emails"), "queue: expected a Queue, got 'emails'"),  # type: ignore[arg-type]  # the mistake
    ],
)
def test_mistakes_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


async def test_a_step_starts_when_its_limit_permits_it() -> None:
    """Its events and its duration do not count the time it waits."""
    clock = TestClock()
    starts: list[datetime] = []

    @workflow("ask")
    async def asking(step: Step, number: int) -> None:
        await step("ask", lambda: number, limit=Limit("api", 1, per="10s"))

    def listen(event: object) -> None:
        if isinstance(event, StepStart):
            starts.append(clock.now())

    runtime = Runtime(MemoryStore(clock=clock), workflows=[asking], clock=clock, on_event=listen)
    runs = await runtime.trigger_many(asking, range(2))
    await clock.run(Worker(runtime).run_until_idle())
    assert timedelta(seconds=10) <= starts[1] - starts[0] <= timedelta(seconds=11)
    for run in runs:
        ended = await runtime.get_run(run.id)
        assert ended is not None
        assert ended.history[0].duration == timedelta(0)


async def test_a_crash_while_a_step_waits_for_its_limit_does_not_repeat_it() -> None:
    @workflow("ask")
    async def asking(step: Step) -> int:
        return await step("ask", lambda: 1, limit=Limit("api", 1))

    report = await explore_crashes(asking)
    assert report.crashes > 10
    assert report.doubled == {"ask": 1}


async def test_an_operator_changes_the_limit_of_steps() -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    starts: list[int] = []
    api = Limit("api", 1)

    async def ask(number: int) -> None:
        starts.append(number)
        await clock.sleep(60)

    @workflow("ask")
    async def asking(step: Step, number: int) -> None:
        await step("ask", ask, number, limit=api)

    runtime = Runtime(store, workflows=[asking], clock=clock)
    await runtime.trigger_many(asking, range(4))
    async with Worker(runtime, grace=0):
        await clock.advance(20)
        (limit,) = await Insights(store, clock=clock).limits()
        assert (limit.name, limit.of, limit.n, limit.in_use) == ("api", "steps", 1, 1)
        await Operations(store, clock=clock).set_limit("api", 2, of="steps", by="ana")
        await clock.advance(60)
        assert len(starts) == 3
