"""Everything about a run except its steps."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from perdure.insights.acts import act_count_of, run_acts
from perdure.insights.beginning import beginning
from perdure.insights.failures import error_of
from perdure.insights.family import fan_out, schedule_of
from perdure.insights.model import (
    Children,
    Fork,
    Json,
    MessageFacts,
    Parent,
    RunFacts,
    WaitFacts,
)
from perdure.insights.redaction import Path, Redact
from perdure.insights.rollback import rollback_facts
from perdure.insights.rows import read_time
from perdure.insights.state import INBOX, RunState
from perdure.insights.steps import groups_of
from perdure.insights.why import why
from perdure.runtime.deadlines import deadline_of
from perdure.runtime.run import latest_report
from perdure.snapshot import (
    PendingWait,
    Snapshot,
    created_at_of,
    generation_of,
    open_waits,
)
from perdure.store import Message
from perdure.validation import RESERVED


def run_facts(
    state: RunState, parent: Parent | None, children: Children, *, whole: bool
) -> RunFacts:
    """Return the facts about a run, with its values or their beginnings."""
    snapshot, redact = state.snapshot, state.redact
    read = redact.value if whole else partial(beginning, redact)
    execution: Mapping[str, Any] = snapshot["execution"]
    metadata = snapshot.get("metadata") or {}
    acts = run_acts(metadata, state.row.id, redact)
    report = latest_report(metadata.get("report"), state.report, created_at_of(metadata))
    return RunFacts(
        run=state.row,
        why=why(state),
        payload=read(metadata.get("input"), ("payload",)),
        output=read(execution.get("output"), ("output",)),
        error=error_of(execution.get("error"), redact, ("output",)),
        error_steps=tuple(execution.get("failed") or ()),
        waits=_waits(snapshot, redact),
        inbox=tuple(_message(each, read) for each in _messages(state)),
        inbox_has_more=len(state.inbox) > INBOX,
        in_flight=state.in_flight,
        acts=acts,
        act_count=act_count_of(metadata, len(acts)),
        generation=generation_of(metadata),
        deadline=deadline_of(metadata),
        progress=report.get("progress"),
        note=redact.text(report.get("note") or ""),
        forked_from=_fork(metadata.get("forkedFrom")),
        known_by=tuple(worker.id for worker in state.drivers),
        groups=groups_of(snapshot),
        warnings=_warnings(snapshot),
        truncated=bool(execution.get("truncated")),
        parent=parent,
        children=children,
        schedule=schedule_of(metadata),
        rollback=rollback_facts(snapshot, redact),
    )


def _waits(snapshot: Snapshot, redact: Redact) -> tuple[WaitFacts, ...]:
    return tuple(_wait(snapshot, wait, redact) for wait in open_waits(snapshot))


def _wait(snapshot: Snapshot, wait: PendingWait, redact: Redact) -> WaitFacts:
    many = fan_out(snapshot, wait)
    kind = wait.get("ask") or wait["kind"]
    is_of_user = "event" in wait and not wait["event"].startswith(RESERVED)
    return WaitFacts(
        id=wait["id"],
        kind="runs" if many is not None else "run" if "run" in wait else kind,
        wake_at=read_time(wait.get("wakeAt")),
        event=wait.get("event") if is_of_user else None,
        attempt=wait.get("attempt"),
        error=redact.text(wait.get("error", "")),
        since=read_time(wait.get("since")),
        run_id=wait.get("run", "") if many is None else many.base,
        question=redact.text(wait.get("question", "")),
        to=wait.get("to", ""),
        options=tuple(wait.get("options", ())),
        data=redact.value(wait.get("data"), ("waits", wait["id"], "data")),
        expires_at=read_time(wait.get("expiresAt")),
    )


def _messages(state: RunState) -> list[Message]:
    """Return the user's messages; the engine's own are short-lived requests."""
    return [each for each in state.inbox[:INBOX] if not each.name.startswith("~")]


def _message(message: Message, read: Callable[[Json, Path], Json]) -> MessageFacts:
    payload = read(read_json(message.payload), ("inbox", message.name))
    return MessageFacts(message.id, message.name, message.sent_at, payload)


def read_json(data: bytes) -> Json:
    """Return stored JSON; `None` if it cannot be read."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _fork(stored: Any) -> Fork | None:
    if not isinstance(stored, Mapping) or not isinstance(stored.get("run"), str):
        return None
    return Fork(stored["run"], str(stored.get("at") or ""))


def _warnings(snapshot: Snapshot) -> tuple[str, ...]:
    return tuple(
        f"step {each['stepId']!r}: {each['path']} was not recorded exactly ({each['reason']})"
        for each in snapshot.get("warnings") or ()
    )
