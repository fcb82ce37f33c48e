"""Bulk operations, as the processes that work on them have reported."""

import msgspec

from perdure.insights.model import BulkProgress
from perdure.store import SearchStore

KEY = "bulk:"
"""Begins the keys of the documents in which bulk operations are kept."""


async def read_bulk(store: SearchStore, id: str) -> BulkProgress | None:
    """Return a bulk operation, or `None` if there is none with this id."""
    return _decode(await store.documents.get(f"{KEY}{id}"))


async def read_bulks(store: SearchStore, limit: int) -> tuple[BulkProgress, ...]:
    """Return the newest bulk operations first."""
    keys = await store.documents.keys(f"{KEY}*")
    found = [_decode(value) for value in await store.documents.get_many(keys)] if keys else []
    known = [each for each in found if each is not None]
    return tuple(sorted(known, key=lambda each: each.began_at, reverse=True)[:limit])


def _decode(value: str | None) -> BulkProgress | None:
    try:
        return None if value is None else msgspec.json.decode(value, type=BulkProgress)
    except (msgspec.MsgspecError, UnicodeError):
        return None
