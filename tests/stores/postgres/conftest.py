"""The tests of the PostgreSQL store run on Debian's server and on the newest."""

import pytest

from tests.servers.process import Server


@pytest.fixture(scope="session", params=["debian", "newest"])
def postgres_server(request: pytest.FixtureRequest) -> Server:
    """Each of the two servers, also for `postgres_url`, `pgbouncer_server` and `pgbouncer_url`."""
    server: Server = request.getfixturevalue(f"{request.param}_postgres_server")
    return server
