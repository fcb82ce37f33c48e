"""`Ok` and `Err`."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import get_type_hints

import pytest

from perdure.errors import UnwrapError
from perdure.result import Err, Ok, Result


def halved(number: int) -> Result[int, str]:
    return Err("odd") if number % 2 else Ok(number // 2)


def described(result: Result[int, str]) -> str:
    match result:
        case Ok(value):
            return f"value {value}"
        case Err(error, None):
            return f"error {error}"
        case Err(error, cause):
            return f"error {error} because {cause}"


def test_results_can_be_matched() -> None:
    """`match` binds the value, or the error and the cause."""
    assert described(halved(4)) == "value 2"
    assert described(halved(3)) == "error odd"
    assert described(Err("odd", "rain")) == "error odd because rain"


def test_ok_distinguishes_success_and_failure() -> None:
    """`.ok` is True for `Ok` and False for `Err`, as in stored records."""
    assert Ok(0).ok is True
    assert Err(0).ok is False


def test_a_success_is_true_and_a_failure_false() -> None:
    """Whatever they contain."""
    assert [bool(Ok(0)), bool(Ok(None)), bool(Err(1))] == [True, True, False]


def test_unwrap_returns_the_value() -> None:
    """Even if it is None."""
    assert Ok(5).unwrap() == 5
    assert Ok(None).unwrap() is None


def test_unwrap_raises_the_error_itself() -> None:
    """If it is an exception."""
    boom = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as raised:
        Err(boom).unwrap()
    assert raised.value is boom


def test_unwrap_of_a_plain_error_raises_from_the_cause() -> None:
    """An error that is not an exception is raised as `UnwrapError` from the cause."""
    cause = KeyError("user")
    with pytest.raises(UnwrapError, match="NOT_FOUND") as raised:
        Err("NOT_FOUND", cause).unwrap()
    assert raised.value.error == "NOT_FOUND"
    assert raised.value.__cause__ is cause


def test_unwrap_ignores_a_cause_that_is_not_an_exception() -> None:
    with pytest.raises(UnwrapError) as raised:
        Err("NOT_FOUND", {"id": 1}).unwrap()
    assert raised.value.__cause__ is None


def test_unwrap_or_returns_the_value_or_the_default() -> None:
    assert Ok(1).unwrap_or(9) == 1
    assert Err("x").unwrap_or(9) == 9


def test_map_changes_only_values() -> None:
    """An `Err` is returned unchanged."""
    failed: Result[int, str] = Err("x", "why")
    assert Ok(2).map(str) == Ok("2")
    assert failed.map(str) is failed


def test_map_err_changes_only_errors() -> None:
    """The cause is kept, and an `Ok` is returned unchanged."""
    fine: Result[int, str] = Ok(2)
    assert Err("x", "why").map_err(str.upper) == Err("X", "why")
    assert fine.map_err(str.upper) is fine


def test_and_then_stops_at_the_first_err() -> None:
    assert halved(8).and_then(halved) == Ok(2)
    assert halved(6).and_then(halved) == Err("odd")
    assert halved(5).and_then(halved) == Err("odd")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Ok(1), "Ok(1)"),
        (Ok("a"), "Ok('a')"),
        (Err("x"), "Err('x')"),
        (Err("x", ValueError("y")), "Err('x', cause=ValueError('y'))"),
    ],
)
def test_the_repr_is_the_expression(result: object, text: str) -> None:
    assert repr(result) == text


@pytest.mark.parametrize("result", [Ok([1]), Err("x", [1])])
def test_results_are_values(result: Ok[list[int]] | Err[str]) -> None:
    """They compare by their content, and can be copied and pickled."""
    assert copy.deepcopy(result) == result
    assert pickle.loads(pickle.dumps(result)) == result


def test_results_are_immutable() -> None:
    """Attributes can be neither changed nor added."""
    with pytest.raises(FrozenInstanceError):
        Ok(1).value = 2  # type: ignore[misc]  # what is tested
    assert not hasattr(Ok(1), "__dict__")
    assert not hasattr(Err(1), "__dict__")


def test_the_alias_can_be_subscripted_at_run_time() -> None:
    """`Result[User, str]` works in annotations that are evaluated."""

    def fetched() -> Result[int, str]:
        return Ok(1)

    assert get_type_hints(fetched) == {"return": Ok[int] | Err[str]}
