"""Completion for queries: fields, and known values."""

from collections.abc import Mapping, Sequence

import msgspec

from perdure.insights.query import FIELDS, ORDERS, STATUSES
from perdure.insights.terms import quoted

_TIMES = ("1h", "24h", "7d", "30d")
_VALUES: dict[str, Sequence[str]] = {
    "status": STATUSES,
    "sort": ORDERS,
    "since": _TIMES,
    "older": _TIMES,
}


class Candidate(msgspec.Struct, frozen=True):
    """A string that may replace `query[start:end]`, and an example or explanation of it."""

    text: str
    start: int
    end: int
    hint: str = ""


def complete(
    query: str, cursor: int | None = None, known: Mapping[str, Sequence[str]] | None = None
) -> tuple[Candidate, ...]:
    """Return the completions of the word at the cursor.

    The default for `cursor` is the end of the query. `known` are values by field, such as the names
    of workflows.
    """
    end = len(query) if cursor is None else max(0, min(cursor, len(query)))
    start = _start_of_word(query[:end])
    field, separator, value = query[start:end].partition(":")
    if not separator:
        return tuple(
            Candidate(f"{name}." if each.has_path else f"{name}:", start, end, each.hint)
            for name, each in FIELDS.items()
            if name.startswith(field)
        )
    if field not in FIELDS:
        return ()
    if FIELDS[field].is_list:
        value = value.rpartition(",")[2]
    values = (known or {}).get(field, _VALUES.get(field, ()))
    begin = end - len(value)
    return tuple(
        Candidate(quoted(each), begin, end) for each in values if each.startswith(value.strip('"'))
    )


def _start_of_word(text: str) -> int:
    """Return where the last word begins: after a space that is not quoted."""
    start, is_quoted = 0, False
    for position, char in enumerate(text):
        if char == '"' and text[position - 1 : position] != "\\":
            is_quoted = not is_quoted
        elif char.isspace() and not is_quoted:
            start = position + 1
    return start
