"""The keys of a queue take turns, whatever the room of each round."""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from perdure import Queue
from perdure.clock import SystemClock
from perdure.runtime.rounds import RoundRequest, ServedQueue
from perdure.store import Grant

KEYS = [f"emails/{key:02}" for key in range(20)]


@pytest.mark.parametrize("longest", [1, 2, 4, 8])
async def test_keys_get_equal_shares(longest: int) -> None:
    """A key has no due run while it is served, for up to `longest` rounds."""
    random, clock = Random(1), SystemClock()
    served_until: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    now = 0

    async def queues(*_: object, **__: object) -> list[str]:
        return [key for key in KEYS if served_until[key] <= now]

    async def claim(_: int, limits: Mapping[str, int]) -> Sequence[Grant]:
        for key in limits:
            turns[key] += 1
            served_until[key] = now + random.randint(1, longest)
        return ()

    permits: Any = SimpleNamespace(store=SimpleNamespace(queues=queues), clock=clock)
    queue = ServedQueue(Queue("emails"), permits, set())
    for now in range(1, 400):
        free = len(KEYS) // 2 - sum(until > now for until in served_until.values())
        if room := min(random.choice([1, 2, 3, 12]), free):
            await queue.take(RoundRequest(room, (), claim, clock.now()))
    assert max(turns.values()) - min(turns.values()) <= 1
