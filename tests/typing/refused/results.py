"""Misuse of results."""

from typing import assert_never

from perdure.result import Err, Ok, Result


def half(number: int) -> Result[int, str]:
    return Ok(number // 2) if number % 2 == 0 else Err("odd")


def return_the_wrong_type() -> str:
    result = half(4)
    if isinstance(result, Ok):
        return result.value  # refused
    return result.error


def read_the_wrong_attribute() -> int:
    result = half(4)
    if result:
        return result.error  # refused
    return result.value  # refused


def wrap_the_wrong_type() -> Result[int, str]:
    return Ok("text")  # refused


def forget_a_case() -> int:
    result = half(4)
    match result:
        case Ok(value):
            return value
        case _:
            assert_never(result)  # refused
