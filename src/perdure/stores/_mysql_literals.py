"""Values as they are written in a statement.

The driver writes bytes with backslashes also where the session's mode takes a backslash for a
character like any other, and a quote in them would end the text. Here that mode is minded.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

from perdure.clock import as_utc

Value: TypeAlias = "str | bytes | int | datetime | Sequence[Value] | None"

# The server tells with every answer in which mode the session is.
NO_BACKSLASH_ESCAPES = 512


class Statement(NamedTuple):
    """One statement, and what belongs in the place of each `%s`.

    A list is written as its items with commas between them, and a tuple in brackets besides.
    """

    sql: bytes
    values: Sequence[Value] = ()

    def text(self, *, backslashes: bool) -> bytes:
        """Give what is sent; `backslashes` tells whether they escape in this session."""
        return self.sql % tuple(_literal(value, backslashes) for value in self.values)


def _literal(value: Value, backslashes: bool) -> bytes:
    match value:
        case None:
            return b"NULL"
        case int():
            return b"%d" % value
        case bytes():
            return b"_binary" + _quoted(value, backslashes)
        case str():
            return _quoted(value.encode(), backslashes)
        case datetime():
            return b"'%s'" % _moment(value)
        case tuple():
            return b"(%s)" % _joined(value, backslashes)
        case _:
            return _joined(value, backslashes)


def _quoted(value: bytes, backslashes: bool) -> bytes:
    if backslashes:
        value = value.replace(b"\\", b"\\\\")
    return b"'%s'" % value.replace(b"'", b"''")


def _joined(values: Sequence[Value], backslashes: bool) -> bytes:
    return b",".join([_literal(value, backslashes) for value in values])


def _moment(moment: datetime) -> bytes:
    naive = as_utc(moment).replace(tzinfo=None)
    return naive.isoformat(" ", "microseconds").encode()


def read_moment(stored: datetime) -> datetime:
    """Give a stored time, which has no zone and is UTC, as the aware one it means."""
    return stored.replace(tzinfo=UTC)
