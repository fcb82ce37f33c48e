"""Queues and limits under crashes: never more than the limit, nothing lost, no permit left over."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from perdure import Limits, Queue, Runtime, Step, Worker, workflow
from perdure.clock import Clock
from perdure.errors import StoreError
from perdure.runtime.definition import Definition
from perdure.store import QueueStore, Store, require_queues
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import sqlite
from perdure.testing.clock import TestClock
from perdure.testing.faults import How
from tests.durability.lease_history import LeaseHistory, most_at_once

TTL = timedelta(seconds=30)
EMAILS = Queue("emails", concurrency=2, per_key=Limits(concurrency=1))
PERMITS = ("~permit:queue:emails", "~permit:queue:emails/a", "~permit:queue:emails/b")


class Crash(StoreError):
    """The process crashes here."""


class Work:
    """The steps of all processes: which are under way, and which have begun."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.begun: list[str] = []

    def workflow(self, queue: Queue) -> Definition[str, None]:
        @workflow("send", queue=queue, key=lambda payload: payload[0])
        async def send(step: Step, payload: str) -> None:
            await step("send", self.do, payload)

        return send

    async def do(self, payload: str) -> None:
        self.begun.append(payload)
        for name in ("", payload[0]):
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])
        try:
            await self.clock.sleep(0.1)
        finally:
            for name in ("", payload[0]):
                self.now[name] -= 1


async def free_permits(store: QueueStore, clock: TestClock) -> Counter[str]:
    """Return how many permits of each limit are free."""
    due = await store.due(clock.now(), 1000, queues=dict.fromkeys(PERMITS, 10))
    return Counter(run.id.rpartition("#")[0] for run in due)


async def work_until_crash(runtime: Runtime, store: LeaseHistory) -> bool:
    """Let a worker end its runs; return whether its process has crashed instead."""
    worker = Worker(runtime, concurrency=3, grace=0)
    working = asyncio.ensure_future(worker.run_until_idle())
    while not working.done() and not store.failed:
        await runtime.clock.sleep(0.05)
    await worker.drain()
    await working
    return store.failed


async def run(clock: TestClock, runtime: Runtime, store: LeaseHistory) -> bool:
    # The clock stands still during a store call: otherwise leases would expire in a slow thread.
    work = work_until_crash(runtime, store)
    return await clock.run(work, is_busy=lambda: store.in_flight > 0)


async def live(make: Callable[[Clock], Store], fail_at: int | None, how: How) -> LeaseHistory:
    """Work in a process that crashes at a store call, and then in another one."""
    clock = TestClock()
    inner = make(clock)
    store = LeaseHistory(inner, clock, fail_at=fail_at, how=how, error=Crash, stays_down=True)
    work = Work(clock)
    send = work.workflow(EMAILS)

    def runtime(on: Any) -> Runtime:
        return Runtime(on, workflows=[send], clock=clock, random=Random(1), lease_ttl=TTL)

    payloads = [f"{key}{number}" for number in range(2) for key in "ab"]
    await runtime(inner).trigger_many(send, payloads, run_ids=payloads)
    if await run(clock, runtime(store), store):
        await clock.advance(TTL * 2)
        after = LeaseHistory(inner, clock)
        await run(clock, runtime(after), after)
        store.leases.update(after.leases)
    assert {run.status for run in await inner.list()} == {"completed"}
    assert work.most == {"": 2, "a": 1, "b": 1}
    assert await free_permits(require_queues(inner), clock) == dict(
        zip(PERMITS, (2, 1, 1), strict=True)
    )
    assert [most_at_once(store.spans(name)) for name in PERMITS] == [2, 1, 1]
    await inner.close()
    return store


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_crash_at_any_store_call_leaks_no_permit_and_loses_no_run(how: How) -> None:
    clean = await live(lambda clock: MemoryStore(clock=clock), None, how)
    for number in range(1, len(clean.calls) + 1):
        await live(lambda clock: MemoryStore(clock=clock), number, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_crash_at_any_store_call_on_sqlite(tmp_path: Path, how: How) -> None:
    clean = await live(lambda clock: sqlite(tmp_path / "clean", clock=clock), None, how)
    for number in range(1, len(clean.calls) + 1):
        path = tmp_path / f"{number}"
        await live(lambda clock, path=path: sqlite(path, clock=clock), number, how)
