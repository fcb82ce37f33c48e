"""Validation of snapshots: which objects are valid, and how problems are reported."""

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import SnapshotFormatError
from perdure.snapshot import (
    ExecutionBlock,
    FailureRecord,
    SuccessRecord,
    assert_valid_snapshot,
    looks_like_workflow_snapshot,
    validate_snapshot,
)

AT = "2030-01-01T00:00:00.000Z"
LATER = "2030-01-02T00:00:00.000Z"


def snapshot(**changes: Any) -> Any:
    return {
        "formatVersion": 1,
        "steps": {},
        "execution": {"status": "running", "lastUpdated": AT},
        **changes,
    }


def with_step(record: object) -> Any:
    return snapshot(steps={"a": record})


def with_execution(**fields: object) -> Any:
    return snapshot(execution={"status": "running", "lastUpdated": AT, **fields})


def failure(**fields: object) -> Any:
    cause = {"type": "thrown", "stringRepresentation": "E"}
    return {"ok": False, "error": "E", "cause": cause, **fields}


def error_cause(**fields: object) -> Any:
    return {"type": "error", "name": "ValueError", "message": "m", **fields}


def warning(step: str, path: str = "value") -> Any:
    return {"type": "lossy_value", "stepId": step, "path": path, "reason": "non-json"}


DURABLE = json.loads("""
{"formatVersion":1,"workflowName":"wf1","steps":{"getUser":{"ok":true,"value":{"id":"a"}},
 "getUser#2":{"ok":true},"fail":{"ok":false,"error":"NOPE","cause":{"type":"error","name":"Error",
 "message":"why","stack":"…"},"meta":{"origin":"result"}}},
 "execution":{"status":"running","lastUpdated":"2026-08-01T10:00:00.000Z","currentStepId":"fail"},
 "metadata":{"userId":"u","version":3,"lastStepKey":"fail","stepOrder":["getUser","getUser#2","fail"],
 "stepArgs":["1k2bw4i","vwadu3",null]}}
""")
IDEMPOTENCY = json.loads("""
{"formatVersion":1,"steps":{},"execution":{"status":"completed","lastUpdated":"2026-08-01T10:00:00.000Z"},
 "metadata":{"workflowId":"i2","idempotencyKey":"K2","input":{"a":1},"finalResult":{"ok":true,"value":{"v":1}}}}
""")


