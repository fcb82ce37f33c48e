"""Scripts and commands on a server that may be unavailable."""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any, NamedTuple, TypeVar

from perdure.clock import Clock, Duration, parse_duration
from perdure.stores.redis.errors import (
    driver_errors,
    is_not_executed,
    is_unavailable,
    load_exceptions,
    translate,
)
from perdure.stores.redis.node import Command, Link, Value
from perdure.stores.redis.scripts import Script, for_cluster

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Call(NamedTuple):
    """The arguments of one call of a script."""

    keys: Sequence[bytes]
    values: Sequence[Value]


class Server:
    """Runs scripts and commands, and translates the driver's errors.

    Within the connect timeout, a command that was certainly not executed is retried. After a lost
    reply, a command is repeated once if it is `repeatable`, so that executing it twice is harmless.
    """

    def __init__(self, link: Link, *, connect_timeout: Duration, clock: Clock) -> None:
        self.link = link
        self.name = _new_name()
        self.is_closed = False
        self._is_unavailable = False
        self._connect_timeout = parse_duration(connect_timeout, "connect_timeout").total_seconds()
        self._clock = clock
        self._errors = driver_errors()
        self._listeners: set[Listener] = set()
        self._no_script: type[Exception] = load_exceptions().NoScriptError

    async def run(
        self, script: Script, calls: Sequence[Call], *, repeatable: bool = True
    ) -> list[Any]:
        """Send calls of a script together, and return the reply to each."""
        try:
            return await self._run(script, calls)
        except self._errors as error:
            return await self._retry(lambda: self._run(script, calls), error, repeatable)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send repeatable commands together, and return the reply to each."""
        try:
            return await self._send(commands)
        except self._errors as error:
            return await self._retry(lambda: self._send(commands), error)

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Return the reply of each primary; an exception where it refused."""
        try:
            return await self.link.send_everywhere(command)
        except self._errors as error:
            return await self._retry(lambda: self.link.send_everywhere(command), error)

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Yield the keys that match, some of them more than once."""
        try:
            async for key in self.link.scan(pattern):
                yield key
        except self._errors as error:
            raise translate(error, self.link.location) from error

    @asynccontextmanager
    async def listen(self, channel: bytes) -> AsyncGenerator["Listener"]:
        """Provide a listener on a channel."""
        try:
            async with self.link.subscriber() as subscriber:
                await subscriber.subscribe(channel)
                listener = Listener(subscriber, self.name)
                self._listeners.add(listener)
                try:
                    yield listener
                finally:
                    self._listeners.discard(listener)
                    await listener.end()
        except self._errors as error:
            raise translate(error, self.link.location) from error

    @contextmanager
    def announcing(self) -> Generator[None]:
        """Wake the listeners of this store after a call that may make a run due."""
        with self.announcing_failure():
            yield
        self.announce()

    @contextmanager
    def announcing_failure(self) -> Generator[None]:
        """Wake the listeners of this store if a call fails that may make a run due."""
        try:
            yield
        except BaseException:
            # The call may still be executed, after the listeners have looked for due runs.
            for listener in self._listeners:
                listener.ignored = None
            self.announce()
            raise

    def announce(self) -> None:
        """Wake the listeners of this store.

        They ignore the server's own notification, which would make a worker look twice.
        """
        for listener in self._listeners:
            listener.wake()

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""
        # Perhaps in another process, forked from the first.
        self.name = _new_name()
        self._listeners.clear()
        self.link.forget_loop()

    async def close(self) -> None:
        """Stop the listeners, and close the connections that the store opened."""
        self.is_closed = True
        try:
            for listener in [*self._listeners]:
                await listener.stop()
            await self.link.close()
        except self._errors as error:
            raise translate(error, self.link.location) from error

    async def _run(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        if self.link.is_sharded:
            script = for_cluster(script)
        replies = await self.link.send(
            [("EVALSHA", script.sha, len(keys), *keys, *values) for keys, values in calls]
        )
        indexes = [n for n, reply in enumerate(replies) if isinstance(reply, self._no_script)]
        if indexes:
            new_calls = [calls[n] for n in indexes]
            new_replies = await self.link.send(
                [("EVAL", script.text, len(keys), *keys, *values) for keys, values in new_calls]
            )
            for n, reply in zip(indexes, new_replies, strict=True):
                replies[n] = reply
        return _raise_refusals(replies)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        return _raise_refusals(await self.link.send(commands))

    async def _retry(
        self, attempt: Callable[[], Awaitable[T]], error: Exception, repeatable: bool = True
    ) -> T:
        started_at = self._clock.monotonic()
        pause = _FIRST_PAUSE
        self._announce_outage(error)
        lost_replies = 0
        while True:
            seconds = self._clock.monotonic() - started_at
            lost_replies += not is_not_executed(error)
            may_repeat = is_unavailable(error) and repeatable and lost_replies == 1
            may_retry = is_not_executed(error) or may_repeat
            if not may_retry or seconds + pause > self._connect_timeout:
                raise translate(error, self.link.location, seconds) from error
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                answer = await attempt()
            except self._errors as next_error:
                error = next_error
            else:
                self._is_unavailable = False
                return answer

    def _announce_outage(self, error: Exception) -> None:
        """Log that an outage begins: if the URL is wrong, callers wait in silence."""
        if is_not_executed(error) and not self._is_unavailable:
            self._is_unavailable = True
            location, seconds = self.link.location, self._connect_timeout
            text = "Redis at %s is unavailable: %s; retrying for up to %gs"
            logger.warning(text, location, error, seconds)


def _raise_refusals(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _new_name() -> bytes:
    return b"%032x" % Random().getrandbits(128)


class Listener:
    """Receives messages of a channel, except those of the ignored sender, until it is stopped."""

    def __init__(self, subscriber: Any, ignored: bytes) -> None:
        self.ignored: bytes | None = ignored
        self._subscriber = subscriber
        self._changed = asyncio.Event()
        self._is_stopped = False
        self._reader = asyncio.ensure_future(self._read())

    def wake(self) -> None:
        """Let `next` return."""
        self._changed.set()

    async def next(self) -> bool:
        """Wait for a message; return `False` once the listener is stopped."""
        await self._changed.wait()
        self._changed.clear()
        if self._is_stopped:
            return False
        if self._reader.done():
            await self._reader  # it has failed
        return True

    async def stop(self) -> None:
        """End `next`, even while it is waiting."""
        self._is_stopped = True
        # A connection that is closed during a read would reopen itself.
        await self.end()
        await self._subscriber.aclose()

    async def end(self) -> None:
        """Stop reading."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        if not self._reader.cancelled():
            # It was raised by `next`, unless the caller has stopped before.
            self._reader.exception()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._subscriber.get_message(
                    ignore_subscribe_messages=True, timeout=None
                )
                if message is not None and message["data"] != self.ignored:
                    self.wake()
        finally:
            self.wake()
