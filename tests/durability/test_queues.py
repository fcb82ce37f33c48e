"""Queues and limits under crashes: never more than the limit, nothing lost, no permit left over."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from perdure import Client, Limit, Limits, Queue, Rate, Runtime, Step, Worker, workflow
from perdure.clock import Clock
from perdure.errors import StoreError
from perdure.runtime.definition import Definition
from perdure.store import Grant, QueueStore, Store, require_queues
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import sqlite
from perdure.testing.clock import TestClock
from perdure.testing.faults import How
from tests.durability.lease_history import LeaseHistory, jain, most_at_once, most_within

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
        self.seconds = 0.1

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
            await self.clock.sleep(self.seconds)
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
    paths = (tmp_path / f"{number}" for number in count())

    def make(clock: Clock) -> Store:
        return sqlite(next(paths), clock=clock)

    clean = await live(make, None, how)
    for number in range(1, len(clean.calls) + 1):
        await live(make, number, how)


async def test_keys_are_served_fairly_and_in_order(clock: TestClock) -> None:
    """Ten thousand runs on a hundred keys of unequal size."""
    order: list[tuple[str, int]] = []

    @workflow("send", queue=Queue("emails"), key=lambda payload: payload[0])
    async def send(step: Step, payload: tuple[str, int]) -> None:
        order.append(payload)

    runtime = Runtime(MemoryStore(clock=clock), workflows=[send], clock=clock)
    sizes = {f"{key:02}": 20 + key * 160 // 99 for key in range(100)}
    payloads = [(key, number) for key, size in sizes.items() for number in range(size)]
    Random(5).shuffle(payloads)
    numbers: Counter[str] = Counter()
    for position, (key, _) in enumerate(payloads):
        payloads[position] = (key, numbers[key])
        numbers[key] += 1
    for first in range(0, len(payloads), 500):
        await runtime.trigger_many(send, payloads[first : first + 500])
        await clock.advance(0.001)
    await clock.run(Worker(runtime).run_until_idle(), limit=120)
    half = Counter(key for key, _ in order[: len(order) // 2])
    waiting = {key: half[key] for key, size in sizes.items() if half[key] < size}
    assert len(order) == len(payloads) == sum(sizes.values())
    assert jain(waiting) >= 0.99
    for key, size in sizes.items():
        assert [number for name, number in order if name == key] == list(range(size))


class StallingStore(MemoryStore):
    """A store whose process is stopped for ten seconds after each claim of runs in queues."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__(clock=clock)
        self.clock = clock

    async def claim(self, *arguments: Any, **options: Any) -> Sequence[Grant]:
        grants = await super().claim(*arguments, **options)
        if any(grant.queue.startswith("emails") for grant in grants):
            await self.clock.advance("10s")
        return grants


async def test_a_worker_that_was_stopped_finds_what_became_due_since(clock: TestClock) -> None:
    """Otherwise it would take the store's clock to be behind, and its queues to be empty."""

    @workflow("email", queue=Queue("emails", concurrency=2))
    async def email(step: Step, to: str) -> None:
        await step("send", lambda: None)

    @workflow("newsletter")
    async def newsletter(step: Step) -> None:
        await step.call("first", email, "ana")
        await step.call("second", email, "bob")

    runtime = Runtime(StallingStore(clock), workflows=[email, newsletter], clock=clock)
    await runtime.trigger(newsletter, wait=False)
    await clock.run(Worker(runtime).run_until_idle())
    assert {run.status for run in await runtime.store.list()} == {"completed"}


