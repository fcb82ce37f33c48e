"""Edit a run at rest with a single fenced write.

Verbs change the history and the status in memory. Then the whole run is written as one rest,
together with the acts of the operators: a crash leaves either the old state or the new one.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from perdure.clock import isoformat, parse_iso
from perdure.durable.host import REPLAY, RunHost
from perdure.durable.lifecycle import log_failure, open_host
from perdure.durable.rollback import end_or_undo
from perdure.durable.session import Session
from perdure.engine.history import History
from perdure.errors import Cancelled, LeaseLost, StoreError
from perdure.runtime.acts import add_act, new_act
from perdure.runtime.deadlines import deadline_of
from perdure.runtime.requests import OPERATOR, WATCH, Request
from perdure.snapshot import (
    ExecutionBlock,
    PendingWait,
    RunStatus,
    Snapshot,
    awaits_of,
    created_at_of,
    is_over,
    open_waits,
    reply_to_of,
    rest_status,
    wake_at_of,
)
from perdure.snapshot.record import encode_failure
from perdure.store import Grant, Rest

UNPAUSED = "unpausedAt"
"""The metadata name of the time when the run was last unpaused."""


class RunEdit:
    """A run that is being edited: its history, its status, and why it is paused or cancelled.

    `stored_block` is its `execution` as it was read, and `was_over` says that it had ended.
    `due_at` is when a queued run starts; `None` means at once. `is_changed` says that the status
    was set: otherwise a run that is over stays as it is. `acts` are the acts of this write,
    `entered_key` is the key of a record that was entered by hand. `undoes` says that the steps of a
    cancelled run have to be undone.
    """

    def __init__(
        self,
        run_id: str,
        history: History,
        stored_block: ExecutionBlock,
        status: RunStatus,
        now: datetime,
        due_at: datetime | None = None,
    ) -> None:
        self.run_id = run_id
        self.history = history
        self.stored_block = stored_block
        self.status: RunStatus = status
        self.was_over = is_over(status)
        self.now = now
        self.due_at = due_at
        self.reason: str = stored_block.get("reason", "")
        self.is_changed = False
        self.acts: list[dict[str, Any]] = []
        self.entered_key = ""
        self.undoes = True

    def record(self, request: Request, *, old: str = "", refusal: str = "") -> None:
        """Record an operator's act; requests of programs are not recorded."""
        if request.by:
            act = new_act(request, self.now, old=old, refusal=refusal)
            self.acts.append(act)
            add_act(self.history.metadata, act)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, unless it was made due again."""
        return is_over(self.status)

    @property
    def written_status(self) -> RunStatus:
        """The status to store; a run whose steps have to be undone first has not ended."""
        is_undone = self.undoes and self.history.rollback is not None
        return "queued" if is_undone and self.status == "cancelled" else self.status

    @property
    def waits(self) -> list[PendingWait]:
        """What the run waits for."""
        return list(self.history.waits.values())

    def make(self, status: RunStatus, *, reason: str = "", due_at: datetime | None = None) -> None:
        """Set the status with which the run will be stored."""
        if self.status == "paused":
            # A schedule skips the times until then.
            self.history.metadata[UNPAUSED] = isoformat(self.now)
        self.status, self.reason, self.due_at = status, reason, due_at
        self.is_changed = True

    def continue_run(self) -> None:
        """Let a worker continue the run at once, unless it is paused."""
        if self.status != "paused":
            self.make("queued")

    def rest(self, host: RunHost) -> tuple[ExecutionBlock, Rest]:
        """Return the execution block and the rest to store."""
        status = self.status
        if status == "cancelled" and self.is_changed:
            end = cancelled(host, self.reason)
            return end_or_undo(host, *end) if self.undoes else end
        if is_over(status):
            return self.stored_block, _over(host, status)
        if status == "paused":
            return self._pause(host)
        if status == "queued":
            awaits = () if self.due_at is None else (OPERATOR,)
            wake_at = self.due_at or host.clock.now()
            return self._block(host, "queued"), Rest("queued", wake_at, awaits)
        return at_rest(host, self.waits)

    def _pause(self, host: RunHost) -> tuple[ExecutionBlock, Rest]:
        block = self._block(host, "paused", reason=self.reason)
        if self.due_at is not None:
            block["dueAt"] = isoformat(self.due_at)
        return block, Rest("paused", None, (OPERATOR,))

    def _block(self, host: RunHost, state: str, **facts: Any) -> ExecutionBlock:
        if self.waits:
            facts["pending"] = self.waits
        return host.block(state=state, **facts)


def edit_of(
    run_id: str, snapshot: Snapshot, now: datetime, due_at: datetime | None = None
) -> RunEdit:
    """Return the edit of a run with this snapshot."""
    history = History("", snapshot)
    return RunEdit(run_id, history, snapshot["execution"], _status_at_rest(snapshot), now, due_at)


def leased_edit(
    session: Session, grant: Grant, due_at: datetime | None = None
) -> tuple[RunEdit, RunHost]:
    """Return the edit of a leased run, and the host that settles it."""
    edit = edit_of(grant.lease.id, grant.snapshot, grant.now, due_at)
    return edit, open_host(session, grant.lease.id, edit.history, grant)


def _status_at_rest(snapshot: Snapshot) -> RunStatus:
    """Return the status of a run that no process executes; if its owner died, it continues."""
    status = rest_status(snapshot)
    return "queued" if status == "running" else status


def stored_due_at(block: ExecutionBlock) -> datetime | None:
    """Return when a run that has not started yet should start, if not at once."""
    return parse_iso(block["dueAt"]) if "dueAt" in block else None


def due_at_of(snapshot: Snapshot, now: datetime) -> datetime | None:
    """Return when a stored run became due: at the end of a wait, or at its start time.

    Return `None` if an event or an operator made it due, since that time is not stored.
    """
    block = snapshot["execution"]
    times = [parse_iso(wait["wakeAt"]) for wait in open_waits(snapshot) if "wakeAt" in wait]
    if past := [time for time in times if time <= now]:
        return min(past)
    if block.get("state") != "queued" or snapshot.get("steps"):
        return None
    created_at = created_at_of(snapshot.get("metadata"))
    return stored_due_at(block) or (parse_iso(created_at) if created_at else None)


async def settle(
    host: RunHost, block: ExecutionBlock, rest: Rest, consumes: Sequence[str] = ()
) -> bytes | None:
    """Write a rest and release the run, even if the store fails.

    Return what was written, or `None` if another owner took over the run.
    """
    try:
        return await host.settle(block, rest, consumes)
    except LeaseLost:
        return None
    except StoreError:
        await log_failure(host.release())
        raise


def cancelled(host: RunHost, reason: str) -> tuple[ExecutionBlock, Rest]:
    """Return the execution block and the rest of a cancelled run."""
    record = encode_failure(Cancelled(host.id, reason), host.id).record
    now = host.block()["lastUpdated"]
    block = host.block("failed", state="cancelled", completedAt=now, error=record)
    return block, _over(host, "cancelled")


def _over(host: RunHost, status: RunStatus) -> Rest:
    """Return the rest of a run whose end may have to be reported.

    The next owner reports it to the parent and the children, and delivers the outbox.
    """
    is_reported = bool(host.history.outbox) or reply_to_of(host.history.metadata) is not None
    return Rest(status, host.clock.now() if is_reported else None, (WATCH,))


def at_rest(host: RunHost, waits: Sequence[PendingWait]) -> tuple[ExecutionBlock, Rest]:
    """Return the execution block and the rest of a run that waits for a time or an event."""
    # Wake it at once: nothing else would wake a run that waits for nothing, as `always_replay`
    # suspends.
    replays = not waits or any(wait["id"].startswith(REPLAY) for wait in waits)
    waits = [wait for wait in waits if not wait["id"].startswith(REPLAY)]
    listens = any(wait["kind"] == "event" for wait in waits)
    state: RunStatus = "waiting" if listens else "suspended"
    block = host.block(state=state, pending=waits)
    snapshot = cast(Snapshot, {"execution": block})
    wake_at = host.clock.now() if replays else wake_at_of(snapshot)
    deadline = deadline_of(host.history.metadata)
    if deadline is not None and host.history.rollback is None:
        wake_at = deadline if wake_at is None else min(wake_at, deadline)
    # A request that arrives while the run is being suspended must wake it.
    return block, Rest(state, wake_at, (*awaits_of(snapshot), OPERATOR))
