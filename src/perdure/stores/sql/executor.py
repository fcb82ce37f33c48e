"""What the parts of `SqlStore` work with: the client, the statements, and the forms of values."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

from perdure import codec
from perdure.snapshot import Snapshot
from perdure.store import Rest
from perdure.stores._reading import merged, reading
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import Answer, SqlClient, ask
from perdure.stores.sql.dialects import Statements

# So many values per statement are taken by every database.
CHUNK = 50
_MICROSECOND = timedelta(microseconds=1)

T = TypeVar("T")


class Desk:
    """Runs the statements of one table for runs whose stored ids begin with `prefix`."""

    def __init__(
        self, client: SqlClient, statements: Statements, *, prefix: str, random: Random
    ) -> None:
        self.prefix = prefix
        self._client = client
        self._statements = statements
        self._random = random

    async def ask(self, statement: str, *values: Any, **words: str) -> Answer:
        """Give what one statement gives."""
        return await ask(self._client, self._statements.fill(statement, **words), values)

    async def ask_as_it_is(self, statement: str) -> None:
        """Run a statement that has its names and takes no values."""
        await ask(self._client, statement, ())

    def ticket(self) -> str:
        """Give a text that nobody has drawn before."""
        return f"{self._random.getrandbits(128):032x}"

    async def lay_to_sleep(self, key: str, rest: Rest, n: int) -> None:
        """Let a run that rests awaiting events wait for them, unless one lies there."""
        answer = await self.ask(sql.LOOK_FOR_MAIL, key)
        for epoch, folded_n, mail, count in answer.rows:
            if folded_n == n and not count:
                values = (moment(rest), key, epoch, n, mail, marks_of(rest.awaits))
                await self.ask(sql.LAY_TO_SLEEP, *values)

    async def tidy(self, key: str) -> None:
        """Mark what was taken and remove what is folded: in this order, for the entries name it."""
        await self.ask(sql.MARK_TAKEN, key)
        await self.ask(sql.REMOVE_TAKEN, key)
        await self.ask(sql.REMOVE_FOLDED, key)

    async def remove_leftovers(self, keys: Sequence[str]) -> None:
        """Remove what belonged to runs that are no more."""
        await self.ask(sql.REMOVE_ENTRIES, *keys, marks=marks(keys))
        await self.ask(sql.REMOVE_MESSAGES, *keys, marks=marks(keys))


def marks(values: Sequence[object]) -> str:
    """Give a place for each value, for `IN (…)`."""
    return ", ".join("?" * len(values))


def rows_of(row: str, count: int) -> str:
    """Give so many rows of places."""
    return " UNION ALL ".join([row] * count)


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Give the values a statement at a time."""
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))


def digest(text: str) -> str:
    """Give a short text in place of any text."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def marks_of(names: Iterable[str]) -> str | None:
    """Give the names of events as marks that a statement can find: `,digest,digest,`."""
    found = [digest(name) for name in names]
    return f",{','.join(found)}," if found else None


def moment(rest: Rest) -> int | None:
    """Give a rest's wake time as a number."""
    return None if rest.wake_at is None else to_microseconds(rest.wake_at, "wake_at")


def span(duration: timedelta) -> int:
    """Give a duration as a number."""
    return duration // _MICROSECOND


def read_run(id: str, snapshot: str, journal: Sequence[str]) -> Snapshot:
    """Give a run's snapshot with its journal applied."""
    with reading(id):
        return merged(*(codec.loads(data) for data in (snapshot, *journal)))
