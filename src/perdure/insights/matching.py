"""Filters that no index covers: on the header of a run, and on its payload."""

import operator as operators
from collections.abc import Callable, Container, Mapping, Sequence
from decimal import Decimal
from typing import Any

from perdure.insights.model import Json, RunRow
from perdure.insights.redaction import Redact, lookup
from perdure.insights.terms import Operator, Term
from perdure.limits import split_queue
from perdure.presence import worker_id

_COMPARE: dict[Operator, Callable[[Any, Any], bool]] = {
    "=": operators.eq,
    ">": operators.gt,
    "<": operators.lt,
    ">=": operators.ge,
    "<=": operators.le,
}


def matches_header(
    row: RunRow, terms: Sequence[Term], owners: Mapping[str, frozenset[str]]
) -> bool:
    """Return whether a run matches the terms on its header.

    `owners` are the owner ids of the workers that a term may name.
    """
    return all(_matches_field(row, term, owners) for term in terms if term.field != "payload")


def _matches_field(row: RunRow, term: Term, owners: Mapping[str, frozenset[str]]) -> bool:
    value = term.values[0]
    match term.field:
        case "version":
            return row.version in map(int, term.values)
        case "owner":
            return row.owner is not None and _is_owner(row.owner, value, owners.get(value, ()))
        case "queue":
            return split_queue(row.queue)[0] == value
        case "waiting":
            return value in row.awaits
        case "step":
            return value in (row.last_step, row.ended_by)
        case "error":
            return value.casefold() in row.error.casefold()
        case _:
            return True


def _is_owner(owner: str, name: str, owners: Container[str]) -> bool:
    """Return whether a worker with this id owns a run, even a lost one without a heartbeat."""
    return owner in owners or worker_id(owner) == name or owner.startswith(name)


def matches_payload(payload: Json, terms: Sequence[Term], redact: Redact) -> bool:
    """Return whether a payload matches the terms; redacted values never match."""
    return all(_matches_at(payload, term, redact) for term in terms if term.field == "payload")


def _matches_at(payload: Json, term: Term, redact: Redact) -> bool:
    try:
        value = untagged(lookup(payload, term.path, redact))
    except LookupError:
        return False
    return _compares(value, term.operator, term.values[0])


def untagged(value: Json) -> Json:
    """Return the string inside a tag such as `{"~decimal": "12.50"}`; other values as they are."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, item),) = value.items()
        if key.startswith("~") and isinstance(item, str):
            return item
    return value


def _compares(value: Json, operator: Operator, operand: str) -> bool:
    left, right = _number(value), _number(operand)
    if left is not None and right is not None:
        return _COMPARE[operator](left, right)
    text = _scalar_text(value)
    return text is not None and _COMPARE[operator](text, operand)


def _number(value: Json) -> Decimal | None:
    """Return a number, or the number in a string, exactly: ids may be large ints."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = Decimal(str(value))
    except ArithmeticError:
        return None
    return number if number.is_finite() else None


def _scalar_text(value: Json) -> str | None:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else None
