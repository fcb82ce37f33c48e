"""Write the rests of runs whose position is known, many in one statement.

One statement with many runs takes the server far less time than as many statements.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from perdure.stores.mongo.batch import RunBatch
from perdure.stores.mongo.documents import encode_snapshot, size_of
from perdure.stores.mongo.inbox import is_awaited
from perdure.stores.mongo.journal import is_embedded, message_name
from perdure.stores.mongo.schema import MAX_COMMAND_SIZE, Collections
from perdure.stores.mongo.updates import Document, is_owned, rest_fields, settle_runs

# Limited, because for each run, the server searches the list of all runs of the statement.
_MAX_RUNS = 500


class SettledRun(NamedTuple):
    """What a rest writes; with `checks_count`, only if the run has exactly that many messages.

    `embedded` are the embedded messages that it removes, because they are consumed.
    """

    batch: RunBatch
    fields: Document
    embedded: list[str]
    checks_count: bool
    message_count: int | None


async def settle(db: Collections, batches: Iterable[RunBatch]) -> int:
    """Write the rests of runs; return how many of the runs were still owned."""
    settled_runs = [_settled_run(batch) for batch in batches]
    count = 0
    for checks_count in (False, True):
        for part in _parts(run for run in settled_runs if run.checks_count is checks_count):
            epochs = {run.batch.key: run.batch.last.epoch for run in part}
            counts = {run.batch.key: run.message_count for run in part} if checks_count else None
            embedded = [name for run in part for name in run.embedded]
            update = settle_runs({run.batch.key: run.fields for run in part}, embedded)
            result = await db.runs.update_many(is_owned(epochs, counts), update)
            count += result.matched_count
    return count


async def delete(db: Collections, epochs: Mapping[str, int]) -> tuple[int, bool]:
    """Delete runs of these epochs; return how many, and whether some may have had messages."""
    condition = is_owned(epochs)
    deleted_count = (await db.runs.delete_many({**condition, "messageCount": None})).deleted_count
    if deleted_count == len(epochs):
        return deleted_count, False
    return deleted_count + (await db.runs.delete_many(condition)).deleted_count, True


def _settled_run(batch: RunBatch) -> SettledRun:
    # Entries before the rest in the same call are part of its snapshot, and not written separately.
    entry, rest, position = batch.last, batch.last.rest, batch.position
    assert rest is not None
    assert position is not None
    consumes = [*map(message_name, batch.consumes)]
    due = is_awaited(position.messages, consumes, rest.awaits)
    body = encode_snapshot(entry.data, f"the snapshot of run {entry.id!r}")
    # The rest replaces the journal, which shows that an unmarked message is consumed.
    embedded, unmarked_names = divide(position.unmarked.union(consumes))
    fields = rest_fields(entry, rest, body, unmarked_names, due=due)
    if consumed_names := position.consumed | {*consumes}:
        fields["consumedCount"] = position.consumed_count + len(consumed_names)
    checks_count = bool(rest.awaits) and not due
    return SettledRun(batch, fields, embedded, checks_count, position.message_count or None)


def divide(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return which of these messages are embedded in a run, and which have documents."""
    embedded: list[str] = []
    others: list[str] = []
    for name in names:
        (embedded if is_embedded(name) else others).append(name)
    return embedded, others


def _parts(runs: Iterable[SettledRun]) -> Iterator[list[SettledRun]]:
    """Yield the runs in parts that fit in a command."""
    part: list[SettledRun] = []
    room = MAX_COMMAND_SIZE
    for run in runs:
        size = size_of(run.fields)
        if part and (len(part) == _MAX_RUNS or size > room):
            yield part
            part, room = [], MAX_COMMAND_SIZE
        part.append(run)
        room -= size
    if part:
        yield part
