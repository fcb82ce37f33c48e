"""A worker claims due and orphaned runs, many at a time, and executes them.

    async with Worker(runtime, concurrency=100) as worker:
        await worker.serve()

The leases of all its runs are renewed together. A run whose owners keep dying before it makes
progress is a suspect: a worker executes one suspect at a time, so that other runs are not blamed,
and pauses it after `max_crashes`. A run that cannot be executed does not affect others. SIGTERM
drains the worker: it claims no more runs, its runs get a grace period, and the rest are released
for other workers; a second signal ends the grace period. On a store with documents, the worker
reports what it does, and operators can drain it and pause its workflows (`perdure.presence`).
"""

from perdure.worker.counters import Counters
from perdure.worker.worker import Worker

__all__ = ["Counters", "Worker"]
