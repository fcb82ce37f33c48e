"""The life of a store that reaches a server: set up lazily and once, closed once."""

import asyncio
from collections.abc import Awaitable, Callable

from perdure.errors import StoreClosed, StoreError


class Lifecycle:
    """Sets a store up when it is first used, and says when it cannot be used any more.

    All who come at once wait for one set-up; when it fails, the next of them tries again. A store
    belongs to the event loop that first used it, and after that loop's end to the next one: then
    `on_move` is called, to forget what was bound to the old one.

        await self._life.ready()  # first line of every verb
    """

    def __init__(
        self,
        name: str,
        set_up: Callable[[], Awaitable[None]],
        *,
        on_move: Callable[[], object] = lambda: None,
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._on_move = on_move
        self._lock = asyncio.Lock()
        self._home: asyncio.AbstractEventLoop | None = None
        self._is_set_up = False
        self.is_closed = False

    async def ready(self) -> None:
        """Set the store up if that was not done yet; raise when it is closed."""
        self.check_open()
        if self._home is not asyncio.get_running_loop():
            self._settle()
        if not self._is_set_up:
            async with self._lock:
                if not self._is_set_up:
                    await self._set_up()
                    self._is_set_up = True
            self.check_open()

    def check_open(self) -> None:
        """Raise `StoreClosed` after `close`."""
        if self.is_closed:
            raise StoreClosed(f"this {self._name} store was closed; open a new one")

    def close(self) -> bool:
        """Let no further call through; False when that was so already."""
        was_open = not self.is_closed
        self.is_closed = True
        return was_open

    def _settle(self) -> None:
        if self._home is not None and not self._home.is_closed():
            raise StoreError(
                f"this {self._name} store belongs to another event loop, where its connections "
                "are; open a store in each loop"
            )
        if self._home is not None:
            self._on_move()
        self._home = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
