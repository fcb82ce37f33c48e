"""Misuse of results that an editor must underline."""

from perdure.result import Err, Ok, Result


def half(number: int) -> Result[int, str]:
    return Ok(number // 2) if number % 2 == 0 else Err("odd")


def use() -> str:
    result = half(4)
    if isinstance(result, Ok):
        return result.value  # refused
    return result.error


def give() -> Result[int, str]:
    return Ok("text")  # refused
