"""Scripts and commands, with the driver's errors translated."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from perdure.clock import Clock, Duration, parse_duration
from perdure.stores.redis.errors import (
    driver_errors,
    is_away,
    is_idle,
    load_exceptions,
    translated,
)
from perdure.stores.redis.node import Command, Link, Value
from perdure.stores.redis.scripts import Script

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Call(NamedTuple):
    """What one run of a script is given."""

    keys: Sequence[bytes]
    values: Sequence[Value]


class Server:
    """Runs scripts on a server that may be away.

    As long as patience lasts it is asked again when it certainly did nothing yet. When an answer
    was lost, what is `repeatable` is asked once more: when doing it twice is as good as once.
    """

    def __init__(self, link: Link, *, connect_timeout: Duration, clock: Clock) -> None:
        self.link = link
        self._connect_timeout = parse_duration(connect_timeout, "connect_timeout").total_seconds()
        self._clock = clock
        self._errors = driver_errors()
        self._ears: set[Ear] = set()
        self._no_script: type[Exception] = load_exceptions().NoScriptError

    async def run(
        self, script: Script, calls: Sequence[Call], *, repeatable: bool = True
    ) -> list[Any]:
        """Give what the script gives for each of the calls, all sent together."""
        try:
            return await self._run(script, calls)
        except self._errors as error:
            return await self._again(lambda: self._run(script, calls), error, repeatable)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Give the reply to each of the commands, which may be done twice, all sent together."""
        try:
            return await self._send(commands)
        except self._errors as error:
            return await self._again(lambda: self._send(commands), error)

    async def ask(self, command: Command) -> list[Any]:
        """Give the reply of each primary; an exception where it refused."""
        try:
            return await self.link.send_everywhere(command)
        except self._errors as error:
            return await self._again(lambda: self.link.send_everywhere(command), error)

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Give the keys that match; a key may come twice."""
        try:
            async for key in self.link.scan(pattern):
                yield key
        except self._errors as error:
            raise translated(error, self.link.where) from error

    @asynccontextmanager
    async def listening(self, channel: bytes) -> AsyncGenerator["Ear"]:
        """Give an ear for what is published on a channel."""
        try:
            async with self.link.subscriber() as subscriber:
                await subscriber.subscribe(channel)
                ear = Ear(subscriber)
                self._ears.add(ear)
                try:
                    yield ear
                finally:
                    self._ears.discard(ear)
        except self._errors as error:
            raise translated(error, self.link.where) from error

    async def close(self) -> None:
        """Close what was opened here; who listens hears no more."""
        try:
            for ear in [*self._ears]:
                await ear.close()
            await self.link.close()
        except self._errors as error:
            raise translated(error, self.link.where) from error

    async def _run(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        replies = await self.link.send(
            [("EVALSHA", script.sha, len(keys), *keys, *values) for keys, values in calls]
        )
        unknown = [n for n, reply in enumerate(replies) if isinstance(reply, self._no_script)]
        if unknown:
            again = [calls[n] for n in unknown]
            late = await self.link.send(
                [("EVAL", script.text, len(keys), *keys, *values) for keys, values in again]
            )
            for n, reply in zip(unknown, late, strict=True):
                replies[n] = reply
        return _accepted(replies)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        return _accepted(await self.link.send(commands))

    async def _again(
        self, attempt: Callable[[], Awaitable[T]], error: Exception, repeatable: bool = True
    ) -> T:
        began = self._clock.monotonic()
        pause = _FIRST_PAUSE
        losses = 0
        while True:
            tried = self._clock.monotonic() - began
            losses += not is_idle(error)
            hopeful = is_idle(error) or (is_away(error) and repeatable and losses == 1)
            if not hopeful or tried + pause > self._connect_timeout:
                raise translated(error, self.link.where, tried) from error
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                return await attempt()
            except self._errors as next_error:
                error = next_error


def _accepted(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class Ear:
    """Hears what is published on a channel, until it is closed."""

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber
        self._news: asyncio.Future[Any] | None = None
        self._is_closed = False

    async def hears(self) -> bool:
        """Wait for news; False when there can be none any more."""
        while not self._is_closed:
            message = self._subscriber.get_message(ignore_subscribe_messages=True, timeout=None)
            news = self._news = asyncio.ensure_future(message)
            try:
                await asyncio.wait([news])
            finally:
                await self._stop()
            if not news.cancelled() and news.result() is not None:
                return True
        return False

    async def close(self) -> None:
        """Hear no more, also when somebody is waiting for news."""
        self._is_closed = True
        # While it is being read from, a connection that is closed opens itself again.
        await self._stop()
        await self._subscriber.aclose()

    async def _stop(self) -> None:
        if self._news is not None:
            self._news.cancel()
            await asyncio.wait([self._news])
