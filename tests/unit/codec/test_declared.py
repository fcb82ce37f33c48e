"""Values of declared classes: stored with the names of their classes, where no type names them."""

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar

import attrs
import msgspec
import pydantic
import pytest

from perdure import codec
from perdure.codec import DeclaredTypes, Loss, Prepared
from perdure.codec.compare import difference
from perdure.errors import CodecError, InvalidArgument
from perdure.result import Err, Ok

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Address:
    city: str


@dataclass
class User:
    name: str
    address: Address | None = None
    anything: Any = None
    friends: list["User"] = field(default_factory=list)


@dataclass
class Admin(User):
    level: int = 1


@dataclass
class Page(Generic[T]):
    items: list[T]


class Point(NamedTuple):
    x: int
    y: int


class Struct(msgspec.Struct):
    user: User


@attrs.define
class Attrs:
    color: Color


class Model(pydantic.BaseModel):
    url: pydantic.HttpUrl


class Row(TypedDict):
    user: User


@dataclass
class Stranger:
    name: str


TYPES = DeclaredTypes([User, Admin, Page, Point, Struct, Attrs, Model])


def prepared(value: object, returns: object = None, types: DeclaredTypes = TYPES) -> Prepared:
    return codec.prepare(value, lambda: returns, types=types)


def restored(result: Prepared, types: DeclaredTypes = TYPES, returns: object = None) -> Any:
    """Return the value as a replay in another process sees it."""
    data = codec.loads(codec.dumps(result.data))
    return codec.decode(data, returns, result.typed, types)


@pytest.mark.parametrize(
    "value",
    [
        User("ana", Address("Rome")),
        [User("ana"), {"boss": Admin("bob", level=2)}],
        {"~x": User("ana")},
        {1: User("ana"), Address("Rome"): 2},
        ({Address("Rome")}, frozenset({Point(1, 2)})),
        Ok(User("ana")),
        Err(User("ana")),
        User("ana", anything=[Admin("bob"), {"deep": Point(1, 2)}], friends=[Admin("eve")]),
        Page([User("ana"), Color.RED]),
        Struct(User("ana")),
        Attrs(Color.RED),
        Model(url=pydantic.HttpUrl("https://example.org/")),
        User("ana", anything={"~declared": 1, "~record": 2}),
        User("ana", anything={"~declared": 1}),
    ],
)
def test_a_value_of_declared_classes_is_restored(value: object) -> None:
    """Nested in anything, in fields of any type, and in place of a base class."""
    result = prepared(value)
    assert result.losses == ()
    assert difference(value, result.value, "value") is None
    assert difference(value, restored(result), "value") is None


def test_the_stored_form_never_changes() -> None:
    """Runs that are under way contain it."""
    name = f"{__name__}.Address"
    assert prepared([Address("Rome")]).data == {
        "~declared": [{"~record": [name, {"city": "Rome"}]}]
    }


def test_a_value_with_a_return_type_is_stored_as_without_declared_classes() -> None:
    value = [User("ana", Address("Rome"))]
    with_types = prepared(value, list[User])
    assert with_types == prepared(value, list[User], codec.NO_TYPES)
    assert with_types.data[0]["address"] == {"city": "Rome"}


@pytest.mark.parametrize("returns", [list, list[Any], list[object], dict[str, Any] | list[Any]])
def test_a_return_type_that_names_no_class_does_not_hide_the_declared_ones(returns: object) -> None:
    result = prepared([User("ana")], returns)
    assert restored(result, returns=returns) == [User("ana")]
    assert result.losses == ()


def test_a_return_type_that_is_added_later_does_not_change_stored_values() -> None:
    result = prepared(User("ana"))
    assert restored(result, returns=User) == User("ana")


def test_plain_values_do_not_collect_the_declared_classes() -> None:
    """Annotations are not even looked at: most values need no class."""

    class Unused(DeclaredTypes):
        def __bool__(self) -> bool:
            raise AssertionError("the classes were collected")

    value = {"a": [1, (2, 3)]}
    assert prepared(value, types=Unused()).value == value


def test_an_undeclared_class_is_lost_and_the_others_are_not() -> None:
    result = prepared([User("ana"), Stranger("bob")])
    assert result.losses == (Loss("value[1]", "non-json"),)
    assert result.losses[0].cls is Stranger
    assert result.value == restored(result) == [User("ana"), {"name": "bob"}]


def test_without_declared_classes_in_it_a_value_is_stored_as_before() -> None:
    assert prepared(Stranger("bob")) == prepared(Stranger("bob"), types=codec.NO_TYPES)


def test_a_class_that_is_no_longer_declared_is_an_error_that_says_so() -> None:
    """A dict in its place would be another value than before the crash."""
    with pytest.raises(CodecError, match=r"User is not declared; declare it with types=\[User\]"):
        restored(prepared(User("ana")), DeclaredTypes([Point]))


def test_without_any_declared_classes_a_declared_value_is_an_error() -> None:
    with pytest.raises(CodecError, match="is not declared"):
        restored(prepared(User("ana")), codec.NO_TYPES)


def moved(cls: type, module: str) -> Any:
    return dataclass(
        type(cls.__name__, (), {"__annotations__": {"city": str}, "__module__": module})
    )


def test_a_class_that_was_moved_to_another_module_is_found_by_its_name() -> None:
    elsewhere = moved(Address, "elsewhere")
    assert restored(prepared(Address("Rome")), DeclaredTypes([elsewhere])) == elsewhere("Rome")


def test_a_name_that_several_classes_have_is_not_guessed() -> None:
    others = DeclaredTypes([moved(Address, "one"), moved(Address, "two")])
    with pytest.raises(CodecError, match="not the only one with its name"):
        restored(prepared(Address("Rome")), others)


def test_classes_of_the_same_name_are_distinguished() -> None:
    one, two = moved(Address, "one"), moved(Address, "two")
    types = DeclaredTypes([one, two])
    value = [one("Rome"), two("Oslo")]
    assert [type(each) for each in restored(prepared(value, types=types), types)] == [one, two]


def test_nothing_is_imported_by_a_stored_name() -> None:
    data = {"~declared": {"~record": ["types.SimpleNamespace", {}]}}
    with pytest.raises(CodecError, match="is not declared"):
        codec.decode(data, None, True, TYPES)


@pytest.mark.parametrize(
    "data",
    [
        {"~declared": {"~record": [7, {}]}},
        {"~declared": {"~record": "x"}},
        {"~declared": {"~record": [f"{__name__}.User", {}]}},
        {"~declared": {"~map": 5}},
    ],
)
def test_malformed_data_raise_a_codec_error(data: Any) -> None:
    with pytest.raises(CodecError):
        codec.decode(data, None, True, TYPES)


async def annotated(step: object, payload: Annotated[dict[str, User], "x"]) -> list[Row] | None: ...


def test_the_annotations_of_a_function_declare_their_classes() -> None:
    """With those in the fields of classes and of typed dicts."""
    types = DeclaredTypes((), annotated)
    assert User in types
    assert Address in types
    assert Admin not in types


def test_annotations_that_cannot_be_resolved_declare_nothing() -> None:
    async def broken(step: "Missing", payload: User) -> "AlsoMissing": ...  # type: ignore[name-defined]  # noqa: F821

    types = DeclaredTypes((), broken)
    assert User in types


@pytest.mark.parametrize("types", [[int], [ValueError], ["User"], User, "User", None, [list[User]]])
def test_only_classes_that_can_be_restored_are_accepted(types: Any) -> None:
    with pytest.raises(InvalidArgument, match="types: expected"):
        DeclaredTypes(types)
