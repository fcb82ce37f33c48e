"""Copy runs from one store to another.

Only runs at rest are copied: a run that a process works on, or that changes while it is read, is
skipped. Copies of runs that are not over are paused, since the originals may still be executed.
After a crash, the same call continues: runs that already exist are left alone, except for messages
that were not sent yet.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from perdure.errors import PerdureError, Refused, RunNotFound, StoreError
from perdure.insights.insights import Insights
from perdure.insights.model import Bundle, RunRow
from perdure.operations.bulk import count_matches
from perdure.operations.starts import OperatorStarter
from perdure.snapshot.acts import acts_of
from perdure.store import RunSummary, require_search

_PAGE = 100
_AT_ONCE = 8
_MAX_COUNTED = 100_000
_MAX_REASONS = 20


class CopyProgress(msgspec.Struct, frozen=True):
    """The progress of a copy. `total` is `None` if there are many runs.

    `existing` counts runs that already existed, `skipped` those that could not be copied, with the
    newest `reasons`.
    """

    total: int | None = None
    copied: int = 0
    existing: int = 0
    skipped: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """How many runs were examined."""
        return self.copied + self.existing + self.skipped


class Copy:
    """A copy from the store of `source`, which must not redact, to the store of `target`."""

    def __init__(self, source: Insights, target: OperatorStarter, act: dict[str, Any]) -> None:
        self._source = source
        self._target = target
        self._act = act
        self._counts = {"copied": 0, "existing": 0, "skipped": 0}
        self._reasons: list[str] = []

    async def run(self, query: str) -> AsyncGenerator[CopyProgress]:
        """Copy the runs that match, and yield the progress every few runs."""
        parsed_query, cursor = self._source.parse(query), None
        match = await count_matches(self._source, parsed_query, _MAX_COUNTED)
        total = None if match.capped else match.count
        yield self._progress(total)
        while True:
            page = await self._source.runs(parsed_query, _PAGE, cursor)
            for first in range(0, len(page.runs), _AT_ONCE):
                await self._copy_all(page.runs[first : first + _AT_ONCE])
                yield self._progress(total)
            if (cursor := page.cursor) is None:
                return

    def _progress(self, total: int | None) -> CopyProgress:
        return CopyProgress(total, **self._counts, reasons=tuple(self._reasons))

    async def _copy_all(self, rows: Sequence[RunRow]) -> None:
        ids = [row.id for row in rows]
        store = require_search(self._target.store, "Operations.copy_from")
        revisions, existing = await asyncio.gather(
            self._source.revisions(ids), store.summaries(ids)
        )
        for row, copy in zip(rows, existing, strict=True):
            try:
                word = await self._copy(row, revisions.get(row.id), copy)
            except StoreError:
                raise
            except PerdureError as error:
                word, reason = "skipped", error.reason if isinstance(error, Refused) else error
                self._reasons = [f"{row.id}: {reason}", *self._reasons][:_MAX_REASONS]
            self._counts[word] += 1

    async def _copy(self, row: RunRow, revision: str | None, copy: RunSummary | None) -> str:
        if copy is None:
            bundle = await self._at_rest(row, revision)
            await self._target.create_imported(bundle, bundle.run_id, self._act)
            return "copied"
        # A process that died may have created the run without sending its messages.
        if copy.status == "paused" and await self._was_imported(copy.id):
            await self._target.send_imported(await self._at_rest(row, revision), copy.id)
        return "existing"

    async def _was_imported(self, run_id: str) -> bool:
        snapshot = await self._target.store.load(run_id)
        acts = acts_of(snapshot.get("metadata")) if snapshot is not None else []
        return any(act.get("verb") == "import" for act in acts)

    async def _at_rest(self, row: RunRow, revision: str | None) -> Bundle:
        """Return a run, checking that it did not change while it was read."""
        if row.owner is not None:
            raise Refused(row.id, "copy", "a process works on it")
        if revision is None:
            raise RunNotFound(row.id)
        bundle = await self._source.export(row.id)
        if await self._source.revisions([row.id]) != {row.id: revision}:
            raise Refused(row.id, "copy", "it changed while it was read")
        return bundle
