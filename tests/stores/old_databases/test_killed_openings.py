"""An old database whose first opening is interrupted: the next one completes it."""

import asyncio
import os
import sys
from pathlib import Path

from perdure.errors import StoreError
from perdure.stores import SqlStore
from tests.stores.old_databases.checks import check_claimed, check_found, of_kinds
from tests.stores.old_databases.places import KINDS, Place, client_of
from tests.stores.sql.clients import CrashingClient

FEW, MANY = 12, 2_200


@of_kinds(*KINDS)
async def test_an_opening_that_is_killed_at_any_moment_is_completed_by_the_next(
    place: Place,
) -> None:
    runs = await place.fill(MANY)
    arguments = (place.kind, place.address, place.namespace, "1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stores.old_databases.killed_opening", *arguments),
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert await process.wait() == 0
    async with place.open() as store:
        await check_found(store, runs)
        await check_claimed(store, runs)


async def test_an_opening_through_a_client_may_crash_at_every_statement(tmp_path: Path) -> None:
    place = Place("sql_sqlite", str(tmp_path / "runs.db"))
    runs = await place.fill(FEW)
    statements, opened = 0, False
    async with client_of(place.kind, place.address) as client:
        while not opened:
            crashing = CrashingClient(client, statements)
            async with SqlStore(crashing, dialect="sqlite") as store:
                try:
                    await store.load("due")
                    opened = True
                except (RuntimeError, StoreError):
                    statements += 1
        async with SqlStore(client, dialect="sqlite") as store:
            await check_found(store, runs)
            await check_claimed(store, runs)
