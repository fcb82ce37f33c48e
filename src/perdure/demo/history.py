"""A day and a half of the sample shop, the same on every call: for screenshots and tests."""

import asyncio
import logging
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import Any, Final, TypeVar

from perdure import codec
from perdure.clock import Cron
from perdure.demo.copying import advance_to, copy_runs
from perdure.demo.samples import (
    CUSTOMERS,
    new_newsletter,
    new_order,
    new_restock,
    new_signup,
)
from perdure.demo.services import Services
from perdure.demo.shop import (
    WORKFLOWS,
    Catalogue,
    Day,
    Item,
    Newsletter,
    Order,
    check_stock,
    import_catalogue,
    newsletter,
    nightly_report,
    order,
    print_labels,
    restock,
    welcome,
)
from perdure.demo.throughput import WORKER, EndedRun, History
from perdure.operations import Operations
from perdure.runtime.definition import Definition
from perdure.runtime.run import Run
from perdure.runtime.runtime import Runtime
from perdure.snapshot import new_snapshot
from perdure.store import LeaseRequest, NewRun, Store
from perdure.stores import MemoryStore
from perdure.testing import TestClock

T = TypeVar("T")

SEEDED_TIME: Final = timedelta(hours=30)
"""How far `seed` advances the clock."""

_BICYCLES = [Item("city-bicycle", 2, 38_900)]
_OUTAGE = range(120, 125)
"""During these orders the carrier is down."""


async def seed(store: Store, clock: TestClock) -> None:
    """Fill a store with runs in every status; the clock is advanced by `SEEDED_TIME`.

    Start the clock this much before the current time, and open the store with it if the store takes
    a clock, so that the runs are as old as they seem.
    """
    past, end = TestClock(clock.now()), clock.now() + SEEDED_TIME
    history = _History(past)
    with _no_logs():
        await history.record_day()
        await history.record_last_hour()
        await history.record_throughput()
    await copy_runs(history.store, store, clock)
    await advance_to(clock, end)


