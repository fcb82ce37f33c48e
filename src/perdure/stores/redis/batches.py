"""Many runs in few calls: as many as a script may have at once, and as a cluster allows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from perdure.stores.redis.keys import Keys, shard_of
from perdure.stores.redis.node import Value
from perdure.stores.redis.server import Call

# A script holds everybody up, and what it is given lies in the server's memory twice.
_MAX_ROWS = 1000
_MAX_BYTES = 8 * 1024 * 1024


class Row(NamedTuple):
    """A run by its id, what a script is told of it, and about how many bytes that are."""

    id: str
    values: Sequence[Value]
    weight: int = 0


class Batch(NamedTuple):
    """The places of the rows that go into one call, and the call."""

    places: Sequence[int]
    call: Call


def batches(
    rows: Sequence[Row], keys: Keys, prefix: str, *, is_split: bool, head: Sequence[Value]
) -> Sequence[Batch]:
    """Give the calls for rows; those of one run stay in order. `head` comes first in each."""
    if len(rows) == 1:
        [row] = rows
        return [Batch((0,), Call((keys.run(prefix + row.id),), (*head, *row.values)))]
    names = [keys.run(prefix + row.id) for row in rows]
    groups = _by_shard(rows, prefix) if is_split else [range(len(rows))]
    return [
        Batch(places, _call(names, rows, places, head))
        for group in groups
        for places in _portions(rows, group)
    ]


def _by_shard(rows: Sequence[Row], prefix: str) -> Sequence[Sequence[int]]:
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(shard_of((prefix + row.id).encode()), []).append(place)
    return [*groups.values()]


def _portions(rows: Sequence[Row], group: Sequence[int]) -> Iterator[Sequence[int]]:
    portion: list[int] = []
    size = 0
    for place in group:
        weight = rows[place].weight
        if portion and (len(portion) == _MAX_ROWS or size + weight > _MAX_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(place)
        size += weight
    if portion:
        yield portion


def _call(
    names: Sequence[bytes], rows: Sequence[Row], places: Sequence[int], head: Sequence[Value]
) -> Call:
    values = [value for place in places for value in rows[place].values]
    return Call([names[place] for place in places], [*head, *values])
