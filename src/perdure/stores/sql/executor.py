"""Running statements, keys, and value formats, for all operations of `SqlStore`."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b, md5
from random import Random
from typing import Any, TypeVar

import msgspec

from perdure import codec
from perdure.errors import InvalidArgument
from perdure.snapshot import Snapshot
from perdure.store import Rest
from perdure.stores._reading import merge_journal, reading
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sql import statements as sql
from perdure.stores.sql.client import Result, SqlClient, query
from perdure.stores.sql.dialects import Statements

# Every database accepts this many rows of values in one statement.
_CHUNK = 50
_MAX_KEY_BYTES = 2_048
_MICROSECOND = timedelta(microseconds=1)

T = TypeVar("T")


class Executor:
    """Runs statements on the tables of one store, for runs whose keys begin with `prefix`."""

    def __init__(
        self, client: SqlClient, statements: Statements, *, prefix: str, random: Random
    ) -> None:
        self._client = client
        self._statements = statements
        self._prefix = prefix
        self._random = random

    async def _run(self, template: str, *values: Any) -> Result:
        return await query(self._client, self._statements.sql(template), values)

    async def _run_many(self, template: str, count: int, *values: Any) -> Result:
        """Run a statement in which one part is repeated `count` times."""
        return await query(self._client, self._statements.many(template, count), values)

    def _key(self, id: str) -> str:
        key = self._prefix + id
        if 4 * len(key) > _MAX_KEY_BYTES and len(key.encode()) > _MAX_KEY_BYTES:
            expected = f"an id of at most {_MAX_KEY_BYTES:,} bytes, including the prefix"
            raise InvalidArgument("id", id, expected)
        return key

    def _id(self, key: str) -> str:
        return key[len(self._prefix) :]

    def _kind(self, workflow: str) -> str:
        """Return a workflow as it is indexed."""
        if not self._statements.dialect.hashes_workflows:
            return workflow
        return md5(workflow.encode(), usedforsecurity=False).hexdigest()

    def _new_ticket(self) -> str:
        """Return a random string, by which a process recognizes the rows it has written."""
        return f"{self._random.getrandbits(128):032x}"

    async def _clean_up(self, key: str) -> None:
        """Remove consumed messages, and then folded entries, which name the messages."""
        await self._run(sql.MARK_CONSUMED, key)
        await self._run(sql.DELETE_CONSUMED, key)
        await self._run(sql.DELETE_FOLDED, key)

    async def _schedule_wake(self, key: str, rest: Rest, n: int) -> None:
        """Set the wake time of a run that waits for events, unless a message has arrived."""
        waiting = await self._run(sql.COUNT_AWAITED_MESSAGES, key)
        for epoch, folded_n, deliveries, messages in waiting.rows:
            if folded_n == n and not messages:
                awaits = digest_list(rest.awaits)
                values = (micros_or_none(rest.wake_at), key, epoch, n, deliveries, awaits)
                await self._run(sql.SCHEDULE_WAKE, *values)

    async def _delete_orphans(self, keys: Sequence[str]) -> None:
        """Delete the entries and messages of deleted runs."""
        await self._run_many(sql.DELETE_ORPHANED_ENTRIES, len(keys), *keys)
        await self._run_many(sql.DELETE_ORPHANED_MESSAGES, len(keys), *keys)
        await self._run_many(sql.DELETE_ORPHANED_TAGS, len(keys), *keys)


def chunks(values: Sequence[T], size: int = _CHUNK) -> Iterator[Sequence[T]]:
    """Yield the values in parts that fit in one statement."""
    return (values[start : start + size] for start in range(0, len(values), size))


def names_text(names: Sequence[str]) -> str:
    """Return names as they are stored: a JSON array."""
    return msgspec.json.encode(names).decode()


def read_names(text: str | None) -> tuple[str, ...]:
    """Return stored names."""
    return () if text is None else msgspec.json.decode(text, type=tuple[str, ...])


def header_values(
    version: int | None, tags: Sequence[str] | None, summary: bytes | None
) -> tuple[int | None, str | None, str | None]:
    """Return a version, tags and a summary as they are stored; `None` stays `None`."""
    # As text, because some clients do not distinguish bytes from text.
    summary_text = None if summary is None else b64encode(summary).decode()
    return version, None if tags is None else names_text(tags), summary_text


def awaits_values(rest: Rest) -> tuple[str | None, str | None]:
    """Return the events that a run awaits, once for searching and once for display."""
    return digest_list(rest.awaits), names_text(rest.awaits) if rest.awaits else None


def digest(text: str) -> str:
    """Return a short digest of a string of any length."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def digest_list(names: Iterable[str]) -> str | None:
    """Return the digests of names as a list that a statement can search: `,digest,digest,`."""
    digests = [digest(name) for name in names]
    return f",{','.join(digests)}," if digests else None


def micros_or_none(time: datetime | None) -> int | None:
    """Return a datetime as microseconds since 1970, and `None` as `None`."""
    return None if time is None else to_microseconds(time, "wake_at")


def to_micros(duration: timedelta) -> int:
    """Return a duration in microseconds."""
    return duration // _MICROSECOND


def read_run(id: str, snapshot: str, journal: Sequence[str]) -> Snapshot:
    """Return a run's snapshot with its journal applied."""
    with reading(id):
        return merge_journal(*(codec.loads(data) for data in (snapshot, *journal)))
