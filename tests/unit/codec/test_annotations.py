"""Objects with fields are stored as their fields and restored by the step's return type."""

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
    cast,
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
    """Its `__post_init__` changes a field each time it runs."""

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

    @pydantic.computed_field  # type: ignore[prop-decorator] # pydantic documents this order
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


def account(**fields: Any) -> Account:
    """Validate fields of types that only the validators accept."""
    return Account.model_validate(fields)


def prepared(value: object, annotation: object) -> Prepared:
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
    (account(accountNumber=7, tags="a,b", site="http://x.y/z", created=NOON, more=(1, 2)), Account),
    (Account(accountNumber=7, parts=[Account(accountNumber=8)], point=Point(x=1)), Account),
    ({"r": Ok(ANN)}, dict[str, Ok[User] | Err[str]]),
    ([Err(Point(x=1), "why")], list[Ok[User] | Err[Point]]),
    ([Ok(1), Err("no")], list[Ok[int] | Err[str]]),
]


@pytest.mark.parametrize(("value", "annotation"), ROUND_TRIPS, ids=lambda case: str(case)[:50])
def test_objects_are_restored_by_their_type(value: object, annotation: Any) -> None:
    """Same classes, same fields, no losses: as the function sees them and after decoding."""
    result = prepared(value, annotation)
    restored = decode(loads(dumps(result.data)), annotation, result.typed)
    assert result.losses == ()
    assert encode(result.value, annotation) == result.data
    assert encode(restored, annotation) == result.data
    assert type(restored) is type(value)


@pytest.mark.parametrize(("value", "annotation"), ROUND_TRIPS, ids=lambda case: str(case)[:50])
def test_restored_objects_are_equal(value: object, annotation: Any) -> None:
    """By `__eq__` of the user's classes."""
    result = prepared(value, annotation)
    assert result.value == value
    assert decode(result.data, annotation, result.typed) == value


def test_fields_are_stored_as_a_plain_object() -> None:
    """Other tools see field names and values, not a class."""
    assert prepared(ANN, User).data == {
        "id": "1",
        "at": {"~datetime": "2024-05-01T12:00:00+00:00"},
        "tags": {"~set": ["a"]},
        "balance": {"~decimal": "1.50"},
    }


def test_a_versioned_class_is_refused() -> None:
    """A later version may store `$v` among the fields; here it would be ignored."""
    data = prepared(ANN, User).data
    with pytest.raises(CodecError, match=r"User has a version \('\$v'\)"):
        decode({"$v": 2, **data}, User, typed=True)


def test_a_users_field_that_is_named_like_the_version_is_escaped() -> None:
    """Only a class that accepts any field can have one."""
    value = Account.model_validate({"accountNumber": 1, "$v": NOON})
    result = prepared(value, Account)
    assert (result.losses, list(result.data)) == ((), ["~"])
    assert decode(result.data, Account, typed=True) == value


def test_a_class_is_named_only_if_the_type_is_ambiguous() -> None:
    """Two classes with the same fields are distinguished by their names."""
    assert prepared(Approved("a"), Approved | Rejected).data == {"by": "a"}
    data = prepared(Rejected("a"), Approved | Rejected).data
    assert data == {"~named": {"~record": ["Rejected", {"by": "a"}]}}
    assert decode(data) == {"by": "a"}


def test_a_stored_name_selects_only_among_the_annotated_classes() -> None:
    """A name in the data never leads to another class."""
    data = {"~named": {"~record": ["Point", {"x": 1, "y": 2}]}}
    assert decode(data, Approved | Rejected, typed=True) == {"x": 1, "y": 2}
    with pytest.raises(CodecError, match="expected Approved, got Point"):
        decode(data, Approved, typed=True)


def test_a_class_without_equality_is_restored() -> None:
    """Fields are compared, so `__eq__` is not needed."""
    result = prepared(NoEquality(3), NoEquality)
    assert result.losses == ()
    assert dataclasses.asdict(result.value) == {"x": 3}


def test_a_restored_attrs_instance_can_cache_its_hash() -> None:
    """The attribute in which attrs caches the hash exists."""

    @attrs.frozen(cache_hash=True)
    class Keeper:
        x: int

    assert hash(prepared(Keeper(1), Keeper).value) == hash(Keeper(1))


def test_attributes_set_by_post_init_are_restored() -> None:
    """This includes those that are not data, such as a lock."""
    value = Derived([1, 2])
    assert value.double == 6
    restored = prepared(value, Derived).value
    assert isinstance(restored, Derived)
    assert (restored.label, restored.double) == ("total 3", 6)
    assert restored.lock is not value.lock


def test_post_init_does_not_change_restored_fields() -> None:
    """Fields have their stored values, whatever `__post_init__` sets."""
    result = prepared(Growing(2), Growing)
    assert result.value == Growing(2)
    assert result.losses == ()


