"""A process that claims whatever is due until nothing is: `python -m … <store> <owner>`.

It says `ready` when the store is open, begins when a line comes in, and ends by printing the ids of
the runs it had as JSON. The store is a URL, or `module:function` that makes one.
"""

import asyncio
import json
import sys
from datetime import timedelta
from importlib import import_module
from typing import cast

from perdure.store import Rest, Store
from perdure.stores import open_store
from perdure.testing.conformance.harness import need_schedule, rested


def opened(where: str) -> Store:
    """Give the store of a URL or a `module:function`."""
    if "://" in where:
        return open_store(where)
    module, _, function = where.partition(":")
    return cast(Store, getattr(import_module(module), function)())


async def contend(where: str, owner: str) -> list[str]:
    """Give the ids of all runs that this process claimed and ended."""
    store = need_schedule(opened(where))
    await store.load("run")
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    ids: list[str] = []
    while grants := await store.claim(owner, timedelta(minutes=1), 5):
        for grant in grants:
            await rested(store, grant, Rest("completed"))
            ids.append(grant.lease.id)
    await store.close()
    return ids


def say(line: str) -> None:
    """Tell the process that waits for this one."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    say(json.dumps(asyncio.run(contend(*sys.argv[1:]))))
