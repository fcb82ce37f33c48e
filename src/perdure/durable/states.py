"""Check for, list and delete stored runs of `durable.run`."""

import asyncio
from collections.abc import Iterable, Sequence

from perdure.errors import InvalidArgument
from perdure.snapshot import rest_status
from perdure.store import RunSummary, Store, check_store
from perdure.validation import check_id, check_int, check_limit


async def has_state(store: Store, id: str, /) -> bool:
    """Return whether the store has a run with this id."""
    return await check_store(store).load(check_id(id)) is not None


async def delete_state(store: Store, id: str, /) -> bool:
    """Delete a run; return whether it existed."""
    existed = await has_state(store, id)
    await store.delete(id)
    return existed


async def delete_states(
    store: Store, ids: Sequence[str], /, *, concurrency: int = 10
) -> dict[str, Exception]:
    """Delete many runs, up to `concurrency` at once; return the errors of those that failed."""
    check_store(store)
    gate = asyncio.Semaphore(check_int(concurrency, "concurrency"))
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InvalidArgument("ids", ids, "a list of run ids")
    errors: dict[str, Exception] = {}

    async def delete(id: str) -> None:
        async with gate:
            try:
                await store.delete(check_id(id))
            except Exception as error:  # noqa: BLE001  # returned to the caller
                errors[id] = error

    await asyncio.gather(*(delete(id) for id in ids))
    return errors


async def list_pending(store: Store, /, *, prefix: str = "", limit: int = 100) -> list[RunSummary]:
    """Return runs that are not over, newest first, without records of idempotency keys."""
    check_store(store)
    pending: list[RunSummary] = []
    size = max(check_limit(limit), 100)
    # A store with only the five methods may accept no more than these two options.
    page = await store.list(prefix=prefix, limit=size)
    while page:
        pending += [
            line
            for line in page
            if not line.id.startswith("idem:") and await _is_pending(store, line)
        ]
        if len(pending) >= limit or len(page) < size or not page[-1].cursor:
            break
        page = await store.list(prefix=prefix, limit=size, after=page[-1].cursor)
    return pending[:limit]


async def _is_pending(store: Store, line: RunSummary) -> bool:
    if line.status != "running":
        return line.status not in ("completed", "cancelled")
    snapshot = await store.load(line.id)
    return snapshot is not None and rest_status(snapshot) not in ("completed", "cancelled")


async def clear_state(store: Store, /) -> int:
    """Delete every run of the store, within its prefix; return how many."""
    check_store(store)
    count = 0
    while page := await store.list(limit=100):
        for line in page:
            await store.delete(line.id)
        count += len(page)
    return count
