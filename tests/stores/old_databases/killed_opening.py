"""Open an old database again and again, and be killed ever later, until one opening succeeds.

    python -m tests.stores.old_databases.killed_opening KIND ADDRESS NAMESPACE SEED

Prints how many processes were killed.
"""

import asyncio
import os
import random
import signal
import sys
import time

from tests.stores.old_databases.places import Place

FIRST_DELAY = 0.001
"""In seconds. The next process is killed after about twice the time of the one before."""


async def _open(place: Place) -> None:
    async with place.open() as store:
        await store.load("due")


def _exit_code(place: Place, delay: float) -> int:
    """Open the database in a process that is killed after a delay; return how it ended."""
    pid = os.fork()
    if pid == 0:
        asyncio.run(_open(place))
        os._exit(0)
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Open until it succeeds; an opening that fails by itself is an error."""
    kind, address, namespace, seed = sys.argv[1:]
    place, jitter = Place(kind, address, namespace), random.Random(seed)
    killed, delay = 0, FIRST_DELAY
    while (code := _exit_code(place, delay)) == -signal.SIGKILL:
        killed += 1
        delay *= jitter.uniform(1.5, 2.5)
    print(killed)
    sys.exit(code)


if __name__ == "__main__":
    main()
