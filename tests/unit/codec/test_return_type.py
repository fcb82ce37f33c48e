"""The return type of a step's function is known, however it is wrapped."""

# Only the signatures matter here.
# mypy: disable-error-code="empty-body"

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


async def unknown() -> Nowhere: ...  # type: ignore[name-defined] # noqa: F821 - cannot be resolved


async def bad_argument(value: Nowhere) -> User: ...  # type: ignore[name-defined] # noqa: F821


async def bare_ok() -> Ok: ...  # type: ignore[type-arg] # what users write


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


@pytest.mark.parametrize(("fn", "expected"), KNOWN, ids=named)
def test_the_type_is_that_of_the_value(fn: Any, expected: Any) -> None:
    """Awaitables are awaited and results unwrapped."""
    assert return_type(fn) == expected
    assert return_type(fn) == expected


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
def test_an_unknown_return_type_is_none(fn: Any) -> None:
    """Without an annotation, or with one that is unspecific or cannot be resolved."""
    assert return_type(fn) is None


def test_local_functions_have_their_own_types() -> None:
    """Functions with the same code but different closures are not confused."""

    def make(cls: type) -> Callable[[], object]:
        def create() -> cls:  # type: ignore[valid-type] # resolved in the closure at run time
            return cls()  # type: ignore[no-any-return]

        return create

    assert return_type(make(User)) is User
    assert return_type(make(Service)) is Service


def test_callable_objects_have_return_types() -> None:
    """The annotation is that of `__call__`."""

    class Fetcher:
        def __call__(self) -> list[User]:
            return []

    assert return_type(Fetcher()) == list[User]
