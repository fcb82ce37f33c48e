"""How two runs differ in their payloads and in the records of their steps."""

from collections.abc import Iterator, Mapping
from typing import Any

from perdure.insights.failures import error_of, first_line
from perdure.insights.model import Comparison, Difference, Json
from perdure.insights.redaction import Redact
from perdure.insights.state import RunState
from perdure.insights.steps import step_path

MOST = 500
"""The maximum number of differences of each kind."""


def compare(left: RunState, right: RunState) -> Comparison:
    """Return the differences of two runs; redacted values are not compared with each other."""
    payloads = (_payload(left), _payload(right))
    steps = list(_steps(left, right))
    return Comparison(
        left=left.row,
        right=right.row,
        payload=tuple(differences(*payloads, "payload"))[:MOST],
        steps=tuple(steps[:MOST]),
        first=steps[0].where if steps else "",
    )


def differences(left: Json, right: Json, path: str) -> Iterator[Difference]:
    """Yield the differences between two values, each with its path."""
    if isinstance(left, dict) and isinstance(right, dict):
        yield from _of_members(left, right, path)
    elif isinstance(left, list) and isinstance(right, list):
        by_index = [dict(enumerate(each)) for each in (left, right)]
        yield from _of_members(by_index[0], by_index[1], path)
    elif left != right or type(left) is not type(right):
        yield Difference(path, left, right)


def _of_members(
    left: Mapping[Any, Json], right: Mapping[Any, Json], path: str
) -> Iterator[Difference]:
    for key, item in left.items():
        if key in right:
            yield from differences(item, right[key], f"{path}.{key}")
        else:
            yield Difference(f"{path}.{key}", item, kind="only_left")
    for key, item in right.items():
        if key not in left:
            yield Difference(f"{path}.{key}", right=item, kind="only_right")


def _payload(state: RunState) -> Json:
    metadata = state.snapshot.get("metadata") or {}
    return state.redact.value(metadata.get("input"), ("payload",))


def _steps(left: RunState, right: RunState) -> Iterator[Difference]:
    """Yield records that differ, in the order of the left run, then those only on the right."""
    ours, theirs = left.snapshot["steps"], right.snapshot["steps"]
    for key, record in ours.items():
        outcome = outcome_of(key, record, left.redact)
        if key not in theirs:
            yield Difference(key, outcome, kind="only_left")
        elif (other := outcome_of(key, theirs[key], right.redact)) != outcome:
            yield Difference(key, outcome, other)
    for key, record in theirs.items():
        if key not in ours:
            outcome = outcome_of(key, record, right.redact)
            yield Difference(key, right=outcome, kind="only_right")


def outcome_of(key: str, record: Mapping[str, Any], redact: Redact) -> Json:
    """Return the redacted value of a record, or its error as `{"error": …}`."""
    path = step_path(key, record)
    if record["ok"]:
        return redact.value(record.get("value"), path)
    return {"error": first_line(error_of(record, redact, path))}
