"""Processes that start quickly, because they are killed soon."""

import multiprocessing
from multiprocessing.context import ForkServerContext

# A worker that is killed within a second must not spend it on imports. There is one list for all
# tests, because the process that they are forked from is started once.
_PRELOADED = [
    "tests.durability.chaos",
    "tests.durability.family_process",
    "tests.durability.ledger",
    "tests.durability.queue_load",
    "tests.durability.queue_process",
    "tests.durability.scheduled",
    "tests.durability.verifier.worker",
    "perdure.stores.file",
    "perdure.stores.libsql",
    "perdure.stores.mongo",
    "perdure.stores.mysql",
    "perdure.stores.postgres",
    "perdure.stores.redis",
    "perdure.stores.sqlite",
    "asyncmy",
    "asyncpg",
    "httpx",
    "redis.asyncio",
]


def forked() -> ForkServerContext:
    """Return a context that starts processes with all modules already imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
