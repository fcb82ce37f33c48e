"""Exceptions are stored as data and restored with their class, where that is safe."""

import asyncio
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from perdure.codec import (
    NOWHERE,
    ErrorCause,
    ErrorScope,
    JSONValue,
    SerializedCause,
    decode,
    decode_cause,
    dumps,
    encode_cause,
    loads,
    prepare,
    prepare_error,
    traceback_of,
)
from perdure.errors import CodecError, StepError, StepFailed, StepTimeout


class PaymentDeclined(Exception):
    """Takes other arguments than it passes to its base class, as many do."""

    def __init__(self, order: str, *, amount: int) -> None:
        super().__init__(f"order {order}: {amount} declined")
        self.order = order
        self.amount = amount


class Unreachable(OSError):
    def __init__(self, host: str) -> None:
        super().__init__(111, "refused", host)
        self.host = host


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


@attrs.define
class AttrsError(Exception):
    code: int


@dataclass
class DataError(Exception):
    code: int
    when: date


def stored(error: object) -> SerializedCause:
    return cast("SerializedCause", loads(dumps(encode_cause(error))))


def round_trip(error: object, *declared: type[BaseException]) -> Any:
    return decode_cause(stored(error), ErrorScope(declared))


BUILT_IN = [
    ValueError("bad", 3),
    KeyError("k"),
    KeyError((1, 2)),
    ZeroDivisionError(),
    FileNotFoundError(2, "No such file", "a.txt"),
    OSError("text only"),
    ConnectionRefusedError(111, "refused"),
    TimeoutError("late"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
    SyntaxError("bad", ("f.py", 1, 2, "text")),
    ImportError("no", name="x", path="y"),
    ValueError("lone \ud800 surrogate"),
    ValueError(date(2024, 1, 1), {1, 2}),
    RecursionError("deep"),
    UserWarning("careful"),
]


@pytest.mark.parametrize("error", BUILT_IN, ids=repr)
def test_built_in_exceptions_are_restored(error: Exception) -> None:
    """With the same class, arguments and message."""
    restored = round_trip(error)
    assert type(restored) is type(error)
    assert restored.args == error.args
    assert str(restored) == str(error)


def test_attributes_of_built_in_exceptions_are_restored() -> None:
    """Those of the class, and those that the caller has set."""
    error = FileNotFoundError(2, "No such file", "a.txt")
    error.attempt = 3  # type: ignore[attr-defined] # callers set what they like
    restored = round_trip(error)
    assert (restored.errno, restored.filename, restored.attempt) == (2, "a.txt", 3)
    assert round_trip(ImportError("no", name="x")).name == "x"


def test_exception_groups_are_restored_with_their_members() -> None:
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("in", [KeyError("b")])])
    restored = round_trip(group)
    assert type(restored) is ExceptionGroup
    assert repr(restored) == repr(group)


DECLARED: list[Exception] = [
    PaymentDeclined("7", amount=5),
    Unreachable("db"),
    SlottedError(3),
    AttrsError(4),
    DataError(5, date(2024, 1, 1)),
]


