"""Queries as text: terms such as `status:failed,paused`, separated by spaces.

A value with spaces, colons or commas is quoted: `error:"connection lost"`. Inside quotes, `\\"` is
a quote and `\\\\` a backslash. The caller defines the meaning of the fields.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TypeAlias, cast

import msgspec

from perdure.clock import parse_duration
from perdure.errors import InvalidArgument, InvalidDuration, PerdureError
from perdure.validation import check_id

Operator: TypeAlias = Literal["=", ">", "<", ">=", "<="]

_OPERATORS: tuple[Operator, ...] = (">=", "<=", "=", ">", "<")
# After the name of a workflow and a colon: the rest of a generated id, or its beginning.
_GENERATED = re.compile(r"[0-9a-f]{8}(-[0-9a-f-]{0,27})?")
_SPECIAL = frozenset('"\\,:=<>')


class InvalidQuery(PerdureError, ValueError):
    """A query cannot be understood; `position` is where, counted from 0."""

    def __init__(self, problem: str, query: str, position: int) -> None:
        super().__init__(f"{problem} (at character {position + 1} of {query!r})")
        self.problem = problem
        self.query = query
        self.position = position


class Term(msgspec.Struct, frozen=True):
    """One condition: the field has one of the values, or satisfies the comparison.

    A bare word has the field "". `path` is the path of the value in the payload.
    """

    field: str
    values: tuple[str, ...]
    operator: Operator = "="
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = ",".join(map(quoted, self.values))
        if not self.field:
            return values
        name = ".".join((self.field, *map(_quoted_part, self.path)))
        return f"{name}:{'' if self.operator == '=' else self.operator}{values}"


class Field(msgspec.Struct, frozen=True):
    """What can be written after a name and a colon.

    `check` raises `ValueError` with what was expected. With `is_list`, several values are separated
    by commas; with `repeats`, the field may occur several times, and all terms must match.
    """

    hint: str
    check: Callable[[str], object]
    is_list: bool = False
    repeats: bool = False
    has_path: bool = False


class _Char(NamedTuple):
    text: str
    is_quoted: bool

    def is_one_of(self, characters: str) -> bool:
        return not self.is_quoted and self.text in characters


class _Token(NamedTuple):
    chars: Sequence[_Char]
    start: int


def parse_terms(text: str, fields: Mapping[str, Field]) -> tuple[Term, ...]:
    """Return the terms of a query with these fields, or raise `InvalidQuery`."""
    if not isinstance(text, str):
        raise InvalidArgument("query", text, "a string such as 'status:failed since:24h'")
    terms: list[Term] = []
    for token in _tokens(text):
        term = _term(token, fields, text)
        is_known = any(term.field == each.field for each in terms)
        if is_known and not (term.field and fields[term.field].repeats):
            raise InvalidQuery(_given_twice(term, fields), text, token.start)
        terms.append(term)
    return tuple(terms)


def parse_time(text: str, now: datetime) -> datetime:
    """Parse a duration before `now` ("24h") or an ISO time; raise `ValueError` if it is neither."""
    try:
        return now - parse_duration(text)
    except (InvalidDuration, OverflowError):
        pass
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        expected = 'a duration such as "24h" or "7d", or a time such as "2026-11-03T09:00"'
        raise ValueError(expected) from None


def closest(word: str, words: Sequence[str], likeness: float = 0.6) -> str:
    """Return "; did you mean 'status'?" if one of the words is close, else an empty string."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=likeness)
    return f"; did you mean {close[0]!r}?" if close else ""


