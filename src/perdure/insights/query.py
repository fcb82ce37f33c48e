"""Queries for runs, as text: `status:failed workflow:order since:24h`.

A bare word is the beginning of an id. The store's index covers the terms in `INDEXED`; the others
filter the results.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import get_args

import msgspec

from perdure.insights.terms import Field, Term, closest, parse_terms, parse_time
from perdure.runtime.schedule_workflow import SCHEDULE
from perdure.snapshot import RunStatus, system_tag
from perdure.snapshot.tags import PARENT, is_tag
from perdure.store import Query
from perdure.validation import check_id, check_prefix

STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
ORDERS = ("newest", "oldest")


class ParsedQuery(msgspec.Struct, frozen=True):
    """A query: its terms, and in `index` the part that the store's index covers.

    `str(query)` is its text; parsing that text at the same time returns an equal query.
    """

    terms: tuple[Term, ...] = ()
    index: Query = Query()

    @property
    def filters(self) -> tuple[Term, ...]:
        """The terms that no index covers."""
        return tuple(term for term in self.terms if not _is_indexed(term))

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))


def parse_query(text: str, now: datetime) -> ParsedQuery:
    """Parse a query; durations count back from `now`.

    Raise `InvalidQuery` with the position of the problem.
    """
    terms = parse_terms(text, FIELDS)
    return ParsedQuery(terms, _index(terms, now))


def _index(terms: Sequence[Term], now: datetime) -> Query:
    first = {term.field: term.values[0] for term in reversed(terms)}
    members = {term.field: term.values for term in terms}
    return Query(
        prefix=first.get("", ""),
        statuses=tuple(status for status in STATUSES if status in members.get("status", ())),
        workflows=members.get("workflow", ()),
        queue=next((term.values[0] for term in terms if _is_exact_queue(term)), None),
        tags=tuple(tag for term in terms for tag in _tags(term)),
        since=parse_time(first["since"], now) if "since" in first else None,
        until=parse_time(first["older"], now) if "older" in first else None,
        oldest_first=first.get("sort") == "oldest",
    )


def _is_indexed(term: Term) -> bool:
    return term.field in INDEXED or _is_exact_queue(term)


def _is_exact_queue(term: Term) -> bool:
    """Return whether a term names one key of a queue, or the runs in no queue.

    Each key of a queue is a separate queue in the store, so no index covers a whole queue.
    """
    return term.field == "queue" and ("/" in term.values[0] or not term.values[0])


def _tags(term: Term) -> Sequence[str]:
    name = _SYSTEM_TAGS.get(term.field)
    if name is not None:
        return [f"{name}={system_tag(name, term.values[0])}"]
    return term.values if term.field == "tag" else ()


def _check_status(value: str) -> None:
    if value not in STATUSES:
        raise ValueError(f"one of {', '.join(STATUSES)}{closest(value, STATUSES)}")


def _check_order(value: str) -> None:
    if value not in ORDERS:
        raise ValueError(" or ".join(ORDERS))


def _check_name(value: str) -> None:
    check_id(value)


def _check_queue(value: str) -> None:
    check_prefix(value)


def _check_tag(value: str) -> None:
    if not is_tag(value):
        raise ValueError("a name and a value, such as tag:customer=acme")


def _check_version(value: str) -> None:
    if not (value.isascii() and value.isdigit()):
        raise ValueError("an int >= 0")


def _check_time(value: str) -> None:
    parse_time(value, datetime(2000, 1, 1, tzinfo=UTC))


def _check_word(value: str) -> None:
    if not value:
        raise ValueError("a non-empty string")


def _check_any(_: str) -> None:
    """Accept anything: a value of a payload may even be an empty string."""


FIELDS: dict[str, Field] = {
    "status": Field("status:failed,paused", _check_status, is_list=True),
    "workflow": Field("workflow:order", _check_name, is_list=True),
    "queue": Field('queue:emails, or queue:"" for none', _check_queue),
    "tag": Field("tag:customer=acme", _check_tag, repeats=True),
    "parent": Field("parent:order-1, the runs that it started", _check_name),
    "schedule": Field("schedule:daily, the runs that it started", _check_name),
    "since": Field("updated since:24h", _check_time),
    "older": Field("not updated for older:1d", _check_time),
    "sort": Field("sort:oldest", _check_order),
    "version": Field("version:2", _check_version, is_list=True),
    "owner": Field("owner:w-3, the worker that has it", _check_word),
    "waiting": Field("waiting:approved, an event", _check_word),
    "step": Field("step:ship, recorded last", _check_word),
    "error": Field("error:CarrierDown, a part of the error", _check_word, repeats=True),
    "payload": Field("payload.total:>100", _check_any, repeats=True, has_path=True),
}

_SYSTEM_TAGS = {"parent": PARENT, "schedule": SCHEDULE}
INDEXED = frozenset({"", "status", "workflow", "tag", "since", "older", "sort", *_SYSTEM_TAGS})
