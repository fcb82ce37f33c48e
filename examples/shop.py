"""A sample shop that stays open until Ctrl-C: orders, approvals, failures, and killed workers.

    python examples/shop.py [SECONDS]
    perdure dev examples/shop.py:runtime

The first command runs it with two worker processes, one of which is killed every minute, and prints
how many runs there are in each status. The second one shows it in the dashboard, on `shop.db`. Its
workflows are in `perdure.demo.shop`.
"""

import asyncio
import logging
import sys
import tempfile
from pathlib import Path
from random import Random

from perdure import Runtime, SystemClock
from perdure.demo.living import living_shop, seed_past
from perdure.demo.services import Services
from perdure.demo.shop import WORKFLOWS
from perdure.stores import sqlite

runtime = Runtime(
    "sqlite:///shop.db", workflows=WORKFLOWS, deps=Services(SystemClock().sleep, Random())
)


async def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "shop.db"))
        await seed_past(f"sqlite:///{path}")
        async with living_shop(f"sqlite:///{path}", say=print), sqlite(path) as store:
            end = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < end:
                counts = (await store.stats()).by_status
                print("  ".join(f"{count} {status}" for status, count in sorted(counts.items())))
                await asyncio.sleep(2)


if __name__ == "__main__":
    # A run that fails is part of the demonstration.
    logging.basicConfig(level=logging.CRITICAL)
    try:
        asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")))
    except KeyboardInterrupt:
        print("closed")
