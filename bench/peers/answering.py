"""The child process of another library: it reads workloads and writes values, as lines of JSON.

It uses only the standard library, because it runs in the environment of the other library.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

VALUE = {"id": "1", "name": "Ann", "padding": "x" * 60}
Workload = Callable[[str, int], Awaitable[float]]
now = time.perf_counter


async def serve(version: str, workloads: Mapping[str, Workload]) -> None:
    """Print the version, then handle requests until the input ends.

    Output of the library itself goes to stderr, because stdout is for results only.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"version": version, "workloads": list(workloads)}), file=answers)
    count = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        count += 1
        value = await workloads[request["workload"]](f"run-{count}", request["size"])
        print(json.dumps({"value": value}), file=answers)
