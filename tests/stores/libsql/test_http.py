"""Requests over our own HTTP connections: everything that HTTP allows a server to answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext

import pytest

from perdure.stores.libsql import http as http_module
from perdure.stores.libsql.http import (
    HttpxTransport,
    NoResponse,
    Response,
    StreamTransport,
    Transport,
)
from perdure.stores.libsql.server import open_transport

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Host:
    """A server that sends each request the next of its answers, and closes after the last."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = [*answers]
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"connection: close" in answer or b"length" not in answer:
                    break
        writer.close()


@asynccontextmanager
async def hosted(*answers: bytes, timeout: float = 5) -> AsyncIterator[tuple[Host, Transport]]:
    host = Host(*answers)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v2/pipeline"
    http = StreamTransport(SSLContext, "here", timeout)
    async with server:
        yield host, http
        await http.close()


def post(host: Host, http: Transport) -> asyncio.Task[Response]:
    return asyncio.ensure_future(http.post(host.url, b"[1]", {"authorization": "Bearer x"}))


async def test_sequential_requests_share_a_connection() -> None:
    """It stays open, and each request has all headers."""
    async with hosted(OK, OK, OK) as (host, http):
        assert [await post(host, http) for _ in range(3)] == [Response(200, b"{}")] * 3
        assert host.connections == 1
        head, _, body = host.requests[0].partition(b"\r\n\r\n")
        first, *fields = head.split(b"\r\n")
        assert (first, body) == (b"POST /v2/pipeline HTTP/1.1", b"[1]")
        where = host.url.split("/")[2].encode()
        assert {b"host: " + where, b"authorization: Bearer x"} <= set(fields)


async def test_concurrent_requests_have_a_connection_each() -> None:
    """No request waits for the answer to another."""
    async with hosted(OK, OK) as (host, http):
        await asyncio.gather(post(host, http), post(host, http))
        assert host.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nmore: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Length:2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    ],
    ids=["chunks", "trailers", "continue", "until close", "closing"],
)
async def test_a_response_may_have_any_form(answer: bytes) -> None:
    """In chunks, of a known length, or until the server closes; the next request succeeds."""
    async with hosted(answer, OK) as (host, http):
        assert [await post(host, http) for _ in range(2)] == [Response(200, b"{}")] * 2


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b"?\r\n\r\n"]
)
async def test_an_incomplete_response_is_an_error(answer: bytes) -> None:
    """The error says that the server may have received the request."""
    async with hosted(answer) as (host, http):
        with pytest.raises(NoResponse, match="may have received") as raised:
            await post(host, http)
        assert raised.value.was_sent


async def test_a_refused_connection_means_not_sent() -> None:
    """Such a request can be sent again."""
    async with hosted() as (host, http):
        host.url = "http://127.0.0.1:9/v2/pipeline"
        with pytest.raises(NoResponse, match="here does not answer") as raised:
            await post(host, http)
        assert not raised.value.was_sent


async def test_a_late_response_times_out() -> None:
    """What arrives of it later is not taken for the next response."""
    late = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    async with hosted(late, OK, timeout=0.1) as (host, http):
        with pytest.raises(NoResponse) as raised:
            await post(host, http)
        assert raised.value.was_sent
        assert await post(host, http) == Response(200, b"{}")
        assert host.connections == 2


async def test_a_connection_is_not_reused_after_its_request_was_cancelled() -> None:
    """The response may still arrive."""
    async with hosted(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", OK) as (host, http):
        cancelled = post(host, http)
        while not host.requests:
            await asyncio.sleep(0.001)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await post(host, http) == Response(200, b"{}")


async def test_a_connection_whose_request_outlives_the_transport_is_closed() -> None:
    """Otherwise it would stay open until it is collected as garbage."""
    asked, answering, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n[1]")
        asked.set()
        await answering.wait()
        writer.write(OK)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        http = StreamTransport(SSLContext, "here", 5)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v2/pipeline"
        posted = asyncio.ensure_future(http.post(url, b"[1]", {}))
        await asked.wait()
        await http.close()
        answering.set()
        assert (await posted).status == 200
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_connection_is_not_reused_after_a_long_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may close it at any time, and a write that cannot be repeated would be lost."""
    async with hosted(OK, OK) as (host, http):
        await post(host, http)
        monkeypatch.setattr(http_module, "_MAX_IDLE_SECONDS", 0)
        await post(host, http)
        assert host.connections == 2


async def test_a_connection_that_the_server_closed_is_not_reused() -> None:
    """A restart of the server between two requests goes unnoticed."""
    async with hosted(OK) as (host, http):
        await post(host, http)
        await asyncio.sleep(0.05)
        host.answers.append(OK)
        assert await post(host, http) == Response(200, b"{}")


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({}, StreamTransport),
        ({"https_proxy": "http://proxy:1"}, HttpxTransport),
        ({"all_proxy": "http://proxy:1"}, HttpxTransport),
        ({"http_proxy": "http://proxy:1"}, StreamTransport),
        ({"https_proxy": "http://proxy:1", "no_proxy": "db.example"}, StreamTransport),
    ],
)
def test_httpx_is_used_for_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type[Transport]
) -> None:
    """The usual environment variables are respected."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert type(open_transport("https://db.example", None, 5)) is kind
