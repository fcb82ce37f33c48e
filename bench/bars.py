"""Bars: measured values and the targets they must meet."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from bench.timing import timed

REPEATS = 30


@dataclass(frozen=True)
class Bar:
    """One measured value and the most it may be (or the least, for a rate).

    `unit` is "ms", "KB" or "×".
    """

    what: str
    bar: float
    measured: float
    unit: str = "ms"
    is_minimum: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the measured value is good enough."""
        return self.measured >= self.bar if self.is_minimum else self.measured <= self.bar

    def line(self) -> str:
        """Return a line of the table."""
        sign = "≥" if self.is_minimum else "≤"
        verdict = "" if self.is_met else "  missed"
        return (
            f"{self.what:<58} {sign} {self.bar:>7,.4g} {self.unit:<3}"
            f"{self.measured:>10,.2f} {self.unit}{verdict}"
        )


def p95(seconds: Iterable[float]) -> float:
    """Return the value that 95 % do not exceed."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, round(len(ordered) * 0.95))]


async def p95_ms(work: Callable[[], Awaitable[object]], repeats: int = REPEATS) -> float:
    """Return the 95th percentile of its duration in milliseconds, after one call that warms up."""
    await work()
    return 1000 * p95([await timed(work()) for _ in range(repeats)])
