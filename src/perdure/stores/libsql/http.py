"""Posts to a libSQL server, over connections of our own or through an httpx client.

A post is small and there are many: httpx takes longer over one than the server takes to answer.
"""

import asyncio
import select
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from ssl import SSLContext
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from perdure.errors import StoreUnavailable

_MOST_LINKS = 100
_IDLE_SECONDS = 5


class Unanswered(StoreUnavailable):
    """The server gave no answer; `sent` tells whether it may have got the request all the same."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Reply(NamedTuple):
    """What the server answered."""

    status: int
    body: bytes


class Http(ABC):
    """A way to post. `timeout` is how many seconds each part of a post may take."""

    def __init__(self, where: str, timeout: float) -> None:
        self._where = where
        self._timeout = timeout

    @abstractmethod
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Give the server's reply, or raise `Unanswered`."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what was opened here."""

    def _unanswered(self, error: Exception, *, sent: bool) -> Unanswered:
        said = f"libSQL at {self._where} does not answer: {str(error) or type(error).__name__}"
        return Unanswered(f"{said}; it may have got the request" if sent else said, sent=sent)


class ClientHttp(Http):
    """Posts through an httpx client: one that was lent, or one of our own for each loop."""

    def __init__(self, httpx: Any, client: Any, where: str, timeout: float) -> None:
        super().__init__(where, timeout)
        self._httpx = httpx
        self._unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
        self._lent = client
        self._own: Any = None
        self._home: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Give the server's reply, or raise `Unanswered`."""
        try:
            response = await self._client().post(
                url, content=body, headers=headers, timeout=self._timeout
            )
        except self._unsent as error:
            raise self._unanswered(error, sent=False) from error
        except self._httpx.HTTPError as error:
            raise self._unanswered(error, sent=True) from error
        return Reply(response.status_code, response.content)

    async def close(self) -> None:
        """Close our own client; one that was lent stays open."""
        client, self._own = self._own, None
        if client is not None and self._home is asyncio.get_running_loop():
            await client.aclose()

    def _client(self) -> Any:
        if self._lent is not None:
            return self._lent
        loop = asyncio.get_running_loop()
        if self._own is None or self._home is not loop:
            # Connections of a loop that has ended are lost with it.
            self._own, self._home = self._httpx.AsyncClient(), loop
        return self._own


class _Target(NamedTuple):
    """Where a URL leads: the server, and what to say there."""

    host: str
    port: int
    secure: bool
    head: str


@lru_cache(maxsize=16)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host = (parts.hostname or "").encode("idna").decode()
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
    head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept-encoding: identity\r\n"
    return _Target(host, parts.port or (443 if secure else 80), secure, head)


def _has_news(socket: Any) -> bool:
    if hasattr(select, "poll"):
        # `select` itself knows no more than 1,024 files.
        poll = select.poll()
        poll.register(socket, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([socket], [], [], 0)[0])


class _Link:
    """One connection, in the hands of one post at a time."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.Transport) -> None:
        self._reader = reader
        self._transport = transport
        self._used_at = 0.0
        self._lasts = True

    @property
    def is_fresh(self) -> bool:
        """Tell whether the server surely has not hung up."""
        idle = asyncio.get_running_loop().time() - self._used_at
        if not self._lasts or self._reader.at_eof() or idle >= _IDLE_SECONDS:
            return False
        # The event loop may not have come to see it yet: between posts, anything to read is an end.
        return not _has_news(self._transport.get_extra_info("socket"))

    async def post(self, request: bytes) -> Reply:
        self._transport.write(request)
        status, headers = await self._head()
        body = await self._body(headers)
        self._used_at = asyncio.get_running_loop().time()
        self._lasts = self._lasts and headers.get("connection", "").lower() != "close"
        return Reply(status, body)

    def drop(self) -> None:
        self._transport.abort()

    async def close(self) -> None:
        self.drop()
        with suppress(OSError):
            await self._reader.read()

    async def _head(self) -> tuple[int, dict[str, str]]:
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            status = int(first.split(" ", 2)[1])
            # What begins with 1 only says that the answer is on its way.
            if status >= 200:
                fields = (line.partition(":") for line in lines)
                return status, {name.lower(): value.strip() for name, _, value in fields}

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return b"".join([chunk async for chunk in self._chunks()])
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        self._lasts = False
        return await self._reader.read()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._reader.readline()).partition(b";")[0], 16):
            yield await self._reader.readexactly(size)
            await self._reader.readline()
        while (await self._reader.readline()).strip():
            pass


class LinkHttp(Http):
    """Posts over connections that stay open for the next post."""

    def __init__(self, certificates: Callable[[], SSLContext], where: str, timeout: float) -> None:
        super().__init__(where, timeout)
        self._certificates = certificates
        self._trusted: SSLContext | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(_MOST_LINKS)
        self._idle: dict[tuple[str, int], list[_Link]] = {}

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Give the server's reply, or raise `Unanswered`."""
        target = _target(url)
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{target.head}{fields}content-length: {len(body)}\r\n\r\n"
        idle = self._idle_links(target)
        async with self._room:
            link = await self._link(target, idle)
            try:
                async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                    reply = await link.post(head.encode("latin-1") + body)
            except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
                link.drop()
                raise self._unanswered(error, sent=True) from error
            except BaseException:
                link.drop()
                raise
        idle.append(link)
        return reply

    async def close(self) -> None:
        """Close the connections."""
        idle, self._idle = self._idle, {}
        if self._home is asyncio.get_running_loop():
            for links in idle.values():
                for link in links:
                    await link.close()

    def _idle_links(self, target: _Target) -> list[_Link]:
        loop = asyncio.get_running_loop()
        if self._home is not loop:
            # Connections of a loop that has ended are lost with it.
            self._home, self._idle, self._room = loop, {}, asyncio.Semaphore(_MOST_LINKS)
        return self._idle.setdefault((target.host, target.port), [])

    async def _link(self, target: _Target, idle: list[_Link]) -> _Link:
        while idle:
            # The last one, so that those nobody needs grow old and are dropped.
            link = idle.pop()
            if link.is_fresh:
                return link
            link.drop()
        if target.secure and self._trusted is None:
            self._trusted = self._certificates()
        trusted = self._trusted if target.secure else None
        reader = asyncio.StreamReader()
        try:
            async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: asyncio.StreamReaderProtocol(reader),
                    target.host,
                    target.port,
                    ssl=trusted,
                )
        except OSError as error:
            raise self._unanswered(error, sent=False) from error
        return _Link(reader, transport)
