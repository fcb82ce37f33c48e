"""The values of steps are stored as JSON with tags, and restored exactly."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from perdure.codec import (
    MAX_DEPTH,
    JSONValue,
    Loss,
    Prepared,
    decode,
    dumps,
    encode,
    fingerprint,
    loads,
    prepare,
)
from perdure.errors import CodecError
from perdure.result import Err, Ok

BERLIN = ZoneInfo("Europe/Berlin")
TINY_OFFSET = timezone(timedelta(microseconds=1))


def prepared(value: object) -> Prepared:
    return prepare(value, lambda: None)


def round_trip(value: object) -> Any:
    return decode(loads(dumps(encode(value))))


PLAIN: list[JSONValue] = [
    None,
    True,
    0,
    -(2**63),
    2**63 - 1,
    1.5,
    "",
    "nul \x00 and ü and 😀",
    [],
    {},
    {"a": [1, {"b": None}]},
    {"~a": 1, "~b": 2},
    {"a~": 1},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_json_is_stored_without_a_copy(value: JSONValue) -> None:
    """A value that is JSON is stored as it is, and the function sees the same object."""
    result = prepared(value)
    assert result.data is value
    assert result.value is value
    assert not result.typed
    assert result.losses == ()


TAGGED = [
    float("inf"),
    float("-inf"),
    2**63,
    -(2**64),
    10**5000,
    "\ud800 alone",
    "\ud83d\ude00",
    datetime(2024, 5, 1, 9, 30),
    datetime(2024, 5, 1, 9, 30, 0, 1, tzinfo=UTC),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-3, seconds=7))),
    datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    datetime(2024, 10, 27, 2, 30, fold=1),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET")),
    date(9999, 12, 31),
    time(23, 59, 59, 999999),
    time(1, 2, fold=1, tzinfo=BERLIN),
    timedelta(days=-1, microseconds=1),
    timedelta.max,
    Decimal("-0.00"),
    Decimal("1E+1000"),
    UUID(int=7),
    b"\x00\xff",
    bytearray(b"ab"),
    complex(-0.0, math.inf),
    Fraction(-1, 3),
    Path("a") / "b.txt",
    Path("surrogate \udc80"),
    (),
    (1, (2, [3])),
    set(),
    {1, "1", (1,), frozenset({2})},
    frozenset({b"x", None}),
    {1: "a", "1": "b", None: "c", (1, 2): "d"},
    {"\ud800": 1},
    {"z": 1, 2: 2, "a": 3},
    {"~datetime": "not a date"},
    {"~": {"~": {"~": 1}}},
    {"~tuple": (1, 2)},
    {"$sealed": "x"},
    {"$blob": {"$v": b"x"}},
    [{"$v": 1}, {"$v": 2, "when": date(2024, 1, 1)}],
    {"~": {"$sealed": 1}},
    [{"deep": [{"when": date(2024, 1, 1)}]}],
    Ok((1, 2)),
    Err("no", {1}),
    {"r": [Ok(None), Err(Decimal(1))]},
]


@pytest.mark.parametrize("value", TAGGED, ids=lambda value: type(value).__name__)
def test_types_that_json_lacks_are_restored(value: object) -> None:
    """Value, type, order of keys and repr are the same after a round trip through JSON."""
    restored = round_trip(value)
    assert type(restored) is type(value)
    assert restored == value
    if not isinstance(value, (set, frozenset, int)):
        assert repr(restored) == repr(value)


@pytest.mark.parametrize("value", TAGGED, ids=lambda value: type(value).__name__)
def test_the_function_sees_what_a_replay_returns(value: object) -> None:
    """`Prepared.value` equals the decoded data, and nothing was lost."""
    result = prepared(value)
    assert result.losses == ()
    assert result.value == decode(result.data)


def test_nan_and_signed_zero_are_restored() -> None:
    """So are other numbers that `==` cannot tell apart."""
    assert math.isnan(round_trip(float("nan")))
    assert repr(round_trip([-0.0, Decimal("sNaN123"), complex("nan")])) == (
        "[-0.0, Decimal('sNaN123'), (nan+0j)]"
    )


def test_equal_keys_and_members_keep_their_types() -> None:
    """`True` does not become 1."""
    assert list(round_trip({True: 1, "x": 2.0}).items()) == [(True, 1), ("x", 2.0)]
    assert repr(round_trip((True, 1, 1.0))) == "(True, 1, 1.0)"


def test_tags_are_readable() -> None:
    """By people and by other tools."""
    assert encode({"at": datetime(2024, 5, 1), "to": {Decimal("1.50")}}) == {
        "at": {"~datetime": "2024-05-01T00:00:00"},
        "to": {"~set": [{"~decimal": "1.50"}]},
    }


SECOND = 1_000_000


@pytest.mark.parametrize(
    "microseconds", [1, -1, SECOND - 1, 1 - SECOND, SECOND, SECOND + 1, -SECOND - 1, 0]
)
@pytest.mark.parametrize("value", [time(9, 30), datetime(2024, 5, 1, 9, 30)])
def test_utc_offsets_of_less_than_a_second_are_restored(
    value: time | datetime, microseconds: int
) -> None:
    """`fromisoformat` of CPython reads such offsets as UTC."""
    aware = value.replace(tzinfo=timezone(timedelta(microseconds=microseconds)))
    restored = round_trip(aware)
    assert repr(restored) == repr(aware)
    assert restored.utcoffset() == timedelta(microseconds=microseconds)


class Zone(tzinfo):
    """A time zone of another library."""

    def tzname(self, _: datetime | None) -> str:
        return "somewhere"

    def dst(self, _: datetime | None) -> timedelta | None:
        return None


def test_a_fixed_offset_of_any_class_is_kept() -> None:
    """A fixed offset of another library's class is restored as `timezone`."""

    class Plus2(Zone):
        def utcoffset(self, _: datetime | None) -> timedelta:
            return timedelta(hours=2)

    result = prepared(datetime(2024, 1, 1, tzinfo=Plus2()))
    assert result.value == datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    assert result.losses == ()


