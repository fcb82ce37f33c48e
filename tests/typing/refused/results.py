"""Misuse of results that an editor must underline."""

from typing import assert_never

from perdure.result import Err, Ok, Result


def half(number: int) -> Result[int, str]:
    return Ok(number // 2) if number % 2 == 0 else Err("odd")


def use() -> str:
    result = half(4)
    if isinstance(result, Ok):
        return result.value  # refused
    return result.error


def ask() -> int:
    result = half(4)
    if result:
        return result.error  # refused
    return result.value  # refused


def give() -> Result[int, str]:
    return Ok("text")  # refused


def forget_an_arm() -> int:
    result = half(4)
    match result:
        case Ok(value):
            return value
        case _:
            assert_never(result)  # refused
