"""The records of a run: in pages, one in full, and folded by name."""

import re
from collections.abc import Mapping
from datetime import timedelta
from statistics import median_low
from typing import Any

from perdure import codec
from perdure.errors import InvalidArgument
from perdure.insights.failures import error_of, first_line
from perdure.insights.model import StepDetail, StepGroup, StepRow, StepsPage
from perdure.insights.preview import preview
from perdure.insights.redaction import Path, Redact
from perdure.insights.rows import read_time
from perdure.snapshot import Snapshot

_COUNT = re.compile(r"(?:#\d+|\[\d+\])+$")


def steps_page(
    snapshot: Snapshot, redact: Redact, after: str | None = None, limit: int = 200
) -> StepsPage:
    """Return records in the order they were made, after the record with the key `after`."""
    keys = list(snapshot["steps"])
    first = 0 if after is None else _position(keys, after) + 1
    shown = keys[first : first + limit]
    rows = tuple(step_row(key, snapshot["steps"][key], redact) for key in shown)
    is_last = first + limit >= len(keys)
    return StepsPage(rows, len(keys), None if is_last or not shown else shown[-1])


def step_detail(snapshot: Snapshot, key: str, redact: Redact) -> StepDetail:
    """Return one record in full."""
    keys = list(snapshot["steps"])
    position = _position(keys, key)
    record: Mapping[str, Any] = snapshot["steps"][key]
    path = step_path(key, record)
    return StepDetail(
        step=step_row(key, record, redact),
        value=redact.value(record.get("value"), path) if record["ok"] else None,
        error=error_of(record, redact, path),
        event=record.get("event", ""),
        position=position + 1,
        later=len(keys) - position - 1,
    )


def step_row(key: str, record: Mapping[str, Any], redact: Redact) -> StepRow:
    """Return a record with a preview of its value or error."""
    ended_at, duration = read_time(record.get("at")), _duration(record)
    path = step_path(key, record)
    is_ok = bool(record["ok"])
    return StepRow(
        key=key,
        name=step_name(key, record),
        kind=record.get("kind", "step"),
        ok=is_ok,
        branch=record.get("branch", ""),
        started_at=None if ended_at is None else ended_at - (duration or timedelta(0)),
        ended_at=ended_at,
        duration=duration,
        attempts=record.get("attempts", 1),
        value=preview(record.get("value"), redact, path) if is_ok else "",
        error="" if is_ok else first_line(error_of(record, redact, path)),
        by=str(record.get("by") or ""),
        size=len(codec.dumps(record.get("value"))) if is_ok else 0,
    )


def step_name(key: str, record: Mapping[str, Any]) -> str:
    """Return the name of a call without the number of its repetition."""
    call = str(record.get("call", key))
    return _COUNT.sub("", call) or call


def step_path(key: str, record: Mapping[str, Any]) -> Path:
    """Return where the value of a record is, for the rules of redaction."""
    return ("steps", step_name(key, record))


def groups_of(snapshot: Snapshot) -> tuple[StepGroup, ...]:
    """Return the calls of a run folded by name and kind, in the order of their first record."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for key, record in snapshot["steps"].items():
        name = (step_name(key, record), record.get("kind", "step"))
        groups.setdefault(name, []).append(record)
    return tuple(_group(name, kind, records) for (name, kind), records in groups.items())


def _group(name: str, kind: str, records: list[Mapping[str, Any]]) -> StepGroup:
    durations = [duration for record in records if (duration := _duration(record)) is not None]
    times = [(read_time(record.get("at")), _duration(record)) for record in records]
    ended = [(at, duration or timedelta(0)) for at, duration in times if at is not None]
    return StepGroup(
        name=name,
        kind=kind,
        count=len(records),
        failed=sum(not record["ok"] for record in records),
        first_started_at=min((at - duration for at, duration in ended), default=None),
        last_ended_at=max((at for at, _ in ended), default=None),
        p50=median_low(durations) if durations else None,
    )


def _duration(record: Mapping[str, Any]) -> timedelta | None:
    took = record.get("durationMs")
    return None if took is None else timedelta(milliseconds=took)


def _position(keys: list[str], key: str) -> int:
    try:
        return keys.index(key)
    except ValueError:
        raise InvalidArgument("key", key, "the key of a record of this run") from None
