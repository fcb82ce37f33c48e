"""The acts of operators, on one run or many."""

from datetime import datetime
from typing import Literal

import msgspec


class Act(msgspec.Struct, frozen=True):
    """An act of an operator: who, what, why, and from where (`cli`, `dashboard`, `python`).

    `was` is what it replaced. `refused` is why it was not applied, if so.
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
    """A query that was saved under a name, with who saved it and when."""

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

    `refused` counts the runs to which the verb did not apply, with the newest `reasons`. An
    operation that was interrupted or stopped can be continued. `seen_at` is when the process that
    works on it last reported.
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
