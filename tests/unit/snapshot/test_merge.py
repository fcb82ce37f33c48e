"""What is made of snapshots: a new one, one out of many, and how a run lies."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import SnapshotFormatError
from perdure.snapshot import (
    RunStatus,
    Snapshot,
    awaits_of,
    is_over,
    merge_snapshots,
    new_snapshot,
    rest_status,
    validate_snapshot,
    wake_at_of,
    workflow_of,
)
from perdure.store import Rest, rest_of

AT = "2030-01-01T00:00:00.000Z"
LATER = "2030-01-02T00:00:00.000Z"
FAILURE = {"ok": False, "error": "E", "cause": None}


def snapshot(**changes: Any) -> Any:
    return {"formatVersion": 1, "steps": {}, "execution": execution(), **changes}


def execution(**fields: object) -> dict[str, object]:
    return {"status": "running", "lastUpdated": AT, **fields}


def with_execution(**fields: object) -> Any:
    return snapshot(execution=execution(**fields))


def warning(step: str, path: str = "value") -> Any:
    return {"type": "lossy_value", "stepId": step, "path": path, "reason": "non-json"}


def test_new_snapshot() -> None:
    """A run that has just begun has no steps; name and metadata are there when given."""
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert new_snapshot(now=now) == snapshot()
    metadata = {"user": "ana"}
    named = new_snapshot("checkout", now=now, metadata=metadata)
    assert named == snapshot(workflowName="checkout", metadata=metadata)
    assert named.get("metadata") is not metadata
    assert validate_snapshot(named).valid


def test_merge() -> None:
    """Steps are replaced in place or come after; execution is the delta's; metadata is merged."""
    base = snapshot(
        workflowName="checkout",
        steps={"a": {"ok": True, "value": 1}, "b": FAILURE},
        metadata={"user": "ana", "try": 1},
    )
    delta = snapshot(
        steps={"c": {"ok": True, "value": 3}, "a": {"ok": True, "value": 9}},
        execution={"status": "completed", "lastUpdated": LATER},
        metadata={"try": 2},
    )
    merged = merge_snapshots(base, delta)
    assert merged == {
        "formatVersion": 1,
        "workflowName": "checkout",
        "steps": {
            "a": {"ok": True, "value": 9},
            "b": FAILURE,
            "c": {"ok": True, "value": 3},
        },
        "execution": {"status": "completed", "lastUpdated": LATER},
        "metadata": {"user": "ana", "try": 2},
    }
    assert list(merged["steps"]) == ["a", "b", "c"]


def test_merge_keeps_warnings_until_their_step_is_recorded_again() -> None:
    """A later clean record of a step clears what was said of the earlier one."""
    base = snapshot(warnings=[warning("a"), warning("b"), warning("gone")])
    delta = snapshot(steps={"a": {"ok": True}, "c": {"ok": True}}, warnings=[warning("c")])
    merged = merge_snapshots(base, delta)
    assert merged.get("warnings") == [warning("b"), warning("gone"), warning("c")]
    cleared = merge_snapshots(snapshot(warnings=[warning("a")]), {"steps": {"a": {"ok": True}}})
    assert "warnings" not in cleared


def test_merge_of_a_delta_that_says_little() -> None:
    """What a delta does not speak of stays as it was."""
    base = snapshot(workflowName="checkout", metadata={"a": 1}, warnings=[warning("z")])
    merged = merge_snapshots(base, {"steps": {"a": {"ok": True}}}, {"metadata": None}, {})
    assert merged == {**base, "steps": {"a": {"ok": True}}}
    assert "metadata" not in merge_snapshots(snapshot(), snapshot())


@pytest.mark.parametrize(
    "delta",
    [
        [],
        None,
        {"formatVersion": 2},
        {"formatVersion": None},
        {"steps": []},
        {"execution": "done"},
        {"metadata": 5},
        {"warnings": {}},
        {"warnings": [{}]},
        {1: 2},
    ],
)
def test_merge_refuses_what_is_no_delta(delta: Any) -> None:
    """A part of the wrong shape is our own error, not a broken snapshot."""
    with pytest.raises(SnapshotFormatError):
        merge_snapshots(snapshot(), delta)


