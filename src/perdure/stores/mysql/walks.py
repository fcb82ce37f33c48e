"""The SQL of a search: bounded walks along indexes, in the order of the search.

A walk finds the places (a time and an id) of matching runs in that order. The result also includes
the last place that it examined, from which the search can continue.
"""

from collections.abc import Sequence
from typing import NamedTuple

from perdure.snapshot import RunStatus
from perdure.store import Query
from perdure.stores._searching import Position, shows_system_runs
from perdure.stores.mysql.literals import Rows, Statement, Value
from perdure.stores.mysql.statements import Conditions, Statements
from perdure.stores.mysql.tags import tag_digest

HEADER = Statement(
    b"run.updated_at, run.status, run.workflow, run.owner, run.version, run.queue, run.tags, "
    b"run.summary, run.created_at, run.wake_at, run.awaits, run.takeovers"
)

BY_UPDATE = """
    SELECT run.updated_at AS time, run.id AS id, %s AS matches
    FROM {runs} AS run FORCE INDEX (by_update)
    WHERE %s ORDER BY run.updated_at {order}, run.id {order} LIMIT %s, %s
"""
# Every InnoDB index ends with the id, and is read in that order. The server does not know this for
# an index that would be too long with the id: with the id in the ORDER BY, it would sort all the
# runs.
BY_WORKFLOW = """
    SELECT run.updated_at AS time, run.id AS id, %s AS matches
    FROM {runs} AS run FORCE INDEX (by_workflow)
    WHERE %s ORDER BY run.updated_at {order} LIMIT %s, %s
"""
BY_TAG = """
    SELECT tagged.created_at AS time, tagged.run AS id, COALESCE((
        SELECT %s FROM {runs} AS run
        WHERE run.id = tagged.run AND run.created_at = tagged.created_at
    ), 0) AS matches
    FROM {tags} AS tagged FORCE INDEX (by_tag)
    WHERE %s ORDER BY tagged.created_at {order}, tagged.run {order} LIMIT %s, %s
"""

# Reading the last place separately is cheaper than numbering the places.
_PLACES = """
    (
        SELECT walked.time, walked.id, 0 AS is_last FROM (%s) AS walked
        WHERE walked.matches ORDER BY walked.time {order}, walked.id {order} LIMIT %s
    ) UNION ALL (
        SELECT walked.time, walked.id, 1 FROM (%s) AS walked
    )
"""
_SEARCH = """
    SELECT found.time, found.id, found.is_last, %s
    FROM (
        SELECT places.time, places.id, places.is_last FROM (%s) AS places
        ORDER BY places.time {order}, places.id {order}, places.is_last LIMIT %s
    ) AS found
    LEFT JOIN {runs} AS run ON run.id = found.id
    ORDER BY found.time {order}, found.id {order}, found.is_last
"""
_SEARCH_IDS = """
    SELECT run.updated_at, run.id, 0, %s FROM {runs} AS run FORCE INDEX (PRIMARY)
    WHERE run.id >= %s AND run.id < %s AND %s
    ORDER BY run.updated_at {order}, run.id {order} LIMIT %s
"""

_BEGINS = "LEFT(run.id, %s) = %s"
_DOES_NOT_BEGIN = "LEFT(run.id, %s) <> %s"
_IN_QUEUE = "run.queue = %s"
_SINCE, _UNTIL = "run.updated_at >= %s", "run.updated_at < %s"
_IN_STATUSES, _IN_WORKFLOWS = "run.status IN (%s)", "run.workflow IN (%s)"
IN_GROUP = "run.workflow <=> %s AND run.status = %s"
WITH_TAG = "tagged.tag = %s"
WITH_OTHER_TAG = """
    EXISTS (
        SELECT 1 FROM {tags} AS other
        WHERE other.run = run.id AND other.tag = %s AND other.created_at = run.created_at
    )
"""


class Group(NamedTuple):
    """The runs of one workflow with one status: a range of an index."""

    workflow: str | None
    status: RunStatus


def add_listed(conditions: Conditions, prefix: str) -> None:
    """Add the conditions that a run has the store's prefix, and is not the engine's own."""
    if prefix:
        conditions.add(_BEGINS, len(prefix), prefix)
    conditions.add(_DOES_NOT_BEGIN, len(prefix) + 1, prefix + "~")