@pytest.mark.parametrize(
    "good",
    [
        snapshot(),
        DURABLE,
        IDEMPOTENCY,
        snapshot(workflowName="checkout", metadata={"workflowId": "w", "input": None}),
        snapshot(metadata={}, warnings=[]),
        snapshot(unknown={"to": "us"}),
        snapshot(metadata={"generation": 2}),
        snapshot(outbox=None),
        snapshot(outbox={}),
        snapshot(outbox={"note": {"send": {"to": "a"}}, "input": {"input": 1, "generation": "x"}}),
        snapshot(outbox={"delivered": None, "": {}}),
        with_execution(state="queued"),
        snapshot(workflowName=None, metadata=None, warnings=None),
        with_execution(completedAt=None, currentStepId=None),
        with_execution(status="completed", completedAt=LATER),
        with_execution(lastUpdated="2030-01-01T01:00:00+01:00"),
        with_execution(output={"a": 1}, error=None),
        with_execution(state="cancelled", status="failed"),
        with_execution(
            state="suspended",
            pending=[
                {"id": "nap", "kind": "sleep", "wakeAt": LATER},
                {"id": "ok", "kind": "event", "event": "approved"},
                {"id": "ok#2", "kind": "event", "event": "approved", "wakeAt": LATER},
            ],
        ),
        with_step({"ok": True}),
        with_step({"ok": True, "value": None}),
        with_step(failure()),
        with_step(failure(cause=None)),
        with_step(failure(meta=None)),
        with_step(failure(meta={"origin": "throw"})),
        with_step(failure(cause=error_cause(stack="…", cause=error_cause(cause=None)))),
        with_step(failure(cause=error_cause(cause={"type": "thrown", "stringRepresentation": ""}))),
        with_step(
            {
                "ok": True,
                "value": 1,
                "at": AT,
                "durationMs": 0.5,
                "attempts": 2,
                "args": "1k2bw4i",
                "kind": "sleep",
                "typed": True,
                "branch": "left",
                "call": "a",
            }
        ),
        snapshot(steps={"a": {"ok": True}}, warnings=[warning("a")]),
        snapshot(steps={"__proto__": {"ok": True}, "": {"ok": True}, 'a"b\n': {"ok": True}}),
    ],
)
def test_valid_snapshots_are_returned_unchanged(good: Any) -> None:
    """Those that perdure writes, and those of other writers of the format."""
    assert looks_like_workflow_snapshot(good)
    check = validate_snapshot(good)
    assert (check.valid, check.errors) == (True, ())
    assert check.snapshot is good
    assert assert_valid_snapshot(good) is good


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (None, "snapshot: expected an object, got None"),
        ([], "snapshot: expected an object, got list"),
        ("{}", "snapshot: expected an object, got '{}'"),
        (OrderedDict(snapshot()), "snapshot: expected an object, got OrderedDict"),
        ({**snapshot(), 1: 2}, "snapshot: expected strings as keys, got 1"),
        (snapshot(formatVersion=2), "formatVersion: expected 1, got 2"),
        (snapshot(formatVersion="1"), "formatVersion: expected 1, got '1'"),
        (snapshot(formatVersion=True), "formatVersion: expected 1, got True"),
        (snapshot(formatVersion=10**5000), "formatVersion: expected 1, got int"),
        (snapshot(steps=[]), "steps: expected an object, got list"),
        (snapshot(steps=None), "steps: expected an object, got None"),
        (snapshot(steps={1: {"ok": True}}), "steps: expected strings as keys, got 1"),
        (with_step(None), 'steps["a"]: expected an object, got None'),
        (with_step({}), 'steps["a"].ok is missing'),
        (with_step({"ok": 1}), 'steps["a"].ok: expected true or false, got 1'),
        (with_step({"ok": False, "cause": None}), 'steps["a"].error is missing'),
        (with_step({"ok": False, "error": 1}), 'steps["a"].cause is missing'),
        (snapshot(steps={'"\n': {}}), 'steps["\\"\\n"].ok is missing'),
        (with_step(failure(cause="E")), "steps[\"a\"].cause: expected an object, got 'E'"),
        (
            with_step(failure(cause={"type": "rain"})),
            'steps["a"].cause.type: expected "error" or "thrown", got \'rain\'',
        ),
        (
            with_step(failure(cause={"type": "thrown"})),
            'steps["a"].cause.stringRepresentation is missing',
        ),
        (
            with_step(failure(cause=error_cause(cause=error_cause(name=None)))),
            'steps["a"].cause.cause.name: expected a string, got None',
        ),
        (
            with_step(failure(meta={"origin": "rain"})),
            'steps["a"].meta.origin: expected "result" or "throw", got \'rain\'',
        ),
        (with_step(failure(meta={})), 'steps["a"].meta.origin is missing'),
        (with_step(failure(meta=[])), 'steps["a"].meta: expected an object, got list'),
        (
            with_step({"ok": True, "at": "noon"}),
            "steps[\"a\"].at: expected an ISO 8601 datetime with a UTC offset, got 'noon'",
        ),
        (
            with_step({"ok": True, "attempts": 0}),
            'steps["a"].attempts: expected an int >= 1, got 0',
        ),
        (
            with_step({"ok": True, "durationMs": math.nan}),
            'steps["a"].durationMs: expected a finite number >= 0, got nan',
        ),
        (with_step({"ok": True, "args": 5}), 'steps["a"].args: expected a string, got 5'),
        (
            with_step({"ok": True, "typed": "yes"}),
            "steps[\"a\"].typed: expected true or false, got 'yes'",
        ),
        (
            with_step({"ok": True, "coded": "yes"}),
            "steps[\"a\"].coded: expected true or false, got 'yes'",
        ),
        (
            with_step({"ok": True, "failures": ["b", 5]}),
            'steps["a"].failures[1]: expected a string, got 5',
        ),
        (
            with_step(failure(meta={"origin": "result", "causeless": 1})),
            'steps["a"].meta.causeless: expected true or false, got 1',
        ),
        (
            with_step(failure(cause=error_cause(notes="n"))),
            "steps[\"a\"].cause.notes: expected a list, got 'n'",
        ),
        (
            with_step(failure(cause=error_cause(attrs=[]))),
            'steps["a"].cause.attrs: expected an object, got list',
        ),
        (snapshot(execution=None), "execution: expected an object, got None"),
        (snapshot(execution="running"), "execution: expected an object, got 'running'"),
        (
            with_execution(status="asleep"),
            'execution.status: expected "running" or "completed" or "failed", got \'asleep\'',
        ),
        (
            with_execution(lastUpdated=5),
            "execution.lastUpdated: expected an ISO 8601 datetime with a UTC offset, got 5",
        ),
        (
            with_execution(completedAt="2030-01-01"),
            (
                "execution.completedAt: expected an ISO 8601 datetime with a UTC offset, "
                "got '2030-01-01'"
            ),
        ),
        (
            with_execution(state="running"),
            (
                'execution.state: expected "queued" or "suspended" or "waiting" or "paused" or '
                "\"cancelled\", got 'running'"
            ),
        ),
        (
            with_execution(outputTyped="yes"),
            "execution.outputTyped: expected true or false, got 'yes'",
        ),
        (with_execution(failed=[None]), "execution.failed[0]: expected a string, got None"),
        (with_execution(pending={}), "execution.pending: expected a list, got dict"),
        (with_execution(pending=[5]), "execution.pending[0]: expected an object, got 5"),
        (
            with_execution(pending=[{"id": "a", "kind": "sleep"}]),
            "execution.pending[0].wakeAt is missing",
        ),
        (
            with_execution(pending=[{"id": "a", "kind": "event"}]),
            "execution.pending[0].event is missing",
        ),
        (
            with_execution(pending=[{"id": "a", "kind": []}]),
            'execution.pending[0].kind: expected "sleep" or "event" or "retry", got list',
        ),
        (snapshot(outbox=[]), "outbox: expected an object, got list"),
        (snapshot(outbox={"note": "sent"}), "outbox[\"note\"]: expected an object, got 'sent'"),
        (snapshot(outbox={"note": {1: 2}}), 'outbox["note"]: expected strings as keys, got 1'),
        (snapshot(metadata={"generation": 0}), "metadata.generation: expected an int >= 1, got 0"),
        (
            snapshot(metadata={"generation": None}),
            "metadata.generation: expected an int >= 1, got None",
        ),
        (
            snapshot(waits={"nap": {"id": "nap", "kind": "sleep"}}),
            'waits["nap"].wakeAt is missing',
        ),
        (snapshot(workflowName=5), "workflowName: expected a string, got 5"),
        (snapshot(metadata=[]), "metadata: expected an object, got list"),
        (snapshot(metadata={"workflowId": 5}), "metadata.workflowId: expected a string, got 5"),
        (snapshot(warnings={}), "warnings: expected a list, got dict"),
        (snapshot(warnings=["a"]), "warnings[0]: expected an object, got 'a'"),
        (
            snapshot(warnings=[warning("a"), {"type": "lossy_value", "path": "", "reason": ""}]),
            "warnings[1].stepId is missing",
        ),
    ],
)
def test_a_problem_is_reported_with_its_path(bad: object, problem: str) -> None:
    """Together with what was expected and what was found."""
    check = validate_snapshot(bad)
    assert check.errors == (problem,)
    assert (check.valid, check.snapshot) == (False, None)


