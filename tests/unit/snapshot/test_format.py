"""New snapshots, and what is read from the snapshot of a run that no process owns."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.errors import SnapshotFormatError
from perdure.snapshot import (
    RunStatus,
    Snapshot,
    awaits_of,
    generation_of,
    is_over,
    new_snapshot,
    rest_status,
    validate_snapshot,
    wake_at_of,
    workflow_of,
)
from perdure.store import Rest, header_of, rest_of

AT = "2030-01-01T00:00:00.000Z"
LATER = "2030-01-02T00:00:00.000Z"


def snapshot(**changes: Any) -> Any:
    return {"formatVersion": 1, "steps": {}, "execution": execution(), **changes}


def execution(**fields: object) -> dict[str, object]:
    return {"status": "running", "lastUpdated": AT, **fields}


def with_execution(**fields: object) -> Any:
    return snapshot(execution=execution(**fields))


def test_a_new_snapshot_has_no_steps() -> None:
    """The workflow name and metadata are present when they are passed, and metadata is copied."""
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert new_snapshot(now=now) == snapshot()
    metadata = {"user": "ana"}
    named = new_snapshot("checkout", now=now, metadata=metadata)
    assert named == snapshot(workflowName="checkout", metadata=metadata)
    assert named.get("metadata") is not metadata
    assert validate_snapshot(named).valid


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
        (with_execution(state="queued", pending=PENDING), Rest("queued")),
        (with_execution(state="paused", pending=PENDING), Rest("paused")),
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
def test_what_a_suspended_run_waits_for(run: Snapshot, rest: Rest) -> None:
    """It wakes at the earliest time it waits for, or by any of its events; other runs by none."""
    header = header_of(run)
    assert rest_of(run) == replace(rest, **header)
    assert (rest_status(run), wake_at_of(run), awaits_of(run)) == (
        rest.status,
        rest.wake_at,
        rest.awaits,
    )


def test_the_name_of_the_workflow_is_optional() -> None:
    assert workflow_of(snapshot(workflowName="checkout")) == "checkout"
    assert workflow_of(snapshot()) is None


@pytest.mark.parametrize(
    ("metadata", "generation"),
    [(None, 1), ({}, 1), ({"generation": 1}, 1), ({"generation": 7}, 7)],
)
def test_generations_count_from_one(metadata: Any, generation: int) -> None:
    assert generation_of(metadata) == generation


@pytest.mark.parametrize("malformed", [0, -1, True, 1.0, "2", None, []])
def test_a_malformed_generation_is_refused(malformed: object) -> None:
    """Read as another number, it would repeat or suppress payments."""
    with pytest.raises(SnapshotFormatError, match=r"metadata\.generation"):
        generation_of({"generation": malformed})


@pytest.mark.parametrize(
    ("status", "over"),
    [
        ("queued", False),
        ("running", False),
        ("suspended", False),
        ("waiting", False),
        ("paused", False),
        ("completed", True),
        ("failed", True),
        ("cancelled", True),
    ],
)
def test_which_runs_are_over(status: RunStatus, over: bool) -> None:
    """A run that completed, failed or was cancelled has ended."""
    assert is_over(status) is over
