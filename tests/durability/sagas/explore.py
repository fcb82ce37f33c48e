"""Crash random programs with undos at every store call.

python -m tests.durability.sagas.explore 0 100
"""

import asyncio
import logging
import sys
import time

from perdure import Run, Runtime
from perdure.errors import StoreError
from perdure.store import Store
from perdure.testing import FaultyStore, explore_crashes
from tests.durability.sagas.programs import WORLD, Node, check, draw, program

LEASE, DEADLINE = 0.4, "3s"


async def explore(nodes: list[Node], *, always_replay: bool = False) -> int:
    """Run a program once without and once with each crash; return how many crashes there were."""

    def compare(clean: Run, survived: Run) -> None:
        check(survived, WORLD.effects, crashes=1)

    exploration = await explore_crashes(
        program,
        nodes,
        store=WORLD.open,
        always_replay=always_replay,
        compare=compare,
        events={"go": None},
    )
    return exploration.crashes


class Crash(StoreError):
    """The process crashes here."""


async def survive(nodes: list[Node], store: Store, run_id: str, fail_at: int | None) -> Run:
    """Run a program in real time, in a process that crashes at a store call, then in another."""
    WORLD.use(store)
    first = FaultyStore(store, fail_at=fail_at, error=Crash, stays_down=True)
    try:
        run = await _drive(first, nodes, run_id)
    except Crash:
        run = await _drive(FaultyStore(store), nodes, run_id)
    check(run, WORLD.effects, crashes=1 if first.failed else 0)
    return run


async def _drive(store: FaultyStore, nodes: list[Node], run_id: str) -> Run:
    runtime = Runtime(store, workflows=[program], lease_ttl=LEASE, suspend_after=0.02)
    async with runtime:
        await runtime.trigger(program, nodes, run_id=run_id, deadline=DEADLINE, wait=False)
        while (run := await runtime.get_run(run_id)) is None or not run.over:
            await runtime.sweep()
            if store.failed:
                # A sweep only logs that the store fails.
                raise Crash(run_id)
            await asyncio.sleep(0.02)
    return run


async def main(first: int, last: int) -> None:
    logging.disable(logging.CRITICAL)
    started, crashes = time.monotonic(), 0
    for seed in range(first, last):
        try:
            before = time.monotonic()
            found = await explore(draw(seed), always_replay=seed % 4 == 3)
            crashes += found
            print(f"seed {seed}: {found} crashes, {time.monotonic() - before:.1f} s", flush=True)
        except BaseException as error:
            print(f"seed {seed}: {draw(seed)}", file=sys.stderr)
            raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"{last - first} programs, {crashes} crashes, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
