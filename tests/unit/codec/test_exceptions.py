"""Exceptions are stored as data and come back as the class they were, where that is safe."""

import asyncio
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from perdure.codec import (
    JSONValue,
    SerializedCause,
    decode,
    decode_cause,
    dumps,
    encode_cause,
    loads,
    prepare,
    prepare_error,
)
from perdure.errors import CodecError, StepError, StepFailed, StepTimeout


class PaymentDeclined(Exception):
    """Wants other arguments than it hands to its base, as many do."""

    def __init__(self, order: str, *, amount: int) -> None:
        super().__init__(f"order {order}: {amount} declined")
        self.order = order
        self.amount = amount


class Unreachable(OSError):
    def __init__(self, host: str) -> None:
        super().__init__(111, "refused", host)
        self.host = host


class SlottedFault(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


@attrs.define
class AttrsFault(Exception):
    code: int


@dataclass
class DataFault(Exception):
    code: int
    when: date


def stored(error: object) -> SerializedCause:
    return cast("SerializedCause", loads(dumps(encode_cause(error))))


def returned(error: object, *declared: type[BaseException]) -> Any:
    return decode_cause(stored(error), declared)


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
def test_built_in_exceptions_come_back_as_they_were(error: Exception) -> None:
    """Class, arguments and text are the same."""
    back = returned(error)
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)


def test_attributes_of_built_in_exceptions_come_back() -> None:
    """What the class keeps beside its arguments, and what a caller has set, is there again."""
    error = FileNotFoundError(2, "No such file", "a.txt")
    error.attempt = 3
    back = returned(error)
    assert (back.errno, back.filename, back.attempt) == (2, "a.txt", 3)
    assert returned(ImportError("no", name="x")).name == "x"


def test_groups_come_back_with_their_members() -> None:
    """An exception group is rebuilt from the inside."""
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("in", [KeyError("b")])])
    back = returned(group)
    assert type(back) is ExceptionGroup
    assert repr(back) == repr(group)


DECLARED: list[Exception] = [
    PaymentDeclined("7", amount=5),
    Unreachable("db"),
    SlottedFault(3),
    AttrsFault(4),
    DataFault(5, date(2024, 1, 1)),
]


