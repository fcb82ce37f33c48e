"""Change one run: directly if it is at rest, or through its owner."""

from datetime import datetime, timedelta
from random import Random
from typing import Any

from perdure import presence
from perdure.clock import Clock
from perdure.durable.session import Session, borrow, poke, wake_workers
from perdure.errors import Refused, RunNotFound
from perdure.operations.outcome import Outcome, describe, requested
from perdure.runtime.acts import copy_acts
from perdure.runtime.edits import RunEdit, edit_of, leased_edit, settle
from perdure.runtime.ends import report_end, watchers_in
from perdure.runtime.pruning import remove_logs_of
from perdure.runtime.requests import (
    OPERATOR,
    Request,
    encode_request,
    requests_in,
)
from perdure.runtime.transitions import lease_request
from perdure.runtime.verbs import apply, apply_all
from perdure.snapshot import Snapshot, created_at_of
from perdure.snapshot.acts import acts_of
from perdure.store import (
    Grant,
    NewMessage,
    Refusal,
    Rest,
    RunSummary,
    Store,
    can_search,
    require_inbox,
)

LEASE_TTL = timedelta(seconds=10)
"""How long a run stays leased to an operator's process that died during a change."""

PAUSE = 0.1
"""Seconds until the next attempt for a run that another process is changing."""


class Changes:
    """Applies requests to the runs of one store."""

    def __init__(self, store: Store, clock: Clock, random: Random) -> None:
        self.store = store
        self._clock = clock
        self._random = random

    def session(self) -> Session:
        """Return the session through which runs are written; enter it to use it."""
        return borrow(self.store, self._clock, LEASE_TTL)

    async def preview(self, run_id: str, request: Request) -> tuple[RunEdit, tuple[str, ...]]:
        """Return the run as it would be after the request, and its current records."""
        snapshot, summary = await self._read(run_id)
        return _try(run_id, snapshot, request, self._clock.now(), _due_at(summary))

    async def apply(self, run_id: str, request: Request) -> Outcome:
        """Apply a request, or send it to the run's owner; raise `Refused` if it does not apply."""
        # Check before leasing the run, because a lease and a rest would look like a change.
        run, _ = await self.preview(run_id, request)
        async with self.session() as session:
            outcome = await self._at_rest(session, run_id, request)
            if run.was_over:
                # No process executes the run: its owner is writing a change, or has died.
                outcome = await self._apply_when_free(session, run_id, request, outcome)
            if isinstance(outcome, Refusal):
                inbox = require_inbox(self.store, "changing a run that is owned elsewhere")
                message = NewMessage(
                    run_id, OPERATOR, encode_request(request), f"{OPERATOR}:{request.id}"
                )
                await inbox.send([message])
                poke(self.store, [run_id])
                # The owner may have released the run just before the message arrived.
                outcome = await self._at_rest(session, run_id, request)
        if isinstance(outcome, Refusal):
            return requested(request, run_id, presence.worker_id(outcome.owner or ""))
        wake_workers(self.store)
        return outcome

    async def _apply_when_free(
        self, session: Session, run_id: str, request: Request, outcome: Outcome | Refusal
    ) -> Outcome:
        """Apply a request to a run that is over, as soon as its lease is free."""
        end = self._clock.monotonic() + LEASE_TTL.total_seconds() * 2
        while isinstance(outcome, Refusal):
            if self._clock.monotonic() > end:
                owner = presence.worker_id(outcome.owner or "")
                raise Refused(run_id, request.verb, f"{owner} is changing it; try again")
            await self._clock.sleep(PAUSE)
            outcome = await self._at_rest(session, run_id, request)
        return outcome

    async def _at_rest(self, session: Session, run_id: str, request: Request) -> Outcome | Refusal:
        """Apply a request to a run that no process owns."""
        summary = await self._summary(run_id)
        grant = await self._lease(session, run_id)
        if isinstance(grant, Refusal):
            return grant
        run, host = leased_edit(session, grant, _due_at(summary))
        before = tuple(run.history)
        waiting = requests_in(grant.inbox)
        # Our request is among them if it was sent to an owner that did not see it.
        others = [each.request for each in waiting if each.request.id != request.id]
        apply_all(run, others)
        consumes = [each.message_id for each in waiting]
        refusal = _apply_once(run, request)
        data = await settle(host, *run.rest(host), consumes)
        await copy_acts(self.store, run_id, run.acts if data is not None else ())
        if refusal is not None:
            raise refusal
        if data is None:
            # Another process took over the run: it is notified, or finds the request in the inbox.
            return Refusal(run_id, "owned", owner="another process")
        return describe(request, run, before)

    async def delete(self, run_id: str, act: dict[str, Any]) -> None:
        """Delete a run that no process owns.

        The act is written first, because nothing remains of the run that could contain it.
        """
        async with self.session() as session:
            grant = await self._lease(session, run_id)
            if isinstance(grant, Refusal):
                owner = presence.worker_id(grant.owner or "")
                raise Refused(run_id, "delete", f"{owner} owns it; cancel it first")
            run, host = leased_edit(session, grant)
            created_at = created_at_of(run.history.metadata)
            await copy_acts(self.store, run_id, [{**act, "was": run.status, "created": created_at}])
            await remove_logs_of(self.store, run_id)
            await settle(host, run.stored_block, Rest(run.status, delete=True))
            await report_end(session, run_id, grant.snapshot, watchers_in(grant.inbox))

    async def _lease(self, session: Session, run_id: str) -> Grant | Refusal:
        """Lease a stored run; raise `RunNotFound` if it does not exist."""
        answer = await session.acquire(lease_request(run_id, self._random, LEASE_TTL))
        if isinstance(answer, Refusal) and answer.reason == "missing":
            raise RunNotFound(run_id)
        return answer

    async def _read(self, run_id: str) -> tuple[Snapshot, RunSummary | None]:
        summary = await self._summary(run_id)
        snapshot = await self.store.load(run_id)
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot, summary

    async def _summary(self, run_id: str) -> RunSummary | None:
        if not can_search(self.store):
            return None
        (summary,) = await self.store.summaries([run_id])
        return summary


def _due_at(summary: RunSummary | None) -> datetime | None:
    """Return when a run that has not started yet should start."""
    is_queued = summary is not None and summary.owner is None and summary.status == "queued"
    return summary.wake_at if summary is not None and is_queued else None


def _apply_once(run: RunEdit, request: Request) -> Refused | None:
    """Apply a request unless the run's owner has already applied it; return a refusal, if any."""
    for act in acts_of(run.history.metadata):
        if act.get("id") == request.id:
            reason = act.get("refused")
            return Refused(run.run_id, request.verb, reason) if reason else None
    try:
        apply(run, request)
    except Refused as error:
        return error
    return None


def _try(
    run_id: str, snapshot: Snapshot, request: Request, now: datetime, due_at: datetime | None
) -> tuple[RunEdit, tuple[str, ...]]:
    run = edit_of(run_id, snapshot, now, due_at)
    before = tuple(run.history)
    apply(run, request)
    return run, before
