"""What every view works with: the questions, the verbs and the options of one dashboard."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, Literal, TypeVar

from perdure.errors import StoreError
from perdure.insights import Insights
from perdure.insights.redaction import DEFAULT_REDACTION
from perdure.operations import Operations

T = TypeVar("T")

_MAX_READS = 4
_MAX_REVEALS = 1000


@dataclass(frozen=True, slots=True)
class Board:
    """The parts of a dashboard. `revealed` answers without redaction."""

    insights: Insights
    revealed: Insights
    operations: Operations
    environment: str = ""
    live: Literal["sse", "poll"] = "sse"
    show_source: bool = False
    has_types: bool = False
    audit_reveals: bool = False
    # A slow page must not keep the store's connections from the workers of this process.
    reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_READS))
    background: set[asyncio.Task[object]] = field(default_factory=set)
    _reveals: set[tuple[str, str, str]] = field(default_factory=set)

    async def reveal(self, run_id: str, person: str, now: datetime) -> Insights:
        """Return the insights that show secrets; the audit trail says who looked, if it should.

        A page that stays open is read every second, so a person's act on a run lasts for the hour.
        """
        reveal = (person, run_id, f"{now:%Y-%m-%d %H}")
        if self.audit_reveals and reveal not in self._reveals:
            await self.operations.note_reveal(run_id, by=person)
            if len(self._reveals) >= _MAX_REVEALS:
                self._reveals.clear()
            self._reveals.add(reveal)
        return self.revealed


@dataclass(frozen=True, slots=True)
class Region(Generic[T]):
    """A part of a page: its data, or why it could not be read."""

    data: T | None = None
    error: str = ""


async def region(reading: Awaitable[T]) -> Region[T]:
    """Read one part of a page; the other parts are shown even if this one fails."""
    try:
        return Region(await reading)
    except StoreError as error:
        return Region(error=problem_of(error))


def problem_of(error: StoreError, failed: str = "read from") -> str:
    """Return what a page says about the store; drivers quote URLs with their passwords."""
    return DEFAULT_REDACTION.text(f"Could not {failed} the store: {error}")