def test_an_unknown_time_zone_becomes_its_offset_and_a_loss() -> None:
    """A zone with changing offsets that is not a `ZoneInfo` has no name that could be stored."""

    class Seasonal(Zone):
        def utcoffset(self, when: datetime | None) -> timedelta | None:
            return None if when is None else timedelta(hours=2)

    value = datetime(2024, 1, 1, tzinfo=Seasonal())
    result = prepared([value])
    assert result.value == [value]
    assert result.losses == (Loss("value[0]", "non-json"),)


class Label(str):
    __slots__ = ()


class Count(int):
    pass


class LogTime(datetime):
    pass


class WallTime(time):
    pass


SUBCLASSES = [
    (Label("x"), "x"),
    (Count(3), 3),
    (OrderedDict(a=1), {"a": 1}),
    (Counter("aa"), {"a": 2}),
    (defaultdict(list, a=[1]), {"a": [1]}),
    (deque([1, 2]), [1, 2]),
    (MappingProxyType({"a": 1}), {"a": 1}),
    (memoryview(b"ab"), b"ab"),
    (LogTime(2024, 1, 1), datetime(2024, 1, 1)),
    (WallTime(9, tzinfo=BERLIN, fold=1), time(9, tzinfo=BERLIN, fold=1)),
    (WallTime(9, tzinfo=TINY_OFFSET), time(9, tzinfo=TINY_OFFSET)),
]


@pytest.mark.parametrize(("value", "base"), SUBCLASSES, ids=lambda value: type(value).__name__)
def test_a_subclass_becomes_its_base_and_a_loss(value: object, base: object) -> None:
    """What a subclass adds to a built-in type cannot be restored; its value can."""
    result = prepared({"it": value})
    assert result.value == {"it": base}
    assert type(result.value["it"]) is type(base)
    assert result.losses == (Loss("value.it", "non-json"),)


def test_an_ordered_dict_keeps_its_order() -> None:
    """It is the order of `items()`, even after `move_to_end`."""
    value = OrderedDict(a=1, b=2)
    value.move_to_end("a")
    assert list(prepared(value).value) == ["b", "a"]


def test_a_cycle_is_cut_where_it_closes() -> None:
    """The reference back to an enclosing container is lost."""
    value: dict[str, object] = {"a": [1]}
    value["a"] = [1, value]
    result = prepared(value)
    assert result.data == {"a": [1, None]}
    assert result.losses == (Loss("value.a[1]", "circular"),)


def test_an_object_that_occurs_twice_is_not_a_cycle() -> None:
    """Only a reference to an enclosing container is one."""
    shared = (1,)
    assert round_trip([shared, shared]) == [(1,), (1,)]


class Plain:
    def __init__(self) -> None:
        self.name = "x"
        self.call = print