keys = st.sampled_from("abcde")
records = st.fixed_dictionaries({"ok": st.just(True), "value": st.integers(0, 9)})
deltas = st.fixed_dictionaries(
    {},
    optional={
        "formatVersion": st.just(1),
        "workflowName": st.sampled_from(["x", "y"]) | st.none(),
        "steps": st.dictionaries(keys, records),
        "execution": st.fixed_dictionaries(
            {"status": st.sampled_from(["running", "completed"]), "lastUpdated": st.just(AT)}
        ),
        "metadata": st.dictionaries(keys, st.integers(0, 9)) | st.none(),
        "warnings": st.lists(st.builds(warning, keys, st.sampled_from("pq"))) | st.none(),
        "later": st.integers(),
    },
)
bases = deltas.map(lambda delta: snapshot(**delta))


@given(bases, deltas, deltas)
def test_merging_is_associative(base: Any, first: Any, second: Any) -> None:
    """A journal may be merged in any grouping: the result is the same, and so is its order."""
    step_by_step = merge_snapshots(merge_snapshots(base, first), second)
    grouped = merge_snapshots(base, merge_snapshots(first, second))
    at_once = merge_snapshots(base, first, second)
    assert step_by_step == grouped == at_once
    assert list(step_by_step["steps"]) == list(grouped["steps"]) == list(at_once["steps"])


@given(bases, st.lists(deltas))
def test_merging_leaves_its_inputs_alone(base: Any, journal: list[Any]) -> None:
    """Neither the merge nor a change of its result at the top shows in what was merged."""
    before = copy.deepcopy((base, journal))
    merged = merge_snapshots(base, *journal)
    assert validate_snapshot(merged).valid
    merged["steps"]["new"] = {"ok": True}
    merged["execution"]["status"] = "failed"
    merged.get("metadata", {})["new"] = 1
    merged.get("warnings", []).append(warning("new"))
    assert (base, journal) == before


@given(bases, st.lists(deltas))
def test_merging_keeps_the_order_of_steps(base: Any, journal: list[Any]) -> None:
    """Steps stand in the order in which each was first recorded."""
    recorded = [key for part in (base, *journal) for key in part.get("steps", {})]
    assert list(merge_snapshots(base, *journal)["steps"]) == list(dict.fromkeys(recorded))


def test_a_long_journal_with_warnings() -> None:
    """Five thousand entries that each clear the warning before them are merged at once."""
    journal = [
        {"steps": {f"s{n % 2500}": {"ok": True}}, "warnings": [warning(f"s{n % 2500}")]}
        for n in range(5000)
    ]
    merged = merge_snapshots(snapshot(), *journal)
    assert len(merged["steps"]) == len(merged.get("warnings", [])) == 2500


PENDING = [
    {"id": "nap", "kind": "sleep", "wakeAt": "2030-01-03T00:00:00.000Z"},
    {"id": "ok", "kind": "event", "event": "approved", "wakeAt": LATER},
    {"id": "no", "kind": "event", "event": "refused"},
    {"id": "ok#2", "kind": "event", "event": "approved"},
]


@pytest.mark.parametrize(
    ("run", "rest"),
    [
        (snapshot(), Rest("running")),
        (with_execution(status="completed"), Rest("completed")),
        (with_execution(status="failed"), Rest("failed")),
        (with_execution(status="failed", state="cancelled", pending=PENDING), Rest("cancelled")),
        (with_execution(pending=PENDING), Rest("running")),
        (with_execution(state="suspended"), Rest("suspended")),
        (
            with_execution(state="suspended", pending=PENDING),
            Rest("suspended", datetime(2030, 1, 2, tzinfo=UTC), ("approved", "refused")),
        ),
        (
            with_execution(state="waiting", pending=PENDING[2:]),
            Rest("waiting", None, ("refused", "approved")),
        ),
    ],
)
def test_how_a_run_lies(run: Snapshot, rest: Rest) -> None:
    """A resting run wakes at the earliest time it waits for, or by any of its events."""
    assert rest_of(run) == rest
    assert (rest_status(run), wake_at_of(run), awaits_of(run)) == (
        rest.status,
        rest.wake_at,
        rest.awaits,
    )


def test_workflow_of() -> None:
    """A snapshot may know the name of its workflow."""
    assert workflow_of(snapshot(workflowName="checkout")) == "checkout"
    assert workflow_of(snapshot()) is None


@pytest.mark.parametrize(
    ("status", "over"),
    [
        ("running", False),
        ("suspended", False),
        ("waiting", False),
        ("completed", True),
        ("failed", True),
        ("cancelled", True),
    ],
)
def test_is_over(status: RunStatus, over: bool) -> None:
    """A run that completed, failed or was cancelled does not go on by itself."""
    assert is_over(status) is over
