"""The SQL of a search: a bounded walk along an index, in the order of the search.

A walk yields places (a time and an id) in that order, and whether the run there matches. It reads
only the index if that is sufficient. The result includes the last place that it examined even if it
does not match, because it shows how far the walk came.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from perdure.snapshot import RunStatus
from perdure.store import Query
from perdure.stores._searching import Position, shows_system_runs
from perdure.stores.postgres.statements import compose

# As text: the connections of a user's pool or engine may decode jsonb.
HEADER = """
    run.updated_at, coalesce({status}, 'running') AS status, {workflow} AS workflow, run.owner,
    run.version, run.queue, run.tags::text AS tags, run.summary, {created_at} AS created_at,
    run.wake_at, run.awaits::text AS awaits, run.takeovers
"""
HEADER_COLUMNS = (
    *("updated_at", "status", "workflow", "owner", "version", "queue", "tags", "summary"),
    *("created_at", "wake_at", "awaits", "takeovers"),
)

_RUNS = "{runs} AS run"

# BETWEEN is redundant, but makes the planner expect few runs in a group. Otherwise it may walk
# along all runs by update, which also have the right order, only to find that none is in the group.
_IN_GROUP = """
    {status} = searched.status AND {status} BETWEEN searched.status AND searched.status
"""
NAMED = "{workflow} = searched.workflow AND" + _IN_GROUP
UNNAMED = "searched.workflow IS NULL AND {workflow} IS NULL AND" + _IN_GROUP

# The places of a walk along all runs that satisfy a condition.
_ALONG = """
    SELECT run.updated_at AS time, run.id, {matches} AS matches
    FROM {source}
    WHERE {bounds}
    ORDER BY run.updated_at {order}, run.id {order}
    LIMIT {depth}
"""

# OFFSET keeps the planner from walking along another index, in the order of the search.
_IN_ID_RANGE = """
    (SELECT * FROM {runs} AS run WHERE run.id >= {low} AND run.id < {high} OFFSET 0) AS run
"""

_ALONG_TAG = """
    SELECT tagged.created_at AS time, tagged.run AS id, coalesce((
        SELECT {matches} FROM {runs} AS run
        WHERE run.id = tagged.run COLLATE {id_collation} AND {created_at} = tagged.created_at
    ), false) AS matches
    FROM {tags} AS tagged
    WHERE tagged.tag = sha256(convert_to({tag}, 'UTF8')) AND {bounds}
    ORDER BY tagged.created_at {order}, tagged.run {order}
    LIMIT {depth}
"""

_FIRST = """
    SELECT * FROM (SELECT walked.*, row_number() OVER () AS n FROM ({walk}) AS walked) AS found
    WHERE found.matches OR found.n = {depth}
    LIMIT {limit}
"""

_IN_GROUPS = """
    SELECT {columns}
    FROM unnest((SELECT {workflows}::text[]), (SELECT {statuses}::text[]))
        AS searched (workflow, status)
    CROSS JOIN LATERAL ({places}) AS found
"""
_COUNT = """
    SELECT count(*) FILTER (WHERE walked.matches), count(*) = {depth} FROM ({walk}) AS walked
"""

_WITH_HEADERS = """
    SELECT found.time, found.id, found.matches, found.n = {depth} AS is_last, run.*
    FROM (
        SELECT * FROM ({places}) AS found
        ORDER BY found.time {order}, found.id {order}
        LIMIT {limit}
    ) AS found
    LEFT JOIN LATERAL (
        SELECT {header} FROM {runs} AS run
        WHERE run.id = found.id COLLATE {id_collation}
        LIMIT 1
    ) AS run ON true
    ORDER BY found.time {order}, found.id {order}
