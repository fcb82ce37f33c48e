"""Queues and limits, from bounded reads of the store and the declarations of live workers."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import get_args

from perdure.insights.due import oldest_due
from perdure.insights.model import KeyRow, LimitRow, QueueRow, Tally
from perdure.insights.redaction import Redact
from perdure.limits import LimitOf, PermitLimit, limit_name, split_queue
from perdure.presence import (
    DeclaredLimit,
    Switches,
    WorkerPresence,
    read_switches,
    read_workers,
)
from perdure.store import Query, RunSummary, SearchStore, Store, can_queue, can_schedule

EXAMINED = 1000
"""The maximum number of due or owned runs of a queue that are examined."""

QUEUES = 100
"""The maximum number of queues that are examined; each key counts as one."""

KEYS = 20
"""The maximum number of keys shown for a queue."""


async def queues(store: SearchStore, redact: Redact, now: datetime) -> tuple[QueueRow, ...]:
    """Return the queues by name, and the runs in no queue.

    These are the queues that have due or owned runs, that workers serve, or that are paused.
    """
    running = await store.search(Query(statuses=("running",)), EXAMINED)
    leased = Counter(run.queue for run in running.runs if run.owner is not None)
    due = await _with_due_runs(store, now)
    switches, declared = await asyncio.gather(read_switches(store), limits(store, now))
    names = {"", *map(_name, leased), *map(_name, due), *switches.paused_queues}
    names.update(limit.name for limit in declared if limit.of != "steps")
    counter = _Counter(store, now, leased, due)
    rows = await asyncio.gather(*(counter.row(name) for name in sorted(names)))
    return tuple(_describe(row, switches, redact, declared) for row in rows)


async def _with_due_runs(store: Store, now: datetime) -> Sequence[str]:
    return await store.queues(now, QUEUES) if can_queue(store) else ()


async def limits(store: SearchStore, now: datetime) -> tuple[LimitRow, ...]:
    """Return the limits that live workers declare, by name."""
    workers, switches = await asyncio.gather(read_workers(store), read_switches(store))
    rows = (_limit(store, now, limit, switches) for limit in _declared_limits(workers))
    return tuple(sorted(await asyncio.gather(*rows), key=lambda row: (row.name, row.of)))


async def limits_for(
    store: SearchStore,
    now: datetime,
    queue: str,
    workers: Iterable[WorkerPresence],
    switches: Switches,
) -> Sequence[LimitRow]:
    """Return the limits that apply to a run in a queue, whose name may include a key."""
    name, key = split_queue(queue)
    own = [limit for limit in _declared_limits(workers) if _is_of(limit, name)]
    limits = [limit for limit in own if key is not None or not limit.name.endswith("/*")]
    return await asyncio.gather(*(_limit(store, now, limit, switches, queue) for limit in limits))


async def runs_ahead(store: SearchStore, now: datetime, queue: str, run_id: str) -> Tally:
    """Return how many runs of the same queue and key start before a due run."""
    if not can_queue(store):
        return Tally(0)
    due = await store.due(now, EXAMINED, queues={queue: EXAMINED})
    earlier_runs = list(takewhile(lambda each: each.id != run_id, due))
    return Tally(len(earlier_runs), len(earlier_runs) == EXAMINED)


def _declared_limits(workers: Iterable[WorkerPresence]) -> Iterable[DeclaredLimit]:
    # The most recently started worker is the newest deployment.
    newest = sorted(workers, key=lambda worker: worker.started_at)
    return {limit.name: limit for worker in newest for limit in worker.limits}.values()


def _is_of(limit: DeclaredLimit, queue: str) -> bool:
    name, of = _split(limit.name)
    return name == queue and of != "steps"


async def _limit(
    store: SearchStore,
    now: datetime,
    declared: DeclaredLimit,
    switches: Switches,
    queue: str | None = None,
) -> LimitRow:
    """Return a limit; for a limit per key, with the use by the key of this queue."""
    name, of = _split(declared.name)
    n = switches.numbers.get(declared.name, declared.n)
    permits = declared.name
    if of.startswith("key_") and queue is not None:
        permits = f"{declared.name.partition(':')[0]}:{queue}"
    is_known = not permits.endswith("/*")
    units = await _units_in_use(store, now, PermitLimit(permits, n)) if is_known else None
    return LimitRow(name, of, n, declared.n, declared.per, units)


def _split(limit: str) -> tuple[str, LimitOf]:
    """Return the name of the queue or `Limit`, and what is limited."""
    name = limit.partition(":")[2].removesuffix("/*")
    kinds: tuple[LimitOf, ...] = get_args(LimitOf)
    return name, next(kind for kind in kinds if limit_name(name, kind) == limit)


async def _units_in_use(store: SearchStore, now: datetime, limit: PermitLimit) -> int:
    """Return how many units are in use: those of leased permits."""
    # Permits are created on first use, so a missing permit is not in use.
    permits = await store.summaries(limit.ids())
    leased_permits = [each for each in permits if each is not None and _is_leased(each, now)]
    return limit.unit * len(leased_permits)


def _is_leased(run: RunSummary, now: datetime) -> bool:
    return run.owner is not None and run.wake_at is not None and run.wake_at > now


class _Counter:
    """Counts the runs of queues and keys."""

    def __init__(
        self, store: SearchStore, now: datetime, leased: Mapping[str, int], due: Iterable[str]
    ) -> None:
        self._store = store
        self._now = now
        self._leased = leased
        self._by_name: dict[str, set[str]] = {}
        self._due: dict[str, list[str]] = {"": [""]}
        for key in due:
            self._due.setdefault(_name(key), []).append(key)
        for key in (*leased, *self._due):
            self._by_name.setdefault(_name(key), set()).add(key)
        for name, keys in self._due.items():
            self._by_name.setdefault(name, set()).update(keys)

    async def row(self, name: str) -> QueueRow:
        keys = sorted(key for key in self._by_name.get(name, ()) if key != name)[:KEYS]
        count, oldest, capped = await self._count(self._due.get(name, ()))
        leased = sum(n for key, n in self._leased.items() if _name(key) == name)
        rows = await asyncio.gather(*map(self._key, keys))
        return QueueRow(name, count, leased, oldest, capped=capped, keys=tuple(rows))

    async def _key(self, key: str) -> KeyRow:
        count, oldest, capped = await self._count([key])
        return KeyRow(split_queue(key)[1] or "", count, self._leased.get(key, 0), oldest, capped)

    async def _count(self, keys: Sequence[str]) -> tuple[int, datetime | None, bool]:
        store = self._store
        if not can_schedule(store) or not keys:
            return 0, None, False
        quotas = dict.fromkeys(keys, EXAMINED) if keys != [""] else None
        due = await store.due(self._now, EXAMINED, queues=quotas)
        oldest = await oldest_due(self._store, due, self._now)
        return len(due), oldest, len(due) == EXAMINED


def _describe(
    row: QueueRow, switches: Switches, redact: Redact, declared: Iterable[LimitRow]
) -> QueueRow:
    switch = switches.queues.get(row.name)
    is_paused = switch is not None and switch.paused
    return QueueRow(
        row.name,
        row.due,
        row.leased,
        row.oldest_due,
        is_paused,
        row.capped,
        redact.text(switch.why) if switch is not None and is_paused else "",
        tuple(each for each in declared if each.name == row.name and each.of != "steps"),
        row.keys,
    )


def _name(queue: str) -> str:
    """Return the name of a queue, which all its keys share."""
    return queue.partition("/")[0]
