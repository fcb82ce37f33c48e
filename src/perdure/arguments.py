"""Checks that public parameters share: the value comes back, or the error names the parameter."""

from random import Random

from perdure.errors import InvalidArgument


def check_flag(value: object, parameter: str) -> bool:
    """Give the flag back, or raise: True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise InvalidArgument(parameter, value, "True or False")
    return value


def check_whole(value: object, parameter: str, *, least: int = 1) -> int:
    """Give the whole number back, or raise: at least `least`, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(parameter, value, f"a whole number, {least} or more")
    return value


def check_text(value: object, parameter: str, wanted: str) -> str:
    """Give the text back as a plain `str`, or raise: not empty, and without lone surrogates."""
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise InvalidArgument(parameter, value, wanted)
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
