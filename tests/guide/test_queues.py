"""Queues and limits: how many runs are under way at once, or start per period."""

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest

from perdure import Limit, Limits, Queue, Rate, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument
from perdure.stores import MemoryStore
from perdure.testing import TestClock


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
    started: list[float] = []

    @workflow("send", queue=Queue("emails", rate=Rate(5, per="1m")))
    async def send(step: Step, number: int) -> None:
        started.append(clock.monotonic())

    runtime = Runtime(MemoryStore(clock=clock), workflows=[send], clock=clock)
    await runtime.trigger_many(send, range(12))
    async with Worker(runtime):
        await clock.advance("3m")
    assert len(started) == 12
    assert all(later - earlier >= 60 for earlier, later in zip(started, started[5:], strict=False))


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
    asked: list[float] = []
    tokens = Limit("tokens", 100_000, per="1m")

    @workflow("ask")
    async def ask(step: Step, number: int) -> None:
        await step("ask", lambda: asked.append(clock.monotonic()), limit=tokens.cost(30_000))

    runtime = Runtime(MemoryStore(clock=clock), workflows=[ask], clock=clock)
    await clock.run(asyncio.gather(*(runtime.trigger(ask, number) for number in range(7))))
    assert len(asked) == 7
    assert asked[2] < 1
    assert 60 <= asked[3] < 61
    assert 120 <= asked[6] < 122
