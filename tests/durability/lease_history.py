"""A history of leases by the store's clock, and a check that no moment has too many holders."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

from perdure.clock import Clock
from perdure.store import Entry, Grant, Lease, Verdict
from perdure.testing.faults import FaultyStore


class LeaseHistory(FaultyStore):
    """A store that keeps when each lease began and ended.

    `leases` has for each lease its queue, and the time from its grant to its release, its rest or
    its expiry. A lease whose owner has crashed lasts until it expires.
    """

    def __init__(self, store: Any, clock: Clock, **options: Any) -> None:
        super().__init__(store, **options)
        self.clock = clock
        self.leases: dict[tuple[str, int], tuple[str, datetime, datetime]] = {}

    async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
        answer = await super()._pass(verb, *arguments, **options)
        match verb:
            case "claim" | "acquire":
                self._begin([each for each in answer if isinstance(each, Grant)])
            case "renew":
                self._renew([each for each in answer if each is not None])
            case "release":
                self._end((lease.id, lease.epoch) for lease in arguments[0])
            case "append":
                self._rest(arguments[0], answer)
        return answer

    def _begin(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            lease = grant.lease
            self.leases[lease.id, lease.epoch] = (grant.queue, grant.now, lease.expires_at)

    def _renew(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            queue, begin, _ = self.leases[lease.id, lease.epoch]
            self.leases[lease.id, lease.epoch] = (queue, begin, lease.expires_at)

    def _rest(self, entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> None:
        pairs = zip(entries, verdicts, strict=True)
        accepted = (entry for entry, verdict in pairs if verdict is Verdict.ACCEPTED)
        self._end((entry.id, entry.epoch) for entry in accepted if entry.rest is not None)

    def _end(self, keys: Iterator[tuple[str, int]]) -> None:
        for key in keys:
            if key in self.leases:
                queue, begin, end = self.leases[key]
                self.leases[key] = (queue, begin, min(end, self.clock.now()))

    def spans(self, queue: str) -> list[tuple[datetime, datetime]]:
        """Return the times during which leases of this queue were held."""
        return [(begin, end) for name, begin, end in self.leases.values() if name == queue]


def most_at_once(spans: Sequence[tuple[datetime, datetime]]) -> int:
    """Return how many of the spans overlap at most; one may begin when another ends."""
    changes = sorted(
        [(begin, 1) for begin, end in spans if begin < end]
        + [(end, -1) for begin, end in spans if begin < end]
    )
    return max(accumulate(change for _, change in changes), default=0)


def most_within(times: Sequence[datetime], period: timedelta) -> int:
    """Return how many of the times are in one period at most, its end excluded."""
    ordered = sorted(times)
    first = most = 0
    for last, time in enumerate(ordered):
        while time - ordered[first] >= period:
            first += 1
        most = max(most, last - first + 1)
    return most


def jain(shares: Mapping[str, float]) -> float:
    """Return Jain's index of fairness: 1 if all shares are equal."""
    values = list(shares.values())
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))
