"""New runs of `SqlStore`, and the table of tags by which runs are found."""

from collections.abc import Sequence
from typing import NamedTuple

from perdure.store import LeaseRequest, NewRun, Rest
from perdure.stores.sql import statements as sql
from perdure.stores.sql.executor import (
    Executor,
    awaits_values,
    chunks,
    digest,
    header_values,
    micros_or_none,
    names_text,
    read_names,
    to_micros,
)


class Tags(Executor):
    """Writes tags, always before the run that has them."""

    async def _add_tags(self, created_at: int, tags: Sequence[tuple[str, str]]) -> None:
        """Write pairs of a key and a tag."""
        for chunk in chunks(sorted((key, digest(tag)) for key, tag in tags)):
            values: list[object] = []
            for key, tag in chunk:
                values += tag, created_at, key
            await self._run_many(sql.ADD_TAGS, len(chunk), *values)

    async def _change_tags(self, key: str, tags: Sequence[str]) -> bool:
        """Write the tags that an existing run is about to have; return whether they changed."""
        run = await self._run(sql.CREATION_AND_TAGS, key)
        for created_at, tags_text in run.rows:
            if read_names(tags_text) != tuple(tags):
                await self._add_tags(created_at, [(key, tag) for tag in tags])
                return True
        return False

    async def _delete_other_tags(self, key: str, tags: Sequence[str]) -> None:
        """Delete the previous tags of a run."""
        values = (key, *map(digest, tags), names_text(tags))
        await self._run_many(sql.DELETE_OTHER_TAGS, len(tags), *values)


class NewRow(NamedTuple):
    """A run to be created: due after a delay, or at its wake time."""

    key: str
    snapshot: bytes
    workflow: str | None
    owner: str | None
    rest: Rest
    queue: str
    version: int
    tags: Sequence[str]
    summary: bytes
    delay: int | None


def leased_row(key: str, request: LeaseRequest) -> NewRow:
    """Return the row of a run that is created with an owner."""
    return NewRow(
        key=key,
        snapshot=request.create or b"",
        workflow=request.workflow,
        owner=request.owner,
        rest=Rest("running"),
        queue="",
        version=request.version,
        tags=request.tags,
        summary=request.summary,
        delay=to_micros(request.ttl),
    )


def enqueued_row(key: str, run: NewRun) -> NewRow:
    """Return the row of a run that waits for a claim, or is created at rest."""
    rest = run.rest or Rest("queued", run.wake_at)
    return NewRow(
        key=key,
        snapshot=run.snapshot,
        workflow=run.workflow,
        owner=None,
        rest=rest,
        queue=run.queue,
        version=run.version if rest.version is None else rest.version,
        tags=run.tags if rest.tags is None else rest.tags,
        summary=run.summary if rest.summary is None else rest.summary,
        delay=None if run.rest or run.wake_at else -to_micros(run.head_start),
    )


class Creation(Tags):
    """Creates runs."""

    async def _insert(self, rows: Sequence[NewRow], creator: str) -> set[str]:
        """Create the runs that do not exist yet, and return their keys."""
        tagged_rows = [row for row in rows if row.tags]
        created_at, existing = await self._existing(tagged_rows) if tagged_rows else (None, ())
        # A run that existed is not created even if it was deleted since: it would have no tags.
        new = [row for row in rows if row.key not in existing]
        tags = [(row.key, tag) for row in new for tag in row.tags]
        if created_at is not None:
            await self._add_tags(created_at, tags)
        created_keys = await self._create_rows(new, creator, created_at) if new else set()
        unused_keys = sorted({key for key, _ in tags} - created_keys)
        if unused_keys:
            await self._run_many(sql.DELETE_UNUSED_TAGS, len(unused_keys), *unused_keys, created_at)
        return created_keys

    async def _existing(self, rows: Sequence[NewRow]) -> tuple[int, set[str]]:
        """Return the current time, and the keys of the runs that exist."""
        keys = [row.key for row in rows]
        result = await self._run_many(sql.NOW_AND_EXISTING, len(keys), *keys)
        return result.rows[0][0], {key for _, key in result.rows if key is not None}

    async def _create_rows(
        self, rows: Sequence[NewRow], creator: str, created_at: int | None
    ) -> set[str]:
        values: list[object] = []
        for row in rows:
            values += row.key, row.snapshot.decode(), row.workflow, row.owner, creator
            values += row.rest.status, *awaits_values(row.rest), row.queue
            values += header_values(row.version, row.tags or None, row.summary or None)
            values += created_at if row.tags else None, row.delay, micros_or_none(row.rest.wake_at)
        await self._run_many(sql.CREATE, len(rows), *values)
        keys = [row.key for row in rows]
        result = await self._run_many(sql.CREATED_RUNS, len(keys), *keys, creator)
        return {key for (key,) in result.rows}
