"""A step function's annotation says what it gives back, however it is wrapped."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from perdure.codec import return_type
from perdure.result import Err, Ok, Result

T = TypeVar("T")


@dataclass
class User:
    id: str


async def fetch(id: str) -> User: ...


def coroutine() -> Coroutine[Any, Any, User]: ...


def awaitable_result() -> Awaitable[Result[User, str]]: ...


async def result() -> Result[list[User], str]: ...


async def either() -> Ok[User] | Ok[int] | Err[str] | None: ...


async def only_err() -> Err[str]: ...


async def optional() -> User | None: ...


async def many() -> dict[str, list[User]]: ...


async def anything() -> Any: ...


async def nothing() -> None: ...


async def variable(value: T) -> T:
    return value


async def unknown() -> Nowhere: ...  # noqa: F821


async def bad_argument(value: Nowhere) -> User: ...  # noqa: F821


async def bare_ok() -> Ok: ...


class Service:
    async def fetch(self) -> User: ...

    @classmethod
    async def of_class(cls) -> User: ...

    @staticmethod
    async def static() -> User: ...

    async def __call__(self) -> User: ...


def logged(fn: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(fn)
    def wrapper(*args: object) -> T:
        return fn(*args)

    return wrapper


KNOWN: list[tuple[Any, Any]] = [
    (fetch, User),
    (coroutine, User),
    (awaitable_result, User),
    (result, list[User]),
    (either, User | int | None),
    (optional, User | None),
    (many, dict[str, list[User]]),
    (bad_argument, User),
    (Service().fetch, User),
    (Service.of_class, User),
    (Service.static, User),
    (Service(), User),
    (functools.partial(fetch, "1"), User),
    (functools.partial(functools.partial(fetch), "1"), User),
    (logged(fetch), User),
    (User, User),
]


def named(each: object) -> str:
    """The same name in every process: without the address that functions show."""
    return str(each).partition(" at 0x")[0][:40]


@pytest.mark.parametrize(("fn", "wanted"), KNOWN, ids=named)
def test_the_type_of_the_value(fn: Any, wanted: Any) -> None:
    """Awaitables are awaited and results unwrapped."""
    assert return_type(fn) == wanted
    assert return_type(fn) == wanted


UNKNOWN: list[Any] = [
    anything,
    nothing,
    variable,
    unknown,
    only_err,
    bare_ok,
    lambda: 1,
    print,
    functools.partial(print),
    None,
    5,
    "text",
]


@pytest.mark.parametrize("fn", UNKNOWN, ids=named)
def test_what_is_not_known_is_none(fn: Any) -> None:
    """No annotation, one that says nothing, or one that has no meaning here."""
    assert return_type(fn) is None


def test_local_functions_have_their_own_types() -> None:
    """Functions of the same code that were made with different classes are not confused."""

    def make(cls: type) -> Callable[[], object]:
        def made() -> cls:
            return cls()

        return made

    assert return_type(make(User)) is User
    assert return_type(make(Service)) is Service


def test_generic_callables_have_types_too() -> None:
    """Objects that are called carry the annotation on their class."""

    class Fetcher:
        def __call__(self) -> list[User]:
            return []

    assert return_type(Fetcher()) == list[User]
