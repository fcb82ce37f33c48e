"""What operators did, to one run or to many."""

from datetime import datetime
from typing import Literal

import msgspec


class Act(msgspec.Struct, frozen=True):
    """What an operator did: who, what, why, from where (`cli`, `dashboard`, `python`).

    `was` says what it replaced. `refused` says why it was not applied, if it was not.
    """

    at: datetime
    by: str
    via: str
    verb: str
    run_id: str = ""
    step: str = ""
    why: str = ""
    was: str = ""
    refused: str = ""


class SavedView(msgspec.Struct, frozen=True):
    """A query that was saved under a name, by whom and when."""

    name: str
    query: str
    by: str
    at: datetime


class ActsPage(msgspec.Struct, frozen=True):
    """One page of the audit trail, newest first; `cursor` continues it."""

    acts: tuple[Act, ...]
    cursor: str | None = None


class BulkProgress(msgspec.Struct, frozen=True):
    """A bulk operation: one verb for each run that a query matches.

    `refused` counts the runs that refused it, with the newest `reasons`. One that is interrupted or
    stopped can be continued. `seen_at` is when the process that works on it last said so.
    """

    id: str
    query: str
    verb: str
    by: str
    why: str
    began_at: datetime
    matched: int | None = None
    done: int = 0
    refused: int = 0
    reasons: tuple[str, ...] = ()
    rate: float | None = None
    limit: int | None = 1000
    state: Literal["running", "stopped", "interrupted", "done"] = "running"
    ended_at: datetime | None = None
    seen_at: datetime | None = None
