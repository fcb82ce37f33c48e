"""The measured values by store, workload, size and contender, and their medians."""

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

PERDURE, RAW, SHARED, BULK, TURN = "perdure", "raw", "raw, shared", "raw, bulk", "loop turn"


class Work(NamedTuple):
    """How a workload is shown: its label with a placeholder for the size, and the unit of its
    values.
    """

    label: str
    unit: str
    scale: float = 1


WORKS = {
    "engine": Work("engine: a step of {size:,} without a store", "µs", 1e6),
    "replay": Work("engine: a replayed step of {size:,} without a store", "µs", 1e6),
    "A": Work("A: a step of {size:,} in one run", "µs", 1e6),
    "B": Work("B: runs of 10 steps at once: {size:,}", "steps/s"),
    "C": Work("C: a resumed step of {size:,}, load included", "µs", 1e6),
    "D": Work("D: a step of {size:,}, memory store", "µs", 1e6),
    "call": Work("D: a step of {size:,} as a plain call", "µs", 1e6),
    "ends": Work("D: start and end of a run, of {size:,} at once", "µs", 1e6),
    "start": Work("start of a run to its first step", "µs", 1e6),
    "due": Work("E: {size:,} runs due at once, one worker", "runs/s"),
    "signals": Work("E: {size:,} waiting runs, all signalled", "runs/s"),
    "bytes": Work("F: bytes a step of {size:,}, handed to the store", "bytes"),
    "disk": Work("F: bytes a step of {size:,}, written to disk", "bytes"),
    "sleeping": Work("F: memory that each of {size:,} sleeping runs holds", "bytes"),
    "retrying": Work("F: memory that each of {size:,} runs holds between attempts", "bytes"),
    "round": Work("L: a round of a loop that continues as new, of {size:,}", "µs", 1e6),
    "react": Work("F: signal to the next step", "µs", 1e6),
    "workers": Work("G: worker processes: {size}", "runs/s"),
    "migrate": Work("H: first opening of {size:,} runs of an earlier version", "s"),
    "twice": Work("G: steps executed twice by {size} processes", "steps"),
    "wake": Work("I: trigger to first step, in one process, p50", "ms", 1e3),
    "across": Work("I: trigger to first step, in another process, p50", "ms", 1e3),
    "across95": Work("I: trigger to first step, in another process, p95", "ms", 1e3),
    "idle": Work("I: an idle worker, of a core", "%"),
    "newest": Work("J: a page of the newest of {size:,} runs", "ms", 1e3),
    "by status": Work("J: a page of {size:,} runs by status", "ms", 1e3),
    "by workflow": Work("J: a page of {size:,} runs by workflow", "ms", 1e3),
    "by both": Work("J: a page of {size:,} runs by workflow and status", "ms", 1e3),
    "by tag": Work("J: a page of {size:,} runs by tag", "ms", 1e3),
    "by prefix": Work("J: a page of {size:,} runs by a rare prefix", "ms", 1e3),
    "by time": Work("J: a page of {size:,} runs by time and status", "ms", 1e3),
    "oldest": Work("J: a page of the oldest of {size:,} runs", "ms", 1e3),
    "page 1,000": Work("J: page 1,000 of {size:,} runs", "ms", 1e3),
    "counts": Work("J: capped counts of {size:,} runs", "ms", 1e3),
    "restart": Work("I: kill -9 to next step, without start and imports", "ms", 1e3),
}


class Key(NamedTuple):
    """What a value belongs to: a store, a workload, its size, and a contender."""

    place: str
    work: str
    size: int
    who: str = PERDURE


class Numbers:
    """All values of one run of the suite."""

    def __init__(self) -> None:
        self._values: dict[Key, list[float]] = {}

    def add(self, key: Key, value: float) -> None:
        """Add a value."""
        self._values.setdefault(key, []).append(value)

    def get(self, place: str, work: str, size: int, who: str = PERDURE) -> float | None:
        """Return the median, or `None` if it was not measured."""
        values = self._values.get(Key(place, work, size, who))
        return median(values) if values else None

    def sizes(self, place: str, work: str, who: str = PERDURE) -> list[int]:
        """Return the sizes at which a workload was measured, smallest first."""
        sizes_measured = (
            key.size for key in self._values if key[:2] == (place, work) and key.who == who
        )
        return sorted(sizes_measured)

    def contenders(self, place: str) -> list[str]:
        """Return the contenders that were measured on a store, in order of appearance."""
        return list(dict.fromkeys(key.who for key in self._values if key.place == place))

    def rows(self, place: str) -> list[tuple[str, int]]:
        """Return the workloads of a store with their sizes, in the order in which they were
        measured.
        """
        return list(dict.fromkeys((key.work, key.size) for key in self if key.place == place))

    def values(self, key: Key) -> list[float]:
        """Return all values of a key."""
        return self._values[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)


def format_value(work: str, value: float) -> str:
    """Return a formatted value with its unit."""
    _, unit, scale = WORKS[work]
    value *= scale
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
