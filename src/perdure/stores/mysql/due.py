"""Find due runs by queue and workflow, earliest first.

Each queue and workflow is a range of the due index, called a *lane*; the index contains a digest of
the workflow.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import NamedTuple

from perdure.store import Due, SupportedVersions
from perdure.stores.mysql.database import Database
from perdure.stores.mysql.literals import Rows, Statement, Value, read_datetime
from perdure.stores.mysql.statements import NOW, Conditions, Statements

# Each select in a UNION costs about as much as ten seeks in an index.
_RANGES_PER_STATEMENT = 50
_ANY_NUMBER = 2**31

# A loose index scan: one seek per lane, however many runs it has. `GROUP BY` must begin with the
# first column of the index.
HEADS = """
    SELECT queue, lane, MIN(wake_at) AS head FROM {runs} FORCE INDEX (by_due)
    WHERE scheduled = 1 AND %s
    GROUP BY scheduled, queue, lane HAVING head <= %s
    ORDER BY scheduled, queue, lane LIMIT %s
"""
# One seek per lane, too. With outdated statistics, the server would read all runs of these lanes
# rather than choose a loose scan.
HEADS_OF_LANES = """
    SELECT queue, lane, (
        SELECT wake_at FROM {runs} FORCE INDEX (by_due)
        WHERE scheduled = 1 AND queue = queues.queue AND lane = lanes.lane
        ORDER BY wake_at LIMIT 1
    ) AS head
    FROM (SELECT %s COLLATE {collation} AS queue %s) AS queues
    CROSS JOIN (SELECT %s AS lane %s) AS lanes
    HAVING head <= %s
"""
_OR_VALUE = b"UNION ALL SELECT %s"
QUEUES = """
    SELECT queue, COUNT(*) FROM (%s) AS lanes GROUP BY queue ORDER BY queue
"""
DUE_IN_RANGE = """
    (SELECT %s AS place, wake_at, id FROM {runs} FORCE INDEX (by_due)
    WHERE scheduled = 1 AND queue = %s AND lane = %s AND %s ORDER BY wake_at LIMIT %s)
"""
DUE_IN_QUEUE = """
    (SELECT queue FROM {runs} FORCE INDEX (by_due)
    WHERE scheduled = 1 AND queue = %s AND %s LIMIT 1)
"""
CLAIM = """
    SELECT
        id, epoch, owner, wake_at, takeovers, CAST(snapshot AS BINARY), queue, version, messages,
        status
    FROM {runs} FORCE INDEX (by_due)
    WHERE scheduled = 1 AND queue = %s AND lane = %s AND %s
    ORDER BY wake_at LIMIT %s FOR UPDATE {skip_locked}
"""

_IN_QUEUES = "queue IN (%s)"
_FROM_QUEUE = "queue >= %s"
_BEFORE_QUEUE = "queue < %s"
_IS_AWAKE = "wake_at <= %s"
_WITH_VERSION = "(version = 0 %s)"
_OR_BETWEEN = b"OR version BETWEEN %s AND %s"

_Versions = Sequence[tuple[int, int]]


class Range(NamedTuple):
    """A lane of a queue, and the maximum number of runs to take from it.

    `versions` are the ranges of versions to take besides 0, both ends included; `None` means any
    version.
    """

    queue: str
    lane: bytes
    versions: _Versions | None
    most: int


class DueRun(NamedTuple):
    """A due run, and the index of its range in a list of ranges."""

    wake_at: datetime
    key: str
    place: int


def lane_of(workflow: str | None) -> bytes:
    """Return the digest of a workflow's name, as the default of the column computes it."""
    return sha256((workflow or "").encode()).digest()[:16]


