"""URLs of libSQL stores, and errors of servers that refuse requests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.errors import InvalidArgument, MissingDependency, StoreError, StoreUnavailable
from perdure.stores import open_store
from perdure.stores.libsql import LibsqlStore, libsql
from perdure.stores.libsql.server import Address
from perdure.stores.sqlite import SqliteStore, sqlite
from perdure.testing.conformance.samples import snapshot

EMPTY: dict[str, Any] = {"rows": [], "cols": [], "affected_row_count": 0}


def answering(
    answer: Callable[[httpx.Request], httpx.Response],
) -> tuple[httpx.AsyncClient, list[httpx.Request]]:
    """Return a client whose server is a function, and the requests it received."""
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return answer(request)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle)), requests


@pytest.mark.parametrize(
    ("url", "base", "token"),
    [
        ("libsql://db-me.turso.io", "https://db-me.turso.io", None),
        ("libsql://db-me.turso.io?authToken=secret", "https://db-me.turso.io", "secret"),
        ("libsql://localhost:8080?tls=0", "http://localhost:8080", None),
        ("https://host/", "https://host", None),
        ("http://127.0.0.1:8080/dev/db", "http://127.0.0.1:8080/dev/db", None),
        ("ws://host:1", "http://host:1", None),
        ("wss://host", "https://host", None),
        ("HTTP://Host:80", "http://Host:80", None),
    ],
)
def test_urls_of_libsqls_own_clients_are_accepted(url: str, base: str, token: str | None) -> None:
    """All of them lead to the server's HTTP address."""
    address = Address(url, None)
    assert (address.base, address.token) == (base, token)


@pytest.mark.parametrize("url", ["", "db", "postgres://host/db", "libsql://", "http:///path", 5])
def test_other_urls_are_refused(url: str) -> None:
    """The error lists the accepted forms."""
    with pytest.raises(InvalidArgument, match=r"libsql://host.*file:path"):
        libsql(url)


def test_secrets_in_a_url_are_not_shown() -> None:
    """A password or token is not part of the address in messages."""
    address = Address("https://me:secret@host?authToken=secret", None)
    assert "secret" not in address.base


@pytest.mark.parametrize("token", ["secret\n", "secret\r\nhost: x", "sécret"])
def test_a_token_that_is_not_a_valid_header_is_refused(token: str) -> None:
    """A line break would end the header; the error does not show the token."""
    with pytest.raises(InvalidArgument, match="line breaks") as raised:
        libsql("libsql://db.example", auth_token=token)
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize("url", ["file:a.db?mode=ro", "file:", "file://host/a.db", "file:a.db#x"])
def test_file_urls_consist_of_a_path_only(url: str) -> None:
    """Other parts would be ignored silently, so they are refused."""
    with pytest.raises(InvalidArgument, match="file: and a path"):
        libsql(url)


def test_a_token_for_a_file_is_refused() -> None:
    """The URL must be a mistake."""
    with pytest.raises(InvalidArgument, match="auth_token"):
        libsql("file:a.db", auth_token="x")


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}"])
async def test_a_file_is_shared_with_sqlite(tmp_path: Path, form: str) -> None:
    """Both have the same schema and see each other's writes."""
    path = tmp_path / "the runs.db"
    url = form.format(str(path).replace(" ", "%20"))
    async with libsql(url) as first, sqlite(path) as second:
        await first.save("run", snapshot("a"))
        assert await second.load("run") == snapshot("a")
        await second.save("run", snapshot("b"))
        assert await first.load("run") == snapshot("b")
    assert isinstance(first, SqliteStore)


def test_open_store_accepts_libsql_urls() -> None:
    """libsql:// and, for plain HTTP, libsql+http://."""
    assert isinstance(open_store("libsql://host"), LibsqlStore)
    assert isinstance(open_store("libsql+http://host:8080"), LibsqlStore)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingDependency, match=r"pip install 'perdure\[libsql\]'"):
        libsql("http://host")


async def test_every_request_has_the_token_and_the_client_stays_open() -> None:
    """A client that was passed in is used as it is and never closed."""

    def answer(request: httpx.Request) -> httpx.Response:
        requests = json.loads(request.content)["requests"]
        response = {"type": "ok", "response": {"type": "execute", "result": EMPTY}}
        if requests[0]["type"] == "batch":
            count = len(requests[0]["batch"]["steps"])
            result = {"step_results": [EMPTY] * count, "step_errors": [None] * count}
            response = {"type": "ok", "response": {"type": "batch", "result": result}}
        return httpx.Response(200, json={"baton": None, "results": [response, response]})

    client, requests = answering(answer)
    async with libsql("libsql://db.example", auth_token="secret", client=client) as store:
        assert await store.load("run") is None
    assert {request.headers["authorization"] for request in requests} == {"Bearer secret"}
    assert {request.url.host for request in requests} == {"db.example"}
    assert not client.is_closed
    await client.aclose()


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_token_is_a_clear_error(status: int) -> None:
    """The error says what to pass; the request is not retried."""
    client, requests = answering(lambda _: httpx.Response(status, text="no entry"))
    async with client, libsql("libsql://db.example", client=client) as store:
        with pytest.raises(StoreError, match=rf"db\.example.*{status}.*auth_token"):
            await store.load("run")
    assert len(requests) == 1


async def test_a_wrong_address_is_a_clear_error() -> None:
    """The error has the server's answer."""
    client, _ = answering(lambda _: httpx.Response(404, text="no such database"))
    async with client, libsql("libsql://db.example", client=client) as store:
        with pytest.raises(StoreError, match="no such database"):
            await store.load("run")


async def test_a_server_error_is_retried() -> None:
    """Until `connect_timeout`; then the error says where and how long."""
    client, requests = answering(lambda _: httpx.Response(503, text="overloaded"))
    async with client, libsql("libsql://db.example", client=client, connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable, match=r"db\.example.*503.*tried for 0\.\ds"):
            await store.load("run")
    assert len(requests) > 2


async def test_a_missing_server_is_unavailable() -> None:
    """The error says where and how long it was tried."""
    async with libsql("http://127.0.0.1:9", connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9.*tried for 0\.\ds"):
            await store.save("run", snapshot())
