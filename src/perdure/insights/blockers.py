"""Rules for `why`: why a due run is not claimed, even though a worker could claim it."""

from datetime import timedelta

from perdure.insights.model import LimitRow, Why
from perdure.insights.phrases import because, due_for, is_due, quote
from perdure.insights.state import RunState
from perdure.insights.words import count_words, duration_words
from perdure.limits import split_queue
from perdure.presence import QueueSwitch, WorkflowSwitch


def workflow_is_paused(state: RunState) -> Why | None:
    """Match if an operator paused the workflow."""
    switch = state.switches.workflows.get(state.row.workflow or "")
    if switch is None or not switch.paused or not is_due(state):
        return None
    return _paused(state, switch, f"Workflow {quote(switch.workflow)}")


def queue_is_paused(state: RunState) -> Why | None:
    """Match if an operator paused the queue."""
    switch = state.switches.queues.get(split_queue(state.row.queue)[0])
    if switch is None or not switch.paused or not is_due(state):
        return None
    return _paused(state, switch, f"Queue {quote(switch.queue)}")


def _paused(state: RunState, switch: WorkflowSwitch | QueueSwitch, what: str) -> Why:
    ago, reason = duration_words(state.now - switch.at), state.redact.text(switch.why)
    sentence = f"{due_for(state)} {what} is paused, by {switch.by} {ago} ago{because(reason)}."
    return Why("held_back", sentence, {"by": switch.by, "why": reason})


def limit_is_reached(state: RunState) -> Why | None:
    """Match if a limit of the queue, or of the run's key, is used up."""
    full = [
        row for row in state.dependencies.limits if row.in_use is not None and row.in_use >= row.n
    ]
    if not is_due(state) or not full:
        return None
    sentence = f"{due_for(state)} {_full(state, full[0])}{_runs_ahead(state)}"
    return Why("held_back", sentence, {"limit": full[0].of, "n": full[0].n})


def _full(state: RunState, limit: LimitRow) -> str:
    subject = f"Queue {quote(limit.name)}"
    if limit.of.startswith("key_"):
        key = split_queue(state.row.queue)[1] or ""
        subject = f"Key {quote(key)} of queue {quote(limit.name)}"
    if limit.per is None:
        return f"{subject} is at its limit, {limit.in_use:,} of {limit.n:,}."
    period = duration_words(timedelta(seconds=limit.per))
    return f"{subject} has started {limit.in_use:,} of {limit.n:,} runs in the last {period}."


def others_come_first(state: RunState) -> Why | None:
    """Match if runs of the same queue and key start before this one."""
    runs_ahead = state.dependencies.runs_ahead
    if not is_due(state) or runs_ahead is None or not runs_ahead.count:
        return None
    return Why("held_back", f"{due_for(state)}{_runs_ahead(state)}", {"ahead": runs_ahead.count})


def _runs_ahead(state: RunState) -> str:
    runs_ahead = state.dependencies.runs_ahead
    if runs_ahead is None or not runs_ahead.count:
        return ""
    name, key = split_queue(state.row.queue)
    of = f"queue {quote(name)}" if key is None else f"key {quote(key)}"
    least = "At least " if runs_ahead.capped else ""
    verb = "starts" if runs_ahead.count == 1 else "start"
    return f" {least}{count_words(runs_ahead.count, 'run')} of {of} {verb} before it."
