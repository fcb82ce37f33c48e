"""Writes that change a leased run without calling its function, and release it.

Each is one rest, fenced by the lease's epoch: a crash leaves either the old state or the new one.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random

from msgspec.structs import replace

from perdure import codec
from perdure.durable.owners import new_owner
from perdure.durable.session import Session
from perdure.engine.history import History
from perdure.runtime.edits import RunEdit, leased_edit, settle
from perdure.runtime.options import Start
from perdure.runtime.requests import Request, requests_in
from perdure.runtime.verbs import apply
from perdure.snapshot import Snapshot, generation_of, reply_to_of, set_generation, workflow_of
from perdure.store import Grant, LeaseRequest, NewRun, Rest, header_of


def lease_request(
    run_id: str, random: Random, ttl: timedelta, new: Snapshot | None = None
) -> LeaseRequest:
    """Return a request for the lease of a stored run, or of a new run with `new`."""
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


async def give_up(session: Session, grant: Grant) -> bytes | None:
    """Release a run that is over, unchanged."""
    return await change(session, grant, lambda _: None)


async def cancel(session: Session, grant: Grant, request: Request) -> bytes | None:
    """Cancel a run, or let its steps be undone first."""
    return await change(session, grant, lambda run: apply(run, request))


async def pause(session: Session, grant: Grant, reason: str) -> bytes | None:
    """Pause a run, keeping its waits, until it is resumed."""
    return await change(session, grant, lambda run: run.make("paused", reason=reason))


async def make_due(session: Session, grant: Grant) -> bytes | None:
    """Let a worker continue a run at once."""
    return await change(session, grant, lambda run: run.make("queued"))


async def retry(session: Session, grant: Grant) -> bytes | None:
    """Let a worker continue a failed run: the steps that ended it run again."""
    old = old_requests(grant)
    # An earlier request to cancel must not end the retried run.
    return await change(session, grant, lambda run: apply(run, Request("", "retry")), old)


async def change(
    session: Session,
    grant: Grant,
    edit: Callable[[RunEdit], None],
    consumes: Sequence[str] = (),
) -> bytes | None:
    """Change a run in one write; return it as JSON, or `None` if another owner took it over."""
    run, host = leased_edit(session, grant)
    edit(run)
    return await settle(host, *run.rest(host), consumes)


async def restart(session: Session, grant: Grant, start: Start) -> bytes | None:
    """Restart a run that is over: no records, the new payload, the next generation.

    Messages stay in its inbox.
    """
    run, host = leased_edit(session, grant)
    history = host.history = History(start.workflow)
    history.metadata.update(start.metadata)
    # Its owner may have died before the end was reported: the waiting run gets the next end, and
    # children are cancelled.
    history.outbox = run.history.outbox
    if (caller := reply_to_of(run.history.metadata)) is not None:
        history.metadata["replyTo"] = caller
    # Steps must not reuse the idempotency keys of the run that ended.
    set_generation(history.metadata, generation_of(grant.snapshot.get("metadata")) + 1)
    wake_at = start.plan.wake_at or host.clock.now() - start.head_start
    block = host.block(state="queued")
    return await settle(host, block, Rest("queued", wake_at), old_requests(grant))


async def replace_run(session: Session, grant: Grant, new: NewRun) -> bytes | None:
    """Replace a run that is over with a new one, as if the old one had been deleted.

    Undelivered items in the outbox of the old run are kept.
    """
    run, host = leased_edit(session, grant)
    history = host.history = History(new.workflow, codec.loads(new.snapshot))
    history.outbox = run.history.outbox
    wake_at = new.wake_at or host.clock.now() - new.head_start
    return await settle(
        host, host.block(state="queued"), Rest("queued", wake_at), old_requests(grant)
    )


def old_requests(grant: Grant) -> list[str]:
    """Return the ids of requests that were made before a run was continued or restarted."""
    return [message_id for message_id, _ in requests_in(grant.inbox)]
