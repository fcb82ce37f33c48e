"""Restore copies of acts that are missing after a crash, from the runs themselves."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime, timedelta
from typing import Any

from perdure import codec
from perdure.clock import parse_iso
from perdure.errors import PerdureError, StoreError
from perdure.runtime.acts import KEPT_FOR, act_key
from perdure.snapshot.acts import acts_of
from perdure.store import Query, RunSummary, SearchStore

_PAGE = 200
_AT_ONCE = 16


async def restore_acts(
    store: SearchStore, now: datetime, limit: int | None, *, dry_run: bool
) -> AsyncGenerator[tuple[int, int]]:
    """Yield after each page of runs how many were examined, and how many copies were missing."""
    examined_count = missing = 0
    cursor: str | None = None
    while limit is None or examined_count < limit:
        page = await store.search(Query(since=now - KEPT_FOR), _PAGE, after=cursor)
        for first in range(0, len(page.runs), _AT_ONCE):
            batch = page.runs[first : first + _AT_ONCE]
            missing_acts = await _missing(store, batch)
            missing += len(missing_acts)
            if not dry_run:
                await _write(store, missing_acts, now)
        examined_count += len(page.runs)
        yield examined_count, missing
        if (cursor := page.cursor) is None:
            return


async def _missing(store: SearchStore, runs: Sequence[RunSummary]) -> dict[str, dict[str, Any]]:
    """Return the acts of some runs that have no copy, by the key of the copy."""
    act_lists = await asyncio.gather(*(_acts(store, run.id) for run in runs))
    acts = {act_key(act): act for each in act_lists for act in each}
    copies = await store.documents.get_many(list(acts)) if acts else []
    return {key: act for (key, act), copy in zip(acts.items(), copies, strict=True) if not copy}


async def _acts(store: SearchStore, run_id: str) -> list[dict[str, Any]]:
    try:
        snapshot = await store.load(run_id)
    except StoreError:
        raise
    except PerdureError:
        # An unreadable run must not prevent the repair of the others.
        return []
    acts = acts_of(snapshot.get("metadata")) if snapshot is not None else []
    return [{**act, "run": run_id} for act in acts if act.get("at") and act.get("id")]


async def _write(store: SearchStore, acts: dict[str, dict[str, Any]], now: datetime) -> None:
    for key, act in acts.items():
        ttl = KEPT_FOR - (now - parse_iso(act["at"]))
        if ttl > timedelta(0):
            await store.documents.set(key, codec.dumps(act).decode(), ttl=ttl)
