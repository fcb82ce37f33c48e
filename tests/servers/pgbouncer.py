"""PgBouncer in transaction mode in front of PostgreSQL, as many hosted databases have it."""

from collections.abc import Sequence
from urllib.parse import urlsplit

import psycopg

from tests.servers.process import LocalServer, Server, program

CONFIG = """\
[databases]
* = host={host} port={upstream}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 1000
default_pool_size = 5
server_login_retry = 1
ignore_startup_parameters = extra_float_digits
"""


class PgBouncer(LocalServer):
    name = "PgBouncer"
    account = "postgres"
    not_ready = (psycopg.OperationalError,)

    def __init__(self, postgres: Server) -> None:
        super().__init__()
        self._upstream = urlsplit(postgres.url)

    @property
    def url(self) -> str:
        return self.before(self._upstream.geturl())

    def before(self, url: str) -> str:
        """Return the URL of the same database through the pooler."""
        parts = urlsplit(url)
        login = parts.netloc.rpartition("@")[0]
        return parts._replace(netloc=f"{login}@127.0.0.1:{self.port}").geturl()

    def prepare(self) -> None:
        config = CONFIG.format(
            host=self._upstream.hostname, upstream=self._upstream.port or 5432, port=self.port
        )
        if self._upstream.username:
            config = config.replace("\n\n", f" user={self._upstream.username}\n\n", 1)
        (self.folder / "pgbouncer.ini").write_text(config)

    def command(self) -> Sequence[str]:
        return [program("pgbouncer", package="pgbouncer"), "pgbouncer.ini"]

    def probe(self) -> str:
        url = urlsplit(self.url)._replace(path="/pgbouncer").geturl()
        with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
            # The admin console speaks only the simple protocol.
            row = psycopg.ClientCursor(connection).execute("SHOW VERSION").fetchone()
        return row[0] if row else self.name
