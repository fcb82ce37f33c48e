"""Requests to a libSQL server, over our own connections or through an httpx client.

There are many small requests. One takes about 0.05 ms of CPU time here, 0.12 ms with h11, 0.8 ms
with httpcore and 1.2 ms with httpx, which is more than the server needs to answer it
(docs/decisions/0016).
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
from perdure.stores._lifecycle import CallsInFlight

_MAX_CONNECTIONS = 100
_MAX_IDLE_SECONDS = 5


class NoResponse(StoreUnavailable):
    """The server did not answer; if `was_sent` is set, it may have received the request."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class Response(NamedTuple):
    """A server's response."""

    status: int
    body: bytes


class Transport(ABC):
    """Sends requests to the server at `url`, each of which may take `timeout` seconds."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout

    @abstractmethod
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Return the server's response, or raise `NoResponse`."""

    @abstractmethod
    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that this transport opened."""

    def _no_response(self, error: Exception, *, was_sent: bool) -> NoResponse:
        message = f"libSQL at {self._url} does not answer: {str(error) or type(error).__name__}"
        if was_sent:
            message += "; it may have received the request"
        return NoResponse(message, was_sent=was_sent)


class HttpxTransport(Transport):
    """Sends requests through an httpx client: the user's or its own."""

    def __init__(self, httpx: Any, client: Any, url: str, timeout: float) -> None:
        super().__init__(url, timeout)
        self._httpx = httpx
        self._unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
        self._client = client
        self._own_client: Any = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Return the server's response, or raise `NoResponse`."""
        client = self._own_client if self._client is None else self._client
        if client is None:
            client = self._own_client = self._httpx.AsyncClient()
        try:
            response = await client.post(url, content=body, headers=headers, timeout=self._timeout)
        except self._unsent as error:
            raise self._no_response(error, was_sent=False) from error
        except self._httpx.HTTPError as error:
            raise self._no_response(error, was_sent=True) from error
        return Response(response.status_code, response.content)

    def forget_loop(self) -> None:
        """Drop the transport's own client, whose connections ended with their loop."""
        self._own_client = None

    async def close(self) -> None:
        """Close the transport's own client; a client that was passed in stays open."""
        client, self._own_client = self._own_client, None
        if client is not None:
            await client.aclose()


class _Target(NamedTuple):
    """A parsed URL: the server's address, and the start of every request to it."""

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


def _is_readable(socket: Any) -> bool:
    if hasattr(select, "poll"):
        # `select` itself fails for file descriptors above 1,023.
        poll = select.poll()
        poll.register(socket, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([socket], [], [], 0)[0])


class _Connection:
    """A connection that serves one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.Transport) -> None:
        self._reader = reader
        self._transport = transport
        self._used_at = 0.0
        self._keep_alive = True

    @property
    def is_reusable(self) -> bool:
        """Whether the server has certainly not closed the connection."""
        idle = asyncio.get_running_loop().time() - self._used_at
        if not self._keep_alive or self._reader.at_eof() or idle >= _MAX_IDLE_SECONDS:
            return False
        # The event loop may not have noticed yet. Between requests, readable data can only mean
        # that the server closed the connection.
        return not _is_readable(self._transport.get_extra_info("socket"))

    async def post(self, request: bytes) -> Response:
        self._transport.write(request)
        status, headers = await self._read_head()
        body = await self._read_body(headers)
        self._used_at = asyncio.get_running_loop().time()
        if headers.get("connection", "").lower() == "close":
            self._keep_alive = False
        return Response(status, body)

    def abort(self) -> None:
        self._transport.abort()

    async def close(self) -> None:
        self.abort()
        with suppress(OSError):
            await self._reader.read()

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            status = int(first.split(" ", 2)[1])
            # A 1xx status only announces the response.
            if status >= 200:
                fields = (line.partition(":") for line in lines)
                return status, {name.lower(): value.strip() for name, _, value in fields}

    async def _read_body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return b"".join([chunk async for chunk in self._read_chunks()])
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        self._keep_alive = False
        return await self._reader.read()

    async def _read_chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self._reader.readline()).partition(b";")[0], 16):
            yield await self._reader.readexactly(size)
            await self._reader.readline()
        while (await self._reader.readline()).strip():
            pass


class StreamTransport(Transport):
    """Sends requests over its own connections, which stay open for the next request."""

    def __init__(self, certificates: Callable[[], SSLContext], url: str, timeout: float) -> None:
        super().__init__(url, timeout)
        self._certificates = certificates
        self._ssl_context: SSLContext | None = None
        self.forget_loop()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Return the server's response, or raise `NoResponse`."""
        target = _target(url)
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{target.head}{fields}content-length: {len(body)}\r\n\r\n"
        address = target.host, target.port
        idle = self._idle.setdefault(address, [])
        async with self._limit:
            self._calls.begin()
            try:
                return await self._post(target, head.encode("latin-1") + body, idle)
            finally:
                self._calls.end()

    async def _post(self, target: _Target, request: bytes, idle: list[_Connection]) -> Response:
        connection = await self._connection(target, idle)
        try:
            async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                response = await connection.post(request)
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            connection.abort()
            raise self._no_response(error, was_sent=True) from error
        except BaseException:
            connection.abort()
            raise
        if self._idle.get((target.host, target.port)) is idle:
            idle.append(connection)
        else:
            # The transport was closed in the meantime: nothing would close this connection later.
            connection.abort()
        return response

    def forget_loop(self) -> None:
        """Drop all connections, which ended with their loop."""
        self._limit = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._calls = CallsInFlight()
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.ended()
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                await connection.close()

    async def _connection(self, target: _Target, idle: list[_Connection]) -> _Connection:
        while idle:
            # The most recently used one, so that surplus connections age and are closed.
            connection = idle.pop()
            if connection.is_reusable:
                return connection
            connection.abort()
        if target.secure and self._ssl_context is None:
            self._ssl_context = self._certificates()
        reader = asyncio.StreamReader()
        try:
            async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: asyncio.StreamReaderProtocol(reader),
                    target.host,
                    target.port,
                    ssl=self._ssl_context if target.secure else None,
                )
        except OSError as error:
            raise self._no_response(error, was_sent=False) from error
        return _Connection(reader, transport)
