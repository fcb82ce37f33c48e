"""The sample shop in operation: new orders, approvals, and workers that are killed."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from random import Random

from perdure.clock import Clock, SystemClock
from perdure.demo.history import SEEDED_TIME, seed
from perdure.demo.samples import draw_sample
from perdure.demo.shop import WORKFLOWS
from perdure.errors import Refused, StoreError
from perdure.runtime.client import Client
from perdure.stores import open_store
from perdure.testing import TestClock

WORKERS = 2
SECONDS_BETWEEN_STARTS = 1.5
SECONDS_BETWEEN_APPROVALS = 6.0
SECONDS_BETWEEN_KILLS = 60.0
SHARE_NOT_GRANTED = 0.1


def ignore(_: str) -> None:
    """Do nothing with a message."""


@asynccontextmanager
async def living_shop(
    url: str,
    *,
    say: Callable[[str], None] = ignore,
    clock: Clock = SystemClock(),
    random: Random | None = None,
) -> AsyncGenerator[None]:
    """Keep the shop open on the store at `url`, with worker processes, inside `async with`.

    The store is shared by processes, for example `sqlite:////tmp/shop.db`. `say` receives a line
    whenever a worker is started or killed.
    """
    async with open_store(url) as store:
        shop = _Shop(Client(store, workflows=WORKFLOWS), clock, random or Random(), say)
        workers = _Workers(url, clock, say)
        tasks = [
            asyncio.create_task(each)
            for each in (shop.start_runs(), shop.approve_orders(), workers.keep_killing())
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await workers.stop()


async def seed_past(url: str, clock: Clock = SystemClock()) -> None:
    """Fill an empty store with the shop's last day, before it opens."""
    past = TestClock(clock.now() - SEEDED_TIME)
    async with open_store(url, clock=past) as store:
        await seed(store, past)


class _Shop:
    """Starts runs and answers approvals, as customers and staff would."""

    def __init__(
        self, client: Client, clock: Clock, random: Random, say: Callable[[str], None]
    ) -> None:
        self._client = client
        self._clock = clock
        self._random = random
        self._say = say

    async def start_runs(self) -> None:
        """Start a run of some workflow every now and then."""
        while True:
            sample = draw_sample(self._random)
            number = self._random.randrange(10_000, 100_000)
            with self._report_errors():
                await self._client.trigger(
                    sample.workflow,
                    sample.draw(self._random),
                    run_id=f"{sample.workflow.name}-{number}",
                    if_exists="return",
                )
            await self._pause(SECONDS_BETWEEN_STARTS)

    async def approve_orders(self) -> None:
        """Answer the oldest open approval, every now and then."""
        while True:
            await self._pause(SECONDS_BETWEEN_APPROVALS)
            with self._report_errors():
                await self._approve_one()

    async def _approve_one(self) -> None:
        page = await self._client.approvals(to="sales")
        for approval in page.approvals[-1:]:
            # An operator who is trying out the demo may have been faster.
            with contextlib.suppress(Refused):
                if self._random.random() >= SHARE_NOT_GRANTED:
                    await self._client.approve(approval.token, by="eva", note="known customer")
                else:
                    await self._client.reject(approval.token, by="eva", note="unpaid bills")

    async def _pause(self, seconds: float) -> None:
        await self._clock.sleep(seconds * (0.5 + self._random.random()))

    @contextlib.contextmanager
    def _report_errors(self) -> Generator[None]:
        """Continue after an error of the store."""
        try:
            yield
        except StoreError as error:
            self._say(f"the store failed: {error}")


class _Workers:
    """Worker processes; every minute one of them is killed and replaced."""

    def __init__(self, url: str, clock: Clock, say: Callable[[str], None]) -> None:
        self._url = url
        self._clock = clock
        self._say = say
        self._processes: list[Process] = []

    async def keep_killing(self) -> None:
        """Start the workers, then kill the oldest one every minute."""
        for _ in range(WORKERS):
            await self._start()
        while True:
            await self._clock.sleep(SECONDS_BETWEEN_KILLS)
            oldest = self._processes.pop(0)
            with contextlib.suppress(ProcessLookupError):
                oldest.kill()
            await oldest.wait()
            self._say(f"worker {oldest.pid} was killed (kill -9); others continue its runs")
            await self._start()

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "perdure.demo.worker",
            self._url,
            stdin=asyncio.subprocess.PIPE,
            # Ctrl-C is for this process alone, which then ends its workers.
            start_new_session=True,
        )
        self._processes.append(process)
        self._say(f"worker {process.pid} started")

    async def stop(self) -> None:
        """End the workers, and wait for them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            await process.wait()
