"""Encode values as SQL literals.

The driver escapes bytes with backslashes even if the session's SQL mode treats a backslash as an
ordinary character; a quote in the bytes would then end the literal. The functions here respect the
mode.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

from perdure.clock import as_utc

Value: TypeAlias = "str | bytes | int | datetime | Rows | Statement | Sequence[Value] | None"

# A flag of the status that the server sends with every reply.
NO_BACKSLASH_ESCAPES = 512


class Rows:
    """Rows, each formatted by the template `row`, joined by a separator."""

    def __init__(
        self, row: bytes, rows: Iterable[Sequence[Value]], separator: bytes = b","
    ) -> None:
        self._row = row
        self._rows = rows
        self._separator = separator

    def encode(self, *, backslashes: bool) -> bytes:
        """Return the bytes to send; `backslashes` is whether they escape in this session."""
        return self._separator.join([self._row % _literals(row, backslashes) for row in self._rows])


class Statement(NamedTuple):
    """A statement or a part of one, and a value for each `%s` in it.

    A list is written as its items joined by commas, a tuple likewise but in parentheses. A value
    can be another part of the statement.
    """

    sql: bytes
    values: Sequence[Value] = ()

    def encode(self, *, backslashes: bool) -> bytes:
        """Return the bytes to send; `backslashes` is whether they escape in this session."""
        return self.sql % _literals(self.values, backslashes)


def _literals(values: Sequence[Value], backslashes: bool) -> tuple[bytes, ...]:
    return tuple([_literal(value, backslashes) for value in values])


def _literal(value: Value, backslashes: bool) -> bytes:
    # Not `match`, which takes twice as long: batches have many values.
    if isinstance(value, str):
        return _quote(value.encode(), backslashes)
    if isinstance(value, bytes):
        return b"_binary" + _quote(value, backslashes)
    if isinstance(value, int):
        return b"%d" % value
    if value is None:
        return b"NULL"
    if isinstance(value, datetime):
        return b"'%s'" % _datetime(value)
    if isinstance(value, (Rows, Statement)):
        return value.encode(backslashes=backslashes)
    items = b",".join(_literals(value, backslashes))
    return b"(%s)" % items if isinstance(value, tuple) else items


def _quote(value: bytes, backslashes: bool) -> bytes:
    if backslashes:
        value = value.replace(b"\\", b"\\\\")
    return b"'%s'" % value.replace(b"'", b"''")


def _datetime(value: datetime) -> bytes:
    naive = as_utc(value).replace(tzinfo=None)
    return naive.isoformat(" ", "microseconds").encode()


def read_datetime(naive: datetime) -> datetime:
    """Return a stored time (naive, in UTC) as an aware datetime."""
    return naive.replace(tzinfo=UTC)
