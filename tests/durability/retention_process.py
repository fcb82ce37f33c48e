"""A worker that removes old runs, in a process that is killed."""

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

from perdure import Keep, Runtime, Step, Worker, workflow
from perdure.runtime import pruning
from perdure.stores import open_store

LEASE = 1.0


@workflow("old", keep=Keep(completed="2d", failed="2d", cancelled="2d"))
async def old(step: Step) -> None:
    """Do nothing: runs of it are created as they are when they have ended."""


async def serve(url: str) -> None:
    """Work until the process is killed."""
    runtime = Runtime(open_store(url), workflows=[old], lease_ttl=LEASE)
    await Worker(runtime, poll=0.05).serve()


def work(url: str) -> None:
    """Run a worker without pauses, which are long on a busy machine."""
    pruning.SHARE = pruning.LARGEST_SHARE = 1.0
    asyncio.run(serve(url))


def make_older(url: str, days: int) -> None:
    """Move all runs of a store into the past."""
    if url.startswith("sqlite:///"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(
                "UPDATE perdure_runs SET updated_at ="
                f" strftime('%Y-%m-%dT%H:%M:%f000Z', updated_at, '-{days} days'),"
                f" created_at = created_at - {days} * 86400000000"
            )
        return
    asyncio.run(_make_older(url, days))


async def _make_older(url: str, days: int) -> None:
    import asyncpg

    connection: Any = await asyncpg.connect(url)
    try:
        await connection.execute(
            f"UPDATE perdure_runs SET updated_at = updated_at - interval '{days} days',"
            f" created_at = created_at - interval '{days} days'"
        )
    finally:
        await connection.close()