class Unexpected:
    """A value that no field of the format accepts."""


def fields_of(shape: Any) -> list[str]:
    """Return the fields that do not accept just any JSON."""
    return [name for name, hint in get_type_hints(shape).items() if hint is not Any]


@pytest.mark.parametrize("name", fields_of(SuccessRecord))
def test_every_described_field_of_a_success_is_validated(name: str) -> None:
    """A field cannot be added to the format without a check of its values."""
    errors = validate_snapshot(with_step({"ok": True, name: Unexpected()})).errors
    assert [error.split(":")[0] for error in errors] == [f'steps["a"].{name}']


@pytest.mark.parametrize("name", fields_of(FailureRecord))
def test_every_described_field_of_a_failure_is_validated(name: str) -> None:
    """The same for failures."""
    errors = validate_snapshot(with_step(failure(**{name: Unexpected()}))).errors
    assert [error.split(":")[0] for error in errors] == [f'steps["a"].{name}']


@pytest.mark.parametrize("name", fields_of(ExecutionBlock))
def test_every_described_field_of_the_execution_is_validated(name: str) -> None:
    """The same for `execution`."""
    errors = validate_snapshot(with_execution(**{name: Unexpected()})).errors
    assert [error.split(":")[0] for error in errors] == [f"execution.{name}"]


