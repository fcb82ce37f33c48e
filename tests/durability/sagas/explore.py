"""Crash random programs with undos at every store call.

python -m tests.durability.sagas.explore 0 100
"""

import asyncio
import logging
import sys
import time

from perdure import Run
from perdure.testing import explore_crashes
from tests.durability.sagas.programs import WORLD, Node, check, draw, program


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
