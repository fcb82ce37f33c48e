"""`Ok` and `Err`: results of runs and steps for failures that callers should handle.

Use `match` or `if result:`; type checkers verify that both cases are handled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeAlias, TypeVar

from perdure.errors import UnwrapError

T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)
T = TypeVar("T")
E = TypeVar("E")
U = TypeVar("U")
F = TypeVar("F")


@dataclass(frozen=True, slots=True, repr=False)
class Ok(Generic[T_co]):
    """A success with its `value`."""

    value: T_co
    ok: ClassVar[Literal[True]] = True

    def __bool__(self) -> Literal[True]:
        """Return `True`, whatever the value is."""
        return True

    def unwrap(self) -> T_co:
        """Return the value."""
        return self.value

    def unwrap_or(self, default: object) -> T_co:
        """Return the value; only `Err` uses the default."""
        return self.value

    def map(self, change: Callable[[T_co], U]) -> "Ok[U]":
        """Return `Ok(change(value))`."""
        return Ok(change(self.value))

    def map_err(self, change: Callable[[Any], object]) -> "Ok[T_co]":
        """Return this `Ok` unchanged."""
        return self

    def and_then(self, then: Callable[[T_co], "Ok[U] | Err[F]"]) -> "Ok[U] | Err[F]":
        """Return `then(value)`, another result."""
        return then(self.value)

    def __repr__(self) -> str:
        return f"Ok({self.value!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Err(Generic[E_co]):
    """A failure with its `error`, and optionally the `cause` that led to it."""

    error: E_co
    cause: object = None
    ok: ClassVar[Literal[False]] = False

    def __bool__(self) -> Literal[False]:
        """Return `False`, whatever the error is."""
        return False

    def unwrap(self) -> NoReturn:
        """Raise the error if it is an exception, else `UnwrapError` from the cause."""
        if isinstance(self.error, BaseException):
            raise self.error
        cause = self.cause if isinstance(self.cause, BaseException) else None
        raise UnwrapError(self.error) from cause

    def unwrap_or(self, default: U) -> U:
        """Return the default."""
        return default

    def map(self, change: Callable[[Any], object]) -> "Err[E_co]":
        """Return this `Err` unchanged."""
        return self

    def map_err(self, change: Callable[[E_co], F]) -> "Err[F]":
        """Return `Err(change(error))` with the same cause."""
        return Err(change(self.error), self.cause)

    def and_then(self, then: Callable[[Any], object]) -> "Err[E_co]":
        """Return this `Err` unchanged, without calling `then`."""
        return self

    def __repr__(self) -> str:
        if self.cause is None:
            return f"Err({self.error!r})"
        return f"Err({self.error!r}, cause={self.cause!r})"


Result: TypeAlias = Ok[T] | Err[E]
