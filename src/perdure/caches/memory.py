"""A cache in this process's memory."""

import heapq
from collections import OrderedDict
from datetime import timedelta
from typing import cast

from perdure import codec
from perdure.clock import Clock, Duration, SystemClock, check_clock, parse_duration
from perdure.snapshot import StepRecord
from perdure.validation import check_int


class MemoryCache:
    """Keeps the records of up to `max_size` steps; the least recently used one is evicted first.

    A record expires after the step's own `ttl`, or else after the cache's; without either it never
    does. Records are kept encoded, so changing a value that was returned does not change the cache.

        cache = MemoryCache(max_size=1000, ttl=timedelta(days=7))
    """

    def __init__(
        self,
        *,
        max_size: int | None = None,
        ttl: Duration | None = None,
        clock: Clock = SystemClock(),
    ) -> None:
        self._max_size = None if max_size is None else check_int(max_size, "max_size")
        self._ttl = None if ttl is None else parse_duration(ttl, "ttl")
        self._clock = check_clock(clock)
        self._entries: OrderedDict[str, tuple[bytes, float | None]] = OrderedDict()
        self._ends: list[tuple[float, str]] = []

    def get(self, key: str, /) -> StepRecord | None:
        """Return the record and mark it as used, or return `None`."""
        self._drop_expired()
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return cast("StepRecord", codec.loads(entry[0]))

    def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        """Store the record; `ttl` takes precedence over the cache's own."""
        self._drop_expired()
        ttl = self._ttl if ttl is None else ttl
        end = None if ttl is None else self._clock.monotonic() + ttl.total_seconds()
        self._entries[key] = (codec.dumps(record), end)
        self._entries.move_to_end(key)
        if end is not None:
            heapq.heappush(self._ends, (end, key))
        if self._max_size is not None and len(self._entries) > self._max_size:
            self._entries.popitem(last=False)

    def has(self, key: str, /) -> bool:
        """Return whether there is a record, without marking it as used."""
        self._drop_expired()
        return key in self._entries

    def delete(self, key: str, /) -> bool:
        """Delete the record, so that the step runs again; return whether it existed."""
        self._drop_expired()
        return self._entries.pop(key, None) is not None

    def clear(self) -> None:
        """Delete all records."""
        self._entries.clear()
        self._ends.clear()

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._entries)

    def _drop_expired(self) -> None:
        if not self._ends:
            return
        now = self._clock.monotonic()
        while self._ends and self._ends[0][0] <= now:
            end, key = heapq.heappop(self._ends)
            # The key may have been set again since then, with another end.
            if self._entries.get(key, (b"", None))[1] == end:
                del self._entries[key]