def test_validators_do_not_run_on_their_own_output() -> None:
    """A validator that splits a string is not called with the resulting list."""
    value = account(accountNumber=7, tags="a,b")
    restored = prepared(value, Account).value
    assert isinstance(restored, Account)
    assert (restored.tags, restored._cents, restored.doubled) == (["a", "b"], 700, 14)


def test_a_changed_private_attribute_is_a_loss() -> None:
    """An attribute that is neither a field nor derived cannot be restored; its path is reported."""
    value = Account(accountNumber=7)
    value._cents = 5
    assert prepared(value, Account).losses == (Loss("value._cents", "non-json"),)


def test_a_pydantic_secret_is_not_stored() -> None:
    """pydantic masks a secret when it is dumped, so it is reported as a loss."""

    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    result = prepared(Login(password=pydantic.SecretStr("hunter2")), Login)
    assert b"hunter2" not in dumps(result.data)
    assert [loss.path for loss in result.losses] == ["value.password"]


def test_without_a_type_objects_become_their_fields() -> None:
    """Each object is a loss, and the function sees the fields the first time too."""
    result = prepared({"user": Point(x=1), "color": Color.RED, "key": {Point(x=2): 1}}, None)
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
def test_an_unhelpful_type_is_ignored(annotation: object) -> None:
    """The value is the decoded data and a loss is reported; nothing is raised."""
    result = prepared({"user": Point(x=1)}, annotation)
    assert result.value == {"user": {"x": 1, "y": 0}}
    assert result.losses == (Loss("value.user", "non-json"),)


def test_a_subclass_of_the_annotated_class_is_a_loss() -> None:
    """It is restored as the annotated class, and the function sees that the first time too."""

    @dataclass
    class Admin(Approved):
        level: int = 0

    result = prepared(Admin("ann", 3), Approved)
    assert result.value == Approved("ann")
    assert result.typed
    assert len(result.losses) == 1


def test_annotations_are_evaluated_only_when_needed() -> None:
    """Not for values that are restored without a type."""

    def never() -> object:
        raise AssertionError

    assert prepare({"a": (1, {2})}, never).losses == ()
    assert prepare([1, "x"], never).losses == ()


def test_annotations_about_plain_values_are_not_enforced() -> None:
    """A string in a field annotated as int is restored as a string."""
    value = Point(x=cast(Any, "one"), y=cast(Any, None))
    result = prepared(value, Point)
    assert result.value == value
    assert result.losses == ()


def test_fields_may_be_added_and_removed_between_deploys() -> None:
    """Missing fields get their default, unknown ones are dropped, required ones are an error."""
    assert decode({"x": 3, "removed": 1}, Point, typed=True) == Point(x=3)
    with pytest.raises(CodecError, match=r"Point: field 'x' is missing.*value\[0\]"):
        decode([{"y": 3}], list[Point], typed=True)


def test_a_removed_enum_member_is_an_error() -> None:
    with pytest.raises(CodecError, match="'blue' is not a Color"):
        decode({"a": "blue"}, dict[str, Color], typed=True)


def test_typed_data_cannot_be_decoded_without_a_type() -> None:
    """They are never returned as something else."""
    with pytest.raises(CodecError, match="returns="):
        decode({"x": 1}, None, typed=True)


def test_a_lost_field_does_not_prevent_restoring_its_object() -> None:
    """A field that is not data is lost, and the object around it is restored."""
    result = prepared(Order([], anything=print), Order)
    assert result.value == Order([])
    assert result.losses == (Loss("value.anything", "non-json"),)
    assert decode(result.data, Order, result.typed) == Order([])


def test_a_cycle_of_objects_is_cut() -> None:
    """In objects as in lists."""
    node = Node(1)
    node.next = node
    result = prepared(node, Node)
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


def test_the_alternatives_of_unions_are_limited() -> None:
    """Data that fit no alternative at any level are refused before every combination was tried."""
    data: JSONValue = None
    for _ in range(80):
        data = {"left": data, "right": {"no": "point"}}
    with pytest.raises(CodecError, match="Point: field 'x' is missing"):
        decode(data, Add | Mul, typed=True)


def test_names_that_exceed_the_depth_limit_are_omitted() -> None:
    """A value at the limit is stored as its fields, with a loss where they are ambiguous."""
    value: Any = Rejected("a")
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    annotation: Any = Approved | Rejected
    for _ in range(MAX_DEPTH - 1):
        annotation = list[annotation]
    result = prepared(value, annotation)
    assert len(result.losses) == 1
    assert encode(decode(result.data, annotation, typed=True), annotation) == result.data


def test_local_classes_are_restored() -> None:
    """A class inside a function that refers to itself is resolved without its module."""

    @dataclass
    class Local:
        inner: "Local | None" = None
        unknown: "Nowhere | None" = None  # type: ignore[name-defined] # noqa: F821 - cannot be resolved

    value = Local(Local())
    assert prepared(value, Local).value == value


def test_the_codec_imports_no_optional_library() -> None:
    """pydantic and attrs are used only if the user has imported them."""
    check = "import sys, perdure.codec; print({'pydantic', 'attr', 'attrs'} & set(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"
