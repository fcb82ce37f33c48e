"""The operators' verbs: how each changes a run at rest, and when it is refused.

None of them needs the workflow function. A verb that applies changes the run in memory and returns
what it replaced, in a few words; otherwise it raises `Refused` and changes nothing.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias, cast

from perdure import codec
from perdure.clock import isoformat
from perdure.durable.outcome import failures_to_retry
from perdure.engine.history import History
from perdure.engine.paths import split_path
from perdure.errors import AppliedBefore, Refused
from perdure.result import Err
from perdure.runtime.deadlines import drop_passed_deadline
from perdure.runtime.edits import RunEdit, stored_due_at
from perdure.runtime.requests import Request, Verb
from perdure.runtime.rollbacks import (
    check_not_undoing,
    check_undo_step,
    check_valid_start,
    continue_rollback,
    drop_records,
    start_over,
)
from perdure.snapshot import (
    UNCHECKED,
    PendingWait,
    RunStatus,
    Snapshot,
    StepRecord,
    rest_status,
)
from perdure.snapshot.acts import acts_of
from perdure.snapshot.asks import is_ask
from perdure.snapshot.labels import SIGNAL
from perdure.snapshot.record import encode_failure
from perdure.snapshot.rollback import SAGA

_MAX_WAS = 200

CANCELLED_BY = "cancelledBy"
"""The metadata name of what cancelled a run, if that is known."""

RETRIED = "retriedAt"
"""The metadata name of the time when a run was continued after it had ended."""

Apply: TypeAlias = Callable[[RunEdit, Request], str]


def apply(run: RunEdit, request: Request) -> None:
    """Apply a verb and record the act, or raise `Refused`."""
    if request.id and any(act.get("id") == request.id for act in acts_of(run.history.metadata)):
        raise AppliedBefore(run.run_id, request.verb)
    old = _VERBS[request.verb](run, request)
    run.record(request, old=old)


def apply_all(run: RunEdit, requests: Sequence[Request]) -> None:
    """Apply the requests in an inbox. No caller waits, so a refusal is recorded as an act."""
    if run.is_over:
        refuse_all(run, requests)
        return
    for request in requests:
        try:
            apply(run, request)
        except Refused as error:
            run.record(request, refusal=error.reason)


def refuse_all(run: RunEdit, requests: Sequence[Request]) -> None:
    """Record that requests came too late: they were made when the run was not over."""
    for request in requests:
        run.record(request, refusal="the run ended first")


def _refuse(run: RunEdit, request: Request, reason: str) -> Refused:
    return Refused(run.run_id, request.verb, reason)


def _shown_status(run: RunEdit) -> RunStatus:
    """Return the status that lists of runs show; an edit counts a running run as queued."""
    snapshot = cast(Snapshot, {"execution": run.stored_block})
    return run.status if run.is_changed else rest_status(snapshot)


def _check_not_over(run: RunEdit, request: Request) -> None:
    if run.is_over:
        raise _refuse(run, request, f"it is {run.status}")


def _cancel(run: RunEdit, request: Request) -> str:
    _check_not_over(run, request)
    if run.history.rollback is not None and request.undo:
        raise _refuse(run, request, "its steps are being undone; the run ends after that")
    status = run.status
    run.make("cancelled", reason=request.why)
    run.undoes = request.undo
    if request.via:
        run.history.metadata[CANCELLED_BY] = request.via
    cancel_children(run.history, run.now)
    return status


def _pause(run: RunEdit, request: Request) -> str:
    _check_not_over(run, request)
    if run.status == "paused":
        raise _refuse(run, request, f"it is already paused: {run.reason or 'no reason was given'}")
    status = run.status
    due_at = run.due_at if status == "queued" else None
    by = f"by {request.by}" if request.by else ""
    reason = ": ".join(filter(None, (by, request.why)))
    run.make("paused", reason=reason, due_at=due_at)
    return status


def _unpause(run: RunEdit, request: Request) -> str:
    if run.status != "paused":
        raise _refuse(run, request, f"it is {_shown_status(run)}, not paused")
    reason = run.reason
    run.make("queued", due_at=stored_due_at(run.stored_block))
    return reason


def _retry(run: RunEdit, request: Request) -> str:
    if run.status != "failed":
        raise _refuse(run, request, f"it is {_shown_status(run)}, not failed")
    _check_complete(run, request)
    keys = failures_to_retry(_snapshot(run))
    if run.history.steps_to_undo() and run.history.rollback is not None:
        return continue_rollback(run)
    _make_due_again(run)
    start_over(run)
    run.history.drop(keys)
    return f"failed at {', '.join(keys)}" if keys else "failed"


def children_of(history: History) -> list[str]:
    """Return the ids of the children that a run has not abandoned."""
    return [*(history.metadata.get("children") or ()), *history.open_children()]


def cancel_children(history: History, now: datetime) -> None:
    """Cancel the children that a run has not abandoned, because it has ended."""
    if children := children_of(history):
        history.cancel_runs("~end", list(dict.fromkeys(children)), isoformat(now))


def continue_over(run: RunEdit) -> None:
    """Continue a failed or cancelled run, because its parent continues."""
    if run.status == "failed":
        apply(run, Request("", "retry"))
    elif run.status == "cancelled":
        _make_due_again(run)
        start_over(run)


def _make_due_again(run: RunEdit) -> None:
    """Continue a run, even if it is over; a deadline that has passed no longer ends it.

    Children that failed or were cancelled are continued when the run asks for them again.
    """
    drop_passed_deadline(run.history.metadata, run.now)
    run.history.metadata.pop(CANCELLED_BY, None)
    if run.was_over:
        # One millisecond later, because a child may have ended within the current one.
        run.history.metadata[RETRIED] = isoformat(run.now + timedelta(milliseconds=1))
    run.continue_run()


def _check_complete(run: RunEdit, request: Request) -> None:
    if run.stored_block.get("truncated"):
        reason = (
            "its records were too large for the store and were dropped; start it again under "
            "another id"
        )
        raise _refuse(run, request, reason)


def _snapshot(run: RunEdit) -> Snapshot:
    steps = {key: run.history.get(key) for key in run.history}
    return cast(Snapshot, {"steps": steps, "execution": run.stored_block})


def _wake(run: RunEdit, request: Request) -> str:
    _check_not_over(run, request)
    waits = [wait for wait in run.waits if request.step in ("", wait["id"])]
    if not waits:
        names = ", ".join(repr(wait["id"]) for wait in run.waits)
        reason = f"it waits for {names}, not for {request.step!r}" if names else "it does not wait"
        raise _refuse(run, request, reason)
    for wait in waits:
        run.history.waits[wait["id"]] = _ended_at(wait, isoformat(run.now))
    run.continue_run()
    return ", ".join(_describe_wait(wait) for wait in waits)


def _ended_at(wait: PendingWait, now: str) -> PendingWait:
    due_wait: PendingWait = {**wait, "wakeAt": now}
    if is_ask(wait):
        due_wait["expiresAt"] = now
    return due_wait


def _describe_wait(wait: PendingWait) -> str:
    deadline = f" until {wait['wakeAt']}" if "wakeAt" in wait else ""
    subject = f"event {wait['event']!r}" if "event" in wait else wait["id"]
    subject = wait["id"] if is_ask(wait) else subject
    return f"{subject}{deadline}"


def _signal(run: RunEdit, request: Request) -> str:
    """Add an event to the run as a record that the next wait for it receives."""
    _check_not_over(run, request)
    check_not_undoing(run, request)
    key = SIGNAL + request.id
    if key in run.history:
        raise AppliedBefore(run.run_id, request.verb)
    facts: Any = {
        "ok": True,
        "value": request.value,
        "at": isoformat(run.now),
        "kind": "event",
        "unclaimed": request.step,
        "by": request.by or request.via,
    }
    run.history.load({key: facts})
    run.continue_run()
    return ""


def _complete_step(run: RunEdit, request: Request) -> str:
    return _enter(run, request, {"ok": True, "value": request.value})


def _skip_step(run: RunEdit, request: Request) -> str:
    return _enter(run, request, {"ok": True})


def _fail_step(run: RunEdit, request: Request) -> str:
    record = encode_failure(Err(request.value), request.step).record
    return _enter(run, request, codec.loads(codec.dumps(record)))


def _enter(run: RunEdit, request: Request, outcome: dict[str, Any]) -> str:
    """Enter a record by hand, for a failed step or one without a record."""
    if run.status in ("completed", "cancelled"):
        raise _refuse(run, request, f"it is {run.status}")
    _check_complete(run, request)
    check_undo_step(run, request)
    branch, call, previous = _place_of(run, request)
    keys = list(run.history)
    _forget_failure(run.history, request.step)
    _close_waits(run, branch, call)
    key = run.entered_key = run.history.reserve(branch, call)
    facts = {"at": isoformat(run.now), "branch": branch, "by": request.by or request.via}
    record = {**outcome, **facts, "call": call}
    run.history.load({key: cast(StepRecord, {k: v for k, v in record.items() if v != ""})})
    # It takes the place of a failure: a race whose branches have all failed would otherwise be
    # decided by the failure of another one.
    run.history.arrange(keys)
    _make_due_again(run)
    return previous


def _place_of(run: RunEdit, request: Request) -> tuple[str, str, str]:
    """Return the branch and the name of the step, and what is known about it."""
    history, key = run.history, request.step
    if key in history:
        record = history.get(key)
        _check_failed(run, request, record)
        return record.get("branch", ""), record.get("call", key), _describe_failure(record)
    wait = history.waits.get(key)
    if wait is None:
        return "", key, "not recorded"
    if wait["kind"] != "retry":
        hint = "signal the event" if wait["kind"] == "event" else "wake the run"
        hint = "answer it" if is_ask(wait) else hint
        raise _refuse(run, request, f"{key!r} is a wait, not a step; {hint} instead")
    return *split_path(key), wait.get("error", "")


def _check_failed(run: RunEdit, request: Request, record: StepRecord) -> None:
    if record["ok"]:
        reason = f"step {request.step!r} succeeded; rewind the run to it to run it again"
        raise _refuse(run, request, reason)
    if record.get("kind", "step") not in ("step", "transaction", "undo"):
        causes = [key for key in record.get("failures", ()) if not key.startswith(SAGA)]
        steps = ", ".join(causes) or "those in its branches"
        reason = f"{request.step!r} is a {record.get('kind')}; change its steps instead: {steps}"
        raise _refuse(run, request, reason)


def _describe_failure(record: Any) -> str:
    error, cause = record.get("error"), record.get("cause") or {}
    if isinstance(error, dict) and "type" in error:
        return f"{error['type']}: {error.get('message', '')}"[:_MAX_WAS]
    return str(cause.get("message") or error)[:_MAX_WAS]


def _forget_failure(history: History, key: str) -> None:
    """Drop a failure, and the races that failed because of it."""
    dropped_keys = [key]
    for other in history:
        if not set(dropped_keys).isdisjoint(history.get(other).get("failures", ())):
            dropped_keys.append(other)
    history.drop(dropped_keys)


def _close_waits(run: RunEdit, branch: str, call: str) -> None:
    waits = run.history.waits
    for id in [id for id in waits if split_path(id) == (branch, call)]:
        del waits[id]


def _retry_step(run: RunEdit, request: Request) -> str:
    if run.status in ("completed", "cancelled"):
        raise _refuse(run, request, f"it is {run.status}")
    _check_complete(run, request)
    if request.step not in run.history:
        raise _refuse(run, request, f"there is no record of step {request.step!r}")
    check_undo_step(run, request)
    record = run.history.get(request.step)
    _check_failed(run, request, record)
    _forget_failure(run.history, request.step)
    _make_due_again(run)
    return _describe_failure(record)


def _rewind(run: RunEdit, request: Request) -> str:
    """Drop a record and all later ones. Open waits start over."""
    _check_complete(run, request)
    check_not_undoing(run, request)
    if request.step not in run.history:
        raise _refuse(run, request, f"there is no record of step {request.step!r}")
    check_valid_start(run, request)
    dropped_keys = drop_records(run, request.step)
    _make_due_again(run)
    return _list_keys(dropped_keys)


def _list_keys(keys: Sequence[str]) -> str:
    names = ", ".join(keys[:10])
    more = f" and {len(keys) - 10} more" if len(keys) > 10 else ""
    return f"{names}{more}"


def _edit_payload(run: RunEdit, request: Request) -> str:
    _check_not_over(run, request)
    if len(run.history):
        reason = "it has records, which were made with the old payload; fork it instead"
        raise _refuse(run, request, reason)
    metadata = run.history.metadata
    old = metadata.get("input")
    # The call that triggered the run may be repeated, and must recognize its payload.
    metadata.setdefault("firstInput", old)
    metadata["input"] = request.value
    metadata[UNCHECKED] = True
    return codec.dumps(old).decode()[:_MAX_WAS]


_VERBS: dict[Verb, Apply] = {
    "cancel": _cancel,
    "pause": _pause,
    "unpause": _unpause,
    "retry": _retry,
    "wake": _wake,
    "signal": _signal,
    "complete_step": _complete_step,
    "skip_step": _skip_step,
    "fail_step": _fail_step,
    "retry_step": _retry_step,
    "rewind": _rewind,
    "edit_payload": _edit_payload,
}
