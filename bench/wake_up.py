"""Workload I: how soon a worker starts a run, what it costs while idle, and how soon a process
replaces one that was killed.

`python -m bench.wake_up ROLE URL …` is one of the other processes. Times that they print are those
of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import quantiles

from bench.timing import now
from bench.workloads import finished
from perdure import Runtime, Step, Worker, workflow
from perdure.stores import open_store

ROOT = Path(__file__).parents[1]
MEMORY = "memory://"
SETTLE = 0.3
# An idle worker polls less often, on a store without notifications: the first runs wake it up.
WARM = 3
GAPS = (0.1, 0.2)

begun: "asyncio.Queue[tuple[str, int]]" = asyncio.Queue()


async def begin(run_id: str) -> None:
    """Log when the first step of a run began."""
    begun.put_nowait((run_id, time.monotonic_ns()))


@workflow("bench-wake")
async def waking(step: Step) -> None:
    """Execute one step."""
    await step("begin", begin, step.run_id)


@workflow("bench-restart")
async def restarting(step: Step) -> None:
    """Print when the second step begins; the first process is killed in it."""
    await step("first", lambda: None)
    await step("second", print_time)


async def print_time() -> None:
    """Print the time, and stay in the step if this process is to be killed in it."""
    print(time.monotonic_ns(), flush=True)
    if "crash" in sys.argv:
        await asyncio.sleep(3600)


async def measure(
    url: str, runs: int, idle_seconds: float, restarts: int
) -> dict[str, list[float]]:
    """Return seconds and percentages, by workload."""
    values = {"wake": await _in_this_process(url, runs)}
    if url != MEMORY:
        values["across"] = await _across_processes(url, runs)
        values["across95"] = [quantiles(values["across"], n=20, method="inclusive")[-1]]
    values["idle"] = [float(await _line("idle", url, str(idle_seconds)))]
    if url.startswith("sqlite"):
        values["restart"] = [await _restart(url) for _ in range(restarts)]
    return values


@asynccontextmanager
async def _working(url: str) -> AsyncGenerator[tuple[Runtime, Worker]]:
    store = open_store(url)
    runtime = Runtime(store, workflows=[waking])
    try:
        async with Worker(runtime) as worker:
            await asyncio.sleep(SETTLE)
            yield runtime, worker
    finally:
        await store.close()


async def _in_this_process(url: str, runs: int) -> list[float]:
    took = []
    async with _working(url) as (runtime, worker):
        for n in range(WARM + runs):
            before = time.monotonic_ns()
            await runtime.trigger(waking, wait=False)
            _, after = await begun.get()
            took.append((after - before) / 1e9)
            await finished(worker, n + 1)
    return took[WARM:]


async def _across_processes(url: str, runs: int) -> list[float]:
    async with _working(url):
        triggered = json.loads(await _line("trigger", url, str(WARM + runs)))
        started = dict([await asyncio.wait_for(begun.get(), 10) for _ in triggered])
    return [(started[run_id] - at) / 1e9 for run_id, at in list(triggered.items())[WARM:]]


async def _restart(url: str) -> float:
    """Return how long a new process takes to reach the next step of a run whose process was killed.

    The time starts when the new process has imported everything.
    """
    first = await _start("crash", url)
    assert first.stdout is not None
    await first.stdout.readline()
    first.kill()
    await first.wait()
    imported, reached = map(int, (await _line("continue", url)).split())
    return (reached - imported) / 1e9


async def _line(*arguments: str) -> bytes:
    process = await _start(*arguments)
    answer, _ = await process.communicate()
    assert process.returncode == 0, f"{arguments} failed"
    return answer


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "bench.wake_up", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)


async def _trigger(url: str, runs: str) -> None:
    store = open_store(url)
    runtime = Runtime(store, workflows=[waking])
    await store.list(limit=1)
    triggered = {}
    for _ in range(int(runs)):
        await asyncio.sleep(random.uniform(*GAPS))
        before = time.monotonic_ns()
        triggered[(await runtime.trigger(waking, wait=False)).id] = before
    print(json.dumps(triggered))
    await store.close()


async def _idle(url: str, seconds: str) -> None:
    async with _working(url):
        began, used = now(), time.process_time()
        await asyncio.sleep(float(seconds))
        print((time.process_time() - used) / (now() - began) * 100)


async def _crash(url: str) -> None:
    runtime = Runtime(open_store(url), workflows=[restarting])
    async with Worker(runtime) as worker:
        await runtime.trigger(restarting, wait=False)
        await finished(worker, 1)


async def _continue(url: str) -> None:
    store = open_store(url)
    print(time.monotonic_ns())
    async with Worker(Runtime(store, workflows=[restarting])) as worker:
        await finished(worker, 1)
    await store.close()


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    "trigger": _trigger,
    "idle": _idle,
    "crash": _crash,
    "continue": _continue,
}


async def _main(role: str, *arguments: str) -> None:
    await ROLES[role](*arguments)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
