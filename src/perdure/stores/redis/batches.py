"""Calls of a script for many runs, in parts and, on a cluster, one shard at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from perdure.stores.redis.keys import Keys, shard_of
from perdure.stores.redis.node import Value
from perdure.stores.redis.server import Call

# Limited, because a script blocks all other clients, and the server holds its arguments in memory
# twice.
_MAX_ITEMS = 1000
_MAX_BYTES = 8 * 1024 * 1024


class Item(NamedTuple):
    """One run in a batch: its id, the script's arguments for it, and their approximate size."""

    id: str
    values: Sequence[Value]
    size: int = 0


class Batch(NamedTuple):
    """One call, and the indexes of its items."""

    indexes: Sequence[int]
    call: Call


def make_batches(
    items: Sequence[Item], keys: Keys, prefix: str, *, is_sharded: bool, head: Sequence[Value]
) -> Sequence[Batch]:
    """Return the calls for the items; items of one run stay in order. `head` starts every call."""
    names = [keys.run(prefix + item.id) for item in items]
    if len(items) == 1:
        return [Batch((0,), Call(names, (*head, *items[0].values)))]
    groups = _by_shard(items, prefix) if is_sharded else [range(len(items))]
    return [
        Batch(indexes, _call(names, items, indexes, head))
        for group in groups
        for indexes in _parts(items, group)
    ]


def _by_shard(items: Sequence[Item], prefix: str) -> Sequence[Sequence[int]]:
    groups: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(shard_of((prefix + item.id).encode()), []).append(index)
    return [*groups.values()]


def _parts(items: Sequence[Item], group: Sequence[int]) -> Iterator[Sequence[int]]:
    part: list[int] = []
    total = 0
    for index in group:
        size = items[index].size
        if part and (len(part) == _MAX_ITEMS or total + size > _MAX_BYTES):
            yield part
            part, total = [], 0
        part.append(index)
        total += size
    if part:
        yield part


def _call(
    names: Sequence[bytes], items: Sequence[Item], indexes: Sequence[int], head: Sequence[Value]
) -> Call:
    values = [value for index in indexes for value in items[index].values]
    return Call([names[index] for index in indexes], [*head, *values])
