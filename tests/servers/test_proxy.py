"""The proxy forwards everything, until it is made to fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from tests.servers.proxy import TcpProxy


@asynccontextmanager
async def echo_server() -> AsyncIterator[tuple[int, list[bytes]]]:
    """Start a server that echoes each line; yield its URL and the lines it has received."""
    observations: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            observations.append(line)
            writer.write(line)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], observations
    finally:
        server.close()


def cut() -> bytes:
    raise ConnectionError("the connection was cut")


async def ask(proxy: TcpProxy, *lines: bytes) -> list[bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    answers = []
    try:
        for line in lines:
            writer.write(line)
            answers.append(await reader.readline() or cut())
    finally:
        writer.close()
    return answers


async def test_it_passes_requests_and_replies() -> None:
    async with echo_server() as (port, _), TcpProxy("127.0.0.1", port) as proxy:
        assert await ask(proxy, b"a\n", b"b\n") == [b"a\n", b"b\n"]


async def test_the_request_of_a_dropped_reply_was_executed() -> None:
    async with echo_server() as (port, seen), TcpProxy("127.0.0.1", port) as proxy:
        proxy.drop_next_reply(to=b"commit")
        with pytest.raises(ConnectionError):
            await ask(proxy, b"begin\n", b"commit\n")
        assert seen == [b"begin\n", b"commit\n"]
        assert proxy.dropped == 1
        assert await ask(proxy, b"commit\n") == [b"commit\n"]


async def test_cut_ends_open_connections_and_serves_new_ones() -> None:
    async with echo_server() as (port, _), TcpProxy("127.0.0.1", port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a\n")
        await reader.readline()
        assert proxy.connections == 1
        proxy.cut()
        assert await reader.read() == b""
        writer.close()
        assert await ask(proxy, b"b\n") == [b"b\n"]


async def test_a_refusing_proxy_looks_like_an_unavailable_server() -> None:
    async with echo_server() as (port, _), TcpProxy("127.0.0.1", port) as proxy:
        proxy.refuse()
        with pytest.raises(ConnectionError):
            await ask(proxy, b"a\n")
        proxy.accept()
        assert await ask(proxy, b"a\n") == [b"a\n"]


async def test_postgres_has_committed_what_the_client_saw_fail(postgres_url: str) -> None:
    async with TcpProxy.before(postgres_url) as proxy:
        connection = await asyncpg.connect(proxy.url)
        await connection.execute("CREATE TABLE kept (n int)")
        proxy.drop_next_reply()
        with pytest.raises((asyncpg.PostgresConnectionError, ConnectionError)):
            await connection.execute("INSERT INTO kept VALUES (1)")
        connection = await asyncpg.connect(proxy.url)
        assert await connection.fetchval("SELECT count(*) FROM kept") == 1
        await connection.close()
