"""Objects with fields are stored as their fields and come back by the step's return type."""

import dataclasses
import functools
import subprocess
import sys
import threading
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum, auto
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    Optional,
    TypedDict,
    TypeVar,
)

import attrs
import msgspec
import pydantic
import pytest

from perdure.codec import (
    MAX_DEPTH,
    JSONValue,
    Loss,
    Prepared,
    decode,
    dumps,
    encode,
    loads,
    prepare,
)
from perdure.errors import CodecError
from perdure.result import Err, Ok

T = TypeVar("T")


class Color(Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(IntEnum):
    LOW = 1


class Mode(StrEnum):
    FAST = "fast"


class Right(Flag):
    READ = auto()
    WRITE = auto()


@dataclass
class User:
    id: str
    at: datetime
    tags: set[str] = field(default_factory=set)
    balance: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: int
    y: int = 0


@dataclass
class Approved:
    by: str


@dataclass
class Rejected:
    by: str


@dataclass
class Order:
    items: list[Approved | Rejected]
    owner: User | None = None
    colors: dict[Color, int] = field(default_factory=dict)
    anything: Any = None


@dataclass
class Node:
    value: int
    next: Optional["Node"] = None
    children: "list[Node]" = field(default_factory=list)


@dataclass
class Page(Generic[T]):
    items: list[T]
    after: "Page[T] | None" = None


@dataclass
class UserPage(Page[User]):
    total: int = 0


@dataclass(eq=False)
class NoEquality:
    x: int


@dataclass
class Derived:
    parts: list[int]
    total: int = field(init=False)
    limit: ClassVar[int] = 3

    def __post_init__(self) -> None:
        self.total = sum(self.parts)
        self.lock = threading.Lock()
        self.label = f"total {self.total}"

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.total


@dataclass
class Growing:
    """Its finishing touch changes a field each time it is run."""

    price: int

    def __post_init__(self) -> None:
        self.price *= 100


@dataclass
class WithInitVar:
    x: int
    scale: InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.x *= scale


@dataclass(init=False)
class OwnInit:
    x: int

    def __init__(self, text: str) -> None:
        self.x = len(text)


class Record(msgspec.Struct, rename="camel", tag=True):
    first_name: str
    point: Point
    maybe: int | msgspec.UnsetType = msgspec.UNSET


class Pair(NamedTuple):
    left: int
    color: Color = Color.RED


@attrs.define
class Box:
    size: int = attrs.field(validator=attrs.validators.gt(0))
    _hidden: list[Point] = attrs.field(factory=list, alias="secret")
    computed: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.computed = self.size * 2


@attrs.frozen
class Frozen:
    inner: Box


class Account(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    number: int = pydantic.Field(alias="accountNumber")
    tags: list[str] = []
    site: pydantic.HttpUrl | None = None
    color: Color = Color.RED
    created: datetime | None = None
    parts: list["Account"] = []
    point: Point | None = None
    _cents: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("tags", mode="before")
    @classmethod
    def split(cls, value: Any) -> Any:
        return value.split(",")

    def model_post_init(self, _context: Any) -> None:
        self._cents = self.number * 100

    @pydantic.computed_field
    @property
    def doubled(self) -> int:
        return 2 * self.number


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True)

    level: Level
    when: datetime


class Shape(TypedDict):
    corner: Point
    name: str


UserId = NewType("UserId", str)
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
ANN = User("1", NOON, {"a"}, Decimal("1.50"))
CHAIN = Node(1, Node(2, None), [Node(3)])


def settled(value: object, annotation: object) -> Prepared:
    return prepare(value, lambda: annotation)


ROUND_TRIPS: list[tuple[object, Any]] = [
    (ANN, User),
    ([ANN, ANN], list[User]),
    ({"a": ANN}, dict[str, User]),
    ((1, ANN), tuple[int, User]),
    ((ANN, ANN), tuple[User, ...]),
    (None, User | None),
    (ANN, User | None),
    (ANN, Optional[User]),  # noqa: UP045 - the older spelling
    (ANN, Annotated[User, "a note"]),
    (Point(x=1), Point),
    ({Point(x=1), Point(x=2)}, set[Point]),
    (frozenset({Point(x=1)}), frozenset[Point]),
    ({Point(x=1): [Point(x=2)]}, dict[Point, list[Point]]),
    (Approved("a"), Approved | Rejected),
    (Rejected("a"), Approved | Rejected),
    ([Rejected("a"), Approved("b")], list[Approved | Rejected]),
    ([Rejected("a")], list[Approved] | list[Rejected]),
    (Order([Approved("a"), Rejected("b")], ANN, {Color.PAIR: 1}, {1, (2,)}), Order),
    (CHAIN, Node),
    (Page([ANN], Page([])), Page[User]),
    (UserPage([ANN]), UserPage),
    (Page([Page([ANN])]), Page[Page[User]]),
    (Derived([1, 2]), Derived),
    (WithInitVar(2, 3), WithInitVar),
    (OwnInit("abc"), OwnInit),
    (Record("Ann", Point(x=1)), Record),
    (Record("Ann", Point(x=1), 3), Record),
    (Pair(1, Color.PAIR), Pair),
    ([Pair(1)], list[Pair]),
    (Box(1, secret=[Point(x=3)]), Box),
    (Frozen(Box(2)), Frozen),
    (Color.PAIR, Color),
    (Level.LOW, Level),
    (Mode.FAST, Mode),
    (Right.READ | Right.WRITE, Right),
    ({Mode.FAST: Level.LOW}, dict[Mode, Level]),
    ([Color.RED, "red"], list[Color | str]),
    (["red", Color.RED], list[str | Color]),
    (Color.RED, Literal[Color.RED]),
    ({"corner": Point(x=1), "name": "c"}, Shape),
    ([{"corner": Point(x=1), "name": "c"}], list[Shape]),
    (Strict(level=Level.LOW, when=NOON), Strict),
    (Account(accountNumber=7, tags="a,b", site="http://x.y/z", created=NOON, more=(1, 2)), Account),
    (Account(accountNumber=7, parts=[Account(accountNumber=8)], point=Point(x=1)), Account),
    ({"r": Ok(ANN)}, dict[str, Ok[User] | Err[str]]),
    ([Err(Point(x=1), "why")], list[Ok[User] | Err[Point]]),
    ([Ok(1), Err("no")], list[Ok[int] | Err[str]]),
]


@pytest.mark.parametrize(("value", "annotation"), ROUND_TRIPS, ids=lambda each: str(each)[:50])
def test_objects_come_back_by_the_type(value: object, annotation: Any) -> None:
    """The same classes with the same fields, now and after the way through JSON, without a loss."""
    result = settled(value, annotation)
    back = decode(loads(dumps(result.data)), annotation, result.typed)
    assert result.losses == ()
    assert encode(result.value, annotation) == result.data
    assert encode(back, annotation) == result.data
    assert type(back) is type(value)


@pytest.mark.parametrize(("value", "annotation"), ROUND_TRIPS, ids=lambda each: str(each)[:50])
def test_objects_come_back_equal(value: object, annotation: Any) -> None:
    """`==` of the user's own classes agrees."""
    result = settled(value, annotation)
    assert result.value == value
    assert decode(result.data, annotation, result.typed) == value


def test_fields_are_stored_as_a_plain_object() -> None:
    """Other tools see field names and values, not our class."""
    assert settled(ANN, User).data == {
        "id": "1",
        "at": {"~datetime": "2024-05-01T12:00:00+00:00"},
        "tags": {"~set": ["a"]},
        "balance": {"~decimal": "1.50"},
    }


def test_a_class_is_named_only_where_the_type_leaves_a_choice() -> None:
    """Two classes with the same fields are told apart by their names, among those of the type."""
    assert settled(Approved("a"), Approved | Rejected).data == {"by": "a"}
    data = settled(Rejected("a"), Approved | Rejected).data
    assert data == {"~named": {"~record": ["Rejected", {"by": "a"}]}}
    assert decode(data) == {"by": "a"}


def test_a_stored_name_finds_no_class_outside_the_type() -> None:
    """A name in the data chooses among the annotated classes and can bring in no other."""
    data = {"~named": {"~record": ["Point", {"x": 1, "y": 2}]}}
    assert decode(data, Approved | Rejected, typed=True) == {"x": 1, "y": 2}
    with pytest.raises(CodecError, match="Point where the type says Approved"):
        decode(data, Approved, typed=True)


def test_equality_is_not_asked_of_the_class() -> None:
    """A class without `__eq__` comes back without a loss."""
    result = settled(NoEquality(3), NoEquality)
    assert result.losses == ()
    assert dataclasses.asdict(result.value) == {"x": 3}


def test_a_class_that_keeps_its_hash_can_be_hashed() -> None:
    """attrs keeps a computed hash in the instance; one that came back has a place for it too."""

    @attrs.frozen(cache_hash=True)
    class Keeper:
        x: int

    assert hash(settled(Keeper(1), Keeper).value) == hash(Keeper(1))


def test_derived_attributes_are_derived_again() -> None:
    """What `__post_init__` makes beside the fields is there again, also what is no data."""
    value = Derived([1, 2])
    assert value.double == 6
    back = settled(value, Derived).value
    assert isinstance(back, Derived)
    assert (back.label, back.double) == ("total 3", 6)
    assert back.lock is not value.lock


def test_a_finishing_touch_does_not_touch_twice() -> None:
    """Fields are as they were stored, whatever `__post_init__` would make of them."""
    result = settled(Growing(2), Growing)
    assert result.value == Growing(2)
    assert result.losses == ()


def test_validators_do_not_run_on_their_own_output() -> None:
    """A validator that splits a text is not handed the list it made."""
    value = Account(accountNumber=7, tags="a,b")
    back = settled(value, Account).value
    assert isinstance(back, Account)
    assert (back.tags, back._cents, back.doubled) == (["a", "b"], 700, 14)


def test_a_changed_private_attribute_is_a_loss() -> None:
    """What is no field and is not derived cannot come back, and it is said where."""
    value = Account(accountNumber=7)
    value._cents = 5
    assert settled(value, Account).losses == (Loss("value._cents", "non-json"),)


def test_a_secret_is_not_stored() -> None:
    """pydantic hides a secret when it is written: it is lost, and said to be."""

    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    result = settled(Login(password=pydantic.SecretStr("hunter2")), Login)
    assert b"hunter2" not in dumps(result.data)
    assert [loss.path for loss in result.losses] == ["value.password"]


def test_without_a_type_objects_become_their_fields() -> None:
    """Each object is named; the function sees now what it would see later."""
    result = settled({"user": Point(x=1), "color": Color.RED, "key": {Point(x=2): 1}}, None)
    assert result.value == {
        "user": {"x": 1, "y": 0},
        "color": "red",
        "key": {"Point(x=2, y=0)": 1},
    }
    assert [loss.path for loss in result.losses] == [
        "value.user",
        "value.color",
        "value.key.keys[0]",
    ]
    assert not result.typed
    assert decode(result.data) == result.value


@pytest.mark.parametrize(
    "annotation", [Any, int, dict[str, Any], Rejected, object, "User", str | int]
)
def test_a_type_that_does_not_tell_is_as_good_as_none(annotation: object) -> None:
    """The value is what decoding gives, and there is a loss; nothing is raised."""
    result = settled({"user": Point(x=1)}, annotation)
    assert result.value == {"user": {"x": 1, "y": 0}}
    assert result.losses == (Loss("value.user", "non-json"),)


def test_a_subclass_of_the_annotated_class_is_a_loss() -> None:
    """Only the annotated class is known when the value is read: the function sees it at once."""

    @dataclass
    class Admin(Approved):
        level: int = 0

    result = settled(Admin("ann", 3), Approved)
    assert result.value == Approved("ann")
    assert result.typed
    assert len(result.losses) == 1


def test_the_type_is_asked_only_when_needed() -> None:
    """Values that come back by themselves cost no look at annotations."""

    def never() -> object:
        raise AssertionError

    assert prepare({"a": (1, {2})}, never).losses == ()
    assert prepare([1, "x"], never).losses == ()


def test_annotations_about_plain_values_are_not_enforced() -> None:
    """The function gave a text where the class says number: it sees the same again."""
    value = Point(x="one", y=None)
    result = settled(value, Point)
    assert result.value == value
    assert result.losses == ()


def test_fields_may_be_added_and_removed_between_deploys() -> None:
    """A missing field takes its default, an unknown one is left out, a needed one is an error."""
    assert decode({"x": 3, "gone": 1}, Point, typed=True) == Point(x=3)
    with pytest.raises(CodecError, match=r"Point without its field 'x'.*value\[0\]"):
        decode([{"y": 3}], list[Point], typed=True)


def test_a_value_that_is_no_member_any_more_is_an_error() -> None:
    """An Enum whose member was removed cannot be guessed."""
    with pytest.raises(CodecError, match="'blue' is no Color"):
        decode({"a": "blue"}, dict[str, Color], typed=True)


def test_typed_data_need_a_type() -> None:
    """Data that were written for a type are never handed out as something else."""
    with pytest.raises(CodecError, match="returns="):
        decode({"x": 1}, None, typed=True)


def test_losses_and_types_go_together() -> None:
    """A field that is no data is lost, and the object around it still comes back."""
    result = settled(Order([], anything=print), Order)
    assert result.value == Order([])
    assert result.losses == (Loss("value.anything", "non-json"),)
    assert decode(result.data, Order, result.typed) == Order([])


def test_objects_that_hold_themselves() -> None:
    """A way back is cut, in objects as in lists."""
    node = Node(1)
    node.next = node
    result = settled(node, Node)
    assert result.value == Node(1)
    assert result.losses == (Loss("value.next", "circular"),)


@dataclass
class Add:
    left: "Add | Mul | None"
    right: Point


@dataclass
class Mul:
    left: "Add | Mul | None"
    right: Point


def test_guessing_ends() -> None:
    """Data that fit no alternative at any level are refused soon, not after every combination."""
    data: JSONValue = None
    for _ in range(80):
        data = {"left": data, "right": {"no": "point"}}
    with pytest.raises(CodecError, match="Point without its field"):
        decode(data, Add | Mul, typed=True)


def test_names_that_would_be_too_deep_are_left_out() -> None:
    """A value as deep as allowed is stored as its fields, with a loss where they mislead."""
    value: Any = Rejected("a")
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    annotation: Any = Approved | Rejected
    for _ in range(MAX_DEPTH - 1):
        annotation = list[annotation]
    result = settled(value, annotation)
    assert len(result.losses) == 1
    assert encode(decode(result.data, annotation, typed=True), annotation) == result.data


def test_local_classes_come_back() -> None:
    """A class inside a function, that names itself, needs no module to be found in."""

    @dataclass
    class Local:
        inner: "Local | None" = None
        unknown: "Nowhere | None" = None  # noqa: F821 - on purpose

    value = Local(Local())
    assert settled(value, Local).value == value


def test_no_optional_library_is_imported() -> None:
    """pydantic and attrs are known when a user's class comes with them, and not before."""
    check = "import sys, perdure.codec; print({'pydantic', 'attr', 'attrs'} & set(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "set()"
