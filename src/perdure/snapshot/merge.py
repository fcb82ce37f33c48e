"""Deltas: snapshots that contain only what is new. A run is its snapshot merged with its journal.

The JSON of a journal entry is assembled from bytes, because a step's record is already encoded and
this runs for every step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from perdure.codec import dumps
from perdure.errors import SnapshotFormatError
from perdure.snapshot.format import (
    FORMAT_VERSION,
    ExecutionBlock,
    OutboxItem,
    PendingWait,
    Snapshot,
    SnapshotWarning,
)
from perdure.snapshot.validate import object_flaw, version_problems, warnings_problems

_STEP_DELTA = (
    b'{"formatVersion":1,"steps":{%b:%b%b},'
    b'"execution":{"status":"running","lastUpdated":"%b","currentStepId":%b}%b}'
)
_PLAIN_STEP_DELTA = _STEP_DELTA % (b"%b", b"%b", b"", b"%b", b"%b", b"")
_WAITS_DELTA = b'{"formatVersion":1,"steps":{},"execution":%b,"waits":%b%b}'

_OPTIONAL_BY_NAME = ("waits", "outbox", "metadata")
_KEPT = ("pending", "rollback")
"""The fields of `execution` that stay until a later `execution` sets them, which few do."""


def plain_step_delta(key: str, record: bytes, at: str) -> bytes:
    """Return the journal entry for the record of a step, if there is nothing else to write."""
    name = dumps(key)
    return _PLAIN_STEP_DELTA % (name, record, at.encode(), name)


def step_delta(
    key: str,
    record: bytes,
    at: str,
    *,
    replaces: Mapping[str, bytes] = MappingProxyType({}),
    waits: Mapping[str, PendingWait | None] = MappingProxyType({}),
    metadata: Mapping[str, Any] = MappingProxyType({}),
    outbox: Mapping[str, OutboxItem | None] = MappingProxyType({}),
    warnings: Sequence[Mapping[str, str]] = (),
) -> bytes:
    """Return the journal entry for the record of a step that ended at `at`.

    `record` is its JSON. The entry also replaces the earlier records `replaces`, opens (or closes,
    if null) the waits `waits`, sets `metadata` by name, adds items to the `outbox` (or removes
    them, if null), and adds `warnings` about the step.
    """
    name = dumps(key)
    other_records = other_fields = b""
    if replaces:
        other_records = b"".join(
            b",%b:%b" % (dumps(other), json) for other, json in replaces.items()
        )
    if waits:
        other_fields = b',"waits":' + dumps(waits)
    if metadata:
        other_fields += _field(b"metadata", metadata)
    if outbox:
        other_fields += _field(b"outbox", outbox)
    if warnings:
        other_fields += b',"warnings":' + dumps(warnings)
    return _STEP_DELTA % (name, record, other_records, at.encode(), name, other_fields)


def waits_delta(
    execution: ExecutionBlock,
    waits: Mapping[str, PendingWait | None],
    metadata: Mapping[str, Any] = MappingProxyType({}),
    outbox: Mapping[str, OutboxItem | None] = MappingProxyType({}),
) -> bytes:
    """Return the journal entry for waits that began (or ended, if null) without a new record."""
    other_fields = _field(b"metadata", metadata) if metadata else b""
    if outbox:
        other_fields += _field(b"outbox", outbox)
    return _WAITS_DELTA % (dumps(execution), dumps(dict(waits)), other_fields)


def _field(name: bytes, entries: Mapping[str, Any]) -> bytes:
    return b',"%b":%b' % (name, dumps(dict(entries)))


def is_merged(snapshot: object) -> bool:
    """Return whether merging this JSON without a delta would return it unchanged.

    Most leased runs have no journal, and this takes a tenth of the time.
    """
    if type(snapshot) is not dict or "warnings" in snapshot or None in snapshot.values():
        return False
    if type(version := snapshot.get("formatVersion")) is not int or version != FORMAT_VERSION:
        return False
    if type(snapshot.get("steps")) is not dict or type(snapshot.get("execution")) is not dict:
        return False
    for name in _OPTIONAL_BY_NAME:
        if name in snapshot and type(snapshot[name]) is not dict:
            return False
    return True


def merge_snapshots(base: Snapshot, *deltas: Mapping[str, object]) -> Snapshot:
    """Return the base with all deltas applied in order; the arguments are not changed.

    A step in a delta replaces the step with the same key in its place; new steps are appended. The
    last `execution` and the last `workflowName` win, but an `execution` without `pending` or
    `rollback` keeps the earlier one. `metadata`, `waits` and `outbox` are merged by name. A null in
    `waits` or `outbox` removes the entry of that name, and is kept: in the merge of two deltas it
    still has to remove the entry of the base. Warnings about a step are dropped when the step is
    recorded again. Merging is associative and takes linear time.
    """
    parts = (base, *deltas)
    snapshot: dict[str, object] = {"formatVersion": FORMAT_VERSION}
    by_name: dict[str, dict[str, object]] = {name: {} for name in ("steps", *_OPTIONAL_BY_NAME)}
    kept_fields: dict[str, object] = {}
    for part in parts:
        _check_delta(part)
        snapshot.update((name, value) for name, value in part.items() if value is not None)
        for name, entries in by_name.items():
            entries.update(_dict_in(part, name))
        execution = _dict_in(part, "execution")
        kept_fields.update(
            (name, execution[name]) for name in _KEPT if execution.get(name) is not None
        )
    snapshot["steps"] = by_name["steps"]
    if "execution" in snapshot:
        snapshot["execution"] = {**_dict_in(snapshot, "execution"), **kept_fields}
    for name in _OPTIONAL_BY_NAME:
        if name in snapshot:
            snapshot[name] = by_name[name]
    if "warnings" in snapshot:
        snapshot["warnings"] = _standing_warnings(parts)
    if not snapshot.get("warnings"):
        snapshot.pop("warnings", None)
    return cast(Snapshot, snapshot)


def _check_delta(part: Mapping[str, object]) -> None:
    if flaw := object_flaw(part):
        raise SnapshotFormatError([f"snapshot{flaw}"])
    if "formatVersion" in part and (problems := version_problems(part)):
        raise SnapshotFormatError(problems)


def _standing_warnings(parts: Sequence[Mapping[str, object]]) -> list[SnapshotWarning]:
    last_recorded = {
        key: index for index, part in enumerate(parts) for key in _dict_in(part, "steps")
    }
    return [
        warning
        for index, part in enumerate(parts)
        for warning in _warnings_in(part)
        if last_recorded.get(warning["stepId"], index) <= index
    ]


def _dict_in(part: Mapping[str, object], name: str) -> dict[str, object]:
    value = part.get(name)
    if value is None:
        return {}
    if flaw := object_flaw(value):
        raise SnapshotFormatError([name + flaw])
    return cast(dict[str, object], value)


def _warnings_in(part: Mapping[str, object]) -> list[SnapshotWarning]:
    warnings = part.get("warnings")
    if warnings is None:
        return []
    if problems := warnings_problems(warnings):
        raise SnapshotFormatError(problems)
    return cast(list[SnapshotWarning], warnings)