class DueRuns:
    """Finds due runs among those whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._database = database
        self._statements = statements
        self._prefix = prefix

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Due]:
        """Return up to `limit` runs that are due, earliest first."""
        ranges, heads = await self._ranges(now, supports, queues)
        runs = await self._earliest(ranges, heads, now, limit, queues)
        return [Due(run.key.removeprefix(self._prefix), run.wake_at) for run in runs]

    async def claims(
        self, limit: int, supports: Sequence[SupportedVersions] | None, queues: Mapping[str, int]
    ) -> list[Statement]:
        """Return the statements that lock the earliest due runs, at most `limit` in total.

        The earliest runs over all ranges decide how many to lock in each. Locking up to the limit
        in every range would hide runs from other claimants that this claim then does not take.
        """
        ranges, heads = await self._ranges(NOW, supports, queues)
        if len(ranges) == 1:
            return [self._claim(ranges[0]._replace(most=min(ranges[0].most, limit)))]
        runs = await self._earliest(ranges, heads, NOW, limit, queues)
        numbers = Counter(run.place for run in runs)
        return [self._claim(ranges[place]._replace(most=numbers[place])) for place in numbers]

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> list[str]:
        """Return the names of queues with due runs, in order."""
        names: list[str] = []
        lanes = limit + _RANGES_PER_STATEMENT
        while len(names) < limit:
            heads = self._statements.bind(HEADS, self._between(low, high), now, lanes)
            rows = (await self._database.run_alone(self._statements.bind(QUEUES, heads))).rows
            names += await self._of_this_store(now, [queue for queue, _ in rows])
            if sum(number for _, number in rows) < lanes:
                break
            # Nothing sorts between a name and that name followed by U+0001: names contain no NUL.
            low = rows[-1][0] + "\x01"
        return names[:limit]

    def _between(self, low: str, high: str | None) -> Statement:
        conditions = Conditions()
        conditions.add(_FROM_QUEUE, low)
        if high is not None:
            conditions.add(_BEFORE_QUEUE, high)
        return self._statements.all(conditions)

    async def _of_this_store(self, now: datetime, queues: Sequence[str]) -> Sequence[str]:
        """Return the queues in which a run with the store's prefix is due."""
        if not self._prefix or not queues:
            return queues
        is_due = self._statements.all(self._is_due(now))
        union = self._statements.union(DUE_IN_QUEUE, [(queue, is_due) for queue in queues])
        due = {queue for (queue,) in (await self._database.run_alone(union)).rows}
        return [queue for queue in queues if queue in due]

    async def _earliest(
        self,
        ranges: Sequence[Range],
        heads: Sequence[datetime],
        now: datetime | Statement,
        limit: int,
        queues: Mapping[str, int],
    ) -> list[DueRun]:
        """Return the earliest due runs.

        The ranges are read in the order of their earliest wake times, until the remaining ones
        cannot contain an earlier run.
        """
        runs: list[DueRun] = []
        for start in range(0, len(ranges), _RANGES_PER_STATEMENT):
            if len(runs) == limit and runs[-1].wake_at <= heads[start]:
                break
            due_runs = await self._due_in(ranges, slice(start, start + _RANGES_PER_STATEMENT), now)
            runs = _first(sorted([*runs, *due_runs]), limit, ranges, queues)
        return runs

    async def _due_in(
        self, ranges: Sequence[Range], some: slice, now: datetime | Statement
    ) -> Sequence[DueRun]:
        rows = [
            (place, each.queue, each.lane, self._in_range(each, now), each.most)
            for place, each in [*enumerate(ranges)][some]
        ]
        result = await self._database.run_alone(self._statements.union(DUE_IN_RANGE, rows))
        return [DueRun(read_datetime(at), key, place) for place, at, key in result.rows]

    async def _ranges(
        self,
        now: datetime | Statement,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> tuple[list[Range], list[datetime]]:
        """Return the ranges whose earliest wake time has passed, by that time, with the times."""
        versions = _versions_by_lane(supports)
        result = await self._database.run_alone(self._heads(now, versions, queues))
        rows = sorted(result.rows, key=lambda row: row[2])
        ranges = [
            Range(queue, lane, None if versions is None else versions[lane], queues[queue])
            for queue, lane, _ in rows
        ]
        return ranges, [read_datetime(head) for _, _, head in rows]

    def _heads(
        self,
        now: datetime | Statement,
        versions: Mapping[bytes, _Versions] | None,
        queues: Mapping[str, int],
    ) -> Statement:
        if versions is None:
            in_queues = self._statements.bind(_IN_QUEUES, [*queues])
            return self._statements.bind(HEADS, in_queues, now, _ANY_NUMBER)
        return self._statements.bind(HEADS_OF_LANES, *_column(queues), *_column(versions), now)

    def _is_due(self, now: datetime | Statement) -> Conditions:
        conditions = Conditions()
        conditions.add(_IS_AWAKE, now)
        conditions.add_prefix(self._prefix)
        return conditions

    def _claim(self, range: Range) -> Statement:
        condition = self._in_range(range, NOW)
        return self._statements.bind(CLAIM, range.queue, range.lane, condition, range.most)

    def _in_range(self, range: Range, now: datetime | Statement) -> Statement:
        conditions = self._is_due(now)
        if range.versions is not None:
            conditions.add(_WITH_VERSION, Rows(_OR_BETWEEN, range.versions, b" "))
        return self._statements.all(conditions)


def _column(values: Iterable[str | bytes]) -> tuple[Value, Value]:
    """Return the values of a derived table's only column: the first, and the remaining rows."""
    first, *others = values
    return first, Rows(_OR_VALUE, [(value,) for value in others], b" ")


def _versions_by_lane(
    supports: Sequence[SupportedVersions] | None,
) -> dict[bytes, _Versions] | None:
    if supports is None:
        return None
    versions: dict[bytes, list[tuple[int, int]]] = {}
    for supported in supports:
        lane = lane_of(supported.workflow)
        versions.setdefault(lane, []).append((supported.first, supported.last))
    return {**versions}


def _first(
    runs: Sequence[DueRun], limit: int, ranges: Sequence[Range], queues: Mapping[str, int]
) -> list[DueRun]:
    """Return the first runs, within the limit and the limits of their queues."""
    quotas = dict(queues)
    first: list[DueRun] = []
    for run in runs:
        queue = ranges[run.place].queue
        if quotas[queue] > 0 and len(first) < limit:
            quotas[queue] -= 1
            first.append(run)
    return first
