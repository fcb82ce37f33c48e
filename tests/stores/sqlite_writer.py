"""Writes to a SQLite store until it is done or killed; tests run it in processes of its own.

Reads one order per line, and forks a process for each: what Python must import is imported once.
A write that was acknowledged by the store is a line in the file that the order names.
"""

import asyncio
import json
import os
import signal
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

from perdure.store import Entry, Grant, Rest, Verdict, Want
from perdure.stores.sqlite import SqliteStore, Transaction, sqlite

HOUR = timedelta(hours=1)
MOVE = "UPDATE account SET balance = balance + ? WHERE id = ?"


def snapshot(*keys: str, status: str = "running") -> bytes:
    steps = {key: {"ok": True, "value": "x" * 99} for key in keys}
    execution = {"status": status, "lastUpdated": "2030-01-01T00:00:00.000Z"}
    return json.dumps({"formatVersion": 1, "steps": steps, "execution": execution}).encode()


async def granted(store: SqliteStore, run: str) -> Grant:
    [grant] = await store.acquire([Want(run, "the writer", HOUR, create=snapshot())])
    assert grant is not None
    return grant


def triple(grant: Grant, turn: int, number: int) -> list[Entry]:
    """Three entries that are appended together."""
    lease = grant.lease
    return [
        Entry(lease.id, lease.epoch, 3 * number + part, snapshot(f"{turn}.{number}.{part}"))
        for part in range(3)
    ]


async def append_for_ever(store: SqliteStore, run: str, turn: int, log: int) -> None:
    grant = await granted(store, run)
    for number in count():
        verdicts = await store.append(triple(grant, turn, number))
        assert verdicts == [Verdict.ACCEPTED] * 3
        os.write(log, f"{turn}.{number}\n".encode())


async def move_for_ever(store: SqliteStore, run: str, turn: int, log: int) -> None:
    lease = (await granted(store, run)).lease

    for number in count():

        async def work(transaction: Transaction, number: int = number) -> Entry:
            await transaction.execute(MOVE, (-1, "ana"))
            await transaction.execute(MOVE, (1, "bob"))
            return Entry(run, lease.epoch, number, snapshot(f"{turn}.{number}"))

        assert await store.transact(run, lease.epoch, work) is Verdict.ACCEPTED
        os.write(log, f"{turn}.{number}\n".encode())


async def ten_steps(store: SqliteStore, run: str) -> None:
    lease = (await granted(store, run)).lease
    keys = [f"step {number}" for number in range(10)]
    for number, key in enumerate(keys):
        [verdict] = await store.append([Entry(run, lease.epoch, number, snapshot(key))])
        assert verdict is Verdict.ACCEPTED
    whole = snapshot(*keys, status="completed")
    [verdict] = await store.append([Entry(run, lease.epoch, 10, whole, rest=Rest("completed"))])
    assert verdict is Verdict.ACCEPTED


async def main(path: str, task: str, run: str, turn: int, log: int) -> None:
    async with sqlite(path) as store:
        match task:
            case "append":
                await append_for_ever(store, run, turn, log)
            case "move":
                await move_for_ever(store, run, turn, log)
            case "fifty":
                await asyncio.gather(*(ten_steps(store, f"{run} {number}") for number in range(50)))
                os.write(log, b"done\n")


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for order in sys.stdin:
        path, task, run, turn, log = json.loads(order)
        child = os.fork()
        if not child:
            with Path(log).open("ab", buffering=0) as file:
                asyncio.run(main(path, task, run, turn, file.fileno()))
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
