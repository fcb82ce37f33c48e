"""What every test may use."""

pytest_plugins = ["tests.servers.fixtures"]
