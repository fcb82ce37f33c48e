"""Properties of the codec that hold for all values."""

import math
from collections.abc import Hashable
from contextlib import suppress
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.codec import (
    JSONValue,
    convert,
    decode,
    decode_cause,
    dumps,
    encode,
    fingerprint,
    loads,
    prepare,
)
from perdure.errors import CodecError
from perdure.result import Err, Ok

OFFSETS = st.timedeltas(timedelta(hours=-23), timedelta(hours=23))
ZONES = st.one_of(st.none(), st.timezones(), st.builds(timezone, OFFSETS))

MARKED = ["~", "~set", "$v", "$sealed", "$blob"]
LEAVES: st.SearchStrategy[Hashable] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(codec=None, categories=["Cs", "Lu", "Cc"])),
    st.sampled_from(["~", "~tuple", "~datetime", "~named"]),
    st.binary(),
    st.dates(),
    st.datetimes(timezones=ZONES, allow_imaginary=True),
    st.times(timezones=ZONES),
    st.timedeltas(),
    st.decimals().filter(lambda value: not value.is_snan()),
    st.uuids(),
    st.fractions().filter(lambda value: value.denominator < 2**1000),
    st.sampled_from([Path("a"), Path("/b c")]),
)


def hashables(inner: st.SearchStrategy[Hashable]) -> st.SearchStrategy[Hashable]:
    return st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Ok, inner),
        st.builds(Err, inner, inner),
    )


KEYS = st.recursive(LEAVES, hashables, max_leaves=5)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5) | st.sampled_from(MARKED), inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(KEYS, max_size=4),
        st.binary().map(bytearray),
        st.builds(Ok, inner),
        st.builds(Err, inner, inner),
    )


VALUES = st.recursive(KEYS, containers, max_leaves=20)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)

TAGS = [
    "",
    "text",
    "int",
    "float",
    "datetime",
    "date",
    "time",
    "timedelta",
    "decimal",
    "uuid",
    "bytes",
    "bytearray",
    "complex",
    "fraction",
    "path",
    "tuple",
    "set",
    "frozenset",
    "map",
    "ok",
    "err",
    "error",
    "record",
    "named",
    "dumped",
    "nothing",
]
TAGGED_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["~" + name for name in TAGS] + MARKED),
            inner,
            min_size=1,
            max_size=1,
        )
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["error", "thrown"])},
            optional={
                "name": st.sampled_from(["ValueError", "OSError", "UnicodeDecodeError", "X"]),
                "message": st.text(max_size=3),
                "args": inner,
                "attrs": inner,
                "cause": inner,
                "notes": inner,
                "value": inner,
                "stringRepresentation": st.text(max_size=3),
            },
        ).map(lambda cause: {"~error": cause})
    ),
    max_leaves=20,
)


def describe(value: Any) -> str:
    """Return a string that differs if two values differ, even in a type or the sign of a zero."""
    match value:
        case list() | tuple():
            inside = ",".join(map(describe, value))
        case dict():
            inside = ",".join(map(describe, value.items()))
        case set() | frozenset():
            inside = ",".join(sorted(map(describe, value)))
        case Ok():
            inside = describe(value.value)
        case Err():
            inside = describe((value.error, value.cause))
        case _:
            inside = repr(value)
    return f"{type(value).__name__}({inside})"


def same(left: Any, right: Any) -> bool:
    return describe(left) == describe(right)


MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(VALUES)
def test_values_are_restored(value: Any) -> None:
    """Through JSON and back: the same values of the same types in the same order."""
    assert same(decode(loads(dumps(encode(value)))), value)


@MANY
@given(VALUES)
def test_the_function_sees_the_same_before_and_after(value: Any) -> None:
    """The value of `prepare` is the decoded value, and nothing is lost."""
    result = prepare(value, lambda: None)
    assert result.losses == ()
    assert same(result.value, value)
    assert same(decode(loads(dumps(result.data))), result.value)


@MANY
@given(VALUES)
def test_encoded_data_are_json(value: Any) -> None:
    """They are the same after a round trip through bytes."""
    data = encode(value)
    assert same(loads(dumps(data)), data)


@MANY
@given(VALUES)
def test_encoding_a_restored_value_returns_the_same_bytes(value: Any) -> None:
    """A resumed run stores what the first one stored."""
    data = encode(value)
    assert dumps(encode(decode(data))) == dumps(data)


@MANY
@given(JSON)
def test_plain_json_is_not_copied(value: JSONValue) -> None:
    """JSON that reads back as itself is stored as the same object."""
    data = encode(value)
    if same(data, value):
        assert data is value
        assert decode(data) is value


@MANY
@given(TAGGED_JSON)
def test_decoding_any_data_raises_only_codec_error(data: JSONValue) -> None:
    """Data of any shape, with tags anywhere."""
    with suppress(CodecError):
        prepare(decode(data), lambda: None)


@MANY
@given(TAGGED_JSON, st.sampled_from([list[int], dict[str, Any], Ok[int] | Err[str], ValueError]))
def test_decoding_any_data_as_a_type_raises_only_codec_error(
    data: JSONValue, annotation: Any
) -> None:
    """The same for `decode` with a type and for `convert`."""
    with suppress(CodecError):
        decode(data, annotation, typed=True)
    with suppress(CodecError):
        convert(data, annotation)


@MANY
@given(TAGGED_JSON)
def test_decoding_any_cause_raises_only_codec_error(data: JSONValue) -> None:
    """The same for causes."""
    cause: Any = data["~error"] if type(data) is dict and "~error" in data else data
    with suppress(CodecError):
        decode_cause(cause)


@MANY
@given(VALUES)
def test_restored_arguments_have_the_same_fingerprint(value: Any) -> None:
    """A replayed call is not mistaken for another one."""
    assert fingerprint((value,)) == fingerprint((decode(loads(dumps(encode(value)))),))


def test_the_comparison_distinguishes_more_than_equality() -> None:
    """`same` finds NaN the same as NaN, and distinguishes signed zeros and types."""
    assert same([math.nan], [math.nan])
    assert not same([0.0], [-0.0])
    assert not same([1], [True])
