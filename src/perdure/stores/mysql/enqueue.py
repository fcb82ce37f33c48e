"""Create runs that wait for a claim: one statement per call, unless some already exist."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from perdure.store import NewRun
from perdure.stores.mysql.database import Database, Transaction
from perdure.stores.mysql.errors import ConstraintViolation
from perdure.stores.mysql.literals import Rows, Statement, Value
from perdure.stores.mysql.rows import chunks, names_as_json, tags_as_json
from perdure.stores.mysql.statements import Statements
from perdure.stores.mysql.tags import add_tags

_MICROSECOND = timedelta(microseconds=1)

ENQUEUE = "INSERT INTO {runs} (%s) VALUES %s"
_COLUMNS = Statement(
    b"id, snapshot, workflow, queue, version, tags, summary, status, awaits, wake_at, created_at, "
    b"updated_at, epoch"
)
_ROW = b"""(
    %%s, %%s, %%s, %%s, %%s, %%s, %%s, %%s, %%s, COALESCE(%%s, %(now)s - INTERVAL %%s MICROSECOND),
    %(now)s, %(now)s, %(epoch)s
)"""
ENQUEUE_ROW = _ROW % {
    b"now": b"UTC_TIMESTAMP(6)",
    b"epoch": b"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
}

# All runs of a call are due relative to the same time, even if several statements insert them.
_READ_CLOCK = Statement(b"SELECT CAST(UTC_TIMESTAMP(6) AS CHAR)")
# A run that this transaction creates has the epoch -1 until its last statements.
ENQUEUE_OR_LOCK = "INSERT INTO {runs} (%s) VALUES %s ON DUPLICATE KEY UPDATE epoch = epoch"
INSERTED_RUNS = "SELECT id FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) AND epoch = -1"
QUEUE_INSERTED = """
    UPDATE {runs} FORCE INDEX (PRIMARY)
    SET epoch = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
    WHERE id IN (%s) AND epoch = -1
"""


class Creator:
    """Creates unowned runs."""

    def __init__(
        self, database: Database, statements: Statements, key: Callable[[str], str]
    ) -> None:
        self._database = database
        self._statements = statements
        self._bind = statements.bind
        self._key = key

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Return whether each run was created, in order."""
        return await self._first_of_each(runs, self._create)

    async def enqueue_in(self, transaction: Transaction, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create runs in the caller's transaction; return whether each was created."""
        return await self._first_of_each(
            runs, lambda runs: self._create_missing(transaction, runs, chunks(_rows(runs)))
        )

    async def _first_of_each(
        self,
        runs: Sequence[NewRun],
        create: Callable[[Mapping[str, NewRun]], Awaitable[Collection[str]]],
    ) -> Sequence[bool]:
        first: dict[str, int] = {}
        for index, run in enumerate(runs):
            first.setdefault(self._key(run.id), index)
        created_keys = await create({key: runs[first[key]] for key in sorted(first)})
        indexes = {first[key] for key in created_keys}
        return [index in indexes for index in range(len(runs))]

    async def _create(self, runs: Mapping[str, NewRun]) -> Collection[str]:
        parts = chunks(_rows(runs))
        if len(parts) == 1:
            tags = add_tags(self._statements, _tags(runs))
            create = self._bind(ENQUEUE, _COLUMNS, Rows(ENQUEUE_ROW, parts[0]))
            with suppress(ConstraintViolation):
                await self._insert([create, *tags])
                return runs.keys()
        return await self._database.transact(
            lambda transaction: self._create_missing(transaction, runs, parts), repeatable=False
        )

    async def _insert(self, statements: Sequence[Statement]) -> None:
        if len(statements) == 1:
            await self._database.run_alone(statements[0], repeatable=False)
        else:
            await self._database.run(*statements, repeatable=False)

    async def _create_missing(
        self,
        transaction: Transaction,
        runs: Mapping[str, NewRun],
        parts: Sequence[Sequence[Sequence[Value]]],
    ) -> Collection[str]:
        [clock] = await transaction.run(_READ_CLOCK)
        now = b"TIMESTAMP'%s'" % clock.rows[0][0].encode()
        row = _ROW % {b"now": now, b"epoch": b"-1"}
        inserts = [self._bind(ENQUEUE_OR_LOCK, _COLUMNS, Rows(row, part)) for part in parts]
        *_, result = await transaction.run(*inserts, self._bind(INSERTED_RUNS, [*runs]))
        new_runs = {key: runs[key] for (key,) in result.rows}
        if new_runs:
            await transaction.finish(
                self._bind(QUEUE_INSERTED, [*new_runs]),
                *add_tags(self._statements, _tags(new_runs)),
            )
        return new_runs


def _rows(runs: Mapping[str, NewRun]) -> Sequence[Sequence[Value]]:
    return [(key, *_header(run), *_state(run)) for key, run in runs.items()]


def _header(new: NewRun) -> tuple[Value, ...]:
    """Return the values of the header columns."""
    version, summary = new.version, new.summary
    if new.rest is not None:
        version = version if new.rest.version is None else new.rest.version
        summary = summary if new.rest.summary is None else new.rest.summary
    tags = tags_as_json(_tags_of(new))
    return new.snapshot, new.workflow, new.queue, version, tags, summary


def _state(new: NewRun) -> tuple[str, bytes | None, datetime | None, int | None]:
    """Return status, awaited names, and the wake time or how many microseconds ago it was."""
    if new.rest is not None:
        return new.rest.status, names_as_json(new.rest.awaits), new.rest.wake_at, None
    if new.wake_at is not None:
        return "queued", None, new.wake_at, None
    return "queued", None, None, new.head_start // _MICROSECOND


def _tags(runs: Mapping[str, NewRun]) -> dict[str, Sequence[str]]:
    return {key: tags for key, run in runs.items() if (tags := _tags_of(run))}


def _tags_of(new: NewRun) -> Sequence[str]:
    return new.tags if new.rest is None or new.rest.tags is None else new.rest.tags
