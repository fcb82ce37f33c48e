"""The types of results: `match` and `if` are exhaustive."""

from typing import assert_never, assert_type

from perdure import Err, Ok, Result


def half(number: int) -> Result[int, str]:
    return Ok(number // 2) if number % 2 == 0 else Err("odd")


def match_both() -> str:
    match half(4):
        case Ok(value):
            assert_type(value, int)
            return str(value)
        case Err(error):
            assert_type(error, str)
            return error


def match_with_the_cause() -> object:
    result = half(4)
    match result:
        case Ok(value):
            return value
        case Err(error, cause):
            assert_type(cause, object)
            return error
        case _:
            assert_never(result)


def narrow_by_truth() -> int:
    result = half(4)
    if result:
        assert_type(result, Ok[int])
        return result.value
    assert_type(result, Err[str])
    return len(result.error)


def narrow_by_class() -> int:
    result = half(4)
    if isinstance(result, Err):
        return len(result.error)
    return result.value


def narrow_by_ok() -> int:
    result = half(4)
    if result.ok is True:
        return result.value
    return len(result.error)


def chain() -> None:
    assert_type(half(4).unwrap(), int)
    assert_type(half(4).unwrap_or(0), int)
    assert_type(half(4).map(str), Ok[str] | Err[str])
    assert_type(half(4).map_err(len), Ok[int] | Err[int])
    assert_type(half(4).and_then(half), Ok[int] | Err[str])
