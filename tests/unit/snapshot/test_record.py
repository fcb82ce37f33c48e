"""Step records: their fields, and what is read back from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_type_hints

import msgspec
import pytest

from perdure import codec
from perdure.errors import CodecError, StepFailed
from perdure.result import Err, Ok
from perdure.snapshot import FailureRecord, SuccessRecord, new_snapshot, validate_snapshot
from perdure.snapshot.record import (
    WireRecord,
    failure_record,
    is_plain,
    result_of,
    success_record,
)

AT = "2030-01-01T00:00:00.000Z"


@dataclass
class Call:
    """A call with every default; each test sets what it is about."""

    id: str = "fetch"
    record_key: str = "fetch"
    call: str = "fetch"
    path: str = ""
    kind: str = "step"
    fingerprint: str = ""
    attempt: int = 1
    failures: Sequence[str] = ()
    event: str = ""
    run: str = ""
    answer: dict[str, Any] | None = None
    undo: object = None
    sagas: Sequence[str] = ()
    returns: Any = None
    errors: Any = None
    within: str = ""

    def return_type(self) -> object:
        return self.returns

    def error_type(self) -> object:
        return self.errors


FULL = Call("fetch", "fetch#2", "fetch", "0/1", "race", "1k2bw4i", 3, ("a", "b"), "go")


@dataclass
class User:
    """A value that is restored by the step's return type."""

    name: str
    tags: list[str] = field(default_factory=list)


class Refused(Exception):
    """An exception that the user declares."""


def stored(record: WireRecord) -> Any:
    """Return the record as a store loads it, after checking it against the format."""
    data = codec.loads(codec.dumps(record))
    run = {**new_snapshot(now=datetime(2030, 1, 1, tzinfo=UTC)), "steps": {"fetch": data}}
    assert validate_snapshot(run).errors == ()
    return data


def wire_types() -> dict[str, object]:
    return {each.name: each.type for each in msgspec.structs.fields(WireRecord)}


def test_the_encoder_knows_exactly_the_fields_of_the_format() -> None:
    """`WireRecord` and the TypedDicts that validation is derived from have the same fields."""
    described = get_type_hints(SuccessRecord) | get_type_hints(FailureRecord)
    assert set(wire_types()) == set(described)
    for name in ("at", "durationMs", "attempts", "args", "kind", "typed", "coded", "branch"):
        assert wire_types()[name] is described[name], name


def test_a_success_with_default_facts_stores_only_its_value() -> None:
    record, visible, losses = success_record(Call(), {"n": 1}, AT, 0.5)
    assert stored(record) == {"ok": True, "value": {"n": 1}, "at": AT, "durationMs": 0.5}
    assert (visible, losses) == ({"n": 1}, ())


def test_a_success_stores_the_facts_of_its_call() -> None:
    record, _, _ = success_record(FULL, None, AT, 0)
    assert stored(record) == {
        "ok": True,
        "value": None,
        "at": AT,
        "durationMs": 0,
        "attempts": 3,
        "args": "1k2bw4i",
        "kind": "race",
        "branch": "0/1",
        "call": "fetch",
        "event": "go",
    }


def test_a_value_with_tags_is_marked_as_coded() -> None:
    record, visible, losses = success_record(Call(), (1, 2), AT, 0)
    assert (stored(record)["value"], stored(record)["coded"]) == ({"~tuple": [1, 2]}, True)
    assert (visible, losses, is_plain(stored(record))) == ((1, 2), (), False)


def test_a_value_of_the_return_type_is_marked_as_typed() -> None:
    record, visible, _ = success_record(Call(returns=User), User("ana"), AT, 0)
    assert stored(record)["typed"] is True
    assert visible == User("ana")
    result, error = result_of(stored(record), "fetch", lambda: User)
    assert (result, error) == (Ok(User("ana")), None)


def test_a_value_that_cannot_be_restored_is_reported() -> None:
    """The function sees what was recorded, and the path of the loss is known."""
    record, visible, losses = success_record(Call(), [User("ana")], AT, 0)
    assert visible == stored(record)["value"] == [{"name": "ana", "tags": []}]
    assert [loss.path for loss in losses] == ["value[0]"]


def test_a_value_that_is_nested_too_deep_is_refused() -> None:
    value: list[Any] = []
    for _ in range(codec.MAX_DEPTH):
        value = [value]
    with pytest.raises(CodecError):
        success_record(Call(), value, AT, 0)


def test_a_raised_failure_is_stored_with_the_facts_of_its_call() -> None:
    error = ValueError("no")
    record, visible, losses = failure_record(FULL, error, codec.NOWHERE, AT, 2.5)
    data = stored(record)
    assert data["cause"].pop("stack")
    assert data == {
        "ok": False,
        "error": {"type": "ValueError", "message": "no"},
        "cause": {"type": "error", "name": "ValueError", "message": "no", "args": ["no"]},
        "meta": {"origin": "throw"},
        "at": AT,
        "durationMs": 2.5,
        "attempts": 3,
        "args": "1k2bw4i",
        "kind": "race",
        "branch": "0/1",
        "call": "fetch",
        "failures": ["a", "b"],
        "event": "go",
    }
    assert (visible, losses) == (error, ())


def test_a_declared_exception_is_raised_again_by_its_class() -> None:
    scope = codec.ErrorScope([Refused])
    record, visible, _ = failure_record(Call(), Refused("no"), scope, AT, 0)
    assert type(visible) is Refused
    result, error = result_of(stored(record), "fetch", lambda: None, scope)
    assert type(error) is Refused
    assert isinstance(result, Err)


@pytest.mark.parametrize("cause", [None, ValueError("why")])
def test_a_returned_err_is_restored_as_step_failed(cause: ValueError | None) -> None:
    """First and replayed, the function sees the same error; a missing cause stays missing."""
    record, visible, _ = failure_record(Call(), Err("no", cause), codec.NOWHERE, AT, 0)
    data = stored(record)
    assert data["meta"] == {"origin": "result"} | ({} if cause else {"causeless": True})
    result, replayed = result_of(data, "fetch", lambda: None)
    for error in (visible, replayed):
        assert isinstance(error, StepFailed)
        assert (error.step, error.error, repr(error.cause)) == ("fetch", "no", repr(cause))
    assert isinstance(result, Err)
    assert (result.error, repr(result.cause)) == ("no", repr(cause))


def test_the_error_of_an_err_is_restored_by_the_error_type() -> None:
    failure = Err(User("ana"))
    record, visible, _ = failure_record(Call(errors=User), failure, codec.NOWHERE, AT, 0)
    assert stored(record)["typed"] is True
    result, replayed = result_of(stored(record), "fetch", lambda: None, error_type=lambda: User)
    assert isinstance(visible, StepFailed)
    assert isinstance(replayed, StepFailed)
    assert visible.error == replayed.error == User("ana")
    assert result == Err(User("ana"))


@pytest.mark.parametrize(
    ("record", "returns", "value"),
    [
        ({"ok": True, "value": {"name": "ana"}}, lambda: User, User("ana")),
        ({"ok": True, "value": {"name": "ana"}}, lambda: None, {"name": "ana"}),
        ({"ok": True}, lambda: None, None),
    ],
)
def test_a_record_of_another_writer_is_converted_to_the_return_type(
    record: Any, returns: Callable[[], object], value: object
) -> None:
    """Other writers of the format store no time and no tags."""
    assert not is_plain(record)
    assert result_of(record, "fetch", returns) == (Ok(value), None)
