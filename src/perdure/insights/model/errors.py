"""Errors of runs and steps, and groups of similar failures."""

from datetime import datetime

import msgspec

from perdure.insights.model.json import Json


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback; `is_engine` marks lines inside perdure."""

    file: str
    line: int
    function: str
    code: str = ""
    is_engine: bool = False


class ErrorFacts(msgspec.Struct, frozen=True):
    """An exception or a returned `Err`, with what caused it, or what was being handled.

    `value` is the JSON of an `Err`'s error that is not an exception. `members` are the members of
    an exception group.
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    value: Json = None
    notes: tuple[str, ...] = ()
    cause: "ErrorFacts | None" = None
    members: tuple["ErrorFacts", ...] = ()


class ErrorGroup(msgspec.Struct, frozen=True):
    """Failed runs with the same workflow, step and error; numbers in the message are folded.

    `query` finds these runs; `by_hour` counts them for a sparkline, oldest hour first.
    """

    workflow: str
    step: str
    type: str
    message: str
    count: int
    first_at: datetime
    last_at: datetime
    run_ids: tuple[str, ...]
    query: str
    by_hour: tuple[int, ...] = ()


class ErrorGroups(msgspec.Struct, frozen=True):
    """Groups of failed runs, largest first, from the newest `examined` failures."""

    groups: tuple[ErrorGroup, ...]
    examined: int
    is_complete: bool
