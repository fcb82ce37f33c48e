"""Queues and limits: bounded reads of the store, and what live workers declare."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import get_args

from perdure.insights.model import KeyRow, LimitRow, QueueRow
from perdure.insights.redaction import Redact
from perdure.limits import (
    MAX_PERMITS,
    LimitOf,
    PermitLimit,
    limit_name,
    split_queue,
)
from perdure.presence import DeclaredLimit, Switches, read_switches, read_workers
from perdure.store import Query, SearchStore, Store, can_queue, can_schedule

EXAMINED = 1000
"""How many due or owned runs of a queue are looked at."""

QUEUES = 100
"""How many queues are looked at, each of their keys being one."""

KEYS = 20
"""How many keys of a queue are shown."""


async def queues(store: SearchStore, redact: Redact, now: datetime) -> tuple[QueueRow, ...]:
    """Return the queues that have due or owned runs, that workers serve or that are paused, and
    the runs in no queue, by name.
    """
    running = await store.search(Query(statuses=("running",)), EXAMINED)
    leased = Counter(run.queue for run in running.runs if run.owner is not None)
    due = await _with_due_runs(store, now)
    switches, declared = await asyncio.gather(read_switches(store), limits(store, now))
    names = {"", *map(_name, leased), *map(_name, due), *switches.paused_queues}
    names.update(limit.name for limit in declared if limit.of != "steps")
    counter = _Counter(store, now, leased, due)
    rows = await asyncio.gather(*(counter.row(name) for name in sorted(names)))
    return tuple(_described(row, switches, redact, declared) for row in rows)


async def _with_due_runs(store: Store, now: datetime) -> Sequence[str]:
    return await store.queues(now, QUEUES) if can_queue(store) else ()


async def limits(store: SearchStore, now: datetime) -> tuple[LimitRow, ...]:
    """Return the limits that live workers declare, by name."""
    workers, switches = await asyncio.gather(read_workers(store), read_switches(store))
    # The worker that was started last is the newest deployment.
    newest = sorted(workers, key=lambda worker: worker.started_at)
    declared = {limit.name: limit for worker in newest for limit in worker.limits}
    rows = (_limit(store, now, limit, switches) for limit in declared.values())
    return tuple(sorted(await asyncio.gather(*rows), key=lambda row: (row.name, row.of)))


async def _limit(
    store: Store, now: datetime, declared: DeclaredLimit, switches: Switches
) -> LimitRow:
    name, of = _split(declared.name)
    n = switches.numbers.get(declared.name, declared.n)
    used = None if of.startswith("key_") else await _used(store, now, PermitLimit(declared.name, n))
    return LimitRow(name, of, n, declared.n, declared.per, used)


def _split(limit: str) -> tuple[str, LimitOf]:
    """Return the name of the queue or `Limit`, and what is limited."""
    name = limit.partition(":")[2].removesuffix("/*")
    kinds: tuple[LimitOf, ...] = get_args(LimitOf)
    return name, next(kind for kind in kinds if limit_name(name, kind) == limit)


async def _used(store: Store, now: datetime, limit: PermitLimit) -> int:
    """Return how many units are taken: those of permits that are not free."""
    if not can_queue(store):
        return 0
    free = await store.due(now, MAX_PERMITS, queues={limit.queue: MAX_PERMITS})
    return max(limit.n - sum(limit.units_of(each.id) for each in free), 0)


class _Counter:
    """Counts the runs of queues and keys."""

    def __init__(
        self, store: Store, now: datetime, leased: Mapping[str, int], due: Iterable[str]
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
        if not can_schedule(self._store) or not keys:
            return 0, None, False
        wanted = dict.fromkeys(keys, EXAMINED) if keys != [""] else None
        due = await self._store.due(self._now, EXAMINED, queues=wanted)
        return len(due), min((each.wake_at for each in due), default=None), len(due) == EXAMINED


def _described(
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
