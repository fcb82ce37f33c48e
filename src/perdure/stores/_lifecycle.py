"""The lifecycle of a store: set up once on first use, bound to one event loop, closed once.

Closing waits a moment for calls in flight, whose connections could otherwise not be closed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from perdure.errors import StoreClosed, StoreError, StoreNotOpened, StoreUnavailable

_CLOSE_TIMEOUT = 2.0


class CallsInFlight:
    """Counts the calls that use a connection, so that closing a store can wait for them."""

    def __init__(self) -> None:
        self._count = 0
        self._idle: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Count a call."""
        self._count += 1

    def end(self) -> None:
        """Count a call that has given its connection back."""
        self._count -= 1
        if self._count == 0 and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def ended(self) -> None:
        """Wait until no call is in flight, but not for long: a server may never answer."""
        if self._count:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle], timeout=_CLOSE_TIMEOUT)


class Lifecycle:
    """Sets a store up on first use, and rejects calls when it cannot be used.

    Concurrent first calls wait for one set-up. If the store is unavailable, all of them fail, and
    the next call tries again. A store belongs to the event loop that first used it. Once that loop
    has ended, the next loop takes the store over, and `on_move` is called to drop everything bound
    to the old one. With `any_loop`, nothing in the store is bound to a loop, and `set_up` may run
    in several loops at once.

        await self._life.ready()  # first line of every public method
    """

    def __init__(
        self,
        name: str,
        set_up: Callable[[], Awaitable[None]],
        *,
        on_move: Callable[[], object] = lambda: None,
        any_loop: bool = False,
    ) -> None:
        self._name = name
        self._set_up = set_up
        self._on_move = on_move
        self._any_loop = any_loop
        # Loops cannot share an asyncio lock: a waiter in another thread may never wake up.
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_set_up = False
        self._failed_attempts = 0
        self._problem = ""
        self.is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether `ready` would return at once."""
        if not self._is_set_up or self.is_closed:
            return False
        return self._any_loop or self._loop is asyncio.get_running_loop()

    async def ready(self) -> None:
        """Set the store up if necessary; raise `StoreClosed` after `close`."""
        self.check_open()
        if not self._any_loop and self._loop is not asyncio.get_running_loop():
            self._bind_loop()
        if not self._is_set_up:
            failed_attempts = self._failed_attempts
            async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                if not self._is_set_up:
                    await self._open(failed_attempts)
            self.check_open()

    async def _open(self, failed_attempts: int) -> None:
        if self._failed_attempts > failed_attempts:
            # An attempt failed while this caller waited. If each caller made its own, the last one
            # would wait for as many timeouts as there are callers.
            raise StoreNotOpened(self._problem)
        try:
            await self._set_up()
        except StoreUnavailable as error:
            self._failed_attempts += 1
            self._problem = str(error)
            raise StoreNotOpened(self._problem) from error.__cause__
        self._is_set_up = True

    def check_open(self) -> None:
        """Raise `StoreClosed` after `close`."""
        if self.is_closed:
            raise StoreClosed(f"this {self._name} store is closed; open a new one")

    def close(self) -> bool:
        """Reject calls from now on; return whether the store was open."""
        was_open = not self.is_closed
        self.is_closed = True
        if was_open and self._loop is not None and self._loop.is_closed():
            self._on_move()  # connections of a loop that has ended cannot be closed
        return was_open

    def _bind_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            raise StoreError(
                f"this {self._name} store belongs to another event loop, where its connections "
                "are; open a store in each loop"
            )
        if self._loop is not None:
            self._on_move()
        self._loop = asyncio.get_running_loop()
