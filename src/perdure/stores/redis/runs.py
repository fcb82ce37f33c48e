"""Scripts on runs: on one, on each of many, and on all shards read as one."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Row, batches
from perdure.stores.redis.keys import SHARDS, STATUSES, Keys, shard_of
from perdure.stores.redis.node import Value
from perdure.stores.redis.replies import (
    due_place,
    list_place,
    to_json,
    wake_time_of,
    workflow_argument,
)
from perdure.stores.redis.scripts import Script
from perdure.stores.redis.server import Call, Server

logger = logging.getLogger(__name__)

_FROM_THE_BEGINNING: tuple[Value, Value] = ("", "")


class Runs:
    """The runs whose ids begin with `prefix`. Ids that come in are without it, replies with it."""

    def __init__(self, server: Server, keys: Keys, prefix: str) -> None:
        self._server = server
        self._keys = keys
        self._prefix = prefix
        self._is_split = server.link.is_split

    async def try_rights(self) -> None:
        """Raise unless this user may do all that the scripts do."""
        await self._server.run(scripts.RIGHTS, [Call([self._keys.trial], ())])

    async def one(self, script: Script, id: str, *values: Value, repeatable: bool = True) -> Any:
        """Give what a script gives for one run."""
        call = Call([self._keys.run(self._prefix + id)], values)
        [reply] = await self._server.run(script, [call], repeatable=repeatable)
        return reply

    async def mail(self, id: str) -> Any:
        """Give the hash of a run's inbox."""
        call = Call([self._keys.mail(self._prefix + id)], ())
        [reply] = await self._server.run(scripts.INBOX, [call])
        return reply

    async def each(
        self,
        script: Script,
        rows: Sequence[Row],
        *head: Value,
        repeatable: bool = True,
        read: Callable[[Any], Sequence[Any]] = lambda reply: reply or (),
    ) -> Sequence[Any]:
        """Give what a script gives for each run; `head` is what it is told first.

        `read` gives the answers that are in a reply, where they are not the reply itself.
        """
        if not rows:
            return ()
        parts = batches(rows, self._keys, self._prefix, is_split=self._is_split, head=head)
        calls = [part.call for part in parts]
        replies = await self._server.run(script, calls, repeatable=repeatable)
        if len(parts) == 1:
            return read(replies[0])
        answers: list[Any] = [None] * len(rows)
        for part, reply in zip(parts, replies, strict=True):
            for place, answer in zip(part.places, read(reply), strict=False):
                answers[place] = answer
        return answers

    async def page(
        self,
        statuses: Sequence[RunStatus],
        prefix: str,
        limit: int,
        workflow: str | None,
        mark: tuple[Value, Value],
    ) -> Sequence[Any]:
        """Give up to `limit` lines of the list, newest first."""
        groups = [
            [self._keys.list(shard, status) for shard in shards for status in statuses]
            for shards in self._groups()
        ]
        name = workflow_argument(workflow)
        lines = await self._all(scripts.LIST, groups, limit, name, prefix=prefix, mark=mark)
        return sorted(lines, key=list_place, reverse=True)[:limit]

    async def due(
        self, now: int | None, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Any]:
        """Give up to `limit` lines of due runs, earliest first."""
        at = "" if now is None else now
        groups = [self._lanes(shards) for shards in self._groups()]
        lines = await self._all(scripts.DUE, groups, limit, _lanes_argument(workflows), at)
        return sorted(lines, key=due_place)[:limit]

    async def claim(
        self, owner: str, ttl: int, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Any]:
        """Give the grants of up to `limit` due runs, earliest first."""
        values = (_lanes_argument(workflows), owner, ttl)
        claims = [
            self._part(scripts.CLAIM, self._lanes(shards), share, *values, repeatable=False)
            for shards, share in await self._shares(limit, workflows)
        ]
        return sorted(await _reachable(claims), key=wake_time_of)

    async def count(self) -> Counter[str]:
        """Give the number of runs by status; under a prefix they are counted one by one."""
        counts: Counter[str] = Counter()
        for shards in self._groups():
            offset, more = 0, 1
            while more:
                keys = [self._keys.list(shard, status) for shard in shards for status in STATUSES]
                call = Call(keys, (self._prefix, offset))
                [(more, window, found)] = await self._server.run(scripts.COUNT, [call])
                for n, number in enumerate(found):
                    counts[STATUSES[n % len(STATUSES)]] += number
                offset += window
        return +counts

    async def prune(self, age: int, statuses: Sequence[RunStatus], limit: int) -> int:
        """Delete up to `limit` runs of these statuses that are older; give how many."""
        pruned = 0
        for key in [self._keys.list(shard, one) for shard in range(SHARDS) for one in statuses]:
            offset, more = 0, 1
            while more and pruned < limit:
                call = Call([key], (age, limit - pruned, self._prefix, offset))
                [(deleted, passed, more)] = await self._server.run(scripts.PRUNE, [call])
                pruned += deleted
                offset += passed
        return pruned

    def _groups(self) -> Sequence[Sequence[int]]:
        """Give the shards that one script may read together."""
        return [[shard] for shard in range(SHARDS)] if self._is_split else [range(SHARDS)]

    def _lanes(self, shards: Sequence[int]) -> Sequence[bytes]:
        return [self._keys.lanes(shard) for shard in shards]

    async def _shares(
        self, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[tuple[Sequence[int], int]]:
        """Give how many of the earliest runs lie in which group of shards."""
        if not self._is_split:
            return [(range(SHARDS), limit)]
        lanes = _lanes_argument(workflows)
        parts = [
            self._part(scripts.DUE, self._lanes(shards), limit, lanes, "")
            for shards in self._groups()
        ]
        due = sorted(await _reachable(parts), key=due_place)[:limit]
        counted = Counter(shard_of(due_place(line)[1]) for line in due)
        return [((shard,), share) for shard, share in counted.items()]

    async def _all(
        self,
        script: Script,
        groups: Sequence[Sequence[bytes]],
        limit: int,
        *values: Value,
        prefix: str = "",
        mark: tuple[Value, Value] = _FROM_THE_BEGINNING,
    ) -> Sequence[Any]:
        parts = [
            self._part(script, keys, limit, *values, prefix=prefix, mark=mark) for keys in groups
        ]
        if len(parts) == 1:
            return await parts[0]
        return [line for part in await asyncio.gather(*parts) for line in part]

    async def _part(
        self,
        script: Script,
        keys: Sequence[bytes],
        limit: int,
        *values: Value,
        prefix: str = "",
        mark: tuple[Value, Value] = _FROM_THE_BEGINNING,
        repeatable: bool = True,
    ) -> Sequence[Any]:
        """Give up to `limit` lines of a script that stops now and then, and says where."""
        lines: list[Any] = []
        while len(lines) < limit:
            told = (limit - len(lines), self._prefix + prefix, *mark, *values)
            [(stopped, found)] = await self._server.run(
                script, [Call(keys, told)], repeatable=repeatable
            )
            lines += found
            if stopped is None:
                break
            mark = stopped
        return lines


async def _reachable(parts: Sequence[Awaitable[Sequence[Any]]]) -> Sequence[Any]:
    """Give the lines of all parts whose server is there; raise when none is."""
    lines: list[Any] = []
    away: list[StoreUnavailable] = []
    for found in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(found, StoreUnavailable):
            away.append(found)
        elif isinstance(found, BaseException):
            raise found
        else:
            lines += found
    if away and len(away) == len(parts):
        raise away[0]
    for error in away:
        logger.warning("some runs cannot be claimed for now: %s", error)
    return lines


def _lanes_argument(workflows: Sequence[str] | None) -> Value:
    if workflows is None:
        return ""
    return to_json([workflow_argument(name) for name in dict.fromkeys(workflows)])
