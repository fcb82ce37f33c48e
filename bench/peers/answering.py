"""The child's side of a peer: one JSON line in asks for a workload, one JSON line out is a number.

Standard library only: it runs in the peer's own environment.
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
    """Say the version, then answer requests until the input ends.

    What the peer itself prints goes to the error stream: the answers have the output alone.
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
