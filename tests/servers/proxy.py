"""A TCP proxy that fails on demand: it cuts connections, or drops the reply to a request."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

CHUNK = 64 * 1024


class TcpProxy:
    """A TCP proxy between a client and a server on loopback.

    >>> async with TcpProxy.before(postgres_url) as proxy:
    ...     store = postgres(proxy.url)
    ...     proxy.drop_next_reply()
    ...     await store.append(entries)  # the server commits; the client sees a cut connection

    A MongoDB URL needs `directConnection=true`, or the client bypasses the proxy.
    """

    def __init__(self, host: str, port: int, *, url: str = "") -> None:
        self._target = (host, port)
        self._url = url
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._trap: bytes | None = None
        self._open = True
        self.dropped = 0
        """How many replies were swallowed so far."""

    @classmethod
    def before(cls, url: str) -> Self:
        """Return a proxy for the server at `url`; the `url` of the proxy leads through it."""
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{url} names no host and port")
        return cls(parts.hostname, parts.port, url=url)

    @property
    def port(self) -> int:
        assert self._server is not None, "the proxy is used inside `async with`"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The URL passed to `before`, but leading through the proxy."""
        parts = urlsplit(self._url)
        login, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}").geturl()

    @property
    def connections(self) -> int:
        """How many connections are open through the proxy."""
        return len(self._links)

    def drop_next_reply(self, *, to: bytes = b"") -> None:
        """Forward the next request that contains `to`, drop the reply, and cut the connection.

        The server has done its work when the client sees the connection end.
        """
        self._trap = to

    def cut(self) -> None:
        """Cut every open connection; new ones are accepted."""
        for link in tuple(self._links):
            link.cut()

    def refuse(self) -> None:
        """Cut every open connection and every new one until `accept` is called."""
        self._open = False
        self.cut()

    def accept(self) -> None:
        """Accept new connections again."""
        self._open = True

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        while self._links:
            await asyncio.sleep(0)

    async def _serve(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        if not self._open:
            client_writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            client_writer.transport.abort()
            return
        link = _Link(client_writer, server_writer)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(link, client_reader))
                group.create_task(self._return(link, server_reader))
        finally:
            self._links.discard(link)

    async def _forward(self, link: "_Link", reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while request := await reader.read(CHUNK):
                if self._trap is not None and self._trap in request:
                    self._trap = None
                    link.swallows = True
                link.server.write(request)
                await link.server.drain()
        link.close()

    async def _return(self, link: "_Link", reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while reply := await reader.read(CHUNK):
                if link.swallows:
                    self.dropped += 1
                    link.cut()
                    break
                link.client.write(reply)
                await link.client.drain()
        link.close()


class _Link:
    """The connection of one client, and our connection to the server on its behalf."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.swallows = False

    def close(self) -> None:
        """Close both connections after forwarding what was read."""
        self.client.close()
        self.server.close()

    def cut(self) -> None:
        """Close both connections at once."""
        self.client.transport.abort()
        self.server.transport.abort()
