"""The operations on the schedule; see `runs`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import merge
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from perdure.errors import StoreUnavailable
from perdure.store import Due, NewRun, Rest, SupportedVersions
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.leases import LeasedRun, LeaseVerbs, read_lease
from perdure.stores.sqlite.runs import (
    MICROSECOND,
    Verb,
    decode_text,
    header_columns,
    json_text,
    rest_columns,
    tags_text,
)
from perdure.stores.sqlite.statements import Row, Statement

# The order of due runs: wake time, version and key.
DueRow: TypeAlias = tuple[int, int, str]

# SQLite merges up to 500 ranges in one statement.
_MAX_RANGES = 256
_LAST_VERSION = 2**63 - 1
# A blob sorts after all text.
_AFTER_NAMES = b""

DUE = """
    $arms
    ORDER BY wake_at, version, id
    LIMIT :most
"""

# A claim looks for runs that are due now: it has no :until, and need not read a row for its owner.
DUE_RANGE = """
    SELECT wake_at, version, id FROM $runs
    WHERE queue = :queue AND workflow IS :workflow$n AND wake_at <= coalesce(:until, $now)
        AND (version BETWEEN :first$n AND :last$n OR version = :unbound$n)
        AND substr(id, 1, length(:prefix)) = :prefix
        AND (wake_at <= $now OR owner IS NULL)
"""

# One seek per workflow, and a last one that finds none: its NULL stands for runs without a
# workflow.
DUE_WORKFLOWS = """
    WITH RECURSIVE workflows (name) AS (
        SELECT ''
        UNION ALL
        SELECT (
            SELECT workflow FROM $runs
            WHERE queue = :queue AND wake_at IS NOT NULL AND workflow > workflows.name
            ORDER BY workflow
            LIMIT 1
        )
        FROM workflows WHERE name IS NOT NULL
    )
    SELECT name FROM workflows WHERE name IS NOT ''
"""

# One seek per queue and workflow. After a workflow with due runs, the rest of the queue is skipped:
# a blob sorts after every name.
QUEUES = """
    WITH RECURSIVE ranges (queue, workflow, is_due) AS (
        SELECT :low, '', false
        UNION ALL
        SELECT r.queue, r.workflow, EXISTS (
            SELECT 1 FROM $runs AS d
            WHERE d.queue = r.queue AND d.workflow = r.workflow AND d.wake_at <= :until
                AND substr(d.id, 1, length(:prefix)) = :prefix
        )
        FROM ranges CROSS JOIN $runs AS r
        WHERE r.rowid = (
            SELECT rowid FROM $runs AS n
            WHERE n.wake_at IS NOT NULL AND n.queue < :high
                AND (n.queue, n.workflow)
                    > (ranges.queue, CASE WHEN ranges.is_due THEN x'' ELSE ranges.workflow END)
            ORDER BY n.queue, n.workflow
            LIMIT 1
        )
    )
    SELECT queue FROM ranges WHERE is_due LIMIT :limit
