"""The worker of the transaction test: transfers money between two accounts, in one transaction per
step.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from multiprocessing.synchronize import Event
from typing import Any

from perdure import Runtime, Step, Worker, workflow
from perdure.events import StepStart
from perdure.stores import open_store

LEASE = 0.3
MOVES = 4

Move = Callable[[Any, str, int], Awaitable[None]]

_TAKE = "UPDATE accounts SET balance = balance - {0} WHERE name = 'ana'"
_GIVE = "UPDATE accounts SET balance = balance + {0} WHERE name = 'ben'"
_NOTE = "INSERT INTO moves (run, n, amount) VALUES ({0}, {1}, {2})"


def amount_of(n: int) -> int:
    """Return the amount of the n-th transfer of a run."""
    return 1 + n


async def move_in_postgres(connection: Any, run: str, n: int) -> None:
    await connection.execute(_TAKE.format("$1"), amount_of(n))
    await connection.execute(_GIVE.format("$1"), amount_of(n))
    await connection.execute(_NOTE.format("$1", "$2", "$3"), run, n, amount_of(n))


async def move_in_mysql(connection: Any, run: str, n: int) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute(_TAKE.format("%s"), (amount_of(n),))
        await cursor.execute(_GIVE.format("%s"), (amount_of(n),))
        await cursor.execute(_NOTE.format("%s", "%s", "%s"), (run, n, amount_of(n)))


async def move_in_sqlite(transaction: Any, run: str, n: int) -> None:
    await transaction.execute(_TAKE.format("?"), (amount_of(n),))
    await transaction.execute(_GIVE.format("?"), (amount_of(n),))
    await transaction.execute(_NOTE.format("?", "?", "?"), (run, n, amount_of(n)))


async def move_in_mongo(transaction: Any, run: str, n: int) -> None:
    accounts, session = transaction.database["accounts"], transaction.session
    for name, change in (("ana", -amount_of(n)), ("ben", amount_of(n))):
        await accounts.update_one({"_id": name}, {"$inc": {"balance": change}}, session=session)
    note = {"run": run, "n": n, "amount": amount_of(n)}
    await transaction.database["moves"].insert_one(note, session=session)


MOVE_IN: dict[str, Move] = {
    "postgres": move_in_postgres,
    "mysql": move_in_mysql,
    "sqlite": move_in_sqlite,
    "sqld": move_in_sqlite,
    "mongo": move_in_mongo,
}


@workflow("transfers")
async def transfers(step: Step, order: dict[str, str]) -> int:
    move = MOVE_IN[order["kind"]]
    for n in range(MOVES):
        while True:
            try:
                await step.transaction(f"move-{n}", move, order["run"], n)
                break
            except Exception:  # noqa: BLE001  # blocked by the transaction of a killed process
                await step.sleep(f"pause-{n}", 0.05)
    return MOVES


async def main(url: str, moving: Event) -> None:
    def tell(event: object) -> None:
        if isinstance(event, StepStart):
            moving.set()

    async with open_store(url) as store:
        runtime = Runtime(store, workflows=[transfers], lease_ttl=LEASE, on_event=tell)
        async with Worker(runtime, concurrency=1, poll=0.05, max_crashes=1000) as worker:
            await worker.serve()


def work(url: str, moving: Event) -> None:
    """Work until the process is killed; `moving` is set when the first transfer begins."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(url, moving))
