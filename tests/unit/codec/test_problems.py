"""Every problem of a value, each with its path."""

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Generic, NamedTuple, NewType, NotRequired, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import codec
from perdure.codec.problems import MAX_PROBLEMS, find_problems
from perdure.errors import CodecError

T = TypeVar("T")
HOSTILE = '"><script>alert(1)</script> 🎈'


@dataclass
class Item:
    sku: str
    count: int


@dataclass
class Order:
    customer: str
    items: list[Item] = field(default_factory=list)
    prices: dict[str, int] = field(default_factory=dict)
    first: Item | None = None

    def __post_init__(self) -> None:
        if self.customer == "nobody":
            raise ValueError("a customer has a name")


class Parcel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="camel", tag="box"):
    weight_kg: Annotated[int, msgspec.Meta(ge=1)] = 1
    to_city: str


class Pair(msgspec.Struct, Generic[T]):
    left: T
    right: T


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    customer: str
    cents: int = pydantic.Field(ge=1, alias="Cents")
    items: list[Item] = []


class Shipment(TypedDict):
    to: str
    weight: NotRequired[int]


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass
class Wrapper:
    model: Model
    shipment: Shipment


class Row(msgspec.Struct, array_like=True):
    a: int


@dataclass
class Choice:
    item: Item | Shipment | Order


class Line(NamedTuple):
    item: Item | Choice
    amount: int = 1


def problems(data: object, annotation: object) -> list[str]:
    return [str(each) for each in find_problems(data, annotation)]


def test_each_field_of_a_dataclass_reports_its_problem() -> None:
    items: list[Any] = [{"sku": 1, "count": "a"}, {"sku": "b"}]
    data = {"items": items, "prices": {"a": 1, "b": "2", "c": None}, "first": {"sku": 7}}
    assert problems(data, Order) == [
        "customer: missing",
        "items[0].sku: Expected `str`, got `int`",
        "items[0].count: Expected `int`, got `str`",
        "items[1].count: missing",
        "prices.b: Expected `int`, got `str`",
        "prices.c: Expected `int`, got `null`",
        "first.count: missing",
        "first.sku: Expected `str`, got `int`",
    ]


def test_a_struct_is_checked_by_its_encoded_names_and_refuses_unknown_ones() -> None:
    assert problems({"type": "bag", "weightKg": 0, "to_city": "Wien", HOSTILE: 1}, Parcel) == [
        "toCity: missing",
        "type: Invalid enum value 'bag'",
        "weightKg: Expected `int` >= 1",
        "to_city: unknown field",
        '["\\"><script>alert(1)</script> 🎈"]: unknown field',
    ]


def test_a_pydantic_model_reports_what_pydantic_reports() -> None:
    data = {"customer": 1, "Cents": 0, "items": [{"sku": 1, "count": "a"}], "more": 1}
    found = problems(data, Model)
    paths = ["customer", "Cents", "items[0].sku", "items[0].count", "more"]
    assert [each.partition(":")[0] for each in found] == paths
    assert found[1] == "Cents: Input should be greater than or equal to 1"
    assert problems({}, Model) == ["customer: Field required", "Cents: Field required"]


def test_models_and_typed_dicts_inside_a_dataclass_report_all_problems() -> None:
    data = {"model": {"Cents": 0}, "shipment": {"weight": "a"}}
    assert [each.partition(":")[0] for each in problems(data, Wrapper)] == [
        "model.customer",
        "model.Cents",
        "shipment.to",
        "shipment.weight",
    ]


def test_generic_types_and_arrays_are_checked_by_their_parts() -> None:
    assert problems({"left": "a", "right": "b"}, Pair[int]) == [
        "left: Expected `int`, got `str`",
        "right: Expected `int`, got `str`",
    ]
    assert problems(["a", 1], tuple[int, str]) == [
        "[0]: Expected `int`, got `str`",
        "[1]: Expected `str`, got `int`",
    ]
    assert problems(["a", "b"], Point) == [
        "[0]: Expected `int`, got `str`",
        "[1]: Expected `int`, got `str`",
    ]


Two = msgspec.Meta(min_length=2, max_length=2)
AT_LEAST_TWO = "Expected `array` of length >= 2"


@pytest.mark.parametrize(
    ("data", "annotation", "own", "parts"),
    [
        (["a"], Annotated[list[int], Two], AT_LEAST_TWO, ["[0]"]),
        (["a", 1, 2], Annotated[set[int], Two], "Expected `array` of length <= 2", ["[0]"]),
        ([{}], Annotated[list[Item], Two], AT_LEAST_TWO, ["[0].sku", "[0].count"]),
        ([{}], Annotated[set[Item] | None, Two], AT_LEAST_TWO, ["[0].sku", "[0].count"]),
        (["a"], NewType("Both", Annotated[list[int], Two]), AT_LEAST_TWO, ["[0]"]),
        (["a", 1, 2], tuple[int, int], "Expected `array` of length 2, got 3", ["[0]"]),
        (["a", 1, 2], Point, "Expected `array` of length 1 to 2, got 3", ["[0]"]),
        ({"a": "x"}, Annotated[dict[str, int], Two], "Expected `object` of length >= 2", ["a"]),
        ({"a": "x"}, dict[int, int], "Expected `int`, got `str` - at `key` in `$`", ["a"]),
    ],
)
def test_a_value_has_its_own_problem_besides_those_of_its_parts(
    data: Any, annotation: Any, own: str, parts: list[str]
) -> None:
    first, *others = problems(data, annotation)
    assert first == own
    assert [each.partition(":")[0] for each in others] == parts
    path, *_ = problems({"left": data, "right": 1}, Pair[annotation])[0].partition(":")
    assert path == "left"


