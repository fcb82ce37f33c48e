"""Which steps of a run can be undone, and which were, according to its records.

The record of a step that has an undo is marked. The undo is itself a step, and its record is named
after the key of the step. The record of a saga says which steps its scope began to undo.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.snapshot.format import Rollback, Snapshot

UNDO = "~undo:"
"""The prefix of the keys of undo records; the key of the step follows."""

SAGA = "~saga:"
"""The prefix of the names of calls that record that the scope of a saga is undone."""

Steps = Mapping[str, Any]


def rollback_of(snapshot: Snapshot) -> Rollback | None:
    """Return the rollback of a run, or `None` if it was never rolled back."""
    return snapshot["execution"].get("rollback")


def is_undone(steps: Steps, key: str) -> bool:
    """Return whether the step with this key was undone."""
    record = steps.get(UNDO + key)
    return record is not None and bool(record["ok"])


def owed_in(steps: Steps) -> list[str]:
    """Return the keys of the steps that still have to be undone, in order."""
    undoable_keys = [key for key, record in steps.items() if record.get("undo") and record["ok"]]
    return [key for key in undoable_keys if not is_undone(steps, key)]


def failures_in(steps: Steps) -> dict[str, str]:
    """Return the failures of undos, by the keys of their steps."""
    undos = ((key, steps.get(UNDO + key)) for key in owed_in(steps))
    return {key: _message(record) for key, record in undos if record is not None}


def _message(record: Any) -> str:
    error, cause = record.get("error"), record.get("cause") or {}
    if isinstance(error, dict) and "type" in error:
        return f"{error['type']}: {error.get('message', '')}".removesuffix(": ")
    return str(cause.get("message") or error)


def undone_in(steps: Steps) -> list[str]:
    """Return the keys of the steps that were undone, in order."""
    return [key for key in steps if is_undone(steps, key)]


def undone_by_saga(record: Any) -> list[str]:
    """Return the keys of the steps that the scope with this record began to undo."""
    value = record.get("value")
    return list(value.get("undoes", ())) if isinstance(value, dict) else []


def led_to_end(steps: Steps, block: Mapping[str, Any]) -> list[str]:
    """Return the keys of the failures, and of the scopes, that led to the end of a run.

    `block` is its outcome, which names those that it ended with. What made a race or a scope fail
    is in its record: a replay that raises the recorded failure does not come to them.
    """
    keys = [key for key in (*block.get("failed", ()), *block.get("sagas", ())) if key in steps]
    for key in keys:
        keys += [each for each in causes_in(steps[key]) if each in steps and each not in keys]
    return keys


def causes_in(record: Any) -> list[str]:
    """Return the keys of what made a race, or the block of a saga, fail."""
    if record.get("kind") == "saga":
        value = record.get("value") or {}
        return [*value.get("failed", ()), *value.get("sagas", ())]
    return list(record.get("failures", ()))


def cancelled_at_end(steps: Steps, led_to_it: Sequence[str]) -> list[str]:
    """Return the keys of the scopes that may have been cancelled by whatever ended the run.

    These are the scopes that were cancelled after the first failure that led to the end or, if no
    step failed, after the last step. A race does not count: its failure is recorded when its other
    branches have ended. A scope that was cancelled for another reason at that time simply runs
    again, as it would after its own failure.
    """
    keys = list(steps)
    failed_steps = [key for key in led_to_it if steps[key].get("kind") not in ("race", "saga")]
    if failed_steps:
        first = keys.index(first_of(steps, failed_steps))
    else:
        others = [key for key in keys if _is_users(steps, key) and key not in led_to_it]
        first = keys.index(others[-1]) if others else 0
    return [key for key in keys[first:] if _was_cancelled(steps[key])]


def _is_users(steps: Steps, key: str) -> bool:
    return not key.startswith(UNDO) and steps[key].get("kind") != "saga"


def _was_cancelled(record: Any) -> bool:
    value = record.get("value")
    return record.get("kind") == "saga" and isinstance(value, dict) and value.get("cause") is None


def being_undone(steps: Steps) -> set[str]:
    """Return the keys of the steps that scopes have undone, or have begun to undo."""
    sagas = [record for record in steps.values() if record.get("kind") == "saga"]
    return {key for record in sagas for key in undone_by_saga(record)}


def undone_outside_sagas(steps: Steps) -> list[str]:
    """Return the keys of the steps that were undone because the run did not succeed."""
    in_sagas = being_undone(steps)
    return [key for key in undone_in(steps) if key not in in_sagas]


def last_valid_start(steps: Steps, at: str) -> str:
    """Return the last step, at `at` or earlier, to which a run can be rewound.

    If the records from there on are dropped, every remaining step that was undone keeps the record
    of its undo.
    """
    keys = list(steps)
    place = {key: index for index, key in enumerate(keys)}
    start = place[at]
    undone_keys = undone_in(steps)
    while earlier_keys := [key for key in undone_keys if place[key] < start <= place[UNDO + key]]:
        start = place[earlier_keys[0]]
    return keys[start]


def first_of(steps: Steps, keys: Sequence[str]) -> str:
    """Return the key that was recorded first."""
    return next(key for key in steps if key in set(keys))
