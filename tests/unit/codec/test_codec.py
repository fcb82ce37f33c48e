"""What a step returned is stored as JSON with tags, and comes back as it was."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
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


def settled(value: object) -> Prepared:
    return prepare(value, lambda: None)


def returned(value: object) -> object:
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
    """A value that is already JSON is itself what is stored and what the function sees."""
    result = settled(value)
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
    [{"deep": [{"when": date(2024, 1, 1)}]}],
    Ok((1, 2)),
    Err("no", {1}),
    {"r": [Ok(None), Err(Decimal(1))]},
]


@pytest.mark.parametrize("value", TAGGED, ids=lambda value: type(value).__name__)
def test_what_json_lacks_comes_back_as_it_was(value: object) -> None:
    """Value, type, order of keys and text form are the same after the way through JSON."""
    back = returned(value)
    assert type(back) is type(value)
    assert back == value
    if not isinstance(value, (set, frozenset, int)):
        assert repr(back) == repr(value)


@pytest.mark.parametrize("value", TAGGED, ids=lambda value: type(value).__name__)
def test_the_function_sees_now_what_it_sees_later(value: object) -> None:
    """`Prepared.value` equals what decoding gives after a crash, and nothing was lost."""
    result = settled(value)
    assert result.losses == ()
    assert result.value == decode(result.data)


def test_nan_and_signed_zero_survive() -> None:
    """Numbers that `==` cannot tell are told apart."""
    assert math.isnan(returned(float("nan")))
    assert repr(returned([-0.0, Decimal("sNaN123"), complex("nan")])) == (
        "[-0.0, Decimal('sNaN123'), (nan+0j)]"
    )


def test_true_is_not_one() -> None:
    """Keys and members that are equal in Python keep their own types."""
    assert list(returned({True: 1, "x": 2.0}).items()) == [(True, 1), ("x", 2.0)]
    assert repr(returned((True, 1, 1.0))) == "(True, 1, 1.0)"


def test_tags_are_readable() -> None:
    """A stored value can be read by people and by other tools."""
    assert encode({"at": datetime(2024, 5, 1), "to": {Decimal("1.50")}}) == {
        "at": {"~datetime": "2024-05-01T00:00:00"},
        "to": {"~set": [{"~decimal": "1.50"}]},
    }


def test_a_fixed_offset_of_any_class_is_kept() -> None:
    """A zone class of another library that only holds an offset is as good as `timezone`."""

    class Plus2(tzinfo):
        def utcoffset(self, _: datetime | None) -> timedelta:
            return timedelta(hours=2)

    result = settled(datetime(2024, 1, 1, tzinfo=Plus2()))
    assert result.value == datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    assert result.losses == ()


def test_a_foreign_zone_becomes_its_offset_and_a_loss() -> None:
    """A zone with seasons that is no `ZoneInfo` has no name to store: only the moment stays."""

    class Seasonal(tzinfo):
        def utcoffset(self, when: datetime | None) -> timedelta | None:
            return None if when is None else timedelta(hours=2)

    value = datetime(2024, 1, 1, tzinfo=Seasonal())
    result = settled([value])
    assert result.value == [value]
    assert result.losses == (Loss("value[0]", "non-json"),)


class Label(str):
    __slots__ = ()


class Count(int):
    pass


class Moment(datetime):
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
    (Moment(2024, 1, 1), datetime(2024, 1, 1)),
]


@pytest.mark.parametrize(("value", "base"), SUBCLASSES, ids=lambda value: type(value).__name__)
def test_a_subclass_becomes_its_base_and_a_loss(value: object, base: object) -> None:
    """What a class adds to a built-in type cannot come back: the value does, and it is said."""
    result = settled({"it": value})
    assert result.value == {"it": base}
    assert type(result.value["it"]) is type(base)
    assert result.losses == (Loss("value.it", "non-json"),)


def test_an_ordered_dict_keeps_the_order_it_shows() -> None:
    """The order is the one `items()` gives, also after `move_to_end`."""
    value = OrderedDict(a=1, b=2)
    value.move_to_end("a")
    assert list(settled(value).value) == ["b", "a"]


def test_a_cycle_is_cut_where_it_closes() -> None:
    """A value that holds itself is stored without the way back."""
    value: dict[str, object] = {"a": [1]}
    value["a"] = [1, value]
    result = settled(value)
    assert result.data == {"a": [1, None]}
    assert result.losses == (Loss("value.a[1]", "circular"),)


def test_the_same_object_twice_is_no_cycle() -> None:
    """Only a way back to an open container is one."""
    shared = (1,)
    assert returned([shared, shared]) == [(1,), (1,)]


class Plain:
    def __init__(self) -> None:
        self.name = "x"
        self.call = print


def test_an_object_becomes_what_it_holds() -> None:
    """An instance of a plain class is its attributes; each thing that is no data is named."""
    result = settled([Plain()])
    assert result.value == [{"name": "x", "call": None}]
    assert result.losses == (Loss("value[0]", "non-json"), Loss("value[0].call", "non-json"))


def test_paths_name_the_place() -> None:
    """A path reads like the expression that gets there, from the root that was given."""
    value = {"user": {"tags": [0, print]}, "a key": [print], 3: print}
    result = prepare(value, lambda: None, root="error")
    assert [loss.path for loss in result.losses] == [
        "error.user.tags[1]",
        "error['a key'][0]",
        "error[3]",
    ]


def test_losses_are_few() -> None:
    """A thousand things of a kind give some warnings, not a thousand."""
    assert len(settled([print] * 1000).losses) == 20


def test_encode_refuses_what_would_not_come_back() -> None:
    """`encode` raises where `prepare` warns, with the path."""
    with pytest.raises(CodecError, match=r"value\.f") as caught:
        encode({"f": print})
    assert caught.value.path == "value.f"


def nested(levels: int) -> JSONValue:
    value: JSONValue = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_nesting_has_one_limit_for_writing_and_reading() -> None:
    """What can be written can be read, and one level more can be neither."""
    assert returned(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(CodecError, match="levels"):
        settled(nested(MAX_DEPTH + 1))
    with pytest.raises(CodecError, match="levels"):
        decode([{"~tuple": []}, nested(MAX_DEPTH)])


def test_tags_count_as_levels() -> None:
    """A value is refused when it is written if it could not be read again."""
    value: object = ()
    for _ in range(MAX_DEPTH // 2 - 1):
        value = (value,)
    assert returned(value) == value
    with pytest.raises(CodecError, match="levels"):
        encode((value,))


def at_stack_depth(frames: int, call: Callable[[], object]) -> object:
    return call() if not frames else at_stack_depth(frames - 1, call)


@pytest.mark.parametrize("frames", [0, 450, 800, 900])
def test_deep_data_never_overflow_the_stack(frames: int) -> None:
    """Too deep is an error of ours, wherever it is met."""
    too_deep: list[Callable[[], object]] = [
        lambda: settled(nested(1000)),
        lambda: decode([nested(1000), {"~tuple": []}]),
        lambda: loads(b"[" * 100_000),
    ]
    for call in too_deep:
        with pytest.raises(CodecError):
            at_stack_depth(frames, call)


def test_the_limit_does_not_depend_on_the_stack() -> None:
    """What is as deep as allowed is written and read from a deep stack too."""
    value = (nested(MAX_DEPTH - 2),)
    assert at_stack_depth(450, lambda: returned(value)) == value


MALFORMED: list[JSONValue] = [
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
def test_malformed_data_are_our_error(data: JSONValue) -> None:
    """Whatever stands under a tag, reading it gives a value or a `CodecError` with the path."""
    with pytest.raises(CodecError, match=r"value|cause") as caught:
        decode({"a": [data]})
    assert caught.value.path


@pytest.mark.parametrize("text", [b"", b"{", b"nan", b"\xff", b"1e999", b'"\\ud800"', "{'a': 1}"])
def test_bad_json_is_our_error(text: bytes | str) -> None:
    """`loads` raises nothing but `CodecError`."""
    with pytest.raises(CodecError, match="JSON"):
        loads(text)


def test_data_that_are_no_json_are_our_error() -> None:
    """`dumps` raises nothing but `CodecError`."""
    for data in ("\ud800", object(), nested(5000)):
        with pytest.raises(CodecError, match="JSON"):
            dumps(data)


def test_fingerprints_are_short_and_stable() -> None:
    """They are the same in each process and version: what is written here must never change."""
    assert fingerprint(()) == "0d4cbb29"
    assert fingerprint(("123", {"b": 1, "a": (2,)})) == "d625a636"


def test_equal_arguments_have_equal_fingerprints() -> None:
    """The order of sets and keys does not count."""
    first = ({"a": 1, "b": 2}, {3: 1, 4: 2}, {"x", "y", "z"}, frozenset({(1, 2), (0, 1)}))
    other = ({"b": 2, "a": 1}, {4: 2, 3: 1}, {"z", "y", "x"}, frozenset({(0, 1), (1, 2)}))
    assert fingerprint(first) == fingerprint(other)


def test_different_arguments_have_different_fingerprints() -> None:
    """Types count, and so does what an argument is nested in."""
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


def test_what_is_no_data_counts_by_its_class() -> None:
    """A client or a lock is the same argument in the next process, wherever it lies in memory."""
    assert fingerprint((Plain(), [print])) == fingerprint((Plain(), [print]))
    cycle: list[object] = []
    cycle.append(cycle)
    assert fingerprint((cycle, nested(1000))) == fingerprint((cycle, nested(1000)))
