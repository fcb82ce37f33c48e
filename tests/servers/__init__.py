"""Real servers for the tests, each a process of our own on a free loopback port."""