"""


class TooManyDue(Exception):
    """More runs are due than a claim was meant for."""


class Range(NamedTuple):
    """Versions of a workflow, both ends included; `unbound` is 0 to include unversioned runs."""

    workflow: str | None
    first: int
    last: int
    unbound: int


class ScheduleVerbs(LeaseVerbs):
    """The operations that create runs and find due runs."""

    def enqueue(self, runs: Sequence[NewRun]) -> Verb[Sequence[bool]]:
        """Create runs that wait for a claim; return `False` for each id that existed."""
        time = self._now_and_stamp()
        rows = [self._new_row(run, time) for run in runs]
        outcomes = yield self._statements.many(sql.CREATE, rows)
        # Of two requests with the same id, the first created the run.
        is_created = {row[0]: True for outcome in outcomes for row in outcome.rows}
        return [is_created.pop(row[0], False) for row in rows]

    def due(
        self,
        until: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Verb[Sequence[Due]]:
        """Return the unowned runs whose wake time is at or before `until`, earliest first."""
        rows = yield from self._due(limit, supports, queues, to_microseconds(until, "now"))
        return [Due(self._id(key), from_microseconds(wake_at)) for wake_at, _, key in rows]

    def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
        *,
        separately: bool = False,
        at_most: int | None = None,
    ) -> Verb[Sequence[LeasedRun]]:
        """Lease the due runs, earliest first; with `separately`, read them in another round.

        With `at_most`, raise `TooManyDue` if more are due. No statement follows the one that grants
        leases, so an error loses none of them. Without it, the runs that were leased are returned
        if the file is locked afterwards.
        """
        runs: list[LeasedRun] = []
        while True:
            quotas = _remaining_quotas(queues, runs)
            try:
                due = yield from self._due(limit - len(runs), supports, quotas)
                if at_most is not None and len(due) > at_most:
                    raise TooManyDue
                new_runs = yield from self._claim(due, owner, ttl, separately=separately)
            except StoreUnavailable:
                if not runs:
                    raise
                return runs
            runs += new_runs
            # Others may have claimed some between two transactions, so look for more.
            if len(new_runs) == len(due) or (at_most is not None and runs):
                return runs

    def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Verb[Sequence[str]]:
        """Return queues with due runs, by name."""
        [outcome] = yield [
            self._statement(
                QUEUES,
                low=low,
                high=_AFTER_NAMES if high is None else high,
                limit=limit,
                prefix=self._prefix,
                until=to_microseconds(now, "now"),
            )
        ]
        return [queue for (queue,) in outcome.rows]

    def _new_row(self, run: NewRun, time: Row) -> Row:
        offset: int | None = -(run.head_start // MICROSECOND)
        rest = Rest("queued", run.wake_at)
        if run.rest is not None:
            rest, offset = run.rest, None
        status, awaits, wake_at = rest_columns(rest)
        header = (run.version, tags_text(run.tags), run.summary)
        changes = header_columns(rest)
        columns = (self._prefix + run.id, decode_text(run.snapshot), run.workflow, wake_at)
        return (
            *(*columns, None, offset, *time, status, awaits, run.queue),
            *(old if new is None else new for old, new in zip(header, changes, strict=True)),
        )

    def _due(
        self,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
        until: int | None = None,
    ) -> Verb[Sequence[DueRow]]:
        """Return runs that are due at `until`, by default now."""
        if supports is None:
            ranges = yield from self._all_ranges([*queues])
        else:
            ranges = dict.fromkeys(queues, _supported(supports))
        statements = {
            queue: [*self._due_statements(queue, most, ranges[queue], until)]
            for queue, most in queues.items()
        }
        outcomes = iter((yield [*chain.from_iterable(statements.values())]))
        due = [
            islice(merge(*(outcome.rows for outcome in islice(outcomes, len(one)))), queues[queue])
            for queue, one in statements.items()
        ]
        return [*islice(merge(*due), limit)]

    def _all_ranges(self, queues: Sequence[str]) -> Verb[dict[str, Sequence[Range]]]:
        """Return all versions of all workflows that have scheduled runs in each queue."""
        outcomes = yield [self._statement(DUE_WORKFLOWS, queue=queue) for queue in queues]
        return {
            queue: [Range(workflow, 0, _LAST_VERSION, 0) for (workflow,) in outcome.rows]
            for queue, outcome in zip(queues, outcomes, strict=True)
        }

    def _due_statements(
        self, queue: str, most: int, ranges: Sequence[Range], until: int | None
    ) -> Iterator[Statement]:
        values = {"queue": queue, "most": most, "until": until, "prefix": self._prefix}
        for start in range(0, len(ranges), _MAX_RANGES):
            part = ranges[start : start + _MAX_RANGES]
            arms = {
                f"{column}{n}": value
                for n, range in enumerate(part)
                for column, value in zip(Range._fields, range, strict=True)
            }
            template = self._statements.sql(DUE, DUE_RANGE, len(part))
            yield Statement(template, {**values, **arms, "now": self._now()})

    def _claim(
        self, due: Sequence[DueRow], owner: str, ttl: timedelta, *, separately: bool
    ) -> Verb[Sequence[LeasedRun]]:
        """Lease these runs, except those that were claimed or changed in the meantime."""
        if not due:
            return []
        ids, latest = json_text([key for _, _, key in due]), due[-1][0]
        times = {"latest": latest, "ttl": ttl // MICROSECOND, "now": self._now()}
        claim = self._statement(sql.CLAIM, ids=ids, owner=owner, **times)
        claim_outcome, *outcomes = yield [claim, *([] if separately else self._contents(ids))]
        rows = {row[0]: row[1:] for row in claim_outcome.rows}
        keys = [key for _, _, key in due if key in rows]
        runs = [read_lease(self._id(key), owner, ttl, *rows[key]) for key in keys]
        if not separately:
            contents = self._read_contents(outcomes)
            return [contents.added_to(one, key) for one, key in zip(runs, keys, strict=True)]
        complete = yield from self._with_journals(runs)
        return [one for one in complete if one is not None]


def _remaining_quotas(queues: Mapping[str, int], runs: Sequence[LeasedRun]) -> Mapping[str, int]:
    """Return how many more runs may be claimed from each queue."""
    if not runs:
        return queues
    counts = Counter(one.queue for one in runs)
    return {queue: most - counts[queue] for queue, most in queues.items() if most > counts[queue]}


def _supported(supports: Sequence[SupportedVersions]) -> Sequence[Range]:
    """Return ranges that contain every supported run once; unversioned runs are in the first."""
    ranges: list[Range] = []
    for workflow, first, last in sorted((one.workflow, one.first, one.last) for one in supports):
        previous = ranges[-1] if ranges and ranges[-1].workflow == workflow else None
        if previous is None:
            ranges.append(Range(workflow, first, last, 0))
        elif first <= previous.last:
            ranges[-1] = previous._replace(last=max(previous.last, last))
        else:
            ranges.append(Range(workflow, first, last, -1))
    return ranges
