"""Search conditions of `SqlStore`, as SQL with parameter values."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from perdure.store import Query
from perdure.stores._prefix import end_of_prefix
from perdure.stores._searching import shows_system_runs
from perdure.stores._timestamps import to_microseconds


class Condition(NamedTuple):
    """A condition on a row."""

    sql: str
    values: Sequence[object] = ()


def all_of(conditions: Iterable[Condition]) -> Condition:
    """Return the conjunction of the conditions."""
    each = [*conditions]
    sql = " AND ".join(condition.sql for condition in each)
    return Condition(sql or "1 = 1", [value for one in each for value in one.values])


def one_of(column: str, names: Sequence[object]) -> Condition:
    """Return the condition that a column has one of these values."""
    return Condition(f"{column} IN ({', '.join('?' * len(names))})", names)


def in_prefix(prefix: str) -> Condition:
    """Return the condition that a run's key begins with a prefix."""
    end = end_of_prefix(prefix)
    if not prefix:
        return Condition("1 = 1")
    if end is None:
        return Condition("run.id >= ?", [prefix])
    return Condition("run.id >= ? AND run.id < ?", [prefix, end])


def is_no_system_run(prefix: str) -> Condition:
    """Return the condition that a run is not one of the engine's own."""
    return Condition("(run.id < ? OR run.id >= ?)", [f"{prefix}~", f"{prefix}\x7f"])


def is_shown(prefix: str, query: Query) -> Iterator[Condition]:
    """Yield the conditions on the ids of the runs that a query finds."""
    if prefix + query.prefix:
        yield in_prefix(prefix + query.prefix)
    if not shows_system_runs(query):
        yield is_no_system_run(prefix)


def of_group(kind: str | None, status: str) -> Condition:
    """Return the condition that a run has this status, and this workflow as indexed."""
    if kind is None:
        return Condition("$kind IS NULL AND run.status = ?", [status])
    return Condition("$kind = ? AND run.status = ?", [kind, status])


def updated_between(query: Query) -> Iterator[Condition]:
    """Yield the conditions on the last update."""
    if query.since is not None:
        yield Condition("run.updated_at >= ?", [to_microseconds(query.since)])
    if query.until is not None:
        yield Condition("run.updated_at < ?", [to_microseconds(query.until)])


def of_header(query: Query) -> Iterator[Condition]:
    """Yield the conditions on the header that depend on a single column."""
    if query.statuses:
        yield one_of("run.status", query.statuses)
    if query.workflows:
        yield one_of("run.workflow", query.workflows)
    if query.queue is not None:
        yield Condition("run.queue = ?", [query.queue])