@pytest.mark.parametrize("name", ["formatVersion", "steps", "execution"])
def test_three_fields_are_required(name: str) -> None:
    """Without one of them, an object does not even look like a snapshot."""
    without = snapshot()
    del without[name]
    assert not looks_like_workflow_snapshot(without)
    assert validate_snapshot(without).errors == (f"{name} is missing",)


@pytest.mark.parametrize("name", ["steps", "execution"])
@pytest.mark.parametrize("part", [None, [], "x"])
def test_steps_and_execution_must_be_objects(name: str, part: object) -> None:
    """An object with null, a list or a string there does not look like a snapshot."""
    assert not looks_like_workflow_snapshot(snapshot(**{name: part}))
    assert not looks_like_workflow_snapshot(part)


def test_all_problems_are_reported_in_the_order_of_the_format() -> None:
    """Version, steps, execution, then the others."""
    bad = {
        "warnings": 1,
        "metadata": 2,
        "execution": {},
        "steps": {"b": {"ok": False}, "a": 5},
    }
    assert validate_snapshot(bad).errors == (
        "formatVersion is missing",
        'steps["b"].error is missing',
        'steps["b"].cause is missing',
        'steps["a"]: expected an object, got 5',
        "execution.status is missing",
        "execution.lastUpdated is missing",
        "metadata: expected an object, got 2",
        "warnings: expected a list, got 1",
    )


def test_assert_valid_snapshot_raises_with_every_problem() -> None:
    """The message starts with the first problem; `errors` contains all of them."""
    with pytest.raises(SnapshotFormatError) as raised:
        assert_valid_snapshot({"formatVersion": 1})
    assert str(raised.value).startswith("Invalid snapshot format: steps is missing")
    assert raised.value.errors == ("steps is missing", "execution is missing")


