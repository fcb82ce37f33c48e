"""Many schedules: how late their runs start, whether times are missed or repeated, and what a
worker costs, with and without killed workers.

    python -m bench.schedules sqlite:////tmp/schedules.db --schedules 1000 --kill-every 5
    python -m bench.schedules sqlite:////tmp/schedules.db --schedules 10000 --workers 1
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import quantiles
from typing import Any

from perdure import Runtime, Step, Worker, workflow
from perdure.clock import parse_iso
from perdure.store import Query, require_search
from perdure.stores import open_store

LEASE = 5
_TICKS = os.sysconf("SC_CLK_TCK")
_processes = multiprocessing.get_context("spawn")


@workflow("bench-tick")
async def tick(step: Step, log: str) -> None:
    """Log how late the run is."""
    await step("log", write_lateness, log, step.run_id, step.scheduled_for)


async def write_lateness(log: str, run_id: str, scheduled_for: datetime) -> None:
    """Append a line to the log of this process."""
    late = (datetime.now(UTC) - scheduled_for).total_seconds()
    with Path(log, str(os.getpid())).open("a") as file:
        file.write(f"{run_id} {late}\n")


async def serve(url: str, poll: float) -> None:
    """Work until the process is killed."""
    runtime = Runtime(open_store(url), workflows=[tick], lease_ttl=LEASE)
    await Worker(runtime, poll=poll).serve()


def work(url: str, poll: float) -> None:
    """Run a worker process."""
    asyncio.run(serve(url, poll))


class Workers:
    """Worker processes; one that is killed is replaced. `cpu` is what all of them have used."""

    def __init__(self, url: str, count: int, poll: float) -> None:
        self._arguments = (url, poll)
        self.cpu = 0.0
        self.kills = 0
        self._alive = [self._start() for _ in range(count)]

    def _start(self) -> Any:
        process = _processes.Process(target=work, args=self._arguments)
        process.start()
        return process

    def kill_one(self) -> None:
        """Kill a worker and start another one."""
        victim = self._alive.pop(random.randrange(len(self._alive)))
        self._end(victim)
        self.kills += 1
        self._alive.append(self._start())

    def begin(self) -> None:
        """Count only what is used from now on."""
        self.cpu = -sum(cpu_seconds(process.pid) for process in self._alive)

    def used(self) -> float:
        """Return the processor time that all workers have used since `begin`."""
        return self.cpu + sum(cpu_seconds(process.pid) for process in self._alive)

    def stop(self) -> None:
        """Kill all workers."""
        for process in self._alive:
            self._end(process)

    def _end(self, process: Any) -> None:
        self.cpu += cpu_seconds(process.pid)
        process.kill()
        process.join()


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def create(runtime: Runtime, count: int, period: float, log: str) -> None:
    """Create schedules whose times are spread over the period."""
    begin = datetime.now(UTC) + timedelta(seconds=5)
    for n in range(count):
        start_at = begin + timedelta(milliseconds=int(period * 1000 * n / count))
        await runtime.schedule(f"s{n}", tick, log, every=period, start_at=start_at, overlap="allow")


async def measure(arguments: argparse.Namespace, log: str) -> dict[str, float]:
    """Return the results."""
    runtime = Runtime(open_store(arguments.url), workflows=[tick])
    await create(runtime, arguments.schedules, arguments.period, log)
    workers = Workers(arguments.url, arguments.workers, arguments.poll)
    try:
        await asyncio.sleep(arguments.warm_up)
        workers.begin()
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < arguments.seconds:
            await asyncio.sleep(min(arguments.kill_every or 1e9, arguments.seconds - elapsed))
            if arguments.kill_every:
                workers.kill_one()
        await asyncio.sleep(LEASE + 5 if arguments.kill_every else 0)
        elapsed, cpu = time.monotonic() - began, workers.used()
        # A schedule that is due now is not overdue.
        overdue = await count_overdue(runtime)
        await end_all(runtime)
    finally:
        workers.stop()
    infos = await runtime.schedules()
    await runtime.store.close()
    lines = [line.split() for path in Path(log).iterdir() for line in path.read_text().splitlines()]
    late = [float(line[1]) for line in lines]
    counts = Counter(line[0] for line in lines)
    period = timedelta(seconds=arguments.period)
    left_out = sum(gaps(times, period) for times in by_schedule(counts).values())
    return {
        "schedules": arguments.schedules,
        "kills": workers.kills,
        "started": sum(info.started for info in infos),
        "ran": len(counts),
        "missed": sum(info.missed for info in infos),
        "left out": left_out,
        "overdue": overdue,
        "repeated steps": sum(counts.values()) - len(counts),
        "late p50 ms": round(quantiles(late, n=100)[49] * 1000),
        "late p99 ms": round(quantiles(late, n=100)[98] * 1000),
        "share of a core": round(cpu / elapsed, 3),
    }


async def count_overdue(runtime: Runtime) -> int:
    """Return how many schedules should have acted five seconds ago."""
    before = datetime.now(UTC) - timedelta(seconds=5)
    infos = await runtime.schedules()
    return sum(info.next_at is not None and info.next_at < before for info in infos)


async def end_all(runtime: Runtime) -> None:
    """Pause all schedules, and wait until the runs that they have started are over."""
    for info in await runtime.schedules():
        await (await runtime.get_schedule(info.name)).pause()
    open_runs = Query(workflows=(tick.name,), statuses=("queued", "running", "suspended"))
    while (await require_search(runtime.store).search(open_runs, 1)).runs:
        await asyncio.sleep(0.5)


def by_schedule(run_ids: Iterable[str]) -> dict[str, list[datetime]]:
    """Return the nominal times of the runs of each schedule."""
    times: defaultdict[str, list[datetime]] = defaultdict(list)
    for run_id in run_ids:
        name, _, time = run_id.rpartition("@")
        times[name].append(parse_iso(time))
    return times


def gaps(times: Sequence[datetime], period: timedelta) -> int:
    """Return how many times are missing between the first and the last."""
    return (max(times) - min(times)) // period + 1 - len(times)


def main() -> None:
    """Measure, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--period", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--poll", type=float, default=0.5)
    parser.add_argument("--kill-every", type=float, default=0)
    with tempfile.TemporaryDirectory() as log:
        json.dump(asyncio.run(measure(parser.parse_args(), log)), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
