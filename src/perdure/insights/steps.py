"""The records of a run: in pages, one in full, or grouped by name."""

import re
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from statistics import median_low
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.clock import from_milliseconds
from perdure.errors import InvalidArgument
from perdure.insights.beginning import beginning
from perdure.insights.chunks import UserValue
from perdure.insights.density import periods_of
from perdure.insights.failures import error_of, first_line
from perdure.insights.model import StepDetail, StepGroup, StepRow, StepsPage
from perdure.insights.preview import preview
from perdure.insights.redaction import Path, Redact
from perdure.insights.rows import read_duration, read_time, started_at
from perdure.snapshot import Snapshot
from perdure.snapshot.labels import label_of
from perdure.snapshot.rollback import UNDO
from perdure.validation import RESERVED

Part: TypeAlias = Literal["run", "payload", "output", "step"]
"""What of a run can be downloaded."""

_COUNT = re.compile(r"(?:#\d+|\[\d+\])+$")


def steps_page(
    snapshot: Snapshot, redact: Redact, after: str | None = None, limit: int = 200
) -> StepsPage:
    """Return records in order, after the record with the key `after`."""
    keys = list(snapshot["steps"])
    first = 0 if after is None else _position(keys, after) + 1
    page = keys[first : first + limit]
    rows = tuple(step_row(key, snapshot["steps"][key], redact) for key in page)
    is_last = first + limit >= len(keys)
    next_key = None if is_last or not page else page[-1]
    periods = periods_of(snapshot) if len(page) < len(keys) else ()
    return StepsPage(rows, len(keys), next_key, first, periods)


def step_detail(snapshot: Snapshot, key: str, redact: Redact, *, whole: bool) -> StepDetail:
    """Return one record, with its value or the beginning of it."""
    keys = list(snapshot["steps"])
    position = _position(keys, key)
    record: Mapping[str, Any] = snapshot["steps"][key]
    path = step_path(key, record)
    read = redact.value if whole else partial(beginning, redact)
    return StepDetail(
        step=step_row(key, record, redact),
        value=read(_value(record), path) if record["ok"] else None,
        error=error_of(record, redact, path),
        event=_event(record),
        position=position + 1,
        later=len(keys) - position - 1,
        arguments=read(record.get("arguments"), (*path, "arguments")),
    )


def value_of(snapshot: Snapshot, part: Part, key: str = "") -> UserValue:
    """Return the input or the output of a run, or the value of the step with this key."""
    if part == "payload":
        return UserValue((snapshot.get("metadata") or {}).get("input"), ("payload",))
    if part == "output":
        return UserValue(snapshot["execution"].get("output"), ("output",))
    _position(list(snapshot["steps"]), key)
    record: Mapping[str, Any] = snapshot["steps"][key]
    return UserValue(_value(record), step_path(key, record))


def _event(record: Mapping[str, Any]) -> str:
    event: str = record.get("event", "")
    return "" if event.startswith(RESERVED) else event


def step_row(key: str, record: Mapping[str, Any], redact: Redact) -> StepRow:
    """Return a record with a preview of its value or error."""
    path = step_path(key, record)
    is_ok = bool(record["ok"])
    return StepRow(
        key=key,
        name=label_of(step_name(key, record)),
        kind=record.get("kind", "step"),
        ok=is_ok,
        branch=record.get("branch", ""),
        started_at=started_at(record),
        ended_at=read_time(record.get("at")),
        duration=read_duration(record),
        attempts=record.get("attempts", 1),
        value=preview(_value(record), redact, path) if is_ok else "",
        error="" if is_ok else first_line(error_of(record, redact, path)),
        by=str(record.get("by") or ""),
        size=len(msgspec.json.encode(record.get("value"))) if is_ok else 0,
        run_id=record.get("run", ""),
    )


def _value(record: Mapping[str, Any]) -> Any:
    """Return the value of a record without the engine's message names."""
    value = record.get("value")
    if record.get("kind") == "start" and isinstance(value, dict):
        return {name: each for name, each in value.items() if name != "event"}
    return value


def step_name(key: str, record: Mapping[str, Any]) -> str:
    """Return the name of a call without the number that distinguishes repeated calls."""
    call = str(record.get("call", key))
    return _COUNT.sub("", call) or call


def step_path(key: str, record: Mapping[str, Any]) -> Path:
    """Return the path of a record's value, for redaction."""
    # An undo may contain the same values as its step.
    return ("steps", step_name(key, record).removeprefix(UNDO))


class _Group:
    """The records with one name and kind, counted while they are read, as there may be many."""

    __slots__ = ("count", "durations", "failed", "first", "last")

    def __init__(self) -> None:
        self.count = self.failed = 0
        self.first: datetime | None = None
        self.last: datetime | None = None
        self.durations: list[float] = []

    def add(self, record: Mapping[str, Any]) -> None:
        self.count += 1
        self.failed += not record["ok"]
        milliseconds = record.get("durationMs")
        if milliseconds is not None:
            self.durations.append(milliseconds)
        begin, end = started_at(record), read_time(record.get("at"))
        if begin is not None and (self.first is None or begin < self.first):
            self.first = begin
        if end is not None and (self.last is None or end > self.last):
            self.last = end


def groups_of(snapshot: Snapshot) -> tuple[StepGroup, ...]:
    """Return the calls of a run grouped by name and kind, in the order of their first record."""
    groups: dict[tuple[str, str], _Group] = {}
    for key, record in snapshot["steps"].items():
        name = (step_name(key, record), record.get("kind", "step"))
        if (group := groups.get(name)) is None:
            group = groups[name] = _Group()
        group.add(record)
    return tuple(_step_group(name, kind, group) for (name, kind), group in groups.items())


def _step_group(name: str, kind: str, group: _Group) -> StepGroup:
    return StepGroup(
        name=label_of(name),
        kind=kind,
        count=group.count,
        failed=group.failed,
        first_started_at=group.first,
        last_ended_at=group.last,
        p50=from_milliseconds(median_low(group.durations)) if group.durations else None,
    )


def _position(keys: list[str], key: str) -> int:
    try:
        return keys.index(key)
    except ValueError:
        raise InvalidArgument("key", key, "the key of a record of this run") from None
