"""Values as they are written in a statement.

The driver writes bytes with backslashes also where the session's mode takes a backslash for a
character like any other, and a quote in them would end the text. Here that mode is minded.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

from perdure.clock import as_utc

Value: TypeAlias = "str | bytes | int | datetime | Rows | Sequence[Value] | None"

# The server tells with every answer in which mode the session is.
NO_BACKSLASH_ESCAPES = 512


class Rows:
    """Rows that are each written as `each`, with a word between them."""

    def __init__(self, each: bytes, rows: Iterable[Sequence[Value]], between: bytes = b",") -> None:
        self._each = each
        self._rows = rows
        self._between = between

    def text(self, *, backslashes: bool) -> bytes:
        """Give what is sent; `backslashes` tells whether they escape in this session."""
        return self._between.join([self._each % _literals(row, backslashes) for row in self._rows])


class Statement(NamedTuple):
    """One statement, and what belongs in the place of each `%s`.

    A list is written as its items with commas between them, and a tuple in brackets besides.
    """

    sql: bytes
    values: Sequence[Value] = ()

    def text(self, *, backslashes: bool) -> bytes:
        """Give what is sent; `backslashes` tells whether they escape in this session."""
        return self.sql % _literals(self.values, backslashes)


def _literals(values: Sequence[Value], backslashes: bool) -> tuple[bytes, ...]:
    return tuple([_literal(value, backslashes) for value in values])


def _literal(value: Value, backslashes: bool) -> bytes:
    # Not by `match`, which takes twice as long, and batches have many values.
    if isinstance(value, str):
        return _quoted(value.encode(), backslashes)
    if isinstance(value, bytes):
        return b"_binary" + _quoted(value, backslashes)
    if isinstance(value, int):
        return b"%d" % value
    if value is None:
        return b"NULL"
    if isinstance(value, datetime):
        return b"'%s'" % _moment(value)
    if isinstance(value, Rows):
        return value.text(backslashes=backslashes)
    joined = b",".join(_literals(value, backslashes))
    return b"(%s)" % joined if isinstance(value, tuple) else joined


def _quoted(value: bytes, backslashes: bool) -> bytes:
    if backslashes:
        value = value.replace(b"\\", b"\\\\")
    return b"'%s'" % value.replace(b"'", b"''")


def _moment(moment: datetime) -> bytes:
    naive = as_utc(moment).replace(tzinfo=None)
    return naive.isoformat(" ", "microseconds").encode()


def read_moment(stored: datetime) -> datetime:
    """Give a stored time, which has no zone and is UTC, as the aware one it means."""
    return stored.replace(tzinfo=UTC)
