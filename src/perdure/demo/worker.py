"""A worker of the sample shop, as a separate process: `python -m perdure.demo.worker URL`.

It ends when its standard input does, so that it does not outlive the process that started it.
"""

import asyncio
import logging
import sys
from random import Random

from perdure.clock import SystemClock
from perdure.demo.services import Services
from perdure.demo.shop import WORKFLOWS
from perdure.runtime.runtime import Runtime
from perdure.stores import open_store
from perdure.worker import Worker


async def work(url: str) -> None:
    """Execute the runs of the shop until standard input is closed."""
    services = Services(SystemClock().sleep, Random())
    async with open_store(url) as store:
        runtime = Runtime(store, workflows=WORKFLOWS, deps=services)
        async with Worker(runtime, concurrency=50, grace=1):
            await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    # A run that fails is part of the demonstration: its traceback belongs on the dashboard.
    logging.basicConfig(level=logging.CRITICAL)
    asyncio.run(work(sys.argv[1]))
