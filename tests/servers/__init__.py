"""Real servers for the tests, each in its own process on a free loopback port."""
