"""`durable.run` with an idempotency key: one key is one result."""

import asyncio
from dataclasses import replace
from typing import Any

from perdure.durable.call import Request, lease, open_host, run_once
from perdure.durable.lifecycle import borrow, log_failure
from perdure.durable.outcome import ending, recorded_result
from perdure.durable.session import Session, store_errors
from perdure.errors import AlreadyRunning, IdempotencyConflict, StoreError
from perdure.events import Bus
from perdure.result import Result
from perdure.snapshot import Snapshot
from perdure.store import Rest, can_lease

_keys: dict[tuple[int, int, str], asyncio.Event] = {}


async def run_with_key(request: Request, key: str) -> Result[Any, Any]:
    """Run under an idempotency key: its record is held while the run goes on, and keeps the result.

    Calls of this process wait for the one that has the key. A failure frees it; a crash leaves its
    lease to expire.
    """
    here = (id(request.store), id(asyncio.get_running_loop()), key)
    while (twin := _keys.get(here)) is not None:
        await twin.wait()
    done = _keys[here] = asyncio.Event()
    try:
        async with borrow(request.store, request.clock, request.lease_ttl) as session:
            return await _once_in(session, request, key)
    finally:
        del _keys[here]
        done.set()


async def _once_in(session: Session, request: Request, key: str) -> Result[Any, Any]:
    facts = {
        "workflowId": request.id,
        "idempotencyKey": key,
        "input": request.metadata.get("input"),
    }
    record = replace(request, id=f"idem:{key}", metadata=facts, bus=Bus(), shared=False)
    with store_errors(request.store, f"load the record of idempotency key {key!r}"):
        stored = await request.store.load(record.id)
    if stored is not None and (kept := _kept_for(record, key, stored)) is not None:
        return kept
    grant = None
    if can_lease(request.store):
        grant = await lease(session, record)
        if grant is None:
            raise AlreadyRunning(request.id, "elsewhere")
        stored = None if grant.created else grant.snapshot
    host = await open_host(session, record, grant, stored)
    try:
        if stored is not None and (kept := _kept_for(record, key, stored)) is not None:
            await host.settle(stored["execution"], Rest("completed"))
            return kept
        # Kept until the key has the result: a crash in between must not run it all again.
        result = await run_once(replace(request, keep=True))
    except IdempotencyConflict:
        await log_failure(host.release())
        raise
    except BaseException:
        await log_failure(host.settle(host.block(), Rest("running", delete=True)))
        raise
    if not result.ok:
        await log_failure(host.settle(host.block(), Rest("running", delete=True)))
        return result
    try:
        await host.settle(ending(host, result, request.fn).block, Rest("completed"))
    except StoreError:
        await log_failure(host.release())
        raise
    if not request.keep:
        await log_failure(_delete(request))
    return result


def _kept_for(record: Request, key: str, stored: Snapshot) -> Result[Any, Any] | None:
    before = (stored.get("metadata") or {}).get("input")
    given = record.metadata["input"]
    if before is not None and given is not None and before != given:
        raise IdempotencyConflict(key)
    return recorded_result(stored, record.fn, record.errors)


async def _delete(request: Request) -> None:
    with store_errors(request.store, f"delete run {request.id!r}, which is done"):
        await request.store.delete(request.id)
