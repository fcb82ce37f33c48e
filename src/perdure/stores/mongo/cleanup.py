"""Removal of what no longer counts, behind the back of those who wait for answers."""

import asyncio
import logging
from collections.abc import Iterable
from typing import TypeVar

from perdure.errors import StoreError
from perdure.stores.mongo.connection import Connection, casual
from perdure.stores.mongo.inbox import mail_of
from perdure.stores.mongo.journal import SEALS_STAY, slots_upto
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.updates import later

T = TypeVar("T")

_log = logging.getLogger(__name__)

_AT_ONCE = 2_000
_PAUSE = 0.5
_WITHOUT_SEAL = {"seal": {"$exists": False}}


class Sweeper:
    """Deletes folded entries and the mail of runs that are gone.

    What it does not get done, because the process ends or the server is away, harms nobody: such
    entries are ignored, and go with their run.
    """

    def __init__(self, connection: Connection[Collections]) -> None:
        self._connection = connection
        self._slots: list[str] = []
        self._logs: list[tuple[str, int]] = []
        self._mail: list[tuple[str, str]] = []
        self._task: asyncio.Task[None] | None = None
        self._hurry: asyncio.Future[None] | None = None

    def slots(self, ids: Iterable[str]) -> None:
        """Remove these entries."""
        self._slots.extend(ids)
        self._begin()

    def logs(self, run: str, epoch: int) -> None:
        """Remove all entries of a run up to this epoch, and in a day the seals among them."""
        self._logs.append((run, epoch))
        self._begin()

    def mail(self, run: str, life: str) -> None:
        """Remove all messages for a run that is gone; a new run of the id has its own."""
        self._mail.append((run, life))
        self._begin()

    async def close(self) -> None:
        """Finish what was begun."""
        if self._task is not None and self._hurry is not None:
            if not self._hurry.done():
                self._hurry.set_result(None)
            await asyncio.wait([self._task])

    def _begin(self) -> None:
        if self._task is None:
            self._hurry = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._sweep(self._hurry))

    async def _sweep(self, hurry: asyncio.Future[None]) -> None:
        try:
            while self._left():
                # What many calls leave behind goes together, when they have their answers.
                await asyncio.wait([hurry], timeout=_PAUSE)
                async with self._connection.use() as db:
                    for _ in range(0, self._left(), _AT_ONCE):
                        await self._round(db)
        except StoreError as error:
            _log.warning("entries that no longer count were not removed: %s", error)
        finally:
            self._task = None

    def _left(self) -> int:
        return max(len(self._slots), len(self._logs), len(self._mail))

    async def _round(self, db: Collections) -> None:
        journal, inbox = casual(db.journal), casual(db.inbox)
        if slots := _take(self._slots):
            await journal.delete_many({"_id": {"$in": slots}})
        if logs := _take(self._logs):
            among = {"$or": [{"_id": slots_upto(run, epoch)} for run, epoch in logs]}
            await journal.delete_many({**among, **_WITHOUT_SEAL})
            stay = [{"$set": {"expireAt": later(SEALS_STAY)}}]
            await journal.update_many({**among, "expireAt": None}, stay)
        if delete := _take(self._mail):
            await inbox.delete_many({"$or": [{"_id": mail_of(run, life)} for run, life in delete]})


def _take(items: list[T]) -> list[T]:
    taken = items[:_AT_ONCE]
    del items[:_AT_ONCE]
    return taken
