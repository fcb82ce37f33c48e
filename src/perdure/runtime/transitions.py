"""Writes that change a leased run without calling its function, and give it up.

Each is one rest, fenced by the lease's epoch: a crash leaves either the old state or the new one.
"""

from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Any

from msgspec.structs import replace

from perdure import codec
from perdure.clock import parse_iso
from perdure.durable.host import RunHost
from perdure.durable.lifecycle import log_failure, open_host
from perdure.durable.outcome import failures_to_retry
from perdure.durable.owners import new_owner
from perdure.durable.session import Session
from perdure.engine.history import History
from perdure.errors import Cancelled, LeaseLost, StoreError
from perdure.runtime.options import Start
from perdure.snapshot import (
    ExecutionBlock,
    Snapshot,
    generation_of,
    rest_status,
    set_generation,
    workflow_of,
)
from perdure.snapshot.record import encode_failure
from perdure.store import Grant, LeaseRequest, Rest, header_of

CANCEL = "~cancel"
"""The event that asks the owner of a run to end it."""


def lease_request(
    run_id: str, random: Random, ttl: timedelta, new: Snapshot | None = None
) -> LeaseRequest:
    """Return a request for a run's lease: of a new run with `new`, else of a stored one."""
    request = LeaseRequest(run_id, new_owner(random), ttl)
    if new is None:
        return request
    return replace(
        request,
        create=codec.dumps(new),
        workflow=workflow_of(new),
        existing=False,
        **header_of(new),
    )


def cancel_requests(grant: Grant) -> list[str]:
    """Return the ids of the messages that ask to cancel the run."""
    return [message.id for message in grant.inbox if message.name == CANCEL]


def unstarted(session: Session, grant: Grant) -> RunHost:
    """Return the host of a run whose function is not run."""
    return open_host(session, grant.lease.id, History("", grant.snapshot), grant)


async def give_up(session: Session, grant: Grant) -> bytes | None:
    """Store a run that is over as it was."""
    rest = Rest(rest_status(grant.snapshot))
    return await _settle(unstarted(session, grant), grant.snapshot["execution"], rest)


async def cancel(session: Session, grant: Grant, reason: str) -> bytes | None:
    """End a run as cancelled."""
    host = unstarted(session, grant)
    return await _settle(host, *cancelled(host, reason))


def cancelled(host: RunHost, reason: str) -> tuple[ExecutionBlock, Rest]:
    """Return how a cancelled run is stored."""
    record = encode_failure(Cancelled(host.id, reason), host.id, (Cancelled,)).record
    now = host.block()["lastUpdated"]
    block = host.block("failed", state="cancelled", completedAt=now, error=record)
    return block, Rest("cancelled")


async def pause(session: Session, grant: Grant, reason: str) -> bytes | None:
    """Pause a run, with what it waits for, until it is resumed."""
    host = unstarted(session, grant)
    waits = list(host.history.waits.values())
    block = host.block(state="paused", reason=reason, pending=waits)
    return await _settle(host, block, Rest("paused", None, (CANCEL,)))


async def make_due(session: Session, grant: Grant) -> bytes | None:
    """Let a worker continue a run at once."""
    host = unstarted(session, grant)
    return await _settle(host, _queued(host), Rest("queued", host.clock.now()))


async def retry(session: Session, grant: Grant) -> bytes | None:
    """Let a worker continue a failed run: the steps that ended it run again."""
    host = unstarted(session, grant)
    host.history.drop(failures_to_retry(grant.snapshot))
    deadline = host.history.metadata.get("deadline")
    if isinstance(deadline, str) and parse_iso(deadline) <= host.clock.now():
        # It would end the run again at once; one that counts from the first claim begins again.
        del host.history.metadata["deadline"]
    # A request to cancel that was sent before does not end what begins after it.
    old = cancel_requests(grant)
    return await _settle(host, _queued(host), Rest("queued", host.clock.now()), old)


async def restart(session: Session, grant: Grant, start: Start) -> bytes | None:
    """Start a run that is over again: no records, the new payload, the next generation.

    Messages stay in its inbox.
    """
    host = unstarted(session, grant)
    history = host.history = History(start.workflow)
    history.metadata = dict(start.metadata)
    # Steps must not use the idempotency keys of the run that ended.
    set_generation(history.metadata, generation_of(grant.snapshot.get("metadata")) + 1)
    wake_at = start.plan.wake_at or host.clock.now() - start.plan.head_start
    return await _settle(host, _queued(host), Rest("queued", wake_at), cancel_requests(grant))


def _queued(host: RunHost) -> ExecutionBlock:
    waits = list(host.history.waits.values())
    return host.block(state="queued", pending=waits) if waits else host.block(state="queued")


async def _settle(
    host: RunHost, block: Any, rest: Rest, consumes: Sequence[str] = ()
) -> bytes | None:
    """Return what was written, or `None` if another owner took the run over."""
    try:
        return await host.settle(block, rest, consumes)
    except LeaseLost:
        return None
    except StoreError:
        await log_failure(host.release())
        raise
