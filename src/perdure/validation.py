"""Checks that public parameters share: the value comes back, or the error names the parameter."""

from collections.abc import Iterable
from random import Random

from perdure.errors import InvalidArgument

MAX_ID_LENGTH = 512


def check_flag(value: object, parameter: str) -> bool:
    """Give the flag back, or raise: True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise InvalidArgument(parameter, value, "True or False")
    return value


def check_int(value: object, parameter: str, *, minimum: int = 1) -> int:
    """Give the whole number back, or raise: at least `minimum`, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgument(parameter, value, f"a whole number, {minimum} or more")
    return value


def check_text(value: object, parameter: str, expected: str) -> str:
    """Give the text back as a plain `str`, or raise: not empty, and without lone surrogates."""
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise InvalidArgument(parameter, value, expected)
    return str.__str__(value)


def is_encodable(text: str) -> bool:
    """Tell whether a text has a form in UTF-8, as all that is written must."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_random(value: object, parameter: str = "random") -> Random:
    """Give the source of chance back, or raise."""
    if not isinstance(value, Random):
        raise InvalidArgument(parameter, value, "a random.Random")
    return value


def check_id(id: object, parameter: str = "id") -> str:
    """Give the id back, or raise: non-empty text up to 512 characters without NUL."""
    expected = f"non-empty text of at most {MAX_ID_LENGTH} characters without NUL"
    if not isinstance(id, str) or not id:
        raise InvalidArgument(parameter, id, expected)
    if len(id) > MAX_ID_LENGTH or "\0" in id or not is_encodable(id):
        raise InvalidArgument(parameter, id, expected)
    return id


def check_prefix(prefix: object, parameter: str = "prefix") -> str:
    """Give the prefix back, or raise: text up to 512 characters without NUL; empty is no prefix."""
    return "" if prefix == "" else check_id(prefix, parameter)


def check_limit(limit: object, parameter: str = "limit") -> int:
    """Give the limit back, or raise: a whole number, zero or more."""
    return check_int(limit, parameter, minimum=0)


def check_errors(errors: object) -> tuple[type[BaseException], ...]:
    """Give the declared exception classes as a tuple, or raise."""
    expected = "a list of exception classes"
    if not isinstance(errors, Iterable) or isinstance(errors, str):
        raise InvalidArgument("errors", errors, expected)
    declared = tuple(errors)
    for error in declared:
        if not isinstance(error, type) or not issubclass(error, BaseException):
            raise InvalidArgument("errors", error, expected)
    return declared
