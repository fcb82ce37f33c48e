"""What every view works with: insights, operations and options for one store."""

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from perdure.clock import Clock
from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.insights import NOTHING_REDACTED, Insights, Redact
from perdure.insights.redaction import DEFAULT_REDACTION
from perdure.operations import Operations
from perdure.runtime import Runtime
from perdure.runtime.definition import Definition
from perdure.store import Store

Stores: TypeAlias = Runtime | Store | Mapping[str, Runtime | Store]
"""What a dashboard shows: the runs of one store, or of several by name."""

_NAME = re.compile(r"[a-z0-9-]+")
_MAX_READS = 4
_MAX_SECONDS = 2.0
# All of a run is read, and redacting megabytes takes longer than reading them.
_LONG = 15
# A slow region times out before its page, so that the page can show the others.
_SHARE_OF_REGION = 0.75
_MAX_REVEALS = 1000


@dataclass(frozen=True, slots=True)
class Board:
    """One store of a dashboard; without a `name` the only one. `raw_insights` do not redact.

    `sources` is the code of workflows by name and version, if it is shown.
    """

    insights: Insights
    raw_insights: Insights
    operations: Operations
    name: str = ""
    environment: str = ""
    read_only: bool = False
    live: Literal["sse", "poll"] = "sse"
    has_types: bool = False
    audit_reveals: bool = False
    sources: Mapping[tuple[str, int], str] = field(default_factory=dict)
    _reads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_READS))
    _reveals: set[tuple[str, str, str]] = field(default_factory=set)

    @asynccontextmanager
    async def reading(self, *, is_long: bool = False) -> AsyncGenerator[None, None]:
        """Let only a few requests read at a time, and each of them only briefly.

        Slow pages must not block the store and its connections for workers.
        """
        async with self._reads, _in_time(_MAX_SECONDS * (_LONG if is_long else 1)):
            yield

    async def reveal(self, run_id: str, person: str, now: datetime) -> Insights:
        """Return the insights that show secrets, recording who looked if required.

        A page that stays open is read every second, so one act per person, run and hour is
        recorded.
        """
        reveal = (person, run_id, f"{now:%Y-%m-%d %H}")
        if self.audit_reveals and reveal not in self._reveals:
            await self.operations.note_reveal(run_id, by=person)
            if len(self._reveals) >= _MAX_REVEALS:
                self._reveals.clear()
            self._reveals.add(reveal)
        return self.raw_insights


def new_boards(stores: Stores, redact: Redact, clock: Clock, **options: Any) -> dict[str, Board]:
    """Return a board for each store by its name, which is "" for one without a name."""
    if not isinstance(stores, Mapping):
        return {"": _new_board(stores, redact, clock, **options)}
    # A name is the first segment of a path, where these are taken.
    if not stores or not all(map(_NAME.fullmatch, stores)) or {*stores} & {"static", "healthz"}:
        expected = "stores by names of a-z, 0-9 and -, except static and healthz"
        raise InvalidArgument("runtime_or_store", [*stores], expected)
    return {name: _new_board(stores[name], redact, clock, name=name, **options) for name in stores}


def _new_board(
    source: Runtime | Store,
    redact: Redact,
    clock: Clock,
    *,
    url: str,
    show_source: bool,
    **options: Any,
) -> Board:
    if isinstance(source, Runtime):
        store, workflows, url = source.store, source.registry.definitions, url or source.url
    else:
        store, workflows = source, []
    return Board(
        insights=Insights(store, redact=redact, clock=clock, url=url),
        raw_insights=Insights(store, redact=NOTHING_REDACTED, clock=clock, url=url),
        operations=Operations(store, via="dashboard", workflows=workflows, clock=clock),
        has_types=bool(workflows),
        sources=_sources(workflows) if show_source else {},
        **options,
    )


def _sources(workflows: Iterable[Definition[Any, Any]]) -> dict[tuple[str, int], str]:
    sources: dict[tuple[str, int], str] = {}
    for each in workflows:
        # Code that was entered or generated has none.
        with suppress(OSError):
            sources[each.name, each.version] = inspect.getsource(each.fn)
    return sources


async def read_region(reading: Awaitable[Any]) -> dict[str, Any]:
    """Read one part of a page; the others are shown even if this one fails or is slow."""
    try:
        async with _in_time(_MAX_SECONDS * _SHARE_OF_REGION):
            return {"data": await reading, "error": ""}
    except StoreError as error:
        return {"data": None, "error": problem_of(error)}


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncGenerator[None, None]:
    timer = asyncio.timeout(seconds)  # noqa: TID251 - a server waits in real time
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise StoreUnavailable(f"it did not answer within {seconds:g} s") from error


def problem_of(error: StoreError, action: str = "read from") -> str:
    """Return the text about a store error; drivers may quote URLs with passwords."""
    return DEFAULT_REDACTION.text(f"Could not {action} the store: {error}")
