"""`durable.run` with an idempotency key: one key, one result."""

import asyncio
from typing import Any

from msgspec.structs import replace

from perdure.durable.host import RunHost
from perdure.durable.lifecycle import log_failure, open_host, save_first
from perdure.durable.outcome import describe_outcome
from perdure.durable.run import Request, already_running, lease, run_once
from perdure.durable.session import Session
from perdure.durable.store_errors import store_errors
from perdure.engine.history import History
from perdure.errors import IdempotencyConflict, StoreError
from perdure.result import Result
from perdure.snapshot import Snapshot
from perdure.store import Refusal, Rest, can_lease


async def run_with_key(request: Request, key: str) -> Result[Any, Any]:
    """Run under an idempotency key, and store the result in the record of the key.

    The record is leased during the run. Other calls in this process wait for the call that has the
    key. A failure frees the key; after a crash, the lease of its record expires.
    """
    async with request.session() as session:
        while (other := session.idempotency_keys.get(key)) is not None:
            await other.wait()
        key_freed = session.idempotency_keys[key] = asyncio.Event()
        try:
            return await _run_in(session, request, key)
        finally:
            del session.idempotency_keys[key]
            key_freed.set()


async def _run_in(session: Session, request: Request, key: str) -> Result[Any, Any]:
    metadata = {
        "workflowId": request.id,
        "idempotencyKey": key,
        "input": request.metadata.get("input"),
    }
    record = replace(request, id=f"idem:{key}", metadata=metadata, shared=False)
    with store_errors(request.store, f"load the record of idempotency key {key!r}"):
        snapshot = await request.store.load(record.id)
    if snapshot is not None and (result := _result_for(record, key, snapshot)) is not None:
        return result
    grant = None
    if can_lease(request.store):
        answer = await lease(session, record)
        if isinstance(answer, Refusal):
            raise already_running(answer, request.id)
        grant = answer
        snapshot = None if grant.created else grant.snapshot
    history = History(record.id, snapshot)
    history.metadata.update(metadata)
    host = open_host(session, record.id, history, grant)
    await save_first(host)
    session.leases.hold(host)
    try:
        if snapshot is not None and (result := _result_for(record, key, snapshot)) is not None:
            await host.settle(snapshot["execution"], Rest("completed"))
            return result
    except IdempotencyConflict:
        await log_failure(host.release())
        raise
    return await _run_and_record(host, request)


async def _run_and_record(host: RunHost, request: Request) -> Result[Any, Any]:
    """Run the function, and store a success as the result of the key; a failure frees the key."""
    try:
        # Kept until the key has the result, so that a crash in between does not run everything
        # again.
        result = await run_once(replace(request, keep=True))
    except BaseException:
        await _free_key(host)
        raise
    if not result.ok:
        await _free_key(host)
        return result
    try:
        outcome = describe_outcome(host, result, request.fn, request.program.types)
        await host.settle(outcome.block, Rest("completed"))
    except StoreError:
        await log_failure(host.release())
        raise
    # Only after the key has the result: if this process dies earlier, the next call finds the run.
    if not request.keep:
        await log_failure(_delete(request))
    return result


async def _free_key(host: RunHost) -> None:
    await log_failure(host.settle(host.block(), Rest("running", delete=True)))


def _result_for(record: Request, key: str, snapshot: Snapshot) -> Result[Any, Any] | None:
    stored_input = (snapshot.get("metadata") or {}).get("input")
    new_input = record.metadata["input"]
    if stored_input is not None and new_input is not None and stored_input != new_input:
        raise IdempotencyConflict(key)
    return record.result_in(snapshot)


async def _delete(request: Request) -> None:
    with store_errors(request.store, f"delete run {request.id!r}, which is completed"):
        await request.store.delete(request.id)