def explode(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("hostile code was run")


class HostileDict(dict[Any, Any]):
    get = keys = items = values = __getitem__ = __iter__ = __len__ = __contains__ = explode
    __eq__ = __repr__ = __bool__ = explode


class HostileMeta(type):
    __name__: Any = property(explode)
    __repr__ = __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = explode


class Hostile(metaclass=HostileMeta):
    __getattr__ = __eq__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = explode
    __class__: Any = property(explode)

    def __hash__(self) -> int:
        return hash("formatVersion")


class HostileText(str):
    __slots__ = ()
    __eq__ = __repr__ = __str__ = __len__ = explode

    def __hash__(self) -> int:
        return str.__hash__(self)


PLACES: list[Callable[[Any], Any]] = [
    lambda thing: thing,
    lambda thing: {thing: 1},
    lambda thing: snapshot(formatVersion=thing),
    lambda thing: snapshot(steps=thing),
    lambda thing: snapshot(steps={thing: {"ok": True}}),
    with_step,
    lambda thing: with_step({"ok": thing}),
    lambda thing: with_step({"ok": True, thing: 1}),
    lambda thing: with_step(failure(cause=thing)),
    lambda thing: with_step(failure(cause={"type": thing})),
    lambda thing: with_step(failure(cause=error_cause(cause=thing))),
    lambda thing: with_step(failure(meta=thing)),
    lambda thing: with_step(failure(meta={"origin": thing})),
    lambda thing: with_step({"ok": True, "at": thing}),
    lambda thing: with_step({"ok": True, "attempts": thing}),
    lambda thing: with_step({"ok": True, "durationMs": thing}),
    lambda thing: snapshot(execution=thing),
    lambda thing: with_execution(status=thing),
    lambda thing: with_execution(lastUpdated=thing),
    lambda thing: with_execution(state=thing),
    lambda thing: with_execution(pending=thing),
    lambda thing: with_execution(pending=[thing]),
    lambda thing: with_execution(pending=[{"id": thing, "kind": thing}]),
    lambda thing: snapshot(metadata=thing),
    lambda thing: snapshot(metadata={"workflowId": thing}),
    lambda thing: snapshot(workflowName=thing),
    lambda thing: snapshot(warnings=thing),
    lambda thing: snapshot(warnings=[thing]),
    lambda thing: snapshot(warnings=[{"stepId": thing}]),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "make", [Hostile, lambda: HostileText("formatVersion")], ids=["object", "text"]
)
def test_hostile_objects_are_reported(place: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    """An object whose methods all raise is a problem like any other, in every place."""
    candidate = place(make())
    assert validate_snapshot(candidate).valid is False
    looks_like_workflow_snapshot(candidate)


@pytest.mark.parametrize("place", [place for n, place in enumerate(PLACES) if n not in (1, 4, 7)])
def test_subclasses_of_dict_are_reported(place: Callable[[Any], Any]) -> None:
    """Their methods, which could raise, are not called."""
    assert validate_snapshot(place(HostileDict())).valid is False


def test_a_cause_that_is_its_own_cause_is_reported() -> None:
    """A cycle of causes does not hang the validation."""
    cause = error_cause()
    cause["cause"] = cause
    assert validate_snapshot(with_step(failure(cause=cause))).errors == (
        'steps["a"].cause is its own cause',
    )


def nested(levels: int, innermost: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(levels):
        innermost = wrap(innermost)
    return innermost


def test_causes_and_values_may_be_nested_to_any_depth() -> None:
    """Validation does not recurse into them."""
    cause = nested(100_000, None, lambda inner: error_cause(cause=inner))
    value = nested(100_000, None, lambda inner: [inner])
    assert validate_snapshot(with_step(failure(cause=cause))).valid
    assert validate_snapshot(with_step({"ok": True, "value": value})).valid


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(AT),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELD_NAMES = """
formatVersion workflowName steps execution metadata warnings ok value error cause meta origin type
name message status lastUpdated pending state kind id wakeAt event stepId path at
"""
field_names = st.sampled_from(FIELD_NAMES.split())
near_snapshots = st.recursive(
    json_values | st.sampled_from([1, True, "running", "error", "thrown", "event", "sleep"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(field_names, inner, max_size=6),
    max_leaves=30,
)


@given(near_snapshots)
def test_validation_never_raises(candidate: object) -> None:
    """Every object is valid or not, and a valid one also looks like a snapshot."""
    check = validate_snapshot(candidate)
    assert check.valid == (check.errors == ()) == (check.snapshot is not None)
    if check.valid:
        assert looks_like_workflow_snapshot(candidate)
