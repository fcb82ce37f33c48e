"""Objects that raise when they are inspected cause a loss, and their exceptions do not escape."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from enum import Enum
from typing import Annotated, Any, ForwardRef, NoReturn, Protocol, cast

import pytest

from perdure.codec import (
    NOWHERE,
    ErrorScope,
    convert,
    decode,
    decode_cause,
    dumps,
    encode_cause,
    fingerprint,
    loads,
    prepare,
    prepare_error,
    return_type,
)
from perdure.errors import CodecError, StepError


class Boom(Exception):
    """What the hostile objects raise."""


def boom(*_args: object, **_options: object) -> NoReturn:
    raise Boom


class RaisingEverywhere:
    __eq__ = boom
    __hash__ = boom
    __repr__ = boom
    __str__ = boom
    __getattr__ = boom
    __class__: Any = property(boom)


class RaisingDict(dict[str, Any]):
    items = boom
    keys = boom
    __iter__ = boom
    __getitem__ = boom


class RaisingList(list[Any]):
    __iter__ = boom
    __len__ = boom


class RaisingText(str):
    __slots__ = ()
    __str__ = boom
    encode = boom
    isascii = boom


class RaisingNumber(int):
    __index__ = boom
    __int__ = boom


@dataclasses.dataclass
class RaisingField:
    good: int = 1

    @property
    def bad(self) -> int:
        raise Boom


RaisingField.__dataclass_fields__["bad"] = dataclasses.fields(RaisingField)[0]


@dataclasses.dataclass
class UnequalToItself:
    x: int = 1
    __eq__ = boom
    __hash__ = boom


class RaisingZone(tzinfo):
    utcoffset = boom
    tzname = boom
    dst = boom


class LyingZone(tzinfo):
    def utcoffset(self, _when: datetime | None) -> timedelta:
        return cast(timedelta, "soon")

    tzname = boom
    dst = boom


class RaisingMeta(type):
    def __hash__(cls) -> int:
        raise Boom

    def __getattribute__(cls, name: str) -> Any:
        raise Boom


def of_raising_class(*bases: type) -> Any:
    """Create it on demand, because the test collector would inspect it."""
    return type.__call__(RaisingMeta("RaisingClass", bases, {}))


class RaisingDictAttribute:
    __dict__: Any = property(boom)


class RaisingSlot:
    __slots__ = ("__weakref__", "here", "not_here")

    def __init__(self) -> None:
        self.here = 1


class LyingSlots:
    __slots__ = ("a",)


LyingSlots.__slots__ = 5  # type: ignore[assignment] # not what Python wrote there


class RaisingEnumValue(Enum):
    A = object()


class Endless:
    """Returns a new object of its class for every attribute."""

    def __getattribute__(self, name: str) -> Any:
        return {"next": Endless(), "more": [Endless(), Endless()]} if name == "__dict__" else object


class RaisingIterator:
    def __iter__(self) -> Iterator[int]:
        raise Boom


class CallableObject:
    def __call__(self) -> None:
        raise Boom


def generator() -> Iterator[int]:
    yield 1


MAKERS: list[Callable[[], object]] = [
    RaisingEverywhere,
    lambda: RaisingDict(a=1),
    lambda: RaisingList([1]),
    lambda: RaisingText("x"),
    lambda: RaisingNumber(5),
    RaisingField,
    UnequalToItself,
    lambda: datetime(2024, 1, 1, tzinfo=RaisingZone()),
    lambda: datetime(2024, 1, 1, tzinfo=LyingZone()),
    of_raising_class,
    RaisingDictAttribute,
    RaisingSlot,
    LyingSlots,
    lambda: RaisingEnumValue.A,
    Endless,
    RaisingIterator,
    CallableObject,
    generator,
    lambda: boom,
    lambda: type,
    lambda: NotImplemented,
    lambda: ...,
    lambda: memoryview(b"abc")[::2],
    lambda: range(3),
    lambda: pytest,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "place",
    [
        lambda value: value,
        lambda value: [value],
        lambda value: {"k": (value,)},
        ValueError,
    ],
)
@pytest.mark.parametrize("annotation", [None, RaisingField, UnequalToItself, RaisingEnumValue, Any])
def test_preparing_never_raises(
    make: Callable[[], object], place: Callable[[object], object], annotation: object
) -> None:
    """There is always something to store; it is JSON and can be read."""
    result = prepare(place(make()), lambda: annotation)
    data = loads(dumps(result.data))
    decode(data, annotation, result.typed)


@pytest.mark.parametrize("make", MAKERS)
def test_fingerprints_never_raise(make: Callable[[], object]) -> None:
    """They are the same for two objects of a class."""
    assert fingerprint((make(), [make()])) == fingerprint((make(), [make()]))


@pytest.mark.parametrize("make", MAKERS)
def test_causes_never_raise(make: Callable[[], object]) -> None:
    """Any value can be a failure, or part of one."""
    for error in (make(), RuntimeError("m", make())):
        cause = encode_cause(error)
        decode_cause(loads(dumps(cause)))


class Named(Protocol):
    def method(self) -> int: ...


@pytest.mark.parametrize(
    "make_type",
    [
        lambda: type(of_raising_class()),
        lambda: Annotated[int, {"not": "hashable"}],
        lambda: Named | UnequalToItself,
        lambda: Named,
        lambda: [1, 2],
        lambda: "no ( type",
        lambda: ForwardRef("Nowhere"),
        lambda: Callable[[int], str],
        lambda: 5,
    ],
)
def test_unusable_types_are_ignored(make_type: Callable[[], Any]) -> None:
    """An annotation without a meaning causes a loss at most."""
    annotation = make_type()
    result = prepare([UnequalToItself(), RaisingEnumValue.A], lambda: annotation)
    dumps(result.data)
    with suppress(CodecError):
        decode({"x": 1}, annotation, typed=True)
    with suppress(CodecError):
        convert({"x": 1}, annotation)


@pytest.mark.parametrize("make", MAKERS)
def test_return_types_never_raise(make: Callable[[], object]) -> None:
    """An object that is not a function has no return type."""
    return_type(cast(Callable[..., object], make()))


class RaisingError(Exception):
    __str__ = boom
    __repr__ = boom
    __notes__: Any = property(boom)


class RaisingState(Exception):
    __reduce__ = boom
    __dict__: Any = property(boom)
    __cause__: Any = property(boom)


@pytest.mark.parametrize("cls", [RaisingError, RaisingState])
@pytest.mark.parametrize("declared", [True, False])
def test_hostile_exceptions_are_encoded(cls: type[Exception], declared: bool) -> None:
    """Always with a name and a message."""
    cause, *_ = prepare_error(cls("x"), ErrorScope([cls] if declared else []))
    assert cause["type"] == "error"
    assert cause["name"] == cls.__name__


def test_an_exception_of_a_hostile_class_is_encoded() -> None:
    """With its name, although the metaclass raises."""
    error = of_raising_class(Exception)
    assert prepare([error], lambda: None).losses
    assert encode_cause(error)["type"] == "error"
    assert type(prepare_error(error, NOWHERE)[1]) is StepError
