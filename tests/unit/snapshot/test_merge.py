"""Merging snapshots with deltas, and the deltas of a journal."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import codec
from perdure.errors import SnapshotFormatError
from perdure.snapshot import (
    merge_snapshots,
    new_snapshot,
    open_waits,
    outbox_of,
    step_delta,
    validate_snapshot,
    waits_delta,
)

AT = "2030-01-01T00:00:00.000Z"
LATER = "2030-01-02T00:00:00.000Z"
FAILURE = {"ok": False, "error": "E", "cause": None}


def snapshot(**changes: Any) -> Any:
    return {"formatVersion": 1, "steps": {}, "execution": execution(), **changes}


def execution(**fields: object) -> dict[str, object]:
    return {"status": "running", "lastUpdated": AT, **fields}


def warning(step: str, path: str = "value") -> Any:
    return {"type": "lossy_value", "stepId": step, "path": path, "reason": "non-json"}


def test_a_delta_is_applied_to_its_base() -> None:
    """Steps are replaced or appended, `execution` is replaced, `metadata` is merged by name."""
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


def test_warnings_are_kept_until_their_step_is_recorded_again() -> None:
    """A later record of a step drops the warnings about the earlier one."""
    base = snapshot(warnings=[warning("a"), warning("b"), warning("unrecorded")])
    delta = snapshot(steps={"a": {"ok": True}, "c": {"ok": True}}, warnings=[warning("c")])
    merged = merge_snapshots(base, delta)
    assert merged.get("warnings") == [warning("b"), warning("unrecorded"), warning("c")]
    cleared = merge_snapshots(snapshot(warnings=[warning("a")]), {"steps": {"a": {"ok": True}}})
    assert "warnings" not in cleared


def test_fields_that_a_delta_lacks_are_kept() -> None:
    """Absent and null mean the same."""
    base = snapshot(workflowName="checkout", metadata={"a": 1}, warnings=[warning("z")])
    merged = merge_snapshots(base, {"steps": {"a": {"ok": True}}}, {"metadata": None}, {})
    assert merged == {**base, "steps": {"a": {"ok": True}}}
    assert "metadata" not in merge_snapshots(snapshot(), snapshot())


NOTE: Any = {"send": {"to": "other", "dedup_id": "run/1/note"}}
START: Any = {"start": {"run_id": "run/1/pay"}}


def test_the_outbox_is_merged_by_name() -> None:
    """An item of a delta replaces the item of the same name in its place; new ones follow."""
    base = snapshot(outbox={"note": NOTE, "pay": START})
    merged = merge_snapshots(base, {"outbox": {"note": START}}, {"outbox": {"more": NOTE}})
    assert list(outbox_of(merged).items()) == [("note", START), ("pay", START), ("more", NOTE)]


def test_a_null_in_a_delta_removes_an_outbox_item() -> None:
    base = snapshot(outbox={"note": NOTE, "pay": START})
    assert outbox_of(merge_snapshots(base, {"outbox": {"note": None}})) == {"pay": START}
    again = merge_snapshots(base, {"outbox": {"note": None}}, {"outbox": {"note": START}})
    assert outbox_of(again) == {"note": START, "pay": START}


def test_a_null_removes_an_item_of_the_base_when_deltas_are_merged_first() -> None:
    """The null stays in the merge of two deltas, which do not contain the item."""
    both = merge_snapshots({"outbox": {"note": None}}, {"outbox": {"more": NOTE}})  # type: ignore[typeddict-item]
    assert both.get("outbox") == {"note": None, "more": NOTE}
    assert outbox_of(merge_snapshots(snapshot(outbox={"note": NOTE}), both)) == {"more": NOTE}


def test_an_outbox_that_became_empty_is_kept_and_has_no_items() -> None:
    """It is absent only if no part has one; then merging adds none."""
    merged = merge_snapshots(snapshot(outbox={"note": NOTE}), {"outbox": {"note": None}})
    assert (merged.get("outbox"), outbox_of(merged)) == ({"note": None}, {})
    assert merge_snapshots(snapshot(outbox={}), {}) == snapshot(outbox={})
    assert "outbox" not in merge_snapshots(snapshot(), {"outbox": None}, {"steps": {}})


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
        {"outbox": ["note"]},
        {"warnings": {}},
        {"warnings": [{}]},
        {1: 2},
    ],
)
def test_a_malformed_delta_is_refused(delta: Any) -> None:
    """The error is `SnapshotFormatError`, and no broken snapshot is returned."""
    with pytest.raises(SnapshotFormatError):
        merge_snapshots(snapshot(), delta)


keys = st.sampled_from("abcde")
records = st.fixed_dictionaries({"ok": st.just(True), "value": st.integers(0, 9)})
items = st.fixed_dictionaries({"send": st.fixed_dictionaries({"to": keys})})
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
        "outbox": st.dictionaries(keys, items | st.none()) | st.none(),
        "warnings": st.lists(st.builds(warning, keys, st.sampled_from("pq"))) | st.none(),
        "later": st.integers(),
    },
)
bases = deltas.map(lambda delta: snapshot(**delta))


@given(bases, deltas, deltas)
def test_merging_is_associative(base: Any, first: Any, second: Any) -> None:
    """A journal may be merged in any grouping, with the same steps in the same order."""
    step_by_step = merge_snapshots(merge_snapshots(base, first), second)
    grouped = merge_snapshots(base, merge_snapshots(first, second))
    at_once = merge_snapshots(base, first, second)
    assert step_by_step == grouped == at_once
    assert list(step_by_step["steps"]) == list(grouped["steps"]) == list(at_once["steps"])
    assert list(outbox_of(step_by_step)) == list(outbox_of(grouped)) == list(outbox_of(at_once))


@given(bases, st.lists(deltas))
def test_merging_does_not_change_its_arguments(base: Any, journal: list[Any]) -> None:
    """Neither the merge nor a change of its result is visible in the base and the deltas."""
    before = copy.deepcopy((base, journal))
    merged = merge_snapshots(base, *journal)
    assert validate_snapshot(merged).valid
    merged["steps"]["new"] = {"ok": True}
    merged["execution"]["status"] = "failed"
    merged.get("metadata", {})["new"] = 1
    merged.get("outbox", {})["new"] = {}
    merged.get("warnings", []).append(warning("new"))
    assert (base, journal) == before


@given(bases, st.lists(deltas))
def test_merging_keeps_the_order_of_steps(base: Any, journal: list[Any]) -> None:
    """Steps are in the order in which each was first recorded."""
    recorded = [key for part in (base, *journal) for key in part.get("steps", {})]
    assert list(merge_snapshots(base, *journal)["steps"]) == list(dict.fromkeys(recorded))


def test_a_long_journal_with_warnings_is_merged_in_linear_time() -> None:
    """Of five thousand entries, the second half replaces the warnings of the first."""
    journal = [
        {"steps": {f"s{n % 2500}": {"ok": True}}, "warnings": [warning(f"s{n % 2500}")]}
        for n in range(5000)
    ]
    merged = merge_snapshots(snapshot(), *journal)
    assert len(merged["steps"]) == len(merged.get("warnings", [])) == 2500


NOW = datetime(2030, 1, 1, tzinfo=UTC)
WAIT: Any = {"id": "nap", "kind": "sleep", "wakeAt": LATER}


def loaded(*journal: bytes) -> Any:
    """Return what a store loads for a new run with this journal."""
    merged = merge_snapshots(new_snapshot("w", now=NOW), *map(codec.loads, journal))
    assert validate_snapshot(merged).valid
    return merged


def test_the_delta_of_a_step_adds_its_record() -> None:
    """The step becomes the current one, and the run was last updated when the step ended."""
    merged = loaded(step_delta("a", b'{"ok":true,"value":1}', LATER))
    assert merged == {
        "formatVersion": 1,
        "workflowName": "w",
        "steps": {"a": {"ok": True, "value": 1}},
        "execution": {"status": "running", "lastUpdated": LATER, "currentStepId": "a"},
    }


@given(st.text(st.characters(codec="utf-8")))
def test_the_delta_of_a_step_with_any_key_is_json(key: str) -> None:
    """Quotes, control characters and characters beyond ASCII are escaped."""
    merged = loaded(step_delta(key, b'{"ok":true}', AT))
    assert merged["steps"] == {key: {"ok": True}}
    assert merged["execution"]["currentStepId"] == key


def test_the_delta_of_a_step_replaces_earlier_records() -> None:
    """The replaced records keep their places."""
    first = step_delta("a", b'{"ok":true,"value":1}', AT)
    second = step_delta("b", b'{"ok":true}', LATER, replaces={"a": b'{"ok":true,"unclaimed":"e"}'})
    steps = loaded(first, second)["steps"]
    assert list(steps.items()) == [("a", {"ok": True, "unclaimed": "e"}), ("b", {"ok": True})]


def test_the_delta_of_a_step_carries_warnings_about_it() -> None:
    merged = loaded(step_delta("a", b'{"ok":true}', AT, warnings=[warning("a")]))
    assert merged["warnings"] == [warning("a")]


def test_the_delta_of_a_step_opens_and_closes_waits() -> None:
    """A wait is open from the delta that begins it to the delta that ends it with null."""
    opened = step_delta("a", b'{"ok":true}', AT, waits={"nap": WAIT})
    closed = step_delta("nap", b'{"ok":true}', LATER, waits={"nap": None})
    assert open_waits(loaded(opened)) == [WAIT]
    assert open_waits(loaded(opened, closed)) == []


def test_the_delta_of_waits_changes_no_step() -> None:
    step = step_delta("a", b'{"ok":true}', AT)
    waits = waits_delta({"status": "running", "lastUpdated": LATER}, {"nap": WAIT})
    merged = loaded(step, waits)
    assert (list(merged["steps"]), open_waits(merged)) == (["a"], [WAIT])
    assert merged["execution"] == {"status": "running", "lastUpdated": LATER}
