"""Measure the migration when a database of an earlier version is first opened.

python -m bench.migrate [--rows 1000000] [--stores postgres,mysql,sqlite]
"""

import argparse
import asyncio

from bench.places import place
from bench.timing import now
from tests.stores.old_databases.places import Place as OldPlace
from tests.stores.old_databases.sql import fill_sql

ROWS = 1_000_000
TARGETS = {"postgres": 60, "mysql": 60, "sqlite": 30}
"""The seconds that the opening may take, by store."""


async def first_opening(name: str, rows: int) -> float:
    """Return the seconds until a store on a database with this many runs answers its first call."""
    with place(name) as here:
        old = OldPlace(name, here.url.removeprefix("sqlite:///"))
        fill_sql(old.kind, old.address, rows // len(old.copied))
        async with old.open() as store:
            start = now()
            snapshot = await store.load("due")
            elapsed = now() - start
            counts = (await store.stats()).by_status
        if snapshot is None or not rows <= sum(counts.values()) <= rows + 100:
            raise AssertionError(f"{name} has lost runs: {counts}")
    return elapsed


async def main() -> None:
    """Measure the given stores, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--stores", default=",".join(TARGETS), help="separated by commas")
    chosen = parser.parse_args()
    for name in chosen.stores.split(","):
        seconds = await first_opening(name, chosen.rows)
        print(f"{name}: {chosen.rows:,} runs in {seconds:.2f} s (target {TARGETS[name]} s)")


if __name__ == "__main__":
    asyncio.run(main())