@pytest.mark.parametrize("error", DECLARED, ids=repr)
def test_declared_exceptions_are_restored_without_init(error: Exception) -> None:
    """A user's class is restored with its attributes, whatever arguments `__init__` takes."""
    restored = round_trip(error, KeyError, type(error))
    assert type(restored) is type(error)
    assert str(restored) == str(error)
    for name in ("order", "amount", "host", "errno", "filename", "code", "when"):
        assert getattr(restored, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("error", DECLARED, ids=repr)
def test_undeclared_exceptions_become_step_error(error: Exception) -> None:
    """With name, message and traceback; the class is not looked up."""
    restored = round_trip(error)
    assert type(restored) is StepError
    assert restored.name == type(error).__name__
    assert restored.message == str(error)
    assert type(error).__name__ in restored.traceback


@pytest.mark.parametrize(
    "error",
    [StopIteration(1), StopAsyncIteration(), KeyboardInterrupt(), SystemExit(1), GeneratorExit()],
    ids=repr,
)
def test_control_flow_exceptions_become_step_error(error: BaseException) -> None:
    """Raising them again would stop something other than the step."""
    assert type(round_trip(error)) is StepError


def test_perdures_errors_are_restored() -> None:
    """They need not be declared."""
    late = round_trip(StepTimeout("fetch", 1.5))
    assert (type(late), late.step, late.seconds) == (StepTimeout, "fetch", 1.5)
    failed = round_trip(StepFailed("pay", {"code": 3}))
    assert (type(failed), failed.error) == (StepFailed, {"code": 3})
    again = round_trip(round_trip(PaymentDeclined("7", amount=5)))
    assert (type(again), again.name) == (StepError, "PaymentDeclined")


def test_a_class_named_like_a_built_in_one_is_not_confused_with_it() -> None:
    """A user's `ValueError` does not become Python's, and is restored if it is declared."""
    impostor = type("ValueError", (Exception,), {})
    assert type(round_trip(impostor("x"))) is StepError
    assert type(round_trip(impostor("x"), impostor)) is impostor
    assert type(round_trip(ValueError("x"), impostor)) is ValueError


def test_causes_and_notes_are_restored() -> None:
    """The whole chain, each exception with its notes."""
    inner = KeyError("k")
    inner.add_note("while looking")
    try:
        raise PaymentDeclined("7", amount=5) from inner
    except PaymentDeclined as error:
        error.add_note("first")
        error.add_note("second")
        restored = round_trip(error, PaymentDeclined)
    assert restored.__notes__ == ["first", "second"]
    assert type(restored.__cause__) is KeyError
    assert restored.__cause__.__notes__ == ["while looking"]


def test_the_traceback_is_stored_as_a_string() -> None:
    """It contains the function and the exception that was being handled."""
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904 - the context is tested
    except ValueError as error:
        stack = cast(ErrorCause, stored(error)).get("stack") or ""
    assert "test_the_traceback_is_stored_as_a_string" in stack
    assert "KeyError: 'first'" in stack


def test_long_and_circular_chains_are_cut() -> None:
    """Of causes."""
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert round_trip(first).__cause__.__cause__ is None
    last = ValueError("end")
    for _ in range(500):
        link = ValueError("link")
        link.__cause__ = last
        last = link
    assert type(round_trip(last)) is ValueError


def test_an_exception_in_its_own_arguments_is_cut() -> None:
    """Like any other cycle."""
    error = ValueError("x")
    error.args = (error,)
    assert type(round_trip(error)) is ValueError


def test_arguments_that_are_not_data_become_the_message() -> None:
    """The class is restored with its message as the only argument."""
    restored = round_trip(RuntimeError("no", print))
    assert type(restored) is RuntimeError
    assert "built-in function print" in str(restored)


THROWN: list[tuple[object, dict[str, JSONValue]]] = [
    (None, {"originalType": "null", "stringRepresentation": "null", "value": None}),
    ("c", {"originalType": "string", "stringRepresentation": "c", "value": "c"}),
    (True, {"originalType": "boolean", "stringRepresentation": "true", "value": True}),
    (10, {"originalType": "number", "stringRepresentation": "10", "value": 10}),
    ({"c": 1}, {"originalType": "Object", "stringRepresentation": "{'c': 1}", "value": {"c": 1}}),
    ([1], {"originalType": "Array", "stringRepresentation": "[1]", "value": [1]}),
    (
        date(1970, 1, 1),
        {
            "originalType": "date",
            "stringRepresentation": "1970-01-01",
            "value": {"~date": "1970-01-01"},
        },
    ),
]


@pytest.mark.parametrize(("value", "expected"), THROWN, ids=repr)
def test_values_that_mean_failure_are_restored(
    value: object, expected: dict[str, JSONValue]
) -> None:
    """They are stored in the shape of the snapshot format."""
    assert stored(value) == {"type": "thrown", **expected}
    assert round_trip(value) == value


def test_a_function_is_described_by_its_string() -> None:
    """Like everything else that is not data."""
    cause = stored(round_trip)
    assert cause.get("originalType") == "function"
    assert "value" not in cause
    assert round_trip(round_trip) == cause.get("stringRepresentation")


def test_long_strings_are_truncated_and_values_are_not() -> None:
    """Only the readable form has a limit."""
    cause: Any = stored("x" * 1500)
    assert len(cause["stringRepresentation"]) == 1000
    assert cause["truncated"] is True
    assert len(cause["value"]) == 1500


def test_null_in_a_cause_means_that_the_field_is_absent() -> None:
    """Document databases store null for fields that another writer left undefined."""
    error: Any = decode_cause(
        {"type": "error", "name": "RangeError", "message": "m", "stack": None, "cause": None}
    )
    assert (error.name, error.traceback, error.__cause__) == ("RangeError", "", None)
    thrown = {"type": "thrown", "stringRepresentation": "c", "originalType": None}
    assert decode_cause(cast(SerializedCause, {**thrown, "truncated": None})) == "c"


def test_causes_of_other_systems_are_read() -> None:
    """JavaScript errors keep their name, and `undefined` becomes `None`."""
    error: Any = decode_cause({"type": "error", "name": "RangeError", "message": "m", "stack": "s"})
    assert (type(error), error.name, error.message, error.traceback) == (
        StepError,
        "RangeError",
        "m",
        "s",
    )
    nested: Any = decode_cause(
        {
            "type": "error",
            "name": "TypeError",
            "message": "m",
            "cause": {
                "type": "thrown",
                "originalType": "string",
                "stringRepresentation": "c",
                "value": "c",
            },
        }
    )
    assert (type(nested), str(nested), nested.__cause__.message) == (TypeError, "m", "c")
    assert (
        decode_cause(
            {"type": "thrown", "originalType": "undefined", "stringRepresentation": "undefined"}
        )
        is None
    )
    assert (
        decode_cause({"type": "thrown", "originalType": "bigint", "stringRepresentation": "10"})
        == "10"
    )


HOSTILE: list[Any] = [
    None,
    5,
    [],
    {},
    {"type": "error"},
    {"type": "error", "name": "E"},
    {"type": "thrown"},
    {"type": "error", "name": "ValueError", "message": "m", "args": "abc"},
    {"type": "error", "name": "ValueError", "message": "m", "attrs": []},
    {"type": "error", "name": "ValueError", "message": "m", "args": [{"~nothing": 1}]},
    {"type": "error", "name": "ValueError", "message": "m", "cause": 5},
]


@pytest.mark.parametrize("cause", HOSTILE, ids=repr)
def test_malformed_causes_raise_codec_error(cause: Any) -> None:
    """Reading a cause raises nothing else."""
    with pytest.raises(CodecError):
        decode_cause(cause)


def test_stored_attributes_cannot_set_special_names() -> None:
    """Names that begin with two underscores are ignored."""
    restored: Any = decode_cause(
        {
            "type": "error",
            "name": "ValueError",
            "message": "m",
            "args": [],
            "attrs": {"__class__": "x", "__cause__": 1, "__dict__": {}, "a b": 1, "fine": 2},
        }
    )
    assert (restored.fine, restored.__cause__, type(restored)) == (2, None, ValueError)
    assert not hasattr(restored, "a b")


def test_arguments_that_do_not_fit_the_class_cause_a_step_error() -> None:
    """With the name of the class."""
    cause: Any = {"type": "error", "name": "UnicodeDecodeError", "message": "m", "args": [1]}
    assert type(decode_cause(cause)) is StepError


def test_the_function_sees_the_exception_that_a_replay_raises() -> None:
    """The same object if its class can be restored, else the `StepError` of a replay."""
    known, declared, unknown = ValueError("a"), SlottedError(1), PaymentDeclined("7", amount=5)
    assert prepare_error(known, NOWHERE)[1] is known
    assert prepare_error(declared, ErrorScope([SlottedError]))[1] is declared
    cause, visible, losses = prepare_error(unknown, NOWHERE)
    assert (type(visible), losses) == (StepError, ())
    assert visible.__context__ is unknown
    assert type(decode_cause(cause)) is StepError
    assert type(prepare_error(asyncio.CancelledError(), NOWHERE)[1]) is StepError


def test_attributes_that_are_not_data_are_lost_the_first_time_too() -> None:
    """The function sees the exception that a replay raises, and each loss has a path."""
    error = PaymentDeclined("7", amount=5)
    error.connection = print  # type: ignore[attr-defined] # callers set what they like
    _, visible, losses = prepare_error(error, ErrorScope([PaymentDeclined]))
    assert isinstance(visible, PaymentDeclined)
    assert (visible.order, visible.amount, hasattr(visible, "connection")) == ("7", 5, False)
    assert [loss.path for loss in losses] == ["exception.connection"]
    assert visible.__context__ is error


def test_an_exception_that_cannot_describe_itself_without_what_was_lost_is_a_step_error() -> None:
    class Unprintable(Exception):
        def __init__(self, request: object) -> None:
            self.request = request

        def __str__(self) -> str:
            return f"refused by {self.request.__name__}"  # type: ignore[attr-defined] # a function

    _, visible, losses = prepare_error(Unprintable(print), ErrorScope([Unprintable]))
    assert (type(visible), str(visible), losses) == (StepError, "Unprintable: refused by print", ())


def test_members_of_a_group_are_restored_by_their_class() -> None:
    """Of nested groups too; a member whose class is unknown is a `StepError`."""
    members = [PaymentDeclined("7", amount=5), ExceptionGroup("in", [SlottedError(3)])]
    restored = round_trip(ExceptionGroup("two", members), PaymentDeclined)
    assert (type(restored), restored.message) == (ExceptionGroup, "two")
    declined, inner = restored.exceptions
    assert (type(declined), declined.amount) == (PaymentDeclined, 5)
    assert (type(inner), type(inner.exceptions[0])) == (ExceptionGroup, StepError)


def test_a_group_is_the_same_object_if_all_its_members_can_be_restored() -> None:
    group = ExceptionGroup("one", [SlottedError(3)])
    assert prepare_error(group, ErrorScope([SlottedError]))[1] is group
    _, visible, _ = prepare_error(group, NOWHERE)
    assert isinstance(visible, ExceptionGroup)
    assert type(visible.exceptions[0]) is StepError


def test_a_group_of_many_members_has_short_tracebacks() -> None:
    """A record must not become too large for the store."""

    def fail(depth: int) -> None:
        if depth == 0:
            raise ValueError("deep")
        fail(depth - 1)

    members = []
    for _ in range(500):
        try:
            fail(50)
        except ValueError as error:
            members.append(error)
    cause = stored(ExceptionGroup("many", members))
    assert len(dumps(cause)) < 500_000


@pytest.mark.parametrize("members", [None, {}, [5], [{"type": "thrown"}], []])
def test_malformed_members_do_not_break_the_reader(members: Any) -> None:
    """Either they are refused, or a group that cannot be created is a `StepError`."""
    cause: Any = {"type": "error", "name": "ExceptionGroup", "message": "m", "members": members}
    try:
        assert isinstance(decode_cause(cause), StepError)
    except CodecError:
        assert members != []


def test_a_restored_exception_keeps_the_traceback_of_the_original() -> None:
    """Even if it is raised and stored again, as the error of the run."""
    try:
        raise KeyError("k")
    except KeyError as error:
        restored = round_trip(error)
    try:
        raise restored
    except KeyError as error:
        again = stored(error)
    assert "test_a_restored_exception_keeps" in traceback_of(again)
    assert 'raise KeyError("k")' in traceback_of(again)
    assert "raise restored" not in traceback_of(again)


def test_the_text_of_a_traceback_contains_the_causes() -> None:
    """In the order in which Python prints them."""
    try:
        raise ValueError("top") from KeyError("below")
    except ValueError as error:
        text = traceback_of(stored(error))
    assert text.index("below") < text.index("direct cause") < text.index("ValueError: top")
    assert traceback_of(stored("not an exception")) == traceback_of(None) == ""


def test_an_exception_raised_from_none_stays_so() -> None:
    error = ValueError("x")
    error.__suppress_context__ = True
    assert round_trip(error).__suppress_context__ is True
    assert round_trip(ValueError("x")).__suppress_context__ is False


def test_causes_are_plain_json() -> None:
    """`json.dumps` accepts them."""
    for error in (*BUILT_IN, *DECLARED, ExceptionGroup("g", [KeyError(Path("x"))])):
        json.dumps(encode_cause(error))


def test_exceptions_can_be_values() -> None:
    """A step may return an exception; the return type names its class."""
    errors = [ValueError("a"), PaymentDeclined("7", amount=5)]
    result = prepare(errors, lambda: list[ValueError | PaymentDeclined])
    assert result.losses == ()
    restored: Any = decode(result.data, list[ValueError | PaymentDeclined], result.typed)
    assert [type(error) for error in restored] == [ValueError, PaymentDeclined]
    assert restored[1].order == "7"
    untyped = prepare(errors, lambda: None)
    assert [loss.path for loss in untyped.losses] == ["value[1]"]
    assert type(untyped.value[1]) is StepError
