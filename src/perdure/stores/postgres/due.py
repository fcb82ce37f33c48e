"""Find due runs, earliest first: each queue and workflow is a range of the due index."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from perdure.store import SupportedVersions
from perdure.stores.postgres.statements import compose

_NEWEST_VERSION = 2**63 - 1

_RANGES = """
    unnest(
        (SELECT $4::text[]), (SELECT $5::text[]), (SELECT $6::bigint[]), (SELECT $7::bigint[]),
        (SELECT $8::bigint[])
    ) WITH ORDINALITY AS range (queue, workflow, first, last, most, i)
"""
_IN_RANGE = """
    run.queue = range.queue AND coalesce(run.workflow, '') = range.workflow
        AND run.version >= range.first AND run.version <= range.last
"""

# SKIP LOCKED never waits, so the order of the locks does not matter.
_LOCKED_IN_RANGE = compose(
    """
    CROSS JOIN LATERAL (
        SELECT id, wake_at AS since, xmin AS row_version FROM {runs} AS run
        WHERE {in_range} AND run.wake_at <= statement_timestamp() AND starts_with(run.id, $3)
        ORDER BY run.wake_at
        LIMIT range.most
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS run
    """,
    in_range=_IN_RANGE,
)
_LEASED_RUNS = """
    leased AS (
        UPDATE {runs} AS run SET
            {set_claimed}, owner = $1, wake_at = statement_timestamp() + $2::interval
        WHERE run.id = ANY (ARRAY(SELECT id FROM locked))
        RETURNING {grant_columns}
    )
    SELECT leased.*, {is_stale} AS stale
    FROM locked JOIN leased USING (id) ORDER BY locked.since, locked.id
"""

CLAIM_ONE = compose(
    """
    WITH locked AS MATERIALIZED (
        SELECT run.* FROM (
            SELECT $4::text AS queue, $5::text AS workflow, $6::bigint AS first,
                $7::bigint AS last, $8::bigint AS most
        ) AS range {locked_in_range}
    ), {leased}
    """,
    locked_in_range=_LOCKED_IN_RANGE,
    leased=_LEASED_RUNS,
)

# The earliest runs over all ranges decide how many to lock in each. Locking up to the limit in
# every range would hide runs from other claimants that this claim then does not take.
CLAIM = compose(
    """
    WITH ranges AS MATERIALIZED (
        SELECT * FROM {ranges}
    ), due AS (
        SELECT range.i, range.most, run.wake_at,
            row_number() OVER (PARTITION BY range.queue ORDER BY run.wake_at) AS place
        FROM ranges AS range CROSS JOIN LATERAL (
            SELECT run.wake_at FROM {runs} AS run
            WHERE {in_range} AND run.wake_at <= statement_timestamp() AND starts_with(run.id, $3)
            ORDER BY run.wake_at
            LIMIT range.most
        ) AS run
    ), earliest AS (
        SELECT i FROM due WHERE place <= most ORDER BY wake_at LIMIT $9
    ), locked AS MATERIALIZED (
        SELECT run.* FROM (
            SELECT queue, workflow, first, last, chosen.most
            FROM ranges JOIN (SELECT i, count(*) AS most FROM earliest GROUP BY i) AS chosen
                USING (i)
        ) AS range {locked_in_range}
    ), {leased}
    """,
    ranges=_RANGES,
    in_range=_IN_RANGE,
    locked_in_range=_LOCKED_IN_RANGE,
    leased=_LEASED_RUNS,
)

DUE = compose(
    """
    SELECT due.id, due.wake_at FROM (
        SELECT run.id, run.wake_at, range.most,
            row_number() OVER (PARTITION BY range.queue ORDER BY run.wake_at) AS place
        FROM {ranges} CROSS JOIN LATERAL (
            SELECT run.id, run.wake_at FROM {runs} AS run
            WHERE {in_range} AND run.wake_at <= $1 AND starts_with(run.id, $3)
                AND (run.owner IS NULL OR run.wake_at <= statement_timestamp())
            ORDER BY run.wake_at
            LIMIT range.most
        ) AS run
    ) AS due
    WHERE due.place <= due.most
    ORDER BY due.wake_at, due.id
    LIMIT $2
    """,
    ranges=_RANGES,
    in_range=_IN_RANGE,
)

# A loose index scan: one lookup per workflow and queue.
WORKFLOWS_OF_QUEUES = """
    WITH RECURSIVE pair (queue, workflow) AS (
        SELECT asked.queue, first.workflow FROM unnest((SELECT $1::text[])) AS asked (queue)
        CROSS JOIN LATERAL (
            SELECT coalesce(run.workflow, '') AS workflow FROM {runs} AS run
            WHERE run.wake_at IS NOT NULL AND run.queue = asked.queue
            ORDER BY coalesce(run.workflow, '')
            LIMIT 1
        ) AS first
        UNION ALL
        SELECT pair.queue, next.workflow FROM pair CROSS JOIN LATERAL (
            SELECT coalesce(run.workflow, '') AS workflow FROM {runs} AS run
            WHERE run.wake_at IS NOT NULL AND run.queue = pair.queue
                AND coalesce(run.workflow, '') > pair.workflow
            ORDER BY coalesce(run.workflow, '')
            LIMIT 1
        ) AS next
    )
    SELECT queue, workflow FROM pair
"""

_PAIR = """
    SELECT run.queue, coalesce(run.workflow, '') AS workflow, (
        SELECT true FROM {runs} AS due
        WHERE due.queue = run.queue AND coalesce(due.workflow, '') = coalesce(run.workflow, '')
            AND due.wake_at <= $1 AND starts_with(due.id, $4)
        ORDER BY due.wake_at
        LIMIT 1
    ) IS NOT NULL AS is_due
    FROM {runs} AS run
    WHERE run.wake_at IS NOT NULL AND {condition} {extra}
    ORDER BY run.queue, coalesce(run.workflow, '')
    LIMIT 1
"""

# A loose index scan that stops at the limit: two lookups per workflow and queue, since a queue is
# due if one of its workflows is.
QUEUES = compose(
    """
    WITH RECURSIVE pair AS (
        SELECT first.*, false AS was_due FROM ({first_pair}) AS first
        UNION ALL
        SELECT next.*, next.queue = pair.queue AND (pair.is_due OR pair.was_due)
        FROM pair CROSS JOIN LATERAL ({next_pair}) AS next
    )
    SELECT queue FROM pair WHERE is_due AND NOT was_due LIMIT $2
    """,
    first_pair=compose(_PAIR, condition="run.queue >= $3"),
    next_pair=compose(
        _PAIR, condition="(run.queue, coalesce(run.workflow, '')) > (pair.queue, pair.workflow)"
    ),
)


class DueRange(NamedTuple):
    """A range of the due index, and the maximum number of runs to take from it.

    The workflow is empty for runs without a workflow.
    """

    queue: str
    workflow: str
    first: int
    last: int
    most: int


def ranges_of(supports: Sequence[SupportedVersions], queues: Mapping[str, int]) -> list[DueRange]:
    """Return the ranges of the runs in these queues that a worker can execute."""
    by_workflow = _ranges_by_workflow(tuple(supports))
    return [
        DueRange(queue, *range, most) for queue, most in queues.items() for range in by_workflow
    ]


# Cached, because a worker asks for the same versions in each claim.
@lru_cache
def _ranges_by_workflow(supports: tuple[SupportedVersions, ...]) -> list[tuple[str, int, int]]:
    versions: dict[str, list[tuple[int, int]]] = {}
    for supported in supports:
        first, last = max(supported.first, 0), min(supported.last, _NEWEST_VERSION)
        # Every SupportedVersions of a workflow includes version 0.
        versions.setdefault(supported.workflow, [(0, 0)]).append((first, last))
    return [
        (workflow, first, last)
        for workflow, ranges in versions.items()
        for first, last in _merge_ranges(ranges)
    ]


def _merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping ranges: a run in two of them would be granted twice."""
    merged_ranges: list[tuple[int, int]] = []
    for first, last in sorted(range for range in ranges if range[0] <= range[1]):
        if merged_ranges and first <= merged_ranges[-1][1] + 1:
            merged_ranges[-1] = (merged_ranges[-1][0], max(last, merged_ranges[-1][1]))
        else:
            merged_ranges.append((first, last))
    return merged_ranges


def every_range(pairs: Sequence[tuple[str, str]], queues: Mapping[str, int]) -> list[DueRange]:
    """Return the ranges of all runs of these pairs of queue and workflow."""
    return [
        DueRange(queue, workflow, 0, _NEWEST_VERSION, queues[queue]) for queue, workflow in pairs
    ]
