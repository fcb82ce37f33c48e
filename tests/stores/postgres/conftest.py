"""The tests of the PostgreSQL store run on Debian's server and on the newest."""

from collections.abc import Iterator

import pytest

from tests.servers.fixtures import started
from tests.servers.pgbouncer import PgBouncer
from tests.servers.process import Server


@pytest.fixture(scope="session", params=["debian", "newest"])
def postgres_server(request: pytest.FixtureRequest) -> Server:
    """Each of the two servers, also for `postgres_url`, `pgbouncer_server` and `pgbouncer_url`."""
    server: Server = request.getfixturevalue(f"{request.param}_postgres_server")
    return server


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: Server) -> Iterator[PgBouncer]:
    """One in front of each: that of other tests is in front of Debian's server, and is kept."""
    server = started(lambda: PgBouncer(postgres_server).start())
    assert isinstance(server, PgBouncer)
    yield server
    server.close()
