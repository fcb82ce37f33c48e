"""A walk along an index: the runs between two positions, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from itertools import islice
from typing import Any

from perdure.store import Query, RunSummary
from perdure.stores._searching import Position, position_of
from perdure.stores.mongo.connection import Collection
from perdure.stores.mongo.documents import UNIX_EPOCH
from perdure.stores.mongo.schema import gather_all
from perdure.stores.mongo.summary import FIELDS, summary_of
from perdure.stores.mongo.updates import Document, to_date

_OR_SAME = {"$lt": "$lte", "$gt": "$gte"}
_OPPOSITE = {"$lt": "$gt", "$gt": "$lt"}


@dataclass(frozen=True, slots=True)
class Walk:
    """Ranges of an index, each with further conditions on its runs; ordered by a time."""

    runs: Collection
    prefix: str
    query: Query
    hint: str
    by: str
    ranges: Sequence[tuple[Document, Document]]

    async def page(
        self,
        after: Position | None,
        stop: Position | None,
        limit: int,
        *,
        filtered: bool = False,
    ) -> list[RunSummary]:
        """Return the first runs between two positions, including the second."""
        bounds = self._bounds(after, stop)
        pages = [
            self._find(all_of(condition, *bounds, rest if filtered else {}), FIELDS, limit)
            for condition, rest in self.ranges
        ]
        summaries = [
            [summary_of(run, self.prefix) for run in page] for page in await gather_all(pages)
        ]
        if len(summaries) == 1:
            return summaries[0]
        newest_first = not self.query.oldest_first
        in_order = merge(*summaries, key=self.position_of, reverse=newest_first)
        return [*islice(in_order, limit)]

    async def further(self, after: Position, size: int) -> Position | None:
        """Return the position about `size` runs further on; `None` if there are fewer."""
        bounds = self._bounds(after, None, in_index=True)
        skip = size // len(self.ranges) - 1
        fields = {self.by: 1}
        pages = [self._find(all_of(each, *bounds), fields, 1, skip) for each, _ in self.ranges]
        positions = [
            Position(run.get(self.by) or UNIX_EPOCH, run["_id"][len(self.prefix) :])
            for page in await gather_all(pages)
            for run in page
        ]
        nearest = min if self.query.oldest_first else max
        return nearest(positions, default=None)

    def position_of(self, run: RunSummary) -> Position:
        """Return the position of a run."""
        return position_of(self.query, run)

    async def _find(
        self, condition: Document, fields: Mapping[str, int], limit: int, skip: int = 0
    ) -> list[Any]:
        direction = 1 if self.query.oldest_first else -1
        order = {self.by: direction, "_id": direction}
        cursor = self.runs.find(condition, fields, hint=self.hint, batch_size=limit + 1)
        return await cursor.sort(order).skip(skip).limit(limit).to_list()

    def _bounds(
        self, after: Position | None, stop: Position | None, *, in_index: bool = False
    ) -> list[Document]:
        """Return the conditions that bound the walk; with `in_index`, they need only the index."""
        forward = "$gt" if self.query.oldest_first else "$lt"
        bounds: list[Document] = []
        if after is not None:
            bounds.append(self._on_side(after, forward, forward, in_index))
        if stop is not None:
            backward = _OPPOSITE[forward]
            bounds.append(self._on_side(stop, backward, _OR_SAME[backward], in_index))
        if self.by == "updatedAt":
            bounds += updated_between(self.query.since, self.query.until)
        return bounds

    def _on_side(self, position: Position, side: str, id_side: str, in_index: bool) -> Document:
        """Match runs on one side of a position: by time, and by id if the time is equal."""
        time, id = to_date(position.time), self.prefix + position.id
        bound = {self.by: {_OR_SAME[side]: time}}
        if in_index:
            # As one of two ranges: the server reads the index once for each of them, but no
            # documents.
            return {**bound, "$or": [{self.by: {side: time}}, {"_id": {id_side: id}}]}
        return {**bound, "$nor": [{self.by: time, "_id": {"$not": {id_side: id}}}]}


def all_of(*conditions: Document) -> Document:
    """Combine conditions; empty conditions match everything."""
    nonempty = [condition for condition in conditions if condition]
    return nonempty[0] if len(nonempty) == 1 else {"$and": nonempty} if nonempty else {}


def updated_between(since: datetime | None, until: datetime | None) -> list[Document]:
    """Match runs by the time of their last update."""
    # Stored times are in whole milliseconds, so compare with the next whole millisecond.
    after = [] if since is None else [{"updatedAt": {"$gte": to_date(since, "since")}}]
    before = [] if until is None else [{"updatedAt": {"$lt": to_date(until, "until")}}]
    return after + before
