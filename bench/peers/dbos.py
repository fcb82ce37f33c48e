"""The workloads with DBOS: `python -m bench.peers.dbos postgresql://… | sqlite:///…`.

It runs with its defaults, which are durable, and with its async API.
"""

import asyncio
import sys
from functools import partial
from importlib.metadata import version
from typing import Any

# Not installed together with perdure: this file runs in its own environment.
from dbos import (  # type: ignore[import-not-found,unused-ignore]
    DBOS,
    SetEnqueueOptions,
    SetWorkflowID,
)

from bench.peers.answering import VALUE, now, serve

# As short as helps: with its default of one second, a limit of 100 is 100 runs per second.
POLLING = 0.02
KEYS = 50
QUEUES: dict[str, dict[str, Any]] = {
    "queue": {},
    "limit": {"global_concurrency": 100},
    "limit per key": {"partition_concurrency": 4},
    "rate": {"limiter": {"limit": 5000, "period": 1}},
}

replayed: dict[str, float] = {}
queued: list[float] = []


async def _fetch(id: str) -> dict[str, str]:
    return VALUE


async def _sequence(count: int) -> None:
    began = now()
    for _ in range(count):
        await fetch("1")
    replayed[DBOS.workflow_id] = now() - began


async def _sleeper(seconds: float) -> None:
    await DBOS.sleep_async(seconds)
    await fetch("1")


async def _counted() -> None:
    queued.append(now())
    await fetch("1")
    queued.append(now())


fetch = DBOS.step(name="fetch")(_fetch)
sequence = DBOS.workflow(name="sequence")(_sequence)
sleeper = DBOS.workflow(name="sleeper")(_sleeper)
counted = DBOS.workflow(name="counted")(_counted)


async def one_run(name: str, count: int) -> float:
    """Return the seconds per step, for consecutive steps."""
    began = now()
    with SetWorkflowID(name):
        await sequence(count)
    return (now() - began) / count


async def many_runs(name: str, runs: int) -> float:
    """Return steps per second, for concurrent workflows of ten steps."""
    began = now()
    handles = [await DBOS.start_workflow_async(sequence, 10) for _ in range(runs)]
    await asyncio.gather(*(handle.get_result() for handle in handles))
    return runs * 10 / (now() - began)


async def resume(name: str, count: int) -> float:
    """Return the seconds per replayed step, from the first line of the function.

    A fork starts as a recovered workflow does; its time in the queue is not counted.
    """
    await one_run(name, count)
    fork = await DBOS.fork_workflow_async(name, count + 1)
    await fork.get_result()
    return replayed[fork.workflow_id] / count


async def due_runs(name: str, runs: int) -> float:
    """Return runs per second, for sleeping workflows that are all due at the same time."""
    due = now() + 1 + runs / 60
    handles = [await DBOS.start_workflow_async(sleeper, max(0.0, due - now())) for _ in range(runs)]
    late = now()
    await asyncio.gather(*(handle.get_result() for handle in handles))
    return runs / (now() - max(due, late))


async def queued_runs(kind: str, name: str, runs: int) -> float:
    """Return runs per second of a queue, from the begin of the first run to the end of the last.

    The queue is registered when all runs are in it, so that enqueueing is not measured.
    """
    queued.clear()
    queue = f"{kind} {name}"
    for number in range(runs):
        key = str(number % KEYS) if "key" in kind else None
        with SetEnqueueOptions(queue_partition_key=key):
            await DBOS.enqueue_workflow_async(queue, counted)
    await DBOS.register_queue_async(queue, polling_interval_sec=POLLING, **QUEUES[kind])
    while len(queued) < 2 * runs:
        await asyncio.sleep(0.002)
    await DBOS.delete_queue_async(queue)
    return runs / (queued[-1] - queued[0])


async def main() -> None:
    DBOS(config={"name": "bench", "system_database_url": sys.argv[1], "log_level": "ERROR"})
    DBOS.launch()
    await one_run("warm", 50)
    workloads = {"A": one_run, "B": many_runs, "C": resume, "due": due_runs}
    workloads |= {kind: partial(queued_runs, kind) for kind in QUEUES}
    await serve(f"DBOS {version('dbos')}", workloads)
    DBOS.destroy()


asyncio.run(main())
