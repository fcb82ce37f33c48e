"""Deliver the items of an outbox. Each may be delivered repeatedly, but takes effect once."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from random import Random
from typing import Any

from perdure import codec
from perdure.durable.outbox import decode_run, send_messages, start_runs
from perdure.durable.session import Session, wake_workers
from perdure.engine.history import History
from perdure.errors import RunConflict
from perdure.runtime.ends import done_message, missing_outcome, new_log, outcome_in
from perdure.runtime.options import payload_conflict
from perdure.runtime.requests import OPERATOR, WATCH, Request, encode_request
from perdure.runtime.transitions import (
    change,
    lease_request,
    old_requests,
    replace_run,
)
from perdure.runtime.verbs import CANCELLED_BY, RETRIED, continue_over
from perdure.snapshot import OutboxItem, Snapshot, is_over, rest_status, tags_of, workflow_of
from perdure.snapshot.record import encode_failure
from perdure.snapshot.tags import PARENT, parent_tag
from perdure.store import (
    Delivery,
    NewMessage,
    NewRun,
    Refusal,
    Store,
    can_search,
    require_lease,
    require_search,
)

BATCH = 500
_PAUSE = 0.05
_ANSWER_TTL = timedelta(hours=1)


class Deliveries:
    """Delivers the items of one run's outbox."""

    __slots__ = ("_history", "_random", "_run_id", "_session", "_ttl")

    def __init__(
        self, session: Session, run_id: str, history: History, random: Random, ttl: timedelta
    ) -> None:
        self._session = session
        self._run_id = run_id
        self._history = history
        self._random = random
        self._ttl = ttl

    async def __call__(self, item: OutboxItem) -> None:
        """Deliver one item."""
        facts: Any = item
        if "start" in facts:
            await self._start(decode_run(facts["start"]))
        if "map" in facts:
            await self._start_many(facts["map"])
        if "answer" in facts:
            documents = require_search(self._session.store, "step.reply").documents
            await documents.set(facts["answer"]["key"], facts["answer"]["value"], ttl=_ANSWER_TTL)
        if "delete" in facts:
            await self._session.store.delete(facts["delete"])
        if "watch" in facts:
            await self._watch(facts["watch"]["run"], facts["watch"]["event"])
        if "cancel" in facts:
            tag = facts["cancel"].get("tag") or parent_tag(self._run_id)
            await self._cancel(facts["cancel"]["id"], facts["cancel"]["runs"], tag)

    async def _start(self, new: NewRun) -> None:
        (is_new,) = await start_runs(self._session, [new])
        if is_new:
            return
        snapshot: Snapshot = codec.loads(new.snapshot)
        metadata = snapshot.get("metadata") or {}
        event = (metadata.get("replyTo") or {}).get("event")
        existing = await self._session.store.load(new.id)
        if existing is not None and await self._is_replaced(new, existing):
            return
        if event is None or existing is None:
            return
        existing_metadata = existing.get("metadata") or {}
        if (existing_metadata.get("replyTo") or {}).get("event") == event:
            # The item was already delivered, and that run reports its own end.
            return
        if (conflict := _conflict(new.id, snapshot, existing)) is not None:
            await self._report(new.id, event, conflict)
        else:
            await self._watch(new.id, event, is_called=True)

    async def _start_many(self, facts: Mapping[str, Any]) -> None:
        """Start runs that report their ends to a log, which is created first."""
        shared_facts, full = facts["run"], facts["full"]
        log = new_log(shared_facts["id"], self._run_id, self._session.clock.now())
        await start_runs(self._session, [log])
        reply = {"run": log.id, "full": full}
        queues = facts.get("queues") or [""] * len(facts["payloads"])
        pairs = zip(facts["payloads"], queues, strict=True)
        runs = [
            decode_run({**numbered_run(shared_facts, number, payload, reply), "queue": queue})
            for number, (payload, queue) in enumerate(pairs, facts["first"])
        ]
        answers = await start_runs(self._session, runs)
        for new in (run for run, is_new in zip(runs, answers, strict=True) if not is_new):
            await self._is_replaced(new, await self._session.store.load(new.id))

    async def _is_replaced(self, new: NewRun, snapshot: Snapshot | None) -> bool:
        """Replace a child of an earlier, removed run that had the id of this run.

        A run that is not over, or that anyone else has started, is left alone.
        """
        while snapshot is not None and _is_of_earlier_run(snapshot, codec.loads(new.snapshot)):
            if await self._replace(new):
                wake_workers(self._session.store)
                return True
            snapshot = await self._session.store.load(new.id)
        return False

    async def _replace(self, new: NewRun) -> bool:
        grant = await self._session.acquire(lease_request(new.id, self._random, self._ttl))
        if isinstance(grant, Refusal):
            await self._session.clock.sleep(_PAUSE)
            return False
        if not _is_of_earlier_run(grant.snapshot, codec.loads(new.snapshot)):
            # The run was started again in the meantime.
            await require_lease(self._session.store).release([grant.lease])
            return False
        return await replace_run(self._session, grant, new) is not None

    async def _watch(self, run_id: str, event: str, *, is_called: bool = False) -> None:
        """Ensure that this run gets a message when the other run ends, or if it has ended."""
        payload = codec.dumps({"run": self._run_id, "event": event, "isCalled": is_called})
        message = NewMessage(run_id, WATCH, payload, f"{event}@{self._run_id}")
        while True:
            (receipt,) = await send_messages(self._session, [message])
            if receipt.delivery in (Delivery.DELIVERED, Delivery.DUPLICATE):
                return None
            snapshot = await self._session.store.load(run_id)
            if snapshot is None:
                return await self._report(run_id, event, missing_outcome(run_id))
            has_ended = is_over(rest_status(snapshot))
            if has_ended and not self._is_to_continue(snapshot, is_called):
                outcome = outcome_in(snapshot["execution"], workflow_of(snapshot))
                return await self._report(run_id, event, outcome)
            # The run was started again in the meantime, or will be continued; then ask again.
            if not has_ended or not await self._continue(run_id):
                await self._session.clock.sleep(_PAUSE)

    def _is_to_continue(self, snapshot: Snapshot, is_called: bool) -> bool:
        """Return whether a child of this run has to be continued.

        That is so if it failed or was cancelled before this run was retried, or if it was cancelled
        together with a call that is now made again.
        """
        retried_at, block = self._history.metadata.get(RETRIED), snapshot["execution"]
        if block["status"] != "failed" or _parent_of(snapshot) != self._run_id:
            return False
        if is_called and (snapshot.get("metadata") or {}).get(CANCELLED_BY) == PARENT:
            return True
        ended_at = block.get("completedAt") or block["lastUpdated"]
        return isinstance(retried_at, str) and ended_at <= retried_at

    async def _continue(self, run_id: str) -> bool:
        """Continue a failed or cancelled child, if no other process is changing it."""
        request = lease_request(run_id, self._random, self._ttl)
        grant = await self._session.acquire(request)
        if isinstance(grant, Refusal):
            return False
        # It may have several requests to cancel, which it has already obeyed.
        old = old_requests(grant)
        is_changed = await change(self._session, grant, continue_over, old) is not None
        wake_workers(self._session.store)
        return is_changed

    async def _report(self, run_id: str, event: str, outcome: Mapping[str, Any]) -> None:
        await send_messages(self._session, [done_message(run_id, event, self._run_id, outcome)])

    async def _cancel(self, id: str, run_ids: Sequence[str], tag: str) -> None:
        why = f"the run that started it, {self._run_id!r}, no longer waits for it"
        for first in range(0, len(run_ids), BATCH):
            batch = run_ids[first : first + BATCH]
            runs = await open_runs(self._session.store, tag, batch)
            request = encode_request(Request("", "cancel", via=PARENT, why=why))
            dedup_id = f"~cancel:{self._run_id}:{id}"
            messages = [NewMessage(run, OPERATOR, request, dedup_id) for run in runs]
            await send_messages(self._session, messages)


