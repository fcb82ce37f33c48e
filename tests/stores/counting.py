"""A process that increments a counter among the documents of a store."""

import asyncio
import json
import sys
from typing import Any

from perdure.keyvalue import Documents
from perdure.stores import open_store

COUNTER = "counter:a"


async def increment(documents: Documents, times: int) -> None:
    """Increment the counter; another process may do the same at any time."""
    for _ in range(times):
        while True:
            old = await documents.get(COUNTER)
            if await documents.replace(COUNTER, old, str(int(old or 0) + 1)):
                break


async def main(url: str, options: str, times: str) -> None:
    store: Any = open_store(url, **json.loads(options))
    async with store:
        await increment(store.documents, int(times))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
