"""Workload G: several worker processes on one store, and whether any step ran twice.

`python -m bench.workers URL` is one of the processes. It prints when it is ready, waits for a line,
prints how many runs it has finished, and finally which steps it executed.
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
from perdure.cli.garbage import collector_for
from perdure.store import Store, require_schedule
from perdure.stores import open_store

ROOT = Path(__file__).parents[1]
STEPS = 3
executed: list[str] = []


async def mark(what: str) -> str:
    """Log that this step was executed in this process."""
    executed.append(what)
    return what


@workflow("bench-shared")
async def shared_workflow(step: Step) -> None:
    """Execute a few steps, in any of the processes."""
    for n in range(STEPS):
        await step("mark", mark, f"{step.run_id} {n}")


class Outcome(NamedTuple):
    """Runs per second of all processes together, and how many steps were executed twice."""

    rate: float
    twice: int


class _Child:
    """One worker process."""

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

    def send_line(self) -> None:
        """Send the next command: first to start, then to stop."""
        self._in.write(b"\n")

    async def read_line(self) -> list[str] | int:
        """Return the next message of the child."""
        message: list[str] | int = json.loads(await self._out.readline())
        return message

    async def follow(self) -> list[str]:
        """Update how many runs are finished, and return which steps were executed."""
        while isinstance(message := await self.read_line(), int):
            self.finished = message
        await self._process.wait()
        return message


async def together(store: Store, url: str, name: str, processes: int, runs: int) -> Outcome:
    """Let the processes execute the runs, all of which are due."""
    ids = [f"{name}-{n}" for n in range(runs)]
    await enqueue(require_schedule(store), shared_workflow.name, ids)
    children = await asyncio.gather(*(_Child.start(url) for _ in range(processes)))
    await asyncio.gather(*(child.read_line() for child in children))
    began = now()
    for child in children:
        child.send_line()
    lists = asyncio.gather(*(child.follow() for child in children))
    while sum(child.finished for child in children) < runs:
        await asyncio.sleep(0.005)
    took = now() - began
    for child in children:
        child.send_line()
    counts = Counter(what for steps in await lists for what in steps)
    assert len(counts) == runs * STEPS, "a step was not executed at all"
    return Outcome(runs / took, sum(n > 1 for n in counts.values()))


async def _next_line() -> None:
    await asyncio.to_thread(sys.stdin.readline)


def _print_line(what: list[str] | int) -> None:
    print(json.dumps(what), flush=True)


async def _work(url: str) -> None:
    store = open_store(url)
    await store.list(limit=1)
    _print_line(0)
    await _next_line()
    stop = asyncio.ensure_future(_next_line())
    runtime = Runtime(store, workflows=[shared_workflow])
    worker = Worker(runtime, concurrency=100, poll=0.05)
    with collector_for(worker.concurrency):
        await _report(worker, stop)
    _print_line(executed)
    await store.close()


async def _report(worker: Worker, stop: asyncio.Future[None]) -> None:
    async with worker:
        reported = 0
        while not stop.done():
            await asyncio.sleep(0.01)
            if worker.counters.finished != reported:
                reported = worker.counters.finished
                _print_line(reported)


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
