"""Compare the CPU time of this version of perdure with that of another revision of it.

    python -m bench.compare REVISION [--pairs 7] [--sqlite]

Each measurement has a process of its own. Both versions are measured alternately, since a machine
is sometimes faster and sometimes slower, and the last column is the median of the ratios of the
pairs. The revision may be old: only `durable.run` is used. The garbage collector is off, as it
depends on what else a process has in memory.
"""

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RUNS, STEPS, REPEATS = 200, 3000, 7
WORKS = {
    "step": f"a step of {STEPS:,} in one run",
    "run": f"a run of 10 steps, of {RUNS} at once",
    "ends": f"start and end of a run, of {RUNS} at once",
    "alone": "start and end of a run, one after another",
}
VALUE = {"id": "1", "name": "Ann", "padding": "x" * 60}


async def fetch(id: str) -> dict[str, str]:
    """Return the value of a step: about 100 bytes."""
    return VALUE


async def microseconds(work: str, store: Any) -> float:
    """Return the CPU time of one step or one run: the median of several repetitions."""
    from perdure import Step, durable

    async def body(step: Step) -> None:
        for _ in range(count):
            await step("fetch", fetch, "1")

    async def run(number: int) -> None:
        (await durable.run({}, body, id=f"run-{number}", store=store)).unwrap()

    count = {"step": STEPS, "run": 10}.get(work, 0)
    measured = []
    for _ in range(REPEATS):
        gc.collect()
        began = time.process_time()
        if work in ("run", "ends"):
            await asyncio.gather(*(run(number) for number in range(RUNS)))
        else:
            for number in range(1 if work == "step" else RUNS):
                await run(number)
        parts = STEPS if work == "step" else RUNS
        measured.append((time.process_time() - began) / parts * 1e6)
    return median(measured)


async def measure(work: str, path: str) -> None:
    """Print the CPU time of a workload, in this process."""
    from perdure.stores import MemoryStore, sqlite

    async with sqlite(path) if path else MemoryStore() as store:
        gc.disable()
        print(await microseconds(work, store))


def in_process(source: Path, work: str, *, on_sqlite: bool) -> float:
    """Return the CPU time of a workload with the version of perdure in this folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/runs.db" if on_sqlite else ""
        output = subprocess.check_output(
            [sys.executable, "-m", "bench.compare", "--measure", work, path],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
    return float(output)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a folder with the source of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.Popen(
            ["git", "archive", revision, "src"], cwd=ROOT, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], stdin=archive.stdout, check=True)
        if archive.wait():
            sys.exit(f"{revision} is not a revision of this repository")
        yield Path(folder) / "src"


def compare(revision: str, pairs: int, *, on_sqlite: bool) -> None:
    """Print both times of each workload, and their ratio."""
    print(f"µs of CPU time {revision:>40}       now   ratio", flush=True)
    with checked_out(revision) as before:
        for work, label in WORKS.items():
            sources = {"before": before, "now": ROOT / "src"}
            times: dict[str, list[float]] = {name: [] for name in sources}
            for number in range(pairs):
                for name in [*sources][:: -1 if number % 2 else 1]:
                    times[name].append(in_process(sources[name], work, on_sqlite=on_sqlite))
            ratio = median([a / b for a, b in zip(times["before"], times["now"], strict=True)])
            old, new = median(times["before"]), median(times["now"])
            print(f"{label:<43}{old:12.1f}{new:10.1f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        asyncio.run(measure(sys.argv[2], sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("revision")
        parser.add_argument("--pairs", type=int, default=7)
        parser.add_argument("--sqlite", action="store_true", help="instead of the memory store")
        chosen = parser.parse_args()
        compare(chosen.revision, chosen.pairs, on_sqlite=chosen.sqlite)
