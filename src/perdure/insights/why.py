"""Why a run is where it is, in one or two sentences.

There is an ordered table of rules, of which the first match wins. Each rule covers one situation,
and describes it in plain words: durations instead of timestamps, what happens next, and who or what
it depends on.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from perdure.insights import blockers, waits
from perdure.insights.acts import run_acts
from perdure.insights.failures import error_of, first_line
from perdure.insights.model import ErrorFacts, InFlight, Why
from perdure.insights.phrases import because, due_for, is_due, quote
from perdure.insights.rollback import (
    describe_failed_rollback,
    describe_rollback,
    describe_undone,
    rollback_facts,
)
from perdure.insights.rows import read_time
from perdure.insights.schedules import read_schedule_input
from perdure.insights.state import RunState
from perdure.insights.terms import closest
from perdure.insights.words import count_words, duration, duration_words, list_words, time_words
from perdure.presence import WorkerPresence, worker_id
from perdure.runtime.schedule_workflow import SCHEDULE
from perdure.snapshot import is_over
from perdure.snapshot.labels import label_of

Rule: TypeAlias = Callable[[RunState], Why | None]

_LONGEST_ERROR = 200


def why(state: RunState) -> Why:
    """Return why a run is where it is."""
    answer = next(answer for rule in RULES if (answer := rule(state)) is not None)
    rollback = rollback_facts(state.snapshot, state.redact)
    if rollback is None or is_over(state.row.status):
        return answer
    sentence = f"{describe_rollback(rollback)} {answer.sentence}"
    return Why(answer.situation, sentence, {**answer.facts, "rollback": rollback.error})


def _completed(state: RunState) -> Why | None:
    if state.row.status != "completed":
        return None
    return Why("completed", f"Completed {_ago(state)}{_duration_text(state)}.")


def _cancelled(state: RunState) -> Why | None:
    if state.row.status != "cancelled":
        return None
    reason = _error_attribute(state, "reason")
    rollback = rollback_facts(state.snapshot, state.redact)
    cancelled = f"Cancelled {_ago(state)}{_duration_text(state)}{because(reason)}."
    return Why("cancelled", cancelled + describe_undone(rollback), {"reason": reason})


def _failed(state: RunState) -> Why | None:
    if state.row.status != "failed":
        return None
    execution: Any = state.snapshot["execution"]
    error = error_of(execution.get("error"), state.redact, ("output",))
    name = error.type if error is not None else "an unknown error"
    failed_keys = [key for key in execution.get("failed") or () if key in state.snapshot["steps"]]
    rollback = rollback_facts(state.snapshot, state.redact)
    if rollback is not None and rollback.not_undone:
        sentence = describe_failed_rollback(rollback)
        return Why("failed", sentence, {"steps": list(rollback.not_undone), "error": name})
    subject = _failed_steps(state, failed_keys) if failed_keys else "The function failed"
    sentence = f"{subject} with {_error_words(error) or name}.{describe_undone(rollback)}"
    sentence += " Nothing will happen until the run is retried."
    return Why("failed", sentence, {"steps": failed_keys, "error": name})


def _error_words(error: ErrorFacts | None) -> str:
    """Return the type of an error and the beginning of its message, for a sentence."""
    text = first_line(error).rstrip(".")
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"


def _failed_steps(state: RunState, keys: Sequence[str]) -> str:
    record: Any = state.snapshot["steps"][keys[0]]
    attempts = record.get("attempts", 1)
    after = f" after {attempts} attempts" if attempts > 1 else ""
    if len(keys) > 1:
        return f"{count_words(len(keys), 'step')}, the first of them {quote(keys[0])}, failed"
    return f"Step {quote(keys[0])} failed{after}"


def _paused(state: RunState) -> Why | None:
    if state.row.status != "paused":
        return None
    acts = run_acts(state.snapshot.get("metadata") or {}, state.row.id, state.redact)
    act = next((each for each in acts if each.verb == "pause" and not each.refused), None)
    reason: str = state.snapshot["execution"].get("reason") or ""
    # A run that was paused automatically has a different reason, and no act.
    if act is None or (reason and not reason.startswith(f"by {act.by}")):
        text = state.redact.text(reason) or f"paused {_ago(state)}"
        sentence = f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
        return Why("paused", sentence, {"reason": text})
    ago = duration_words(state.now - act.at)
    sentence = f"Paused by {act.by} {ago} ago{because(act.why)}."
    return Why("paused", sentence, {"by": act.by, "why": act.why})


def _owner_silent(state: RunState) -> Why | None:
    row = state.row
    if row.owner is None or row.lease_expires_at is None or state.owner is not None:
        return None
    time_left, owner = row.lease_expires_at - state.now, worker_id(row.owner)
    if time_left > timedelta(0) and not state.is_lost:
        return None
    sentence = f"No heartbeat from {owner}. Its lease "
    if time_left <= timedelta(0):
        sentence += f"expired {duration_words(-time_left)} ago; "
    else:
        sentence += f"expires in {duration_words(time_left)}; then "
    facts = {"owner": owner, "lease_expires_at": row.lease_expires_at}
    return Why("owner_silent", sentence + _next_owner(state), facts)


def _next_owner(state: RunState) -> str:
    if state.drivers:
        return "another worker takes over."
    return f"no live worker can take over. {_missing_worker(state)}"


def _running(state: RunState) -> Why | None:
    if state.row.owner is None:
        return None
    steps = state.in_flight
    if not steps:
        return _running_between_steps(state)
    return Why("running", _step_in_flight(steps[0], state, len(steps) - 1), {"steps": len(steps)})


def _step_in_flight(step: InFlight, state: RunState, others: int) -> str:
    others_text = (
        f" {count_words(others, 'other step')} of the run are in flight." if others > 1 else ""
    )
    others_text = " 1 other step of the run is in flight." if others == 1 else others_text
    if step.next_attempt_at is not None and step.next_attempt_at > state.now:
        time_left = duration_words(step.next_attempt_at - state.now)
        sentence = f"Step {quote(label_of(step.key))} failed attempt {step.attempt}"
        return f"{sentence}; the next one starts on {step.worker} in {time_left}.{others_text}"
    since = duration_words(state.now - step.since)
    attempt = f", attempt {step.attempt}" if step.attempt > 1 else ""
    running = f"Step {quote(label_of(step.key))} has been running on {step.worker}"
    return f"{running} for {since}{attempt}.{others_text}"


def _running_between_steps(state: RunState) -> Why:
    owner = worker_id(state.row.owner or "")
    facts = {"owner": owner, "lease_expires_at": state.row.lease_expires_at}
    records = state.snapshot["steps"]
    last = next(reversed(records), None)
    at = None if last is None else read_time(records[last].get("at"))
    if last is None or at is None:
        return Why("running", f"Running on {owner}. No step has been recorded yet.", facts)
    ago = duration_words(state.now - at)
    sentence = f"Running on {owner}. The last record, {quote(label_of(last))}, was made {ago} ago."
    return Why("running", sentence, facts)


def _no_worker(state: RunState) -> Why | None:
    if not is_due(state) or _takers(state):
        return None
    return Why("no_worker", f"{due_for(state)} {_missing_worker(state)}", _version_facts(state))


def _missing_worker(state: RunState) -> str:
    if not state.workers:
        return "No worker is running."
    row = state.row
    versions_by_worker = {
        worker.id: [each for each in worker.workflows if each.workflow == row.workflow]
        for worker in state.workers
    }
    if not any(versions_by_worker.values()):
        names = {each.workflow for worker in state.workers for each in worker.workflows}
        guess = closest(row.workflow or "", sorted(names), 0.75) or "."
        return f"No live worker knows workflow {quote(row.workflow or '')}{guess}"
    if not state.drivers:
        versions = (_versions(id, ranges) for id, ranges in versions_by_worker.items() if ranges)
        missing = f"No live worker knows workflow {quote(row.workflow or '')}"
        return f"{missing} version {row.version} ({list_words(list(versions))})."
    if all(worker.draining for worker in state.drivers):
        return "All workers that know it are stopping."
    return f"No live worker takes runs from queue {quote(_queue_name(state))}."


def _versions(worker: str, ranges: Sequence[Any]) -> str:
    first, last = min(each.first for each in ranges), max(each.last for each in ranges)
    if first == last:
        return f"{worker} knows version {first}"
    return f"{worker} knows versions {first} to {last}"


def _version_facts(state: RunState) -> dict[str, Any]:
    return {"workflow": state.row.workflow, "version": state.row.version}


def _all_busy(state: RunState) -> Why | None:
    takers = _takers(state)
    if not is_due(state) or any(worker.running < worker.slots for worker in takers):
        return None
    slots = sum(worker.slots for worker in takers)
    facts = {"slots": slots, "workers": [worker.id for worker in takers]}
    busy = "The only slot is busy." if slots == 1 else f"All {slots:,} slots are busy."
    return Why("held_back", f"{due_for(state)} {busy}", facts)


def _is_soon_claimed(state: RunState) -> Why | None:
    if not is_due(state):
        return None
    names = list_words([worker.id for worker in _takers(state)][:3])
    crashes = ""
    if state.row.takeovers > 1:
        crashes = f" Its last {state.row.takeovers} owners died without making progress."
    return Why("due", f"{due_for(state)}{crashes} The next free slot of {names} takes it.")


def _waiting_for_run(state: RunState) -> Why | None:
    run_waits = waits.event_waits(state)
    ids = [wait["run"] for wait in run_waits if "run" in wait]
    if not ids:
        return None
    others = f" and {count_words(len(ids) - 1, 'other run')}" if len(ids) > 1 else ""
    child = state.dependencies.child
    facts = {"runs": ids}
    if child is None:
        sentence = f"Waiting for run {quote(ids[0])}{others}, which is not in the store."
        return Why("waiting", sentence, facts)
    of = f"run {quote(ids[0])} of workflow {quote(child.row.workflow or '')}"
    timeout = waits.timeout_words(state, run_waits)
    sentence = f"Waiting for {of}, which is {child.row.status}{others}{timeout}."
    return Why("waiting", f"{sentence} About that run: {why(child).sentence}", facts)


def _schedule(state: RunState) -> Why | None:
    schedule_input = read_schedule_input(state.snapshot) if state.row.workflow == SCHEDULE else None
    if schedule_input is None or state.row.wake_at is None:
        return None
    of, at = quote(schedule_input.spec.workflow), state.row.wake_at
    time_left, until = duration_words(at - state.now), time_words(at, state.now)
    sentence = f"Scheduled: the next run of workflow {of} starts at {until}, in {time_left}."
    return Why("scheduled", sentence, {"wake_at": at, "workflow": schedule_input.spec.workflow})


def _scheduled(state: RunState) -> Why | None:
    at = state.row.wake_at
    if at is None:
        return None
    begin = "continues" if state.snapshot["steps"] else "starts"
    time_left, until = duration_words(at - state.now), time_words(at, state.now)
    return Why(
        "scheduled", f"Scheduled: the run {begin} at {until}, in {time_left}.", {"wake_at": at}
    )


def _otherwise(state: RunState) -> Why:
    return Why(
        "unknown",
        f"The run is {state.row.status}, was last changed {_ago(state)}, and waits for nothing "
        "that is recorded.",
    )


RULES: tuple[Rule, ...] = (
    _completed,
    _cancelled,
    _failed,
    _paused,
    _owner_silent,
    _running,
    blockers.workflow_is_paused,
    blockers.queue_is_paused,
    _no_worker,
    blockers.limit_is_reached,
    _all_busy,
    blockers.others_come_first,
    _is_soon_claimed,
    _waiting_for_run,
    waits.for_runs,
    waits.for_answer,
    waits.for_event,
    waits.for_time,
    _schedule,
    _scheduled,
    _otherwise,
)


def _takers(state: RunState) -> list[WorkerPresence]:
    """Return the live workers that may claim the run when it is due."""
    queue = _queue_name(state)
    return [
        worker
        for worker in state.drivers
        if not worker.draining and (not queue or queue in worker.queues)
    ]


def _queue_name(state: RunState) -> str:
    return state.row.queue.partition("/")[0]


def _ago(state: RunState) -> str:
    return f"{duration_words(state.now - state.row.updated_at)} ago"


def _duration_text(state: RunState) -> str:
    created_at, ended_at = state.row.created_at, state.row.ended_at
    if created_at is None or ended_at is None:
        return ""
    return f", {duration(ended_at - created_at)} after it was created"


def _error_attribute(state: RunState, name: str) -> str:
    error: Any = state.snapshot["execution"].get("error")
    cause = error.get("cause") if isinstance(error, dict) else None
    attributes = cause.get("attrs") if isinstance(cause, dict) else None
    value = attributes.get(name) if isinstance(attributes, dict) else None
    return state.redact.text(value) if isinstance(value, str) else ""
