"""`Ok` and `Err`: what a run or a step gives back when failure is an answer and not an accident.

Take them apart with `match`, or ask `if result:`; type checkers see that nothing was forgotten.
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
    """A success that holds `value`."""

    value: T_co
    ok: ClassVar[Literal[True]] = True

    def __bool__(self) -> Literal[True]:
        """A success is true, whatever it holds."""
        return True

    def unwrap(self) -> T_co:
        """Give the value."""
        return self.value

    def unwrap_or(self, default: object) -> T_co:
        """Give the value; the default is for `Err`."""
        return self.value

    def map(self, change: Callable[[T_co], U]) -> "Ok[U]":
        """Give `Ok` of the changed value."""
        return Ok(change(self.value))

    def map_err(self, change: Callable[[Any], object]) -> "Ok[T_co]":
        """Give this same `Ok`; only an `Err` is changed."""
        return self

    def and_then(self, then: Callable[[T_co], "Ok[U] | Err[F]"]) -> "Ok[U] | Err[F]":
        """Give what `then` makes of the value."""
        return then(self.value)

    def __repr__(self) -> str:
        return f"Ok({self.value!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Err(Generic[E_co]):
    """A failure that holds `error`, and in `cause` what led to it when that is known."""

    error: E_co
    cause: object = None
    ok: ClassVar[Literal[False]] = False

    def __bool__(self) -> Literal[False]:
        """A failure is false, whatever it holds."""
        return False

    def unwrap(self) -> NoReturn:
        """Raise the error itself when it is an exception, else `UnwrapError` from the cause."""
        if isinstance(self.error, BaseException):
            raise self.error
        cause = self.cause if isinstance(self.cause, BaseException) else None
        raise UnwrapError(self.error) from cause

    def unwrap_or(self, default: U) -> U:
        """Give the default."""
        return default

    def map(self, change: Callable[[Any], object]) -> "Err[E_co]":
        """Give this same `Err`; only an `Ok` is changed."""
        return self

    def map_err(self, change: Callable[[E_co], F]) -> "Err[F]":
        """Give `Err` of the changed error, with the same cause."""
        return Err(change(self.error), self.cause)

    def and_then(self, then: Callable[[Any], object]) -> "Err[E_co]":
        """Give this same `Err`; nothing comes after it."""
        return self

    def __repr__(self) -> str:
        if self.cause is None:
            return f"Err({self.error!r})"
        return f"Err({self.error!r}, cause={self.cause!r})"


Result: TypeAlias = Ok[T] | Err[E]