"""


class Group(NamedTuple):
    """The runs of one workflow with one status: a range of an index."""

    workflow: str | None
    status: RunStatus


class Walk:
    """Writes the SQL of one search, which refers to `values`.

    `depth` is the maximum number of runs it examines; per group, if it walks along several.
    """

    def __init__(
        self, query: Query, prefix: str, depth: int, after: Position | None = None
    ) -> None:
        self.values: list[object] = []
        self._query = query
        self._prefix = prefix
        self._after = after
        self._parts = {
            "depth": self._bind(depth),
            "order": "ASC" if query.oldest_first else "DESC",
        }
        self._filters = [*self._by_header()]

    def by_update(self, limit: int) -> str:
        """Return a search along all runs."""
        return self._with_headers(self._first(self._along(_RUNS, self._bounds()), limit))

    def by_id(self, low: str, high: str, limit: int) -> str:
        """Return a search along the runs whose ids are in a range."""
        runs = compose(_IN_ID_RANGE, low=self._bind(low), high=self._bind(high))
        walk = self._along(runs, [*self._bounds(), *self._by_group()])
        return self._with_headers(self._first(walk, limit))

    def by_tag(self, tag: str, limit: int) -> str:
        """Return a search along the runs with a tag, by creation."""
        tags = f"run.tags ?& {self._bind(list(self._query.tags))}::text[]"
        walk = compose(
            _ALONG_TAG,
            matches=_all([tags, *self._filters, *self._by_group(), *self._update_conditions()]),
            tag=self._bind(tag),
            bounds=_all(self._after_conditions("tagged.created_at, tagged.run")),
        )
        return self._with_headers(self._first(walk, limit))

    def by_group(self, groups: Sequence[Group], limit: int) -> str:
        """Return a search along the runs of each group."""
        places = self._first(self._along_group(), limit)
        return self._with_headers(self._in_groups(groups, "found.*", places))

    def counts(self, groups: Sequence[Group]) -> str:
        """Return a count of the runs of each group, and whether it is partial."""
        count = compose(_COUNT, walk=self._along_group(), **self._parts)
        return self._in_groups(groups, "searched.*, found.*", count)

    def _in_groups(self, groups: Sequence[Group], columns: str, places: str) -> str:
        workflows, statuses = (self._bind(list(names)) for names in zip(*groups, strict=True))
        return compose(
            _IN_GROUPS, columns=columns, workflows=workflows, statuses=statuses, places=places
        )

    def _along_group(self) -> str:
        bounds = self._bounds()
        walks = (self._along(_RUNS, [group, *bounds]) for group in (NAMED, UNNAMED))
        return "({}) UNION ALL ({})".format(*walks)

    def _along(self, runs: str, bounds: Sequence[str]) -> str:
        return compose(_ALONG, source=runs, matches=_all(self._filters), bounds=_all(bounds))

    def _first(self, walk: str, limit: int) -> str:
        self._parts["limit"] = self._bind(limit)
        return compose(_FIRST, walk=walk, **self._parts)

    def _with_headers(self, places: str) -> str:
        return compose(_WITH_HEADERS, places=places, header=HEADER, **self._parts)

    def _bind(self, value: object) -> str:
        self.values.append(value)
        return f"${len(self.values)}"

    def _bounds(self) -> list[str]:
        return [*self._update_conditions(), *self._after_conditions("run.updated_at, run.id")]

    def _update_conditions(self) -> Iterator[str]:
        if self._query.since is not None:
            yield f"run.updated_at >= {self._bind(self._query.since)}"
        if self._query.until is not None:
            yield f"run.updated_at < {self._bind(self._query.until)}"

    def _after_conditions(self, place: str) -> Iterator[str]:
        if self._after is not None:
            time, id = self._bind(self._after.time), self._bind(self._prefix + self._after.id)
            yield f"({place}) {'>' if self._query.oldest_first else '<'} ({time}, {id})"

    def _by_header(self) -> Iterator[str]:
        if prefix := self._prefix + self._query.prefix:
            yield f"starts_with(run.id, {self._bind(prefix)})"
        if not shows_system_runs(self._query):
            yield f"NOT starts_with(run.id, {self._bind(self._prefix + '~')})"
        if self._query.queue is not None:
            yield f"run.queue = {self._bind(self._query.queue)}"

    def _by_group(self) -> Iterator[str]:
        if self._query.statuses:
            statuses = self._bind(list(self._query.statuses))
            yield f"coalesce({{status}}, 'running') = ANY ({statuses}::text[])"
        if self._query.workflows:
            yield f"{{workflow}} = ANY ({self._bind(list(self._query.workflows))}::text[])"


def _all(conditions: Iterable[str]) -> str:
    return " AND ".join(conditions) or "true"