class Walk:
    """Writes the statements of one search."""

    def __init__(
        self, statements: Statements, query: Query, prefix: str, after: Position | None
    ) -> None:
        self._statements = statements
        self._query = query
        self._prefix = prefix
        self._after = after
        self._order = "ASC" if query.oldest_first else "DESC"

    def by_update(self, limit: int, depth: int) -> Statement:
        """Return a search along all runs."""
        matches = self._add_header(Conditions())
        self._add_group(matches)
        return self._search(BY_UPDATE, matches, [self._bounds()], limit, depth)

    def by_group(self, groups: Sequence[Group], limit: int, depth: int) -> Statement:
        """Return a search along the runs of each group, examining up to `depth` of each."""
        bounds = [self._bounds() for _ in groups]
        for conditions, group in zip(bounds, groups, strict=True):
            conditions.add(IN_GROUP, *group)
        return self._search(BY_WORKFLOW, self._add_header(Conditions()), bounds, limit, depth)

    def by_tag(self, limit: int, depth: int) -> Statement:
        """Return a search along the runs with a tag, by creation."""
        matches, bounds = self._add_header(Conditions()), Conditions()
        self._add_group(matches)
        self._add_times(matches)
        first, *others = self._query.tags
        for tag in others:
            matches.add(WITH_OTHER_TAG, tag_digest(tag))
        bounds.add(WITH_TAG, tag_digest(first))
        self._add_after(bounds, "tagged.created_at", "tagged.run")
        return self._search(BY_TAG, matches, [bounds], limit, depth)

    def by_id(self, low: str, high: str, limit: int) -> Statement:
        """Return a search among the runs whose stored ids are in a range."""
        conditions = self._bounds()
        self._add_header(conditions)
        self._add_group(conditions)
        return self._bind(_SEARCH_IDS, HEADER, low, high, self._statements.all(conditions), limit)

    def _search(
        self,
        template: str,
        matches: Conditions,
        bounds: Sequence[Conditions],
        limit: int,
        depth: int,
    ) -> Statement:
        condition = self._statements.all(matches)
        walks = [
            (
                self._bind(template, condition, bound, 0, depth),
                limit,
                self._bind(template, Statement(b"0"), bound, depth - 1, 1),
            )
            for bound in map(self._statements.all, bounds)
        ]
        places = Rows(self._bind(_PLACES).sql, walks, b" UNION ALL ")
        return self._bind(_SEARCH, HEADER, places, limit)

    def _bind(self, template: str, *values: Value) -> Statement:
        return self._statements.bind(template.replace("{order}", self._order), *values)

    def _bounds(self) -> Conditions:
        conditions = Conditions()
        self._add_times(conditions)
        self._add_after(conditions, "run.updated_at", "run.id")
        return conditions

    def _add_times(self, conditions: Conditions) -> None:
        if self._query.since is not None:
            conditions.add(_SINCE, self._query.since)
        if self._query.until is not None:
            conditions.add(_UNTIL, self._query.until)

    def _add_after(self, conditions: Conditions, time: str, id: str) -> None:
        if self._after is not None:
            side = ">" if self._query.oldest_first else "<"
            condition = f"{time} {side}= %s AND ({time} {side} %s OR {id} {side} %s)"
            at, key = self._after.time, self._prefix + self._after.id
            conditions.add(condition, at, at, key)

    def _add_header(self, conditions: Conditions) -> Conditions:
        if shows_system_runs(self._query):
            conditions.add(_BEGINS, len(self._prefix), self._prefix)
        else:
            add_listed(conditions, self._prefix)
        prefix = self._prefix + self._query.prefix
        if self._query.prefix:
            conditions.add(_BEGINS, len(prefix), prefix)
        if self._query.queue is not None:
            conditions.add(_IN_QUEUE, self._query.queue)
        return conditions

    def _add_group(self, conditions: Conditions) -> None:
        if self._query.statuses:
            conditions.add(_IN_STATUSES, [*self._query.statuses])
        if self._query.workflows:
            conditions.add(_IN_WORKFLOWS, [*self._query.workflows])