@pytest.mark.parametrize("error", DECLARED, ids=repr)
def test_declared_exceptions_come_back_without_their_init(error: Exception) -> None:
    """A user's class comes back with its attributes, whatever its `__init__` wants."""
    back = returned(error, KeyError, type(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    for name in ("order", "amount", "host", "errno", "filename", "code", "when"):
        assert getattr(back, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("error", DECLARED, ids=repr)
def test_undeclared_exceptions_come_back_as_step_error(error: Exception) -> None:
    """Name, message and traceback are kept; the class is not looked for."""
    back = returned(error)
    assert type(back) is StepError
    assert back.name == type(error).__name__
    assert back.message == str(error)
    assert type(error).__name__ in back.traceback


@pytest.mark.parametrize(
    "error",
    [StopIteration(1), StopAsyncIteration(), KeyboardInterrupt(), SystemExit(1), GeneratorExit()],
    ids=repr,
)
def test_exceptions_that_steer_python_come_back_as_step_error(error: BaseException) -> None:
    """To raise these again would stop something else than the step."""
    assert type(returned(error)) is StepError


def test_our_own_errors_come_back() -> None:
    """perdure's errors need not be declared."""
    late = returned(StepTimeout("fetch", 1.5))
    assert (type(late), late.step, late.seconds) == (StepTimeout, "fetch", 1.5)
    failed = returned(StepFailed("pay", {"code": 3}))
    assert (type(failed), failed.error) == (StepFailed, {"code": 3})
    again = returned(returned(PaymentDeclined("7", amount=5)))
    assert (type(again), again.name) == (StepError, "PaymentDeclined")


def test_a_class_named_like_a_built_in_one_is_not_taken_for_it() -> None:
    """A user's `ValueError` neither becomes Python's nor is hidden by it when it is declared."""
    impostor = type("ValueError", (Exception,), {})
    assert type(returned(impostor("x"))) is StepError
    assert type(returned(impostor("x"), impostor)) is impostor
    assert type(returned(ValueError("x"), impostor)) is ValueError


def test_causes_and_notes_come_back() -> None:
    """The chain is as long as it was, each link with its notes."""
    inner = KeyError("k")
    inner.add_note("while looking")
    try:
        raise PaymentDeclined("7", amount=5) from inner
    except PaymentDeclined as error:
        error.add_note("first")
        error.add_note("second")
        back = returned(error, PaymentDeclined)
    assert back.__notes__ == ["first", "second"]
    assert type(back.__cause__) is KeyError
    assert back.__cause__.__notes__ == ["while looking"]


def test_the_traceback_is_text() -> None:
    """The stack names file and function, and the exception that was being handled."""
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904 - on purpose
    except ValueError as error:
        stack = stored(error).get("stack", "")
    assert "test_the_traceback_is_text" in stack
    assert "KeyError: 'first'" in stack


def test_endless_chains_end() -> None:
    """A chain that closes on itself, and one that is very long, are cut."""
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert returned(first).__cause__.__cause__ is None
    last = ValueError("end")
    for _ in range(500):
        link = ValueError("link")
        link.__cause__ = last
        last = link
    assert type(returned(last)) is ValueError


def test_an_exception_that_holds_itself() -> None:
    """A cycle through the arguments is cut as any other."""
    error = ValueError("x")
    error.args = (error,)
    assert type(returned(error)) is ValueError


def test_arguments_that_are_no_data_leave_the_message() -> None:
    """The class comes back, with its text for the only argument."""
    back = returned(RuntimeError("no", print))
    assert type(back) is RuntimeError
    assert "built-in function print" in str(back)


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


@pytest.mark.parametrize(("value", "wanted"), THROWN, ids=repr)
def test_other_failures_are_thrown_values(value: object, wanted: dict[str, JSONValue]) -> None:
    """The shape is the snapshot format's own, and the value comes back."""
    assert stored(value) == {"type": "thrown", **wanted}
    assert returned(value) == value


def test_functions_have_no_value() -> None:
    """What is no data is told by its text."""
    cause = stored(returned)
    assert cause.get("originalType") == "function"
    assert "value" not in cause
    assert returned(returned) == cause.get("stringRepresentation")


def test_long_texts_are_cut_and_values_are_not() -> None:
    """The text for people has a limit; the value has none."""
    cause: Any = stored("x" * 1500)
    assert len(cause["stringRepresentation"]) == 1000
    assert cause["truncated"] is True
    assert len(cause["value"]) == 1500


def test_causes_of_other_systems_are_read() -> None:
    """JavaScript's errors come back by name; its `undefined` is no text."""
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
def test_malformed_causes_are_our_error(cause: Any) -> None:
    """Reading a cause raises nothing but `CodecError`."""
    with pytest.raises(CodecError):
        decode_cause(cause)


def test_stored_attributes_cannot_touch_the_machinery() -> None:
    """Names with two underscores are not set, whatever the data say."""
    back: Any = decode_cause(
        {
            "type": "error",
            "name": "ValueError",
            "message": "m",
            "args": [],
            "attrs": {"__class__": "x", "__cause__": 1, "__dict__": {}, "a b": 1, "fine": 2},
        }
    )
    assert vars(back) == {"fine": 2}


def test_arguments_that_do_not_fit_the_class_give_a_step_error() -> None:
    """A stored exception that cannot be one of its class is told by name."""
    cause: Any = {"type": "error", "name": "UnicodeDecodeError", "message": "m", "args": [1]}
    assert type(decode_cause(cause)) is StepError


def test_the_function_sees_the_class_that_will_come_back() -> None:
    """The same object if its class returns; else the `StepError` that does, raised from it."""
    known, declared, unknown = ValueError("a"), SlottedFault(1), PaymentDeclined("7", amount=5)
    assert prepare_error(known, [])[1] is known
    assert prepare_error(declared, [SlottedFault])[1] is declared
    cause, seen = prepare_error(unknown, [])
    assert type(seen) is StepError
    assert seen.__cause__ is unknown
    assert type(decode_cause(cause)) is StepError
    assert type(prepare_error(asyncio.CancelledError(), [])[1]) is StepError


def test_causes_are_plain_json() -> None:
    """Any JSON library writes them."""
    for error in (*BUILT_IN, *DECLARED, ExceptionGroup("g", [KeyError(Path("x"))])):
        json.dumps(encode_cause(error))


def test_exceptions_are_values_too() -> None:
    """A step may return an exception; the type says of which class."""
    errors = [ValueError("a"), PaymentDeclined("7", amount=5)]
    result = prepare(errors, lambda: list[ValueError | PaymentDeclined])
    assert result.losses == ()
    back: Any = decode(result.data, list[ValueError | PaymentDeclined], result.typed)
    assert [type(each) for each in back] == [ValueError, PaymentDeclined]
    assert back[1].order == "7"
    untyped = prepare(errors, lambda: None)
    assert [loss.path for loss in untyped.losses] == ["value[1]"]
    assert type(untyped.value[1]) is StepError
