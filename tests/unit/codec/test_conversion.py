"""JSON of other origin is converted to a type, or the error names the field."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import attrs
import msgspec
import pydantic
import pytest

from perdure.codec import JSONValue, convert
from perdure.errors import CodecError


class Plan(Enum):
    FREE = "free"


@dataclass
class Card:
    number: str


@dataclass
class Cash:
    cents: int


@dataclass
class Signup:
    email: str
    plan: Plan = Plan.FREE
    tags: set[str] = field(default_factory=set)
    at: datetime | None = None


@dataclass
class Checkout:
    payments: list[Card | Cash]
    by_name: dict[str, Card | Cash] = field(default_factory=dict)


class SignupModel(pydantic.BaseModel):
    email: str
    age: int = pydantic.Field(ge=18, alias="years")


class SignupStruct(msgspec.Struct, forbid_unknown_fields=True):
    email: str
    age: Annotated[int, msgspec.Meta(ge=18)] = 18


class SignupDict(TypedDict):
    email: str
    age: NotRequired[int]


class SignupTuple(NamedTuple):
    email: str
    home: Path


@attrs.define
class SignupAttrs:
    email: str
    model: SignupModel | None = None


MODEL = SignupModel(email="a", years=20)

FITTING: list[tuple[JSONValue, Any, object]] = [
    ({"email": "a"}, Signup, Signup("a")),
    (
        {"email": "a", "plan": "free", "tags": ["x"], "at": "2024-05-01T00:00:00Z"},
        Signup,
        Signup("a", tags={"x"}, at=datetime(2024, 5, 1, tzinfo=UTC)),
    ),
    ({"email": "a", "tags": {"x"}, "at": None}, Signup, Signup("a", tags={"x"})),
    ({"email": "a", "years": 20}, SignupModel, MODEL),
    ({"email": "a"}, SignupStruct, SignupStruct("a")),
    ({"email": "a"}, SignupDict, {"email": "a"}),
    (["a", "/home"], SignupTuple, SignupTuple("a", Path("/home"))),
    ({"email": "a", "model": {"email": "a", "years": 20}}, SignupAttrs, SignupAttrs("a", MODEL)),
    ([{"email": "a", "years": 20}], list[SignupModel], [MODEL]),
    ({"number": "1"}, Card | Cash, Card("1")),
    ({"cents": 1}, Card | Cash, Cash(1)),
    (
        {"payments": [{"cents": 1}, {"number": "1"}], "by_name": {"a": {"cents": 2}}},
        Checkout,
        Checkout([Cash(1), Card("1")], {"a": Cash(2)}),
    ),
    ([[{"cents": 1}]], tuple[list[Card | Cash], ...], ([Cash(1)],)),
    (None, Card | Cash | None, None),
    ("1.50", Decimal, Decimal("1.50")),
    (3, int, 3),
    (3, float, 3.0),
    ({"any": [1]}, Any, {"any": [1]}),
    ({"a": 1}, dict[str, int], {"a": 1}),
]


@pytest.mark.parametrize(("data", "annotation", "value"), FITTING, ids=lambda each: str(each)[:40])
def test_valid_data_are_converted_to_the_type(
    data: JSONValue, annotation: Any, value: object
) -> None:
    """To dataclasses, pydantic, attrs and msgspec classes, TypedDicts and built-in types."""
    got = convert(data, annotation)
    assert got == value
    assert type(got) is type(value)


MISFITS: list[tuple[JSONValue, Any, str]] = [
    ({}, Signup, "value"),
    ({"email": 5}, Signup, "value.email"),
    ({"email": "a", "plan": "gold"}, Signup, "value.plan"),
    ({"email": "a", "tags": ["x", 5]}, Signup, "value.tags[1]"),
    ({"email": "a", "at": "soon"}, Signup, "value.at"),
    ({"email": "a", "years": 3}, SignupModel, "value.years"),
    ({"email": "a"}, SignupModel, "value.years"),
    ([{"email": "a", "years": "x"}], list[SignupModel], "value[0]"),
    ({"email": "a", "age": 3}, SignupStruct, "value.age"),
    ({"email": "a", "extra": 3}, SignupStruct, "value"),
    ({"email": "a", "age": "3"}, SignupDict, "value.age"),
    ({"email": "a", "model": {}}, SignupAttrs, "value.model"),
    ({"payments": [{"cents": "x"}]}, Checkout, "value.payments[0]"),
    ({}, Checkout, "value"),
    ({"payments": {}}, Checkout, "value.payments"),
    ({"payments": [], "by_name": []}, Checkout, "value.by_name"),
    ({"neither": 1}, Card | Cash, "value"),
    ("3", int, "value"),
    (1.5, Path | int, "value"),
    (5, Path, "value"),
    (1, print, "value"),
    (1, "int", "value"),
]


@pytest.mark.parametrize(("data", "annotation", "path"), MISFITS, ids=lambda each: str(each)[:40])
def test_the_error_names_the_invalid_field(data: JSONValue, annotation: Any, path: str) -> None:
    """It is always a `CodecError` with the path of the field."""
    with pytest.raises(CodecError) as caught:
        convert(data, annotation)
    assert caught.value.path == path


def test_an_error_raised_by_the_class_becomes_codec_error() -> None:
    """The exception of the class is its cause."""

    @dataclass
    class Positive:
        number: int

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError("negative")

    with pytest.raises(CodecError, match="negative"):
        convert({"number": -1}, Positive)


@dataclass
class Add:
    left: "Add | Mul | None"
    right: int


@dataclass
class Mul:
    left: "Add | Mul | None"
    right: int


def test_the_alternatives_of_unions_are_limited() -> None:
    """Data that fit no alternative at any level are refused before every combination was tried."""
    data: JSONValue = {"left": None, "right": "no number"}
    for _ in range(80):
        data = {"left": data, "right": 1}
    with pytest.raises(CodecError):
        convert(data, Add | Mul)
