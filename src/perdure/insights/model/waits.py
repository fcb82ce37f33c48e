"""What runs wait for, and the messages in their inboxes."""

from datetime import datetime
from typing import Literal

import msgspec

from perdure.insights.model.json import Json
from perdure.insights.model.rows import RunRow


class WaitFacts(msgspec.Struct, frozen=True):
    """Something that a run waits for.

    This can be a time, an event, the next attempt of a step, or the end of other runs: `run_id` is
    the id of that run, or the prefix of the ids of many. It can also be the answer to a callback,
    or to an approval with its `question`, addressee (`to`), `options` and `data`; `expires_at` is
    when this wait ends without an answer.
    """

    id: str
    kind: Literal["sleep", "event", "retry", "run", "runs", "approval", "callback"]
    wake_at: datetime | None = None
    event: str | None = None
    attempt: int | None = None
    error: str = ""
    since: datetime | None = None
    run_id: str = ""
    question: str = ""
    to: str = ""
    options: tuple[str, ...] = ()
    data: Json = None
    expires_at: datetime | None = None


class ApprovalRow(msgspec.Struct, frozen=True):
    """An approval that a run waits for; `wait` is its name in the run."""

    run_id: str
    workflow: str | None
    wait: str
    question: str
    to: str = ""
    options: tuple[str, ...] = ()
    since: datetime | None = None
    expires_at: datetime | None = None


class ApprovalsPage(msgspec.Struct, frozen=True):
    """One page of open approvals, newest runs first; `cursor` continues it."""

    approvals: tuple[ApprovalRow, ...]
    cursor: str | None = None


class MessageFacts(msgspec.Struct, frozen=True):
    """An unconsumed message in the inbox of a run."""

    id: str
    event: str
    sent_at: datetime
    payload: Json = None


class AgendaHour(msgspec.Struct, frozen=True):
    """How many runs wake in one hour."""

    hour: datetime
    count: int


class AwaitedEvent(msgspec.Struct, frozen=True):
    """How many runs wait for an event, and since when the first of them has waited.

    `run_ids` are the first of them, in the order in which they began to wait.
    """

    event: str
    count: int
    oldest_at: datetime
    run_ids: tuple[str, ...] = ()


class Agenda(msgspec.Struct, frozen=True):
    """What will happen next: the next runs to wake, wakes by hour, and awaited events."""

    next: tuple[RunRow, ...]
    hours: tuple[AgendaHour, ...]
    events: tuple[AwaitedEvent, ...]
    examined: int
    is_complete: bool
