"""Two workers share a hundred runs, and each run is executed once.

python examples/many_workers.py
"""

import asyncio
from collections import Counter

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import sqlite

done: Counter[str] = Counter()


async def resize(picture: str) -> str:
    await asyncio.sleep(0.01)
    done[picture] += 1
    return f"small {picture}"


@workflow("thumbnail")
async def thumbnail(step: Step, picture: str) -> str:
    return await step("resize", resize, picture)


async def main() -> None:
    async with sqlite("pictures.db") as store:
        first, second = (Runtime(store, workflows=[thumbnail]) for _ in range(2))
        for n in range(100):
            await first.trigger(thumbnail, f"{n}.jpg", run_id=f"picture-{n}", wait=False)
        async with Worker(first, concurrency=10) as one, Worker(second, concurrency=10) as two:
            while one.counters.finished + two.counters.finished < 100:
                await asyncio.sleep(0.05)
        shares = one.counters.finished, two.counters.finished
    print(f"{len(done)} pictures, {max(done.values())} time each; shared as {shares}")


if __name__ == "__main__":
    asyncio.run(main())
