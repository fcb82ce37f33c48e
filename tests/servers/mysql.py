"""MariaDB (or MySQL): a server process, and an empty database per test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pymysql

from tests.servers.process import (
    LocalServer,
    NotReady,
    Server,
    eventually,
    identity,
    program,
    run_once,
    unique_name,
)


class MysqlServer(LocalServer):
    name = "MariaDB"
    account = "mysql"
    not_ready = (pymysql.err.OperationalError,)

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/mysql"

    def prepare(self) -> None:
        install = program("mariadb-install-db", package="mariadb-server")
        # As root, the script switches to the account itself, and needs root for that.
        flags = [f"--user={self.account}"] if identity(self.account) else []
        login = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        run_once([install, "--no-defaults", *flags, *self._folders(), *login], self.folder)

    def _folders(self) -> Sequence[str]:
        # Two installations at the same time would remove each other's temporary tables.
        return [f"--datadir={self.folder / 'data'}", f"--tmpdir={self.folder}"]

    def command(self) -> Sequence[str]:
        return [
            program("mariadbd", package="mariadb-server"),
            "--no-defaults",
            *self._folders(),
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--max-connections=400",
        ]

    def probe(self) -> str:
        return mysql_version(self.url)


def mysql_version(url: str) -> str:
    """Return name and version of the server at `url`."""
    version = str(query(url, "SELECT VERSION()")[0][0])
    return ("MariaDB " if "MariaDB" in version else "MySQL ") + version.split("-")[0]


@contextmanager
def fresh_database(server: Server) -> Iterator[str]:
    """Yield the URL of an empty database. Then no client may be connected, and it is dropped."""
    name = unique_name()
    server.ensure()
    query(server.url, f"CREATE DATABASE `{name}`")
    try:
        yield urlsplit(server.url)._replace(path=f"/{name}").geturl()
    finally:
        server.ensure()
        try:
            _await_no_connections(server, name)
        finally:
            # An open transaction would lock the tables, and the drop would wait for it forever.
            for row in _connections(server, name):
                query(server.url, f"KILL {row[0]}")
            query(server.url, f"DROP DATABASE IF EXISTS `{name}`")


def _connections(server: Server, database: str) -> Sequence[tuple[Any, ...]]:
    find = "SELECT id, command, info FROM information_schema.processlist WHERE db = %s"
    return query(server.url, find, database)


def _await_no_connections(server: Server, database: str) -> None:
    """Wait for the server to notice closed connections; fail if some were left open."""

    def attempt() -> None:
        if open_connections := _connections(server, database):
            raise NotReady(f"the test left connections to {database} open: {open_connections}")

    eventually(attempt, retry_on=(NotReady,), connect_timeout=10)


def connect_arguments(url: str) -> dict[str, Any]:
    """Return the arguments that PyMySQL, aiomysql and asyncmy take instead of a URL."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
        "database": parts.path.lstrip("/"),
        "connect_timeout": 5,
    }


def connect(url: str) -> "pymysql.Connection[pymysql.cursors.Cursor]":
    """Return a connection that commits each statement.

    It does not use TLS: reading the certificates takes longer than most tests.
    """
    return pymysql.connect(**connect_arguments(url), ssl_disabled=True, autocommit=True)


def query(url: str, statement: str, *values: object) -> Sequence[tuple[Any, ...]]:
    """Return the rows of a statement, on a connection of its own."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(statement, values)
        return tuple(cursor.fetchall())
