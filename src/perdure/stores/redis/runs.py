"""Calls of scripts: for one run, for each of many, and for all shards read as one."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus
from perdure.stores._shell import Query
from perdure.stores._timestamps import to_microseconds
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Item, make_batches
from perdure.stores.redis.keys import SHARDS, STATUSES, Keys, shard_of
from perdure.stores.redis.node import Value
from perdure.stores.redis.replies import (
    due_order,
    grant_order,
    list_order,
    to_json,
    workflow_argument,
)
from perdure.stores.redis.scripts import Script
from perdure.stores.redis.server import Call, Server

logger = logging.getLogger(__name__)

_START: tuple[Value, Value] = ("", "")


class Runs:
    """The runs whose stored ids start with `prefix`: arguments are without it, replies with it."""

    def __init__(self, server: Server, keys: Keys, prefix: str) -> None:
        self._server = server
        self._keys = keys
        self._prefix = prefix
        self._is_sharded = server.link.is_sharded

    async def check_permissions(self) -> None:
        """Raise unless this user may use all commands of the scripts."""
        await self._server.run(scripts.PERMISSIONS, [Call([self._keys.probe], ())])

    async def one(self, script: Script, id: str, *values: Value, repeatable: bool = True) -> Any:
        """Return the reply of a script for one run."""
        call = Call([self._keys.run(self._prefix + id)], values)
        [reply] = await self._server.run(script, [call], repeatable=repeatable)
        return reply

    async def inbox(self, id: str) -> Any:
        """Return the hash of a run's inbox."""
        call = Call([self._keys.inbox(self._prefix + id)], ())
        [reply] = await self._server.run(scripts.INBOX, [call])
        return reply

    async def each(
        self,
        script: Script,
        items: Sequence[Item],
        *head: Value,
        repeatable: bool = True,
        read: Callable[[Any], Sequence[Any]] = lambda reply: reply or (),
    ) -> Sequence[Any]:
        """Return the answer of a script for each run; `head` are its first arguments.

        `read` returns the answers in a reply, where they are not the reply itself.
        """
        batches = make_batches(
            items, self._keys, self._prefix, is_sharded=self._is_sharded, head=head
        )
        calls = [batch.call for batch in batches]
        replies = await self._server.run(script, calls, repeatable=repeatable)
        if len(batches) == 1:
            return read(replies[0])
        answers: list[Any] = [None] * len(items)
        for batch, reply in zip(batches, replies, strict=True):
            for index, answer in zip(batch.indexes, read(reply), strict=False):
                answers[index] = answer
        return answers

    async def list(self, query: Query, statuses: Sequence[RunStatus]) -> Sequence[Any]:
        """Return lines of the lists, the most recently updated first."""
        groups = [
            [self._keys.list(shard, status) for shard in shards for status in statuses]
            for shards in self._groups()
        ]
        mark = _START
        if query.after is not None:
            time, id = query.after
            mark = to_microseconds(time), self._prefix + id
        parts = [
            self._part(
                scripts.LIST,
                keys,
                query.limit,
                workflow_argument(query.workflow),
                prefix=query.prefix,
                mark=mark,
            )
            for keys in groups
        ]
        return sorted(await _concatenated(parts), key=list_order, reverse=True)[: query.limit]

    async def due(
        self, now: int | None, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Any]:
        """Return lines of due runs, earliest first."""
        at = "" if now is None else now
        parts = [
            self._part(scripts.DUE, self._workflow_keys(shards), limit, _names(workflows), at)
            for shards in self._groups()
        ]
        return sorted(await _concatenated(parts), key=due_order)[:limit]

    async def claim(
        self, owner: str, ttl: int, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Any]:
        """Return the grants of up to `limit` due runs, earliest first."""
        values = (_names(workflows), owner, ttl)
        claims = [
            self._part(scripts.CLAIM, self._workflow_keys(shards), share, *values, repeatable=False)
            for shards, share in await self._shares(limit, workflows)
        ]
        return sorted(await _available(claims), key=grant_order)

    async def count(self) -> Counter[str]:
        """Return the number of runs by status; under a prefix they are counted one by one."""
        counts: Counter[str] = Counter()
        for shards in self._groups():
            offset, more = 0, 1
            while more:
                keys = [self._keys.list(shard, status) for shard in shards for status in STATUSES]
                call = Call(keys, (self._prefix, offset))
                [(more, window, numbers)] = await self._server.run(scripts.COUNT, [call])
                for n, number in enumerate(numbers):
                    counts[STATUSES[n % len(STATUSES)]] += number
                offset += window
        return +counts

    async def prune(self, age: int, statuses: Sequence[RunStatus], limit: int) -> int:
        """Delete up to `limit` runs of these statuses that are older; return how many."""
        pruned = 0
        for key in [self._keys.list(shard, each) for shard in range(SHARDS) for each in statuses]:
            offset, more = 0, 1
            while more and pruned < limit:
                call = Call([key], (age, limit - pruned, self._prefix, offset))
                [(deleted, skipped, more)] = await self._server.run(scripts.PRUNE, [call])
                pruned += deleted
                offset += skipped
        return pruned

    def _groups(self) -> Sequence[Sequence[int]]:
        """Return the shards that one script can read together."""
        return [[shard] for shard in range(SHARDS)] if self._is_sharded else [range(SHARDS)]

    def _workflow_keys(self, shards: Sequence[int]) -> Sequence[bytes]:
        return [self._keys.workflows(shard) for shard in shards]

    async def _shares(
        self, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[tuple[Sequence[int], int]]:
        """Return how many of the earliest due runs are in each group of shards."""
        if not self._is_sharded:
            return [(range(SHARDS), limit)]
        parts = [
            self._part(scripts.DUE, self._workflow_keys(shards), limit, _names(workflows), "")
            for shards in self._groups()
        ]
        due = sorted(await _available(parts), key=due_order)[:limit]
        counts = Counter(shard_of(due_order(line)[1]) for line in due)
        return [((shard,), share) for shard, share in counts.items()]

    async def _part(
        self,
        script: Script,
        keys: Sequence[bytes],
        limit: int,
        *values: Value,
        prefix: str = "",
        mark: tuple[Value, Value] = _START,
        repeatable: bool = True,
    ) -> Sequence[Any]:
        """Return up to `limit` lines of a script that may stop early, and is then continued."""
        lines: list[Any] = []
        while len(lines) < limit:
            arguments = (limit - len(lines), self._prefix + prefix, *mark, *values)
            [(stopped, some)] = await self._server.run(
                script, [Call(keys, arguments)], repeatable=repeatable
            )
            lines += some
            if stopped is None:
                break
            mark = stopped
        return lines


async def _concatenated(parts: Sequence[Awaitable[Sequence[Any]]]) -> Sequence[Any]:
    if len(parts) == 1:
        return await parts[0]
    return [line for part in await asyncio.gather(*parts) for line in part]


async def _available(parts: Sequence[Awaitable[Sequence[Any]]]) -> Sequence[Any]:
    """Return the lines of all parts whose server is available; raise if none is."""
    lines: list[Any] = []
    errors: list[StoreUnavailable] = []
    for result in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(result, StoreUnavailable):
            errors.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            lines += result
    if errors and len(errors) == len(parts):
        raise errors[0]
    for error in errors:
        logger.warning("some runs cannot be claimed for now: %s", error)
    return lines


def _names(workflows: Sequence[str] | None) -> Value:
    if workflows is None:
        return ""
    return to_json([workflow_argument(name) for name in dict.fromkeys(workflows)])
