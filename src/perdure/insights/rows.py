"""A run in a list, from its header."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from perdure.clock import from_milliseconds, parse_iso
from perdure.engine.children import DONE
from perdure.engine.map_runs import FULL
from perdure.errors import InvalidArgument
from perdure.insights.model import RunRow
from perdure.insights.redaction import Redact
from perdure.insights.words import list_words
from perdure.presence import worker_id
from perdure.snapshot import is_over, visible_tags
from perdure.snapshot.asks import ANSWER, ASKS
from perdure.snapshot.summary import Summary, read_summary
from perdure.store import RunSummary
from perdure.validation import RESERVED


def row_of(run: RunSummary, redact: Redact) -> RunRow:
    """Return the row of a run."""
    summary = read_summary(run.summary)
    tags = visible_tags(dict(tag.split("=", 1) for tag in run.tags if "=" in tag))
    return RunRow(
        id=run.id,
        workflow=run.workflow,
        version=run.version or summary.version,
        status=run.status,
        queue=run.queue,
        tags=redact.tags(tags),
        created_at=run.created_at or read_time(summary.created),
        updated_at=run.updated_at,
        ended_at=run.updated_at if is_over(run.status) else None,
        wake_at=None if run.owner is not None or is_over(run.status) else run.wake_at,
        owner=run.owner,
        lease_expires_at=None if run.owner is None else run.wake_at,
        awaits=tuple(event for event in run.awaits if not event.startswith("~")),
        takeovers=run.takeovers,
        steps=summary.steps,
        failed_steps=summary.failed,
        last_step=summary.last_step,
        ended_by=_ended_by(summary),
        error=redact.text(summary.error),
        reason=redact.text(summary.reason),
        size=summary.size,
        revision=run.revision,
        questions=_questions(run, summary, redact),
        waits_for=_waits_for(run),
        worker=worker_id(run.owner) if run.owner else "",
    )


def _questions(run: RunSummary, summary: Summary, redact: Redact) -> tuple[str, ...]:
    # The summary was written when the run was last at rest.
    if run.owner is not None or is_over(run.status):
        return ()
    return tuple(redact.text(ask.question) for ask in summary.asks)


def _waits_for(run: RunSummary) -> str:
    """Return the events that a run waits for, and what the engine's own events stand for."""
    words = dict.fromkeys(_event_words(event, run.tags) for event in run.awaits)
    return list_words([*filter(None, words)])


def _event_words(event: str, tags: Iterable[str]) -> str:
    if event.startswith(ANSWER):
        is_approval = any(tag.startswith(f"{ASKS}=") for tag in tags)
        return "an approval" if is_approval else "a callback"
    if event.startswith((DONE, FULL)):
        return "child runs"
    return "" if event.startswith(RESERVED) else event


def _ended_by(summary: Summary) -> str:
    if summary.ended_by is None:
        # Written by an earlier version: the last record is usually the step that ended the run.
        return summary.last_step if summary.error and summary.failed else ""
    return summary.ended_by


def read_time(text: object) -> datetime | None:
    """Return a stored time, or `None` if it is missing or cannot be read."""
    try:
        return parse_iso(text) if isinstance(text, str) and text else None
    except InvalidArgument:
        return None


def read_duration(record: Mapping[str, Any]) -> timedelta | None:
    """Return how long a recorded call took, at most `timedelta.max`; `None` if it is missing."""
    milliseconds = record.get("durationMs")
    return None if milliseconds is None else from_milliseconds(milliseconds)


def started_at(record: Mapping[str, Any]) -> datetime | None:
    """Return when a recorded call began, or `None` if that is unknown or before the year 1."""
    ended_at = read_time(record.get("at"))
    try:
        return None if ended_at is None else ended_at - (read_duration(record) or timedelta(0))
    except OverflowError:
        # Another tool may have written any duration.
        return None
