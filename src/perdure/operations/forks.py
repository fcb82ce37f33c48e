"""Create runs from stored ones: forks, and imports of exported runs."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, cast

from perdure.clock import isoformat
from perdure.errors import InvalidArgument, Refused
from perdure.insights.model import Bundle
from perdure.operations.outcome import KEEP, Keep
from perdure.runtime.acts import add_act
from perdure.runtime.deadlines import LIMIT
from perdure.runtime.verbs import RETRIED
from perdure.snapshot import (
    UNCHECKED,
    ExecutionBlock,
    Metadata,
    Snapshot,
    StepRecord,
    is_over,
    open_waits,
    rest_status,
    system_tag,
    validate_snapshot,
    visible_tags,
    workflow_of,
)
from perdure.snapshot.patches import forget_patches
from perdure.snapshot.rewind import kept_before
from perdure.snapshot.rollback import last_valid_start

PAUSED = "imported; resume it when its original no longer runs"

FORK_TAG = "~fork"
"""The tag by which the forks of a run are found."""


_NOT_FORKED = (
    *("acts", "actCount", "firstInput", "report", "deadline", "forkedFrom"),
    # A fork of a child run reports to no parent, and does not own the children of its source.
    *("parent", "depth", "replyTo", "children", LIMIT, RETRIED),
)


class Fork(NamedTuple):
    """What a fork takes over from its source, and what it changes.

    It keeps the records before `at`, or none without `at`. `values` replaces the values of kept
    steps.
    """

    at: str | None = None
    payload: object | Keep = KEEP
    values: Mapping[str, Any] = {}
    version: int | None = None


def forked(
    source_id: str, source: Snapshot, fork: Fork, act: dict[str, Any], now: datetime, by: str
) -> tuple[Snapshot, list[str]]:
    """Return the snapshot of a new run, and the keys of the source's records that it drops."""
    steps = source["steps"]
    if source["execution"].get("truncated"):
        raise Refused(source_id, "fork", "its records were too large for the store")
    if fork.at is not None and fork.at not in steps:
        raise Refused(source_id, "fork", f"there is no record of step {fork.at!r}")
    keys = list(steps)
    if fork.at is not None and (start := last_valid_start(steps, fork.at)) != fork.at:
        reason = f"step {start!r} was undone after it; choose that step or an earlier one"
        raise Refused(source_id, "fork", reason)
    kept_keys = kept_before(steps, fork.at) if fork.at is not None else []
    records = {key: _record(steps[key], key, fork.values, now, by) for key in kept_keys}
    if unknown := set(fork.values) - set(kept_keys):
        expected = f"keys of kept steps: {', '.join(kept_keys) or 'there are none'}"
        raise InvalidArgument("values", sorted(unknown), expected)
    metadata = _metadata(source_id, source.get("metadata") or {}, fork, now)
    forget_patches(metadata, keys, 0 if fork.at is None else keys.index(fork.at))
    add_act(metadata, act)
    snapshot: Snapshot = {
        "formatVersion": 1,
        "workflowName": workflow_of(source) or "",
        "steps": records,
        "execution": {"status": "running", "state": "queued", "lastUpdated": isoformat(now)},
        "metadata": metadata,
    }
    return snapshot, [key for key in keys if key not in records]


def _record(
    record: StepRecord, key: str, values: Mapping[str, Any], now: datetime, by: str
) -> StepRecord:
    if key not in values:
        # A fork does not undo the work of its source.
        return cast(StepRecord, {name: fact for name, fact in record.items() if name != "undo"})
    if not record["ok"] or record.get("kind", "step") not in ("step", "transaction"):
        raise InvalidArgument("values", key, "the key of a step that succeeded")
    facts = {name: fact for name, fact in record.items() if name in ("branch", "call", "kind")}
    new_record = {**facts, "ok": True, "value": values[key], "at": isoformat(now), "by": by}
    return cast(StepRecord, new_record)


def _metadata(source_id: str, source: Metadata, fork: Fork, now: datetime) -> Metadata:
    """Return the metadata of a fork.

    The seed is kept, because the kept records depend on values that were derived from it.
    """
    metadata = {name: value for name, value in source.items() if name not in _NOT_FORKED}
    metadata["createdAt"] = isoformat(now)
    metadata["forkedFrom"] = {"run": source_id, "at": fork.at or ""}
    metadata["tags"] = visible_tags(metadata.get("tags"))
    metadata["tags"][FORK_TAG] = system_tag(FORK_TAG, source_id)
    if fork.payload is not KEEP:
        metadata["input"] = fork.payload
        metadata[UNCHECKED] = True
    if fork.version is not None:
        metadata["version"] = fork.version
        metadata.pop("definitionHash", None)
    return metadata


def imported(bundle: Bundle, act: dict[str, Any], now: datetime) -> Snapshot:
    """Return the snapshot of an imported run, with the act.

    A run that is not over is paused: the original may still be executed elsewhere.
    """
    check = validate_snapshot(bundle.snapshot)
    if check.snapshot is None:
        raise InvalidArgument("bundle", bundle.run_id, f"a valid snapshot: {check.errors[0]}")
    snapshot = check.snapshot
    metadata = {**(snapshot.get("metadata") or {})}
    add_act(metadata, act)
    execution = snapshot["execution"]
    if not is_over(rest_status(snapshot)):
        waits = {"pending": waits} if (waits := open_waits(snapshot)) else {}
        paused: Any = {"status": "running", "state": "paused", "reason": PAUSED, **waits}
        execution = cast(ExecutionBlock, {**paused, "lastUpdated": isoformat(now)})
    return {**snapshot, "execution": execution, "metadata": metadata, "waits": {}}
