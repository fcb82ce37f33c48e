"""Bulk operations, as reported by the processes that work on them."""

from datetime import datetime, timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from perdure.insights.model import BulkProgress
from perdure.store import SearchStore

KEY: Final = "bulk:"
"""The prefix of the keys of bulk operations."""

SILENT_AFTER: Final = timedelta(seconds=15)
"""A process that has not written for this long no longer works on its operation."""


async def read_bulk(store: SearchStore, id: str, now: datetime) -> BulkProgress | None:
    """Return a bulk operation, or `None` if there is none with this id."""
    return _read(await store.documents.get(f"{KEY}{id}"), now)


async def read_bulks(store: SearchStore, limit: int, now: datetime) -> tuple[BulkProgress, ...]:
    """Return bulk operations, newest first."""
    keys = await store.documents.keys(f"{KEY}*")
    documents = (
        [_read(value, now) for value in await store.documents.get_many(keys)] if keys else []
    )
    bulks = [each for each in documents if each is not None]
    return tuple(sorted(bulks, key=lambda each: each.began_at, reverse=True)[:limit])


def _read(value: str | None, now: datetime) -> BulkProgress | None:
    try:
        progress = None if value is None else msgspec.json.decode(value, type=BulkProgress)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    if progress is None or progress.state != "running":
        return progress
    is_silent = progress.seen_at is None or now - progress.seen_at > SILENT_AFTER
    return replace(progress, state="interrupted") if is_silent else progress