@pytest.mark.parametrize(
    ("data", "annotation", "problem"),
    [
        ({"x": 1}, Point, "Expected `array`, got `object`"),
        ({"a": 1}, Annotated[list[int], Two], "Expected `array`, got `object`"),
        ([1], dict[str, int], "Expected `object`, got `array`"),
        ({"a": 1}, Row, "Expected `array`, got `object`"),
        ({"item": {"sku": "a", "count": 1}}, Line, "Expected `array`, got `object`"),
        ([1], Choice, "Expected `object`, got `array`"),
        ({"a": 1}, list[Item | Choice], "Expected `array`, got `object`"),
        ({"a": [1]}, dict[str, Item], "a: Expected an object with the fields of Item, got `array`"),
        (None, list[Item | Choice], "Expected `array`, got `null`"),
    ],
)
def test_arrays_and_objects_are_not_confused(data: Any, annotation: Any, problem: str) -> None:
    assert problems(data, annotation) == [problem]


def test_a_named_tuple_is_an_array_whatever_its_types() -> None:
    """msgspec does not convert a union of two dataclasses."""
    item = {"sku": "a", "count": 1}
    assert codec.convert([item, 2], Line) == Line(Item("a", 1), 2)
    assert codec.convert([{"item": item}], Line) == Line(Choice(Item("a", 1)))
    assert problems([item, "a", 3], Line) == [
        "Expected `array` of length 1 to 2, got 3",
        "[1]: Expected `int`, got `str`",
    ]
    assert problems([], Line) == ["Expected `array` of length 1 to 2, got 0"]


@pytest.mark.parametrize(
    ("data", "annotation", "problem"),
    [
        ("a", int, "Expected `int`, got `str`"),
        ({"customer": "nobody"}, Order, "a customer has a name"),
        ([1], Order, "Expected an object with the fields of Order, got `array`"),
        ([1], tuple[int, int], "Expected `array` of length 2, got 1"),
        ({"a": 1}, dict[int, int], "Expected `int`, got `str` - at `key` in `$`"),
    ],
)
def test_a_value_whose_parts_fit_has_one_problem(data: Any, annotation: Any, problem: str) -> None:
    assert problems(data, annotation) == [problem]


def test_names_that_contain_dots_are_quoted_in_paths() -> None:
    found = problems({"a.b": "", "": "", HOSTILE: ""}, dict[str, int])
    assert [each.rpartition(":")[0] for each in found] == [
        '["a.b"]',
        '[""]',
        '["\\"><script>alert(1)</script> 🎈"]',
    ]


def test_keys_that_are_not_strings_are_shown_as_they_are() -> None:
    """Such keys come from Python, not from JSON."""
    day = date(2026, 1, 2)
    assert problems({day: "x"}, dict[date, int]) == [f"[{day!r}]: Expected `int`, got `str`"]


class Unresolved(msgspec.Struct):
    total: "Missing"  # type: ignore[name-defined]  # noqa: F821 - this is what is tested


def test_a_type_that_cannot_be_resolved_is_the_problem() -> None:
    [problem] = problems({"total": 1}, Unresolved)
    assert "name 'Missing' is not defined" in problem


def test_a_value_with_very_many_problems_lists_the_first_ones() -> None:
    found = find_problems(["x"] * 1000, list[int])
    assert len(found) == MAX_PROBLEMS + 1
    assert str(found[-1]) == "there are more problems"


class Tree(msgspec.Struct):
    child: "Tree | None" = None


def test_a_value_that_is_nested_too_deeply_is_a_problem() -> None:
    data: Any = 7
    for _ in range(20_000):
        data = {"child": data}
    assert problems(data, Tree) == ["nested too deeply for the remaining Python stack"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", HOSTILE]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*Order.__dataclass_fields__, *Item.__dataclass_fields__]), inner
        )
    ),
    max_leaves=12,
)


@given(json_values, st.sampled_from([Order, Model, Parcel, Wrapper, list[Item], dict[str, Order]]))
def test_there_are_problems_exactly_if_the_conversion_fails(data: Any, annotation: Any) -> None:
    try:
        codec.convert(data, annotation)
        fits = True
    except CodecError:
        fits = False
    assert fits == (not find_problems(data, annotation))