async def open_runs(store: Store, tag: str, run_ids: Sequence[str]) -> list[str]:
    """Return the runs that are not over and have the tag of the run that started them.

    A run may have been started by another run or program, if `run_id=` named an existing run.
    """
    if can_search(store):
        runs = [run for run in await store.summaries(run_ids) if run is not None]
        return [run.id for run in runs if tag in run.tags and not is_over(run.status)]
    snapshots = [(run_id, await store.load(run_id)) for run_id in run_ids]
    return [
        run_id
        for run_id, snapshot in snapshots
        if snapshot is not None
        and tag in tags_of(snapshot.get("metadata"))
        and not is_over(rest_status(snapshot))
    ]


def _parent_of(snapshot: Snapshot) -> str:
    parent: Mapping[str, Any] = (snapshot.get("metadata") or {}).get("parent") or {}
    return str(parent.get("run", ""))


def _is_of_earlier_run(snapshot: Snapshot, new: Snapshot) -> bool:
    """Return whether a run is over, and belongs to an earlier run with the id of the new parent."""
    stored_parent, own = (
        (each.get("metadata") or {}).get("parent") or {} for each in (snapshot, new)
    )
    if not is_over(rest_status(snapshot)) or stored_parent.get("run") != own.get("run"):
        return False
    return bool(stored_parent.get("seed")) and stored_parent["seed"] != own.get("seed")


def numbered_run(
    shared_facts: Mapping[str, Any], index: int, payload: Any, reply: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one of many runs: what they share, with its own id, seed and payload."""
    snapshot, run_id = shared_facts["snapshot"], f"{shared_facts['id']}/{index}"
    metadata = {**snapshot["metadata"], "replyTo": {**reply, "event": str(index)}}
    # The same for each delivery, and different from that of any other run.
    metadata["seed"] = hashlib.sha256(f"{metadata['seed']}/{index}".encode()).hexdigest()[:16]
    metadata.pop("input", None)
    if payload is not None:
        metadata["input"] = payload
    return {**shared_facts, "id": run_id, "snapshot": {**snapshot, "metadata": metadata}}


def _conflict(run_id: str, new: Snapshot, snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the outcome for a parent if the id of its new run belongs to another run."""
    workflow = workflow_of(snapshot)
    reason = payload_conflict(new, snapshot)
    if not reason:
        return None
    record = encode_failure(RunConflict(run_id, workflow, reason), run_id).record
    return {**codec.loads(codec.dumps(record)), "workflow": workflow or ""}
