"""A process that claims due runs until there are none: `python -m … <store> <owner>`.

It prints `ready` when the store is open, starts when it reads a line, and finally prints the ids of
the runs it claimed as JSON. The store is given as a URL, or as a `module:function` that returns a
store.
"""

import asyncio
import json
import sys
from datetime import timedelta
from importlib import import_module
from typing import cast

from perdure.store import Rest, Store
from perdure.stores import open_store
from perdure.testing.conformance.harness import need_schedule, write_rest


def open_by_name(location: str) -> Store:
    """Open the store of a URL or a `module:function`."""
    if "://" in location:
        return open_store(location)
    module, _, function = location.partition(":")
    return cast(Store, getattr(import_module(module), function)())


async def claim_all(location: str, owner: str) -> list[str]:
    """Return the ids of all runs that this process claimed and completed."""
    store = need_schedule(open_by_name(location))
    await store.load("run")
    write_line("ready")
    await asyncio.to_thread(sys.stdin.readline)
    ids: list[str] = []
    while grants := await store.claim(owner, timedelta(minutes=1), 5):
        for grant in grants:
            await write_rest(store, grant, Rest("completed"))
            ids.append(grant.lease.id)
    await store.close()
    return ids


def write_line(line: str) -> None:
    """Print a line for the process that waits for this one."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    write_line(json.dumps(asyncio.run(claim_all(*sys.argv[1:]))))
