"""Pages of runs: the store's index finds candidates, and filters choose among them.

A search with filters is bounded: it stops after `EXAMINED` runs or `TIME`, and the page says how
far it looked. Only filters on payloads read snapshots.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

from perdure.clock import Clock
from perdure.errors import PerdureError
from perdure.insights.matching import matches_header, matches_payload
from perdure.insights.model import RunRow, RunsPage, Tally
from perdure.insights.query import ParsedQuery, parse_query
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.store import Page, RunSummary, SearchStore

EXAMINED = 20_000
TIME = 0.7
"""The maximum duration of a search with filters, in seconds."""

_COUNTED = 4
BATCH = 500
LOADS = 32
"""The maximum number of snapshots read at once."""


class Search:
    """A search that ends when its page is full, nothing is left, or its bounds are reached."""

    def __init__(
        self,
        store: SearchStore,
        query: ParsedQuery,
        redact: Redact,
        clock: Clock,
        owners: Mapping[str, frozenset[str]],
    ) -> None:
        self._store = store
        self._query = query
        self._redact = redact
        self._clock = clock
        self._owners = owners
        self._filters = query.filters
        self._needs_payload = any(term.field == "payload" for term in self._filters)
        self._rows: list[RunRow] = []
        self._examined = 0
        self._cursor: str | None = None
        self._last: datetime | None = None

    async def page(self, limit: int, after: str | None) -> RunsPage:
        """Return up to `limit` runs."""
        if _asks_for_secrets(self._query, self._redact):
            return RunsPage(())
        if not self._filters:
            return self._full_page(await self._store.search(self._query.index, limit, after=after))
        end = self._clock.monotonic() + TIME
        self._cursor = after
        while True:
            page = await self._store.search(self._query.index, BATCH, after=self._cursor)
            await self._add(page, limit, end)
            if len(self._rows) == limit:
                return RunsPage(tuple(self._rows), self._cursor, self._examined)
            if page.cursor is None and self._is_through(page):
                return RunsPage(tuple(self._rows), None, self._examined)
            if self._examined >= EXAMINED or self._clock.monotonic() >= end:
                return RunsPage(tuple(self._rows), self._cursor, self._examined, self._last)

    async def without(self, limit: int) -> dict[str, Tally]:
        """Return for each term how many runs match the others, where an index can tell."""
        tallies: dict[str, Tally] = {}
        for left_out in self._query.terms:
            terms = [term for term in self._query.terms if term is not left_out]
            fewer = parse_query(" ".join(map(str, terms)), self._clock.now())
            if terms and not fewer.filters and len(tallies) < _COUNTED:
                search = Search(self._store, fewer, self._redact, self._clock, {})
                page = await search.page(limit, None)
                tallies[str(left_out)] = Tally(len(page.runs), page.cursor is not None)
        return tallies

    def _full_page(self, page: Page) -> RunsPage:
        rows = tuple(row_of(run, self._redact) for run in page.runs)
        return RunsPage(rows, page.cursor, len(rows), page.searched_until)

    def _is_through(self, page: Page) -> bool:
        return not page.runs or page.runs[-1].cursor == self._cursor

    async def _add(self, page: Page, limit: int, end: float) -> None:
        """Add the runs of a page that match, and move the cursor to the last one examined."""
        size = LOADS if self._needs_payload else BATCH
        for first in range(0, len(page.runs), size):
            batch = page.runs[first : first + size]
            for run, row in zip(batch, await self._matching(batch), strict=True):
                self._examined += 1
                self._cursor = run.cursor
                self._last = run.created_at if self._query.index.tags else run.updated_at
                if row is not None:
                    self._rows.append(row)
                if len(self._rows) == limit:
                    return
            if self._clock.monotonic() >= end:
                return
        if page.cursor is not None:
            self._cursor = page.cursor
            self._last = page.searched_until or self._last

    async def _matching(self, runs: Sequence[RunSummary]) -> list[RunRow | None]:
        rows = [row_of(run, self._redact) for run in runs]
        candidates = [
            row if matches_header(row, self._filters, self._owners) else None for row in rows
        ]
        if not self._needs_payload:
            return candidates
        return list(await asyncio.gather(*map(self._with_payload, candidates)))

    async def _with_payload(self, row: RunRow | None) -> RunRow | None:
        if row is None:
            return None
        try:
            snapshot = await self._store.load(row.id)
        except PerdureError:
            # An unreadable run must not end the search for the others.
            return None
        metadata = (snapshot.get("metadata") if snapshot else None) or {}
        is_match = matches_payload(metadata.get("input"), self._filters, self._redact)
        return row if is_match else None


def _asks_for_secrets(query: ParsedQuery, redact: Redact) -> bool:
    tags = (tag.partition("=") for tag in query.index.tags)
    return any(redact.hides(("tags", name), value) for name, _, value in tags)