def test_an_undeclared_object_becomes_its_attributes() -> None:
    """Each attribute that is not data is reported."""
    result = prepared([Plain()])
    assert result.value == [{"name": "x", "call": None}]
    assert result.losses == (Loss("value[0]", "non-json"), Loss("value[0].call", "non-json"))


def test_paths_look_like_python_expressions() -> None:
    """They start at the root that was passed."""
    value = {"user": {"tags": [0, print]}, "a key": [print], 3: print}
    result = prepare(value, lambda: None, root="error")
    assert [loss.path for loss in result.losses] == [
        "error.user.tags[1]",
        "error['a key'][0]",
        "error[3]",
    ]


def test_the_number_of_losses_is_limited() -> None:
    """A thousand similar objects cause a few warnings, not a thousand."""
    assert len(prepared([print] * 1000).losses) == 20


def test_encode_refuses_values_that_cannot_be_restored() -> None:
    """`encode` raises with the path where `prepare` reports a loss."""
    with pytest.raises(CodecError, match=r"value\.f") as caught:
        encode({"f": print})
    assert caught.value.path == "value.f"


def nested(levels: int) -> JSONValue:
    value: JSONValue = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_writing_and_reading_have_the_same_depth_limit() -> None:
    """One level more can be neither written nor read."""
    assert round_trip(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(CodecError, match="levels"):
        prepared(nested(MAX_DEPTH + 1))
    with pytest.raises(CodecError, match="levels"):
        decode([{"~tuple": []}, nested(MAX_DEPTH)])


def test_tags_count_towards_the_depth_limit() -> None:
    """A value that could not be read again is refused when it is written."""
    value: object = ()
    for _ in range(MAX_DEPTH // 2 - 1):
        value = (value,)
    assert round_trip(value) == value
    with pytest.raises(CodecError, match="levels"):
        encode((value,))


def at_stack_depth(frames: int, call: Callable[[], object]) -> object:
    return call() if not frames else at_stack_depth(frames - 1, call)


@pytest.mark.parametrize("frames", [0, 450, 800, 900])
def test_deep_data_raise_codec_error_not_recursion_error(frames: int) -> None:
    """From any depth of the caller's stack."""
    too_deep: list[Callable[[], object]] = [
        lambda: prepared(nested(1000)),
        lambda: decode([nested(1000), {"~tuple": []}]),
        lambda: loads(b"[" * 100_000),
    ]
    for call in too_deep:
        with pytest.raises(CodecError):
            at_stack_depth(frames, call)


def test_the_depth_limit_does_not_depend_on_the_stack() -> None:
    """A value at the limit is written and read from a deep stack too."""
    value = (nested(MAX_DEPTH - 2),)
    assert at_stack_depth(450, lambda: round_trip(value)) == value


@pytest.mark.parametrize("key", ["$v", "$sealed", "$blob"])
def test_reserved_keys_are_escaped_and_never_misread(key: str) -> None:
    """A later version may give them a meaning: what a user stores is not taken for that."""
    assert encode({key: 1}) == {"~": {key: 1}}
    assert round_trip([{key: {key: 1}}]) == [{key: {key: 1}}]
    assert encode({key: 1, "more": 2}) == {key: 1, "more": 2}
    with pytest.raises(
        CodecError, match=r"unknown tag '\$\w+'; was this written by a newer perdure"
    ):
        decode([{key: 1}])


@pytest.mark.parametrize("key", ["$", "$V", "$sealed ", "$blobs", "sealed", "$oid"])
def test_other_keys_with_a_dollar_are_stored_as_they_are(key: str) -> None:
    assert encode({key: 1}) == decode({key: 1}) == {key: 1}


MALFORMED: list[JSONValue] = [
    {"$v": 1},
    {"$sealed": "x"},
    {"$blob": "sha256:0"},
    {"~": 1},
    {"~nothing": 1},
    {"~type": "builtins.dict"},
    {"~int": 5},
    {"~int": "xyz"},
    {"~float": "1.5"},
    {"~float": ["nan"]},
    {"~text": "***"},
    {"~text": None},
    {"~datetime": 5},
    {"~datetime": "yesterday"},
    {"~datetime": {}},
    {"~datetime": {"at": "2024-01-01", "zone": "Nowhere/Land"}},
    {"~datetime": {"at": "2024-01-01", "zone": "../../etc/passwd"}},
    {"~datetime": {"at": "2024-01-01", "zone": "Europe"}},
    {"~datetime": {"at": "2024-01-01", "zone": "a\x00b"}},
    {"~datetime": {"at": "2024-01-01", "offset": [9, 0, 0]}},
    {"~datetime": {"at": "2024-01-01", "fold": 7}},
    {"~datetime": {"at": "2024-01-01", "fold": "1"}},
    {"~date": 20240101},
    {"~time": "25:00"},
    {"~timedelta": [10**12, 0, 0]},
    {"~timedelta": "abc"},
    {"~timedelta": [1, 2]},
    {"~timedelta": [1.5, 0, 0]},
    {"~decimal": 1.5},
    {"~decimal": "one"},
    {"~uuid": "7"},
    {"~uuid": None},
    {"~bytes": "not base64!"},
    {"~bytearray": 3},
    {"~complex": [1.0]},
    {"~complex": ["1", "2"]},
    {"~fraction": ["0x1", "0x0"]},
    {"~fraction": ["0x" + "f" * 10**6, "0x3"]},
    {"~path": 5},
    {"~tuple": "abc"},
    {"~set": [[1]]},
    {"~set": {"a": 1}},
    {"~frozenset": [{}]},
    {"~map": [[1]]},
    {"~map": [[[], 1]]},
    {"~map": {"a": 1}},
    {"~err": {}},
    {"~err": []},
    {"~record": {}},
    {"~record": ["A"]},
    {"~error": {"type": "error"}},
    {"~error": {"type": "surprise"}},
    {"~error": {"type": "error", "name": "ValueError", "message": "m", "args": {}}},
    {"~error": {"type": "error", "name": 1, "message": "m"}},
    {"~error": {"type": "error", "name": "E", "message": "m", "cause": {"type": "error"}}},
    {"~error": []},
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data)[:60])
def test_malformed_data_raise_codec_error(data: JSONValue) -> None:
    """Reading any payload of any tag returns a value or raises `CodecError` with the path."""
    with pytest.raises(CodecError, match=r"value|cause") as caught:
        decode({"a": [data]})
    assert caught.value.path


@pytest.mark.parametrize("text", [b"", b"{", b"nan", b"\xff", b"1e999", b'"\\ud800"', "{'a': 1}"])
def test_invalid_json_raises_codec_error(text: bytes | str) -> None:
    """`loads` raises nothing else."""
    with pytest.raises(CodecError, match="JSON"):
        loads(text)


def test_data_that_json_cannot_represent_raise_codec_error() -> None:
    """`dumps` raises nothing else."""
    for data in ("\ud800", object(), nested(100_000)):
        with pytest.raises(CodecError, match="JSON"):
            dumps(data)


def test_many_containers_that_are_not_deep_are_written() -> None:
    data: JSONValue = [[]] * 20_000
    assert loads(dumps(data)) == data


def test_fingerprints_are_short_and_stable() -> None:
    """They are the same in every process and version: the expected values must never change."""
    assert fingerprint(()) == "0d4cbb29"
    assert fingerprint(("123", {"b": 1, "a": (2,)})) == "d625a636"


def test_equal_arguments_have_equal_fingerprints() -> None:
    """The order of sets and keys does not matter."""
    first = ({"a": 1, "b": 2}, {3: 1, 4: 2}, {"x", "y", "z"}, frozenset({(1, 2), (0, 1)}))
    other = ({"b": 2, "a": 1}, {4: 2, 3: 1}, {"z", "y", "x"}, frozenset({(0, 1), (1, 2)}))
    assert fingerprint(first) == fingerprint(other)


def test_different_arguments_have_different_fingerprints() -> None:
    """Types and nesting matter."""
    sets: list[tuple[object, ...]] = [
        (),
        (1,),
        ("1",),
        (True,),
        ((1,),),
        ([1],),
        ({1},),
        (1, 2),
        (date(2024, 1, 1),),
        ("2024-01-01",),
        (ValueError("a"),),
        (ValueError("b"),),
        (object(),),
    ]
    assert len({fingerprint(args) for args in sets}) == len(sets)


def test_arguments_that_are_not_data_count_by_their_class() -> None:
    """A client or a lock is the same argument in the next process."""
    assert fingerprint((Plain(), [print])) == fingerprint((Plain(), [print]))
    cycle: list[object] = []
    cycle.append(cycle)
    assert fingerprint((cycle, nested(1000))) == fingerprint((cycle, nested(1000)))
