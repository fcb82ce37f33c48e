"""Find and claim due runs, and find the queues that have them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from perdure.errors import StoreUnavailable
from perdure.store import SupportedVersions
from perdure.stores.redis import scripts
from perdure.stores.redis.keys import SHARDS, shard_of
from perdure.stores.redis.node import Value
from perdure.stores.redis.replies import (
    ClaimedRun,
    DueRun,
    read_claimed_runs,
    read_due_runs,
    to_json,
    version_ranges,
    without_none,
)
from perdure.stores.redis.runs import Runs
from perdure.stores.redis.scripts import Script
from perdure.stores.redis.server import Call

logger = logging.getLogger(__name__)

# With a prefix, at least this many queues are examined at a time.
_FEWEST_QUEUES = 100

_START: tuple[Value, Value] = ("", "")


class _InQueue(Protocol):
    @property
    def queue(self) -> str: ...


Q = TypeVar("Q", bound=_InQueue)


class _RunFilter(NamedTuple):
    """Which runs to find: how many, in which shards, of which queues and workflows."""

    shards: Sequence[int]
    limit: int
    queues: Mapping[str, int]
    supports: Mapping[str, Sequence[tuple[int, int]]] | None


class Claims:
    """The due runs of one store."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._wakes = [runs.keys.wakes(shard) for shard in range(SHARDS)]

    async def due(
        self,
        now: int,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[DueRun]:
        """Return due runs, earliest first."""
        parts = self._due(_RunFilter((), limit, queues, version_ranges(supports)), now)
        return _earliest(await _concatenate(parts), limit, queues)

    async def claim(
        self,
        owner: str,
        ttl: int,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[ClaimedRun]:
        """Return the replies with the grants of due runs, earliest first."""
        run_filter = _RunFilter(self._runs.groups[0], limit, queues, version_ranges(supports))
        shares = await self._shares(run_filter) if self._runs.is_sharded else [run_filter]
        return sorted(await _available([self._claim(share, owner, ttl) for share in shares]))

    async def queues(self, now: int, limit: int, low: str, high: str | None) -> Sequence[str]:
        """Return queues with due runs, by name."""
        if not self._runs.prefix:
            return await self._queues(now, limit, low, high)
        names: list[str] = []
        page = max(limit, _FEWEST_QUEUES)
        while len(names) < limit:
            candidates = await self._queues(now, page, low, high)
            names += await self._with_runs(candidates, now)
            if len(candidates) < page:
                break
            low = candidates[-1] + "\x01"
        return names[:limit]

    async def _queues(self, now: int, limit: int, low: str, high: str | None) -> Sequence[str]:
        """Return queues that have due runs of any prefix.

        Each shard is asked for its share, and again while it may have names below the last one.
        """
        share = max(4, 2 * limit // SHARDS)
        names: set[bytes] = set()
        starts = {shard: low.encode() for shard in range(SHARDS)}
        while starts:
            calls = [
                Call([self._wakes[shard]], (share, start, high or "", now))
                for shard, start in starts.items()
            ]
            replies = await self._runs.server.run(scripts.QUEUES, calls)
            names.update(name for _, some in replies for name in some)
            first = sorted(names)[:limit]
            following = zip(starts, replies, strict=True)
            starts = {
                shard: start
                for shard, (start, _) in following
                if start is not None and (len(first) < limit or start <= first[-1])
            }
        return [name.decode() for name in sorted(names)[:limit]]

    async def _with_runs(self, queues: Sequence[str], now: int) -> Sequence[str]:
        """Return the queues that have due runs of this prefix."""
        due = await self.due(now, len(queues), None, dict.fromkeys(queues, 1)) if queues else ()
        due_queues = {run.queue for run in due}
        return [queue for queue in queues if queue in due_queues]

    async def _shares(self, run_filter: _RunFilter) -> Sequence[_RunFilter]:
        """Return which of the earliest due runs are in each shard."""
        due = _earliest(
            await _available(self._due(run_filter, "")), run_filter.limit, run_filter.queues
        )
        shares: dict[int, Counter[str]] = {}
        for run in due:
            shares.setdefault(shard_of(run.id), Counter())[run.queue] += 1
        return [
            _RunFilter((shard,), queues.total(), queues, run_filter.supports)
            for shard, queues in shares.items()
        ]

    def _due(self, run_filter: _RunFilter, now: Value) -> Sequence[Awaitable[Sequence[DueRun]]]:
        """Return the due runs of each group of shards, with the given time or "" for now."""
        return [
            self._collect(scripts.DUE, run_filter._replace(shards=shards), read_due_runs, now)
            for shards in self._runs.groups
        ]

    def _claim(self, share: _RunFilter, owner: str, ttl: int) -> Awaitable[Sequence[ClaimedRun]]:
        """Return the replies with the grants of due runs."""
        return self._collect(scripts.CLAIM, share, read_claimed_runs, owner, ttl, repeatable=False)

    async def _collect(
        self,
        script: Script,
        run_filter: _RunFilter,
        read: Callable[[Any], Sequence[Q]],
        *values: Value,
        repeatable: bool = True,
    ) -> Sequence[Q]:
        """Return the runs that a script finds; a script that stops early is called again."""
        keys = [self._wakes[shard] for shard in run_filter.shards]
        runs: list[Q] = []
        mark, quotas = _START, run_filter.queues
        while len(runs) < run_filter.limit and quotas:
            request = _request(quotas, run_filter.supports)
            head = (run_filter.limit - len(runs), self._runs.prefix, *mark, request)
            [(stop, some)] = await self._runs.server.run(
                script, [Call(keys, (*head, *values))], repeatable=repeatable
            )
            runs += read(some)
            if stop is None:
                break
            mark = stop
            # Counter subtraction drops the queues whose limits are used up.
            quotas = Counter(run_filter.queues) - Counter(run.queue for run in runs)
        return runs


def _request(
    queues: Mapping[str, int], supports: Mapping[str, Sequence[tuple[int, int]]] | None
) -> bytes:
    return to_json(without_none({"queues": [*queues.items()], "supports": supports}))


def _earliest(runs: Sequence[DueRun], limit: int, queues: Mapping[str, int]) -> Sequence[DueRun]:
    """Return the earliest runs of several groups of shards, within the limits of their queues."""
    quotas = Counter(queues)
    earliest: list[DueRun] = []
    for run in sorted(runs):
        if len(earliest) < limit and quotas[run.queue] > 0:
            quotas[run.queue] -= 1
            earliest.append(run)
    return earliest


async def _concatenate(parts: Sequence[Awaitable[Sequence[Q]]]) -> Sequence[Q]:
    if len(parts) == 1:
        return await parts[0]
    return [run for part in await asyncio.gather(*parts) for run in part]


async def _available(parts: Sequence[Awaitable[Sequence[Q]]]) -> Sequence[Q]:
    """Return the runs of all parts whose server is available; raise if none is."""
    if len(parts) == 1:
        # Without a task, whose end would be noticed two iterations of the event loop later.
        return await parts[0]
    runs: list[Q] = []
    errors: list[StoreUnavailable] = []
    for result in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(result, StoreUnavailable):
            errors.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            runs += result
    if errors and len(errors) == len(parts):
        raise errors[0]
    for error in errors:
        logger.warning("some runs cannot be claimed for now: %s", error)
    return runs
