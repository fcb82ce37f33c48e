"""Kill a workflow halfway and watch another process finish it, on SQLite.

A worker process runs an order of five steps. It is killed with `kill -9` right after the payment.
Then another worker is started, and the charges to the card are counted.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import sqlite

COLOURED = sys.stdout.isatty() or "FORCE_COLOR" in os.environ
BOLD, DIM, RED, GREEN, BLUE, END = (
    f"\033[{code}m" if COLOURED else "" for code in (1, 2, 31, 32, 34, 0)
)
RUN = "order-42"


@dataclass
class Order:
    customer: str
    amount: int


@dataclass
class Receipt:
    charge: str
    amount: int


def effect(text: str) -> None:
    """Affect the outside world: append a line to a file, which no replay can undo."""
    with Path(os.environ["DEMO_EFFECTS"]).open("a") as file:
        file.write(text + "\n")
    print(f"  {GREEN}▸{END} {text} {DIM}(process {os.getpid()}){END}", flush=True)


async def reserve(customer: str) -> str:
    effect(f"reserve a table for {customer}")
    return "table 7"


async def charge(amount: int) -> Receipt:
    effect(f"charge the card: {amount} €")
    return Receipt("ch_1001", amount)


async def cook(table: str) -> str:
    await asyncio.sleep(0.4)
    effect(f"cook for {table}")
    return "dinner"


async def serve(dish: str, table: str) -> None:
    effect(f"serve {dish} at {table}")


@workflow("dinner")
async def dinner(step: Step, order: Order) -> str:
    table = await step("reserve", reserve, order.customer)
    receipt = await step("charge", charge, order.amount)
    await step.sleep("settle", "300ms")
    dish = await step("cook", cook, table)
    await step("serve", serve, dish, table)
    return f"{order.customer} paid {receipt.amount} € once, and ate {dish}"


async def work(path: str) -> None:
    """Work until the run is over."""
    async with sqlite(path) as store:
        runtime = Runtime(store, workflows=[dinner])
        await runtime.trigger(dinner, Order("Ada", 30), run_id=RUN, wait=False)
        async with Worker(runtime, poll=0.1):
            while not (run := await runtime.get_run(RUN)) or not run.over:
                await asyncio.sleep(0.05)


def start(path: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, __file__, path])
    print(f"{BOLD}worker {process.pid} starts{END}", flush=True)
    return process


def wait_for(text: str, effects: Path) -> None:
    while not effects.exists() or text not in effects.read_text():
        time.sleep(0.01)


async def report(path: str) -> None:
    async with sqlite(path) as store:
        run = await Runtime(store, workflows=[dinner]).get_run(RUN)
    assert run is not None
    print(f"\n{BOLD}the records of {RUN!r} in SQLite{END} ({run.status})")
    for line in run.history:
        took = f"{line.duration.total_seconds() * 1000:.0f} ms" if line.duration else ""
        print(f"  {line.at:%H:%M:%S}  {line.key:<10} {line.kind:<6} {DIM}{took}{END}")
    print(f"  → {GREEN}{run.output}{END}")


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, effects = str(Path(folder, "demo.db")), Path(folder, "effects.txt")
        os.environ["DEMO_EFFECTS"] = str(effects)
        print(f"{BLUE}A workflow of five steps, each recorded before the next one starts.{END}\n")
        first = start(path)
        wait_for("charge", effects)
        time.sleep(0.1)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        print(f"{RED}{BOLD}kill -9 {first.pid}{END}{RED}: charged, but not cooked yet{END}\n")
        second = start(path)
        assert second.wait() == 0
        asyncio.run(report(path))
        lines = effects.read_text().splitlines()
    charges = sum("charge" in line for line in lines)
    right = charges == 1 and len(lines) == 4
    print(f"\n{GREEN if right else RED}{BOLD}The card was charged {charges} time(s).{END}", end=" ")
    print(f"{DIM}{time.monotonic() - began:.1f} s in total{END}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    if len(sys.argv) > 1:
        asyncio.run(work(sys.argv[1]))
    else:
        main()
