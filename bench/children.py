"""Workload K: what child runs cost, compared with the same runs without a parent.

`python -m bench.children [sqlite postgres …]` prints the writes of one child, and the time of many
children of one parent beside that of as many plain runs. The memory is the peak of this process,
which is worker, parent and client at once.
"""

import asyncio
import resource
import sys
from collections import Counter

from bench.places import place
from bench.timing import now
from perdure import Runtime, Step, Worker, workflow
from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.testing.faults import FaultyStore

CHILDREN = 10_000
activations: list[str] = []
WRITES = ("acquire", "append", "claim", "enqueue", "release", "send")


@workflow("bench-child")
async def child(step: Step, number: int) -> int:
    """Execute one step."""
    return await step("work", lambda: number)


@workflow("bench-calls")
async def calls(step: Step) -> int:
    """Call one child."""
    return await step.call("child", child, 1)


@workflow("bench-maps")
async def maps(step: Step, count: int) -> int:
    """Call many children."""
    activations.append(step.run_id)
    return sum(await step.map_runs("children", child, range(count)))


async def plain(store: Store) -> float:
    """Return the seconds from creating this many runs until the last has ended."""
    runtime = Runtime(store, workflows=[child])
    began = now()
    async with Worker(runtime) as worker:
        await runtime.trigger_many(child, range(CHILDREN))
        await worker.run_until_idle()
    return now() - began


async def mapped(store: Store) -> tuple[float, int]:
    """Return the same for as many children of one parent, and how often that was activated."""
    runtime = Runtime(store, workflows=[maps, child])
    activations.clear()
    began = now()
    async with Worker(runtime):
        run = await runtime.trigger(maps, CHILDREN, wait=False)
        total = await runtime.result(run)
        took = now() - began
    assert total == sum(range(CHILDREN))
    return took, len(activations)


async def writes_of_one() -> Counter[str]:
    """Return the store calls that write for one call of a child, by verb."""
    store = FaultyStore(MemoryStore())
    runtime = Runtime(store, workflows=[calls, child])
    run = await runtime.trigger(calls)
    while not run.over:
        await runtime.sweep()
        run = await runtime.resume(run.id)
    counts = Counter(each.verb for each in store.calls)
    return Counter({verb: counts[verb] for verb in WRITES if counts[verb]})


def peak_megabytes() -> float:
    """Return the most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def main(names: list[str]) -> None:
    """Measure each store and print the times."""
    writes = await writes_of_one()
    listed = ", ".join(f"{count} {verb}" for verb, count in writes.items())
    print(f"one child: {writes.total()} writes, with those of its parent ({listed})")
    for name in names:
        with place(name) as measured:
            store = measured.open()
            alone = await plain(store)
            together, activations = await mapped(store)
            await store.close()
        print(
            f"{name:10} {CHILDREN:,} plain runs {alone:6.2f} s, children {together:6.2f} s "
            f"({together / alone:.2f}×), parent activated {activations} times, "
            f"{peak_megabytes():.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["sqlite", "postgres"]))
