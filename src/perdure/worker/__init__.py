"""A worker claims runs that are due or orphaned, many at a time, and drives them.

    async with Worker(runtime, concurrency=100) as worker:
        await worker.serve()

The leases of all its runs are renewed together. A run whose owners keep dying before it makes
progress is a suspect: a worker drives one suspect at a time, so that the runs beside it are not
taken for the cause, and pauses it after `max_crashes`. A run that cannot be driven harms no other.
SIGTERM drains the worker: it claims nothing more, its runs get a grace period, and what is left is
released for other workers; a second one ends the grace period. On a store with documents the worker
shows what it does, and operators can drain it and pause its workflows (`perdure.presence`).
"""

from perdure.worker.counters import Counters
from perdure.worker.worker import Worker

__all__ = ["Counters", "Worker"]
