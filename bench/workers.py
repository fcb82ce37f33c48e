"""Workload G: so many worker processes on one store, and whether any step ran twice.

`python -m bench.workers URL` is one of the processes: it says when it is up, waits for the word to
go, tells how many runs it has finished, and at the end which steps it executed.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from bench.timing import now
from bench.workloads import enqueue
from perdure import Runtime, Step, Worker, workflow
from perdure.store import Store, require_schedule
from perdure.stores import open_store

ROOT = Path(__file__).parents[1]
STEPS = 3
executed: list[str] = []


async def mark(what: str) -> str:
    """Remember that this step was executed here."""
    executed.append(what)
    return what


@workflow("bench-shared")
async def shared_workflow(step: Step) -> None:
    """Do a few steps that any of the processes may do."""
    for n in range(STEPS):
        await step("mark", mark, f"{step.run_id} {n}")


class Outcome(NamedTuple):
    """Runs per second of all processes together, and how many steps were executed twice."""

    rate: float
    twice: int


class _Child:
    """One worker process, seen from the conductor."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self.finished = 0

    @classmethod
    async def start(cls, url: str) -> "_Child":
        command = (sys.executable, "-m", "bench.workers", url)
        pipe = subprocess.PIPE
        limit = 2**26
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=limit
            )
        )

    def tell(self) -> None:
        """Say the next word: first to go, then to stop."""
        self._in.write(b"\n")

    async def hear(self) -> list[str] | int:
        """Give what the child says next."""
        said: list[str] | int = json.loads(await self._out.readline())
        return said

    async def follow(self) -> list[str]:
        """Follow how many runs are finished, and give which steps were executed."""
        while isinstance(said := await self.hear(), int):
            self.finished = said
        await self._process.wait()
        return said


async def together(store: Store, url: str, name: str, processes: int, runs: int) -> Outcome:
    """Let so many processes work off so many runs that all wait for them."""
    ids = [f"{name}-{n}" for n in range(runs)]
    await enqueue(require_schedule(store), shared_workflow.name, ids)
    children = await asyncio.gather(*(_Child.start(url) for _ in range(processes)))
    await asyncio.gather(*(child.hear() for child in children))
    began = now()
    for child in children:
        child.tell()
    lists = asyncio.gather(*(child.follow() for child in children))
    while sum(child.finished for child in children) < runs:
        await asyncio.sleep(0.005)
    took = now() - began
    for child in children:
        child.tell()
    counts = Counter(what for steps in await lists for what in steps)
    assert len(counts) == runs * STEPS, "a step was not executed at all"
    return Outcome(runs / took, sum(n > 1 for n in counts.values()))


async def _word() -> None:
    await asyncio.to_thread(sys.stdin.readline)


def _say(what: list[str] | int) -> None:
    print(json.dumps(what), flush=True)


async def _work(url: str) -> None:
    store = open_store(url)
    await store.list(limit=1)
    _say(0)
    await _word()
    stop = asyncio.ensure_future(_word())
    runtime = Runtime(store, workflows=[shared_workflow])
    async with Worker(runtime, concurrency=100, poll=0.05) as worker:
        told = 0
        while not stop.done():
            await asyncio.sleep(0.01)
            if worker.counters.finished != told:
                told = worker.counters.finished
                _say(told)
    _say(executed)
    await store.close()


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
