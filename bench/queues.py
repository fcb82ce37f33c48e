"""What a queue costs, compared with the same runs in no queue.

`python -m bench.queues [sqlite postgres …]` prints runs per second of one worker, and beside it
those of DBOS where it can be installed. The rate limit is too high to be reached, so only its cost
is measured.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

from bench.peers import Peer, PeerFailed, install
from bench.places import Place, place
from bench.timing import now
from bench.workloads import finished
from perdure import Limits, Queue, Rate, Runtime, Step, Worker, workflow
from perdure.runtime.definition import Definition
from perdure.store import Store

RUNS, KEYS, REPEATS = 3000, 50, 5
# DBOS takes longer for a run, and is not measured without a queue.
PEER, PEER_RUNS = "dbos", 500


async def work(step: Step, number: int) -> None:
    """Execute one step."""
    await step("work", lambda: number)


PLAIN = workflow("bench-plain")(work)
UNLIMITED = workflow("bench-queue", queue=Queue("open"))(work)
LIMITED = workflow("bench-limit", queue=Queue("limited", concurrency=100))(work)
PER_KEY = workflow(
    "bench-keys",
    queue=Queue("keyed", per_key=Limits(concurrency=4)),
    key=lambda number: str(number % KEYS),
)(work)
RATED = workflow("bench-rate", queue=Queue("rated", rate=Rate(5000, per="1s")))(work)
LANES = {
    "plain": PLAIN,
    "queue": UNLIMITED,
    "limit": LIMITED,
    "limit per key": PER_KEY,
    "rate": RATED,
}


async def rate(store: Store, definition: Definition[int, None]) -> float:
    """Return how many runs per second one worker executes, all of which are due."""
    runtime = Runtime(store, workflows=[definition])
    await runtime.trigger_many(definition, range(RUNS))
    began = now()
    async with Worker(runtime, concurrency=100) as worker:
        await finished(worker, RUNS)
        return RUNS / (now() - began)


@asynccontextmanager
async def started_peer(place: Place) -> AsyncIterator[Peer | None]:
    """Start DBOS on a store, if it is installed and can use that store."""
    if not place.peer_url or not install(print, [PEER]):
        yield None
        return
    peer = await Peer.start(PEER, place.peer_url.format(peer=PEER))
    try:
        yield peer
    finally:
        await peer.close()


async def measure(store: Store, peer: Peer | None) -> dict[str, float]:
    """Return the median rate of each variant, measured alternately, without peers that fail."""
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for name, definition in LANES.items():
            rates[name].append(await rate(store, definition))
            if peer is not None and name in peer.workloads:
                try:
                    rates[f"{name}, {peer.version}"].append(await peer.ask(name, PEER_RUNS))
                except PeerFailed as error:
                    print(f"{peer.version} failed: {error}", flush=True)
                    peer = None
    return {name: median(each) for name, each in rates.items() if each}


async def main(names: list[str]) -> None:
    """Measure each store and print the rates."""
    for name in names:
        with place(name) as measured:
            async with started_peer(measured) as peer:
                store = measured.open()
                rates = await measure(store, peer)
                await store.close()
        for lane, each in rates.items():
            share = each / rates["plain"]
            print(f"{name:10} {lane:26} {each:8,.0f} runs/s {share:7.0%}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["sqlite", "postgres"]))
