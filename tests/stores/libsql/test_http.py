"""Posts to a libSQL server over connections of our own: what HTTP allows a server to answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext

import pytest

from perdure.stores.libsql import http as _libsql_http
from perdure.stores.libsql.http import ClientHttp, Http, LinkHttp, Reply, Unanswered
from perdure.stores.libsql.server import http_to

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Host:
    """A server that gives each request the next of its answers, and hangs up after the last."""

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
async def hosted(*answers: bytes, timeout: float = 5) -> AsyncIterator[tuple[Host, Http]]:
    host = Host(*answers)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
    host.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v2/pipeline"
    http = LinkHttp(SSLContext, "here", timeout)
    async with server:
        yield host, http
        await http.close()


def post(host: Host, http: Http) -> asyncio.Task[Reply]:
    return asyncio.ensure_future(http.post(host.url, b"[1]", {"authorization": "Bearer x"}))


async def test_posts_one_after_another_share_a_connection() -> None:
    """It stays open, and each request says all that the server must know."""
    async with hosted(OK, OK, OK) as (host, http):
        assert [await post(host, http) for _ in range(3)] == [Reply(200, b"{}")] * 3
        assert host.connections == 1
        head, _, body = host.requests[0].partition(b"\r\n\r\n")
        first, *fields = head.split(b"\r\n")
        assert (first, body) == (b"POST /v2/pipeline HTTP/1.1", b"[1]")
        where = host.url.split("/")[2].encode()
        assert {b"host: " + where, b"authorization: Bearer x"} <= set(fields)


async def test_posts_at_once_have_a_connection_each() -> None:
    """Nobody waits for another's answer."""
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
    ids=["chunks", "trailers", "continue", "until the end", "closing"],
)
async def test_a_reply_comes_in_any_form(answer: bytes) -> None:
    """In chunks, of a known length or until the server hangs up; and then the next one."""
    async with hosted(answer, OK) as (host, http):
        assert [await post(host, http) for _ in range(2)] == [Reply(200, b"{}")] * 2


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b"?\r\n\r\n"]
)
async def test_half_an_answer_is_none(answer: bytes) -> None:
    """The server may have got the request, and the error says so."""
    async with hosted(answer) as (host, http):
        with pytest.raises(Unanswered, match="may have got") as raised:
            await post(host, http)
        assert raised.value.sent


async def test_nobody_there_has_got_nothing() -> None:
    """What was not sent may be sent again."""
    async with hosted() as (host, http):
        host.url = "http://127.0.0.1:9/v2/pipeline"
        with pytest.raises(Unanswered, match="here does not answer") as raised:
            await post(host, http)
        assert not raised.value.sent


async def test_an_answer_that_takes_too_long_is_not_waited_for() -> None:
    """The rest of it, when it comes, is nobody else's answer."""
    late = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    async with hosted(late, OK, timeout=0.1) as (host, http):
        with pytest.raises(Unanswered) as raised:
            await post(host, http)
        assert raised.value.sent
        assert await post(host, http) == Reply(200, b"{}")
        assert host.connections == 2


async def test_a_connection_is_not_used_after_its_post_was_cancelled() -> None:
    """Its answer may still come, and belongs to nobody."""
    async with hosted(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", OK) as (host, http):
        cancelled = post(host, http)
        while not host.requests:
            await asyncio.sleep(0.001)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await post(host, http) == Reply(200, b"{}")


async def test_a_connection_that_lay_idle_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may hang up any moment, and a write that must not be repeated would be lost."""
    async with hosted(OK, OK) as (host, http):
        await post(host, http)
        monkeypatch.setattr(_libsql_http, "_IDLE_SECONDS", 0)
        await post(host, http)
        assert host.connections == 2


async def test_a_connection_that_the_server_ended_is_not_used() -> None:
    """A restart of the server between two posts costs nothing."""
    async with hosted(OK) as (host, http):
        await post(host, http)
        await asyncio.sleep(0.05)
        host.answers.append(OK)
        assert await post(host, http) == Reply(200, b"{}")


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({}, LinkHttp),
        ({"https_proxy": "http://proxy:1"}, ClientHttp),
        ({"all_proxy": "http://proxy:1"}, ClientHttp),
        ({"http_proxy": "http://proxy:1"}, LinkHttp),
        ({"https_proxy": "http://proxy:1", "no_proxy": "db.example"}, LinkHttp),
    ],
)
def test_a_proxy_is_left_to_httpx(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type[Http]
) -> None:
    """The variables that name one are obeyed."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert type(http_to("https://db.example", None, 5)) is kind