@pytest.mark.parametrize("concurrency", [20, None])
async def test_more_keys_than_a_round_looks_at_have_equal_shares(
    clock: TestClock, concurrency: int | None
) -> None:
    """Although some runs take long."""
    keys, each = 130, 8
    order: list[int] = []
    random = Random(3)

    async def send(key: int) -> None:
        order.append(key)
        await clock.sleep(random.choice([0.01, 0.05]))

    @workflow("send", queue=Queue("emails", concurrency=concurrency), key=lambda key: f"{key:03}")
    async def sending(step: Step, key: int) -> None:
        await step("send", send, key)

    runtime = Runtime(MemoryStore(clock=clock), workflows=[sending], clock=clock)
    await runtime.trigger_many(sending, [key for _ in range(each) for key in range(keys)])
    await clock.run(Worker(runtime).run_until_idle(), limit=120)
    half = Counter(order[: len(order) // 2])
    assert len(order) == keys * each
    assert jain({str(key): half[key] for key in range(keys)}) >= 0.97


async def test_no_period_has_more_starts_than_the_rate(clock: TestClock) -> None:
    store = LeaseHistory(MemoryStore(clock=clock), clock)
    starts = []

    @workflow("send", queue=Queue("emails", rate=Rate(20, per="1s")))
    async def send(step: Step, number: int) -> None:
        starts.append(clock.now())

    runtimes = [Runtime(store, workflows=[send], clock=clock, random=Random(n)) for n in range(3)]
    await runtimes[0].trigger_many(send, range(400))
    began = clock.now()
    await clock.run(asyncio.gather(*(Worker(each).run_until_idle() for each in runtimes)))
    assert len(starts) == 400
    assert most_within(starts, timedelta(seconds=1)) == 20
    assert most_at_once(store.spans("~permit:rate:emails")) == 20
    # The first twenty start at once.
    assert 380 / (clock.now() - began).total_seconds() >= 20 * 0.98


@pytest.mark.parametrize("per", [None, "1s"])
async def test_a_limit_of_steps_holds_over_all_workers(clock: TestClock, per: str | None) -> None:
    inner = MemoryStore(clock=clock)
    # Runtimes that share a store object share permits, as those of one process do.
    stores = [LeaseHistory(inner, clock) for _ in range(3)]
    work, begun = Work(clock), list[datetime]()
    api = Limit("api", 4, per=per)

    @workflow("ask")
    async def ask(step: Step, number: int) -> None:
        await step("ask", work.do, "a", limit=api)

    @workflow("tell")
    async def tell(step: Step, number: int) -> None:
        await step("tell", lambda: begun.append(clock.now()), limit=api.cost(2))

    asking = ask if per is None else tell
    runtimes = [Runtime(store, workflows=[asking], clock=clock) for store in stores]
    await runtimes[0].trigger_many(asking, range(40))
    workers = [Worker(each, concurrency=10) for each in runtimes]
    await clock.run(asyncio.gather(*(worker.run_until_idle() for worker in workers)))
    spans = [store.spans("~permit:limit:api") for store in stores]
    assert all(spans)
    assert most_at_once([span for each in spans for span in each]) == 4
    if per is None:
        assert (len(work.begun), work.most["a"]) == (40, 4)
    else:
        assert (len(begun), most_within(begun, timedelta(seconds=1))) == (40, 2)


async def test_a_lost_permit_stops_the_run_that_uses_it(clock: TestClock) -> None:
    work = Work(clock)
    send = work.workflow(EMAILS)
    inner = MemoryStore(clock=clock)
    runtime = Runtime(inner, workflows=[send], clock=clock, lease_ttl=TTL)
    await runtime.trigger(send, "a", run_id="a")
    work.seconds = 100
    async with Worker(runtime, grace=0):
        await clock.advance(1)
        assert work.now["a"] == 1
        # As if the process had been stopped for so long that the permit expired.
        await inner.delete("~permit:queue:emails/a#1.0")
        await clock.advance(TTL)
        assert work.begun == ["a", "a"]
        assert work.most["a"] == 1


async def test_a_sleeping_run_holds_no_permit_and_takes_its_turn_again(clock: TestClock) -> None:
    order: list[str] = []

    @workflow("send", queue=Queue("emails", concurrency=1))
    async def send(step: Step, name: str) -> None:
        order.append(f"{name} begins or continues")
        await step("begin", clock.sleep, 1)
        await step.sleep("pause", "1h")
        await step("end", lambda: order.append(f"{name} ends"))

    runtime = Runtime(MemoryStore(clock=clock), workflows=[send], clock=clock)
    await runtime.trigger_many(send, ["a", "b"])
    async with Worker(runtime):
        await clock.advance("1m")
        assert order == ["a begins or continues", "b begins or continues"]
        await clock.advance("1h")
    assert [each for each in order if each.endswith("ends")] == ["a ends", "b ends"]


async def test_a_suspect_that_is_released_holds_no_permit(clock: TestClock) -> None:
    """Two runs saw their owners die. One is executed, and the other must not take up a slot."""
    work, store = Work(clock), MemoryStore(clock=clock)
    work.seconds = 600
    send = work.workflow(Queue("emails", concurrency=2))
    runtime = Runtime(store, workflows=[send], clock=clock)
    await runtime.trigger_many(send, ["a", "b"])
    for _ in range(3):
        assert len(await store.claim("dead", TTL, 2, queues={"emails/a": 1, "emails/b": 1})) == 2
        await clock.advance("1m")
    async with Worker(runtime, grace=0):
        await clock.advance("1s")
        await runtime.trigger(send, "c", wait=False)
        await clock.advance("1s")
        assert len(work.begun) == 2
        assert work.begun[1] == "c"


async def test_a_worker_for_which_a_queue_has_no_room_takes_no_permits_of_its_keys(
    clock: TestClock,
) -> None:
    """They would be missing where the queue is served, and some keys would get less than others."""
    work, store = Work(clock), MemoryStore(clock=clock)
    work.seconds = 10
    send = work.workflow(Queue("emails", concurrency=1, per_key=Limits(concurrency=1)))
    busy = Runtime(store, workflows=[send], clock=clock)
    history = LeaseHistory(store, clock)
    other = Runtime(history, workflows=[send], clock=clock)
    await busy.trigger(send, "a1", wait=False)
    async with Worker(busy, grace=0):
        await clock.advance(1)
        await busy.trigger(send, "b1", wait=False)
        async with Worker(other, grace=0):
            await clock.advance(5)
    asked_for = {id.partition("#")[0] for call in history.calls for id in call.ids}
    assert work.begun == ["a1"]
    assert asked_for & {*PERMITS} == {PERMITS[0]}


async def test_a_key_whose_permit_is_elsewhere_does_not_keep_others_waiting(
    clock: TestClock,
) -> None:
    work, store = Work(clock), MemoryStore(clock=clock)
    work.seconds = 1000
    send = work.workflow(EMAILS)
    runtimes = [Runtime(store, workflows=[send], clock=clock) for _ in range(2)]
    await runtimes[0].trigger(send, "a1", wait=False)
    async with Worker(runtimes[0], concurrency=1, grace=0):
        await clock.advance(1)
        await runtimes[0].trigger_many(send, ["a2", "b1"])
        async with Worker(runtimes[1], grace=0):
            await clock.advance(1)
    assert work.begun == ["a1", "b1"]


async def test_a_raised_limit_applies_to_queued_runs(clock: TestClock) -> None:
    work, store = Work(clock), MemoryStore(clock=clock)
    work.seconds = 10
    few = Runtime(store, workflows=[work.workflow(Queue("emails", concurrency=1))], clock=clock)
    many = Runtime(store, workflows=[work.workflow(Queue("emails", concurrency=3))], clock=clock)
    await few.trigger_many("send", ["a", "b", "c", "d", "e", "f"])
    async with Worker(few, grace=0):
        await clock.advance(5)
    assert work.most[""] == 1
    async with Worker(many, grace=0):
        await clock.advance(15)
        assert work.most[""] == 3
    # A worker with the lower limit deletes the permits that it does not have.
    async with Worker(few, grace=0):
        await clock.advance(65)
    assert await free_permits(store, clock) == {PERMITS[0]: 1}


async def test_permits_of_a_key_are_deleted_after_an_idle_hour(clock: TestClock) -> None:
    work, store = Work(clock), MemoryStore(clock=clock)
    send = work.workflow(EMAILS)
    runtime = Runtime(store, workflows=[send], clock=clock)
    await runtime.trigger_many(send, ["a", "b"])
    async with Worker(runtime, poll=60):
        await clock.advance("50m")
        await runtime.trigger(send, "b2")
        await clock.advance("40m")
        assert await free_permits(store, clock) == {PERMITS[0]: 2, PERMITS[2]: 1}
        await runtime.trigger(send, "a2")
        await clock.advance("5m")
    assert work.begun == ["a", "b", "b2", "a2"]


async def test_a_run_that_was_created_by_name_keeps_to_the_limits(clock: TestClock) -> None:
    """Where the workflow is not known, nothing is known of its queue either."""
    work, store = Work(clock), MemoryStore(clock=clock)
    client = Client(store, clock=clock)
    for number in range(4):
        await client.trigger("send", f"a{number}")
    runtime = Runtime(store, workflows=[work.workflow(EMAILS)], clock=clock)
    await clock.run(Worker(runtime).run_until_idle())
    async with Worker(runtime):
        await clock.advance(10)
    assert sorted(work.begun) == ["a0", "a1", "a2", "a3"]
    assert work.most["a"] == 1


@pytest.mark.parametrize("key", ["", "a/b", "~", "%2F", "'; --", "🙂" * 300, "x" * 512, "\0"])
async def test_a_key_may_be_any_string(clock: TestClock, key: str) -> None:
    finished_keys: list[str] = []
    limited = Queue("emails", per_key=Limits(concurrency=1, rate=Rate(5, per="1m")))

    @workflow("send", queue=limited, key=lambda payload: payload)
    async def send(step: Step, payload: str) -> None:
        finished_keys.append(payload)

    runtime = Runtime(MemoryStore(clock=clock), workflows=[send], clock=clock)
    await runtime.trigger_many(send, [key, key + "2"])
    await clock.run(Worker(runtime).run_until_idle())
    assert sorted(finished_keys) == sorted([key, key + "2"])


async def test_child_runs_are_in_the_queue_of_their_workflow(clock: TestClock) -> None:
    work = Work(clock)
    send = work.workflow(EMAILS)

    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.all(*(step.call(f"child {name}", send, name) for name in ("a", "a2", "b")))

    runtime = Runtime(MemoryStore(clock=clock), workflows=[parent, send], clock=clock)
    await runtime.trigger(parent, run_id="parent", wait=False)
    await clock.run(Worker(runtime).run_until_idle())
    run = await runtime.get_run("parent")
    assert run is not None
    assert run.status == "completed"
    assert work.most == {"": 2, "a": 1, "b": 1}


async def test_a_lost_permit_of_a_step_stops_its_run(clock: TestClock) -> None:
    work, store = Work(clock), MemoryStore(clock=clock)
    work.seconds = 100

    @workflow("ask")
    async def ask(step: Step, name: str) -> None:
        await step("ask", work.do, name, limit=Limit("api", 1))

    runtime = Runtime(store, workflows=[ask], clock=clock, lease_ttl=TTL)
    await runtime.trigger(ask, "a", run_id="a", wait=False)
    async with Worker(runtime, grace=0):
        await clock.advance(1)
        await store.delete("~permit:limit:api#1.0")
        await clock.advance(TTL)
        assert (work.begun, work.most["a"]) == (["a", "a"], 1)
        await clock.advance(100)
    run = await runtime.get_run("a")
    assert run is not None
    assert run.status == "completed"


async def test_a_cancelled_attempt_leaves_no_permit_behind(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    one = Limit("api", 1)

    @workflow("ask")
    async def ask(step: Step, number: int) -> None:
        await step("ask", clock.sleep, 60, limit=one)

    runtime = Runtime(store, workflows=[ask], clock=clock, lease_ttl=TTL)
    runs = [asyncio.ensure_future(runtime.trigger(ask, number)) for number in range(3)]
    await clock.advance(1)
    for run in runs:
        run.cancel()
    await clock.run(asyncio.wait(runs))
    await clock.advance(1)
    assert len(await store.due(clock.now(), 10, queues={"~permit:limit:api": 10})) == 1


async def test_a_worker_without_queues_asks_for_no_permits(clock: TestClock) -> None:
    @workflow("plain")
    async def plain(step: Step) -> None:
        await step("work", lambda: None)

    store = LeaseHistory(MemoryStore(clock=clock), clock)
    runtime = Runtime(store, workflows=[plain], clock=clock)
    await runtime.trigger(plain, wait=False)
    await clock.run(Worker(runtime).run_until_idle())
    # When it starts, it looks at what is to be pruned.
    verbs = {call.verb for call in store.calls if call.ids != ("~maintenance",)}
    assert verbs == {"enqueue", "list", "claim", "append"}
    assert not any(id.startswith("~permit") for call in store.calls for id in call.ids)
