"""Report the end of a run to other runs.

The end is durable before it is reported. Then the run that called this one, and the runs that asked
for it, get a message that takes effect once, however often it is sent. A request that arrives while
a run ends makes the run due again, and its next owner answers.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from perdure import codec
from perdure.durable.outbox import send_messages
from perdure.durable.session import Session
from perdure.engine.children import DONE
from perdure.errors import RunNotFound
from perdure.runtime.requests import WATCH
from perdure.snapshot import (
    ExecutionBlock,
    PendingWait,
    Snapshot,
    is_over,
    new_snapshot,
    reply_to_of,
    rest_status,
    system_tag,
    workflow_of,
)
from perdure.snapshot.asks import ANSWER
from perdure.snapshot.record import encode_failure
from perdure.snapshot.tags import PARENT, parent_tag
from perdure.store import Message, NewMessage, NewRun, Receipt, Rest


def watchers_in(messages: Iterable[Message]) -> list[Message]:
    """Return the requests for a report of the run's end."""
    return [message for message in messages if message.name == WATCH]


def is_called_again(snapshot: Snapshot, watchers: Iterable[Message]) -> bool:
    """Return whether a run was cancelled by its parent, which has since repeated the call.

    The call reached the run before the request to cancel it, so the run has to continue.
    """
    metadata = snapshot.get("metadata") or {}
    if metadata.get("cancelledBy") != PARENT:
        return False
    parent = (metadata.get("parent") or {}).get("run")
    requests = (codec.loads(message.payload) for message in watchers)
    return any(each.get("isCalled") and each["run"] == parent for each in requests)


def leftovers_in(messages: Iterable[Message], waits: Iterable[PendingWait]) -> list[str]:
    """Return the ids of reports and answers for which the run no longer waits.

    A wait is durable before its answer can exist, so no later wait is meant for these messages.
    """
    awaited_events = {wait.get("event") for wait in waits}
    ends = (message for message in messages if message.name.startswith((DONE, ANSWER)))
    return [message.id for message in ends if message.name not in awaited_events]


def done_message(run_id: str, event: str, to: str, outcome: Mapping[str, Any]) -> NewMessage:
    """Return the message that reports the end of a run."""
    # As a string: its values are decoded with the types of the run that ended, not as an event.
    payload = codec.dumps({"run": run_id, "outcome": codec.dumps(outcome).decode()})
    return NewMessage(to, event, payload, f"{event}@{run_id}")


def outcome_in(block: ExecutionBlock, workflow: str | None) -> dict[str, Any]:
    """Return the outcome of a run as a record, like that of a step."""
    facts: Mapping[str, Any] = block
    if block["status"] == "completed":
        outcome = {"ok": True, "value": facts.get("output"), "at": block["lastUpdated"]}
        outcome["typed" if facts.get("outputTyped") else "coded"] = True
    else:
        outcome = dict(facts.get("error") or {"ok": False, "error": "failed", "cause": None})
        outcome["at"] = block["lastUpdated"]
    return {**outcome, "workflow": workflow or ""}


def missing_outcome(run_id: str) -> dict[str, Any]:
    """Return the outcome of a run that does not exist."""
    record = encode_failure(RunNotFound(run_id), run_id).record
    return {**codec.loads(codec.dumps(record)), "workflow": ""}


async def report_end(
    session: Session,
    run_id: str,
    snapshot: Snapshot,
    watchers: Iterable[Message] = (),
) -> None:
    """Send the end of a run to the run that called it, and to those that asked for it.

    A run that is not over is reported as one that no longer exists.
    """
    requests = [codec.loads(message.payload) for message in watchers]
    if (caller := reply_to_of(snapshot.get("metadata") or {})) is not None:
        requests.append(caller)
    if not requests:
        return
    if is_over(rest_status(snapshot)):
        outcome = outcome_in(snapshot["execution"], workflow_of(snapshot))
    else:
        outcome = missing_outcome(run_id)
    messages = [done_message(run_id, each["event"], each["run"], outcome) for each in requests]
    receipts = await send_messages(session, messages)
    for each, receipt in zip(requests, receipts, strict=True):
        await _report_full(session, each.get("full"), receipt)


async def _report_full(session: Session, full: Any, receipt: Receipt) -> None:
    """Wake the parent if its log has all the ends that the parent waits for.

    Several runs may find the log complete, or one of them again after a crash: they send the same
    message.
    """
    if full is not None and receipt.unconsumed >= full["count"]:
        event = full["event"]
        await send_messages(session, [NewMessage(full["run"], event, b"null", event)])


LOG = "~log:"
"""The prefix of the ids of logs."""


def new_log(base: str, owner: str, now: datetime) -> NewRun:
    """Return a new log, to which the runs whose ids begin with `base` report their ends."""
    tags = {PARENT: system_tag(PARENT, owner)}
    snapshot = new_snapshot("~log", now=now, metadata={"parent": {"run": owner}, "tags": tags})
    snapshot["execution"]["state"] = "waiting"
    rest = Rest("waiting")
    return NewRun(LOG + base, "~log", codec.dumps(snapshot), rest=rest, tags=(parent_tag(owner),))


def log_owner(snapshot: Snapshot | None) -> str:
    """Return the id of the run that a log belongs to, or "" if it is unknown."""
    parent = None if snapshot is None else (snapshot.get("metadata") or {}).get("parent")
    return str((parent or {}).get("run", ""))
