"""The workloads with DBOS: `python -m bench.peers.dbos postgresql://… | sqlite:///…`.

It runs with its defaults, which are durable, and with its async API.
"""

import asyncio
import sys
from importlib.metadata import version

# Not installed together with perdure: this file runs in its own environment.
from dbos import DBOS, SetWorkflowID  # type: ignore[import-not-found,unused-ignore]

from bench.peers.answering import VALUE, now, serve

replayed: dict[str, float] = {}


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


fetch = DBOS.step(name="fetch")(_fetch)
sequence = DBOS.workflow(name="sequence")(_sequence)
sleeper = DBOS.workflow(name="sleeper")(_sleeper)


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


async def main() -> None:
    DBOS(config={"name": "bench", "system_database_url": sys.argv[1], "log_level": "ERROR"})
    DBOS.launch()
    await one_run("warm", 50)
    workloads = {"A": one_run, "B": many_runs, "C": resume, "due": due_runs}
    await serve(f"DBOS {version('dbos')}", workloads)
    DBOS.destroy()


asyncio.run(main())