def _given_twice(term: Term, fields: Mapping[str, Field]) -> str:
    if not term.field:
        return "a query has one bare word, the beginning of an id; quote an id with spaces"
    hint = f"; write {term.field}:a,b for either of two" if fields[term.field].is_list else ""
    return f"{term.field!r} is given twice{hint}"


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens between unquoted spaces."""
    chars: list[_Char] = []
    start = quote = -1
    position = 0
    while position < len(text):
        char = text[position]
        if quote < 0 and char.isspace():
            if start >= 0:
                yield _Token(chars, start)
            chars, start = [], -1
        else:
            start = position if start < 0 else start
            if char == '"':
                quote = position if quote < 0 else -1
            else:
                is_escaped = (
                    quote >= 0 and char == "\\" and text[position + 1 : position + 2] in ('"', "\\")
                )
                position += is_escaped
                chars.append(_Char(text[position], quote >= 0))
        position += 1
    if quote >= 0:
        raise InvalidQuery("the quote is not closed", text, quote)
    if start >= 0:
        yield _Token(chars, start)


def _term(token: _Token, fields: Mapping[str, Field], text: str) -> Term:
    name, rest = _split_name(token, fields)
    if rest is None:
        return Term("", (_check_value(_text(token.chars), check_id, "id", token, text),))
    field, *path = (_text(part) for part in _split(name, "."))
    if field not in fields and _GENERATED.fullmatch(_text(rest)):
        return Term("", (_text(token.chars),))
    if field not in fields or (path and not fields[field].has_path):
        raise InvalidQuery(_unknown_field(_text(name), fields, token), text, token.start)
    if fields[field].has_path and not all([path, *path]):
        problem = f"{field!r} needs a path, such as {field}.customer.id:42"
        raise InvalidQuery(problem, text, token.start)
    operator, values = _values(rest, fields[field])
    for value in values:
        _check_value(value, fields[field].check, field, token, text)
    return Term(field, values, operator, tuple(path))


def _check_value(
    value: str, check: Callable[[str], object], name: str, token: _Token, query: str
) -> str:
    try:
        check(value)
    except ValueError as error:
        expected = error.expected if isinstance(error, InvalidArgument) else error
        problem = f"{name}: expected {expected}, got {value!r}"
        raise InvalidQuery(problem, query, token.start) from None
    return value


def _split_name(
    token: _Token, fields: Mapping[str, Field]
) -> tuple[Sequence[_Char], Sequence[_Char] | None]:
    """Split a token at the first colon, or at a comparison operator in its place."""
    for n, char in enumerate(token.chars):
        if char.is_one_of(":"):
            return token.chars[:n], token.chars[n + 1 :]
        if char.is_one_of("=<>"):
            first = _text(_split(token.chars[:n], ".")[0])
            if first in fields and fields[first].has_path:
                return token.chars[:n], token.chars[n:]
    return token.chars, None


def _values(rest: Sequence[_Char], field: Field) -> tuple[Operator, tuple[str, ...]]:
    if field.is_list:
        return "=", tuple(dict.fromkeys(_text(part) for part in _split(rest, ",")))
    if field.has_path:
        begins = "".join(char.text if not char.is_quoted else " " for char in rest[:2])
        for operator in _OPERATORS:
            if begins.startswith(operator):
                return operator, (_text(rest[len(operator) :]),)
    return "=", (_text(rest),)


def _unknown_field(name: str, fields: Mapping[str, Field], token: _Token) -> str:
    names = ", ".join(f"{each}.…" if field.has_path else each for each, field in fields.items())
    guess = closest(name, list(fields)) or "."
    quote = quoted(_text(token.chars))
    return f"unknown field {name!r}{guess} Fields: {names}. An id with a colon is quoted: {quote}"


def _split(chars: Sequence[_Char], separator: str) -> list[Sequence[_Char]]:
    parts: list[list[_Char]] = [[]]
    for char in chars:
        if char.is_one_of(separator):
            parts.append([])
        else:
            parts[-1].append(char)
    return cast(list[Sequence[_Char]], parts)


def _text(chars: Sequence[_Char]) -> str:
    return "".join(char.text for char in chars)


def quoted(value: str) -> str:
    """Return a value as it is written in a query."""
    is_plain = value and not any(char in _SPECIAL or char.isspace() for char in value)
    return value if is_plain else _in_quotes(value)


def _quoted_part(part: str) -> str:
    return _in_quotes(part) if "." in part else quoted(part)


def _in_quotes(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
