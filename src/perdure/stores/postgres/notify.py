"""Hints that a run became due, by LISTEN and NOTIFY."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from perdure.clock import Clock
from perdure.errors import StoreUnavailable
from perdure.store import Capabilities
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.schema import Names
from perdure.stores.postgres.store import PostgresStore

logger = logging.getLogger(__name__)


class HintingPostgresStore(PostgresStore):
    """A store whose sessions are its own, so that they can listen."""

    def __init__(
        self,
        database: Database,
        names: Names,
        *,
        prefix: str,
        capabilities: Capabilities,
        clock: Clock,
    ) -> None:
        super().__init__(database, names, prefix=prefix, capabilities=capabilities)
        self._clock = clock
        self._ears: dict[_Ear, Any] = {}

    async def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process; ends when the store is closed.

        A connection of its own listens. When that is lost, a new one is made, and a hint comes for
        what may have happened meanwhile.
        """
        await self._life.ready()
        while not self._life.is_closed:
            try:
                async with self._listening() as ear:
                    yield
                    while await ear.hears():
                        yield
            except StoreUnavailable as error:
                logger.warning("no hints for now: %s", error)
                await self._clock.sleep(1)

    async def close(self) -> None:
        """Close the connections that were opened here, and end the hints."""
        await super().close()
        for ear in list(self._ears):
            ear.deafen()
            await self._hang_up(ear)

    @asynccontextmanager
    async def _listening(self) -> AsyncGenerator["_Ear"]:
        connection = await self._database.connections.dedicate()
        ear = _Ear()
        self._ears[ear] = connection
        try:
            connection.add_termination_listener(ear.deafen)
            with self._database.speaking():
                await connection.add_listener(self._names.channel, ear.wake)
            yield ear
        finally:
            await self._hang_up(ear)

    async def _hang_up(self, ear: "_Ear") -> None:
        # Whoever comes second, be it the store that closes, waits until the first is done.
        async with ear.hanging_up:
            connection = self._ears.get(ear)
            if connection is None:
                return
            connection.remove_termination_listener(ear.deafen)
            try:
                with self._database.speaking():
                    await connection.remove_listener(self._names.channel, ear.wake)
            finally:
                await self._database.connections.dismiss(connection)
                del self._ears[ear]


class _Ear:
    """What a connection that listens has heard since it was last asked."""

    def __init__(self) -> None:
        self.hanging_up = asyncio.Lock()
        self._news = asyncio.Event()
        self._is_deaf = False

    def wake(self, *_: Any) -> None:
        self._news.set()

    def deafen(self, *_: Any) -> None:
        self._is_deaf = True
        self._news.set()

    async def hears(self) -> bool:
        """Wait for news; False when there can be none any more."""
        await self._news.wait()
        self._news.clear()
        return not self._is_deaf