@contextmanager
def _no_logs() -> Generator[None]:
    """Log nothing: the runs that fail are part of the history."""
    logger = logging.getLogger("perdure")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _History:
    """Executes the runs of the shop in memory, on a clock that it advances."""

    def __init__(self, clock: TestClock) -> None:
        self.store = MemoryStore(clock=clock)
        self._clock = clock
        self._start = clock.now()
        self._random = Random(2030)
        self._services = Services(clock.sleep, Random(14))
        self._throughput = History(clock.now())
        self._operations = Operations(self.store, clock=clock, random=Random(6))
        self._runtime = Runtime(
            self.store, workflows=WORKFLOWS, clock=clock, random=Random(5), deps=self._services
        )

    async def record_day(self) -> None:
        """Record an order every ten minutes, and what else happens in a day."""
        await self._trigger(order, self._order(_BICYCLES), "order-1000")
        await self._trigger(nightly_report, Day("2030-03-01", 137), "report-03-01")
        for number in range(1, 175):
            await self._advance_to(timedelta(minutes=10 * number))
            await self._ten_minutes(number)
        await self._trigger(nightly_report, Day("2030-03-02", 0), "report-03-02")

    async def _ten_minutes(self, number: int) -> None:
        self._services.outages = {"carrier"} if number in _OUTAGE else set()
        await self._trigger(order, new_order(self._random), f"order-{1000 + number}")
        if number % 20 == 1:
            await self._trigger(welcome, new_signup(self._random), f"welcome-{number}")
        if number % 24 == 2:
            await self._trigger(restock, new_restock(self._random), f"restock-{number}")
        if number % 60 == 5:
            catalogue = Catalogue("northwind", 12 + number // 5)
            await self._trigger(import_catalogue, catalogue, f"catalogue-{number}")
        if number % 8:
            await self._approve(number)

    async def record_last_hour(self) -> None:
        """Record runs that need attention, what operators did, and some that have just begun."""
        await self._advance_to(SEEDED_TIME - timedelta(minutes=50))
        self._services.outages = {"supplier"}
        await self._trigger(restock, new_restock(self._random), "restock-190")
        await self._trigger(order, self._order(_BICYCLES), "order-1180")
        await self._runtime.signal("order-1180", "address changed", {"city": "Oslo"})
        sold_out = [Item("bell", 1, 890), Item("sold-out", 3, 1_250)]
        await self._trigger(order, self._order(sold_out), "order-1181")
        await self._trigger(order, self._order(_BICYCLES), "order-1182")
        await self._trigger(order, self._order(_BICYCLES), "order-1183")
        await self._operate()
        await self._advance_to(SEEDED_TIME - timedelta(minutes=4))
        await self._enqueue_unknown()
        await self._schedule()
        await self._trigger(newsletter, new_newsletter(self._random), "newsletter-7")
        await self._advance_to(SEEDED_TIME - timedelta(seconds=12))
        await self._trigger(order, self._order([Item("lock", 1, 3_450)]), "order-1184")
        await self._lease_running()
        await self._advance_to(SEEDED_TIME - timedelta(seconds=2))
        await self._queue_emails()
        await advance_to(self._clock, self._start + SEEDED_TIME)

    async def _queue_emails(self) -> None:
        """Begin a newsletter: its emails wait in their queue until a worker claims them."""
        email = Newsletter("summer sale", [*CUSTOMERS, *CUSTOMERS[:3]])
        await self._trigger(newsletter, email, "newsletter-8")

    async def _operate(self) -> None:
        """Let operators intervene, each for a reason."""
        order_id = f"order-{1000 + _OUTAGE.start}"
        await self._operations.complete_step(
            order_id,
            "ship",
            {"tracking": "trk_by_phone", "carrier": "Post"},
            by="ana",
            why="carrier confirmed by phone, ticket 4411",
        )
        await self._operations.cancel("order-1182", by="ana", why="ordered twice")
        trouble = "status:failed error:CarrierDown"
        await self._operations.save_view("carrier-trouble", trouble, by="eva")
        await self._operations.pause("order-1183", by="eva", why="address is being checked")
        await self._operations.fork(
            "order-1181", new_id="order-1181-again", by="ana", why="try without a bell"
        )

    async def _schedule(self) -> None:
        """Create schedules; one of them is paused."""
        nightly = Cron("0 2 * * *", tz="Europe/Berlin")
        day, email = Day("2030-03-03", 137), Newsletter("spring sale", ["acme", "hooli"])
        await self._runtime.schedule("stock-check", check_stock, every="1m")
        await self._runtime.schedule(
            "nightly-report", nightly_report, day, every=nightly, jitter="5m", on_failure="pause"
        )
        mondays = Cron("0 8 * * 1", tz="Europe/Berlin")
        await self._runtime.schedule("weekly-newsletter", newsletter, email, every=mondays)
        await self._operations.pause_schedule(
            "weekly-newsletter", by="eva", why="the new template is not ready"
        )

    async def record_throughput(self) -> None:
        """Write what a worker would have reported."""
        await self._throughput.write(self.store, self._clock.now())

    def _order(self, items: list[Item]) -> Order:
        return new_order(self._random, items)

    async def _run(self, work: Awaitable[T]) -> T:
        """Run a coroutine, advancing the clock whenever all tasks wait for it."""
        task = asyncio.ensure_future(work)
        # Everything is in memory, so nothing but the clock is ever waited for: unlike `clock.run`,
        # this gives threads and sockets no time, which would add up to ten seconds.
        while not task.done() and await self._clock.advance_to_next():
            pass
        return await task

    async def _trigger(self, workflow: Definition[Any, Any], payload: Any, run_id: str) -> None:
        run = await self._run(self._runtime.trigger(workflow, payload, run_id=run_id))
        self._count(run)

    def _count(self, run: Run) -> None:
        if run.over and run.workflow is not None and run.created_at is not None:
            duration = self._clock.now() - run.created_at
            ended_run = EndedRun(self._clock.now(), run.workflow, run.status, duration)
            self._throughput.runs.append(ended_run)

    async def _approve(self, number: int) -> None:
        """Approve the order before last, if it waits for that."""
        run_id = f"order-{1000 + number - 2}"
        run = await self._runtime.get_run(run_id)
        if run is not None and run.status == "waiting":
            await self._runtime.approve(run.pending[0].token, by="eva", note="known customer")
            await self._run(self._runtime.resume(run_id))

    async def _advance_to(self, elapsed: timedelta) -> None:
        """Advance the clock, and continue each run at the time it is due."""
        target = self._start + elapsed
        supports = self._runtime.registry.all_supported_versions
        while due := await self.store.due(target, 1, supports=supports):
            await advance_to(self._clock, due[0].wake_at)
            runs = await self._run(self._runtime.sweep(self._clock.now()))
            for run in runs:
                self._count(run)
            if not runs:
                break
        await advance_to(self._clock, target)

    async def _enqueue_unknown(self) -> None:
        """Create a run of a version that no worker of the shop knows."""
        snapshot = new_snapshot(
            "invoice",
            now=self._clock.now(),
            metadata={"version": 3, "input": {"order": "order-1169", "net": 31_120}},
        )
        await self.store.enqueue(
            [NewRun("invoice-77", "invoice", codec.dumps(snapshot), version=3)]
        )

    async def _lease_running(self) -> None:
        """Create a run that is owned by another process."""
        await self._runtime.trigger(print_labels, 30, run_id="labels-12", wait=False)
        request = LeaseRequest("labels-12", WORKER, timedelta(hours=1))
        await self.store.acquire([request])
