"""Argument checks: each returns the value, or raises an error that names the parameter."""

from collections.abc import Iterable
from random import Random
from typing import Literal, TypeAlias, get_args

from perdure.errors import InvalidArgument

MAX_ID_LENGTH = 512
_EXPECTED_ID = f"a non-empty string of at most {MAX_ID_LENGTH} characters without NUL"

Reaction: TypeAlias = Literal["warn", "error", "ignore"]
"""What to do about a suspicious condition."""

RESERVED = "~"
"""The prefix of the engine's own runs, workflows, events and steps, such as `~cancel`."""


def check_flag(value: object, parameter: str) -> bool:
    """Check for exactly `True` or `False`."""
    if not isinstance(value, bool):
        raise InvalidArgument(parameter, value, "True or False")
    return value


def check_reaction(value: object, parameter: str) -> Reaction:
    """Check for `"warn"`, `"error"` or `"ignore"`."""
    reactions: tuple[Reaction, ...] = get_args(Reaction)
    for reaction in reactions:
        if value == reaction:
            return reaction
    raise InvalidArgument(parameter, value, "'warn', 'error' or 'ignore'")


def check_int(value: object, parameter: str, *, minimum: int = 1) -> int:
    """Check for an int that is not a bool and at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgument(parameter, value, f"an int >= {minimum}")
    return value


def check_text(value: object, parameter: str, expected: str) -> str:
    """Check for a non-empty string without lone surrogates; return it as a plain `str`."""
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise InvalidArgument(parameter, value, expected)
    return str.__str__(value)


def is_encodable(text: str) -> bool:
    """Return whether a string can be encoded in UTF-8, as required for everything stored."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_random(value: object) -> Random:
    """Check for a `random.Random`."""
    if not isinstance(value, Random):
        raise InvalidArgument("random", value, "a random.Random")
    return value


def check_id(id: object, parameter: str = "id") -> str:
    """Check for a non-empty string of at most 512 characters without NUL."""
    if not isinstance(id, str) or not id:
        hint = "Pass its id" if isinstance(getattr(id, "id", None), str) else ""
        raise InvalidArgument(parameter, id, _EXPECTED_ID, hint)
    # Most ids are ASCII, and need not be encoded for this.
    if len(id) > MAX_ID_LENGTH or "\0" in id or not (id.isascii() or is_encodable(id)):
        raise InvalidArgument(parameter, id, _EXPECTED_ID)
    return id


def check_unreserved(name: str, parameter: str) -> str:
    """Check that a name chosen by the user does not begin with `~`, which is reserved.

    Stores do accept such names, since they keep the engine's own runs and messages.
    """
    if name.startswith(RESERVED):
        hint = f"Names that begin with {RESERVED!r} are reserved for perdure: choose another one"
        raise InvalidArgument(
            parameter, name, f"a name that does not begin with {RESERVED!r}", hint
        )
    return name


def check_user_id(id: object, parameter: str = "id") -> str:
    """Check an id chosen by the user: like `check_id`, and not reserved."""
    return check_unreserved(check_id(id, parameter), parameter)


def check_event(name: object, parameter: str) -> str:
    """Check the name of an event chosen by the user."""
    expected = "the event's name, a non-empty string"
    return check_unreserved(check_text(name, parameter, expected), parameter)


def check_prefix(prefix: object, parameter: str = "prefix") -> str:
    """Check for a string of at most 512 characters without NUL; it may be empty."""
    return "" if prefix == "" else check_id(prefix, parameter)


def check_limit(limit: object, parameter: str = "limit") -> int:
    """Check for an int >= 0."""
    return check_int(limit, parameter, minimum=0)


def check_errors(errors: object) -> tuple[type[BaseException], ...]:
    """Check for an iterable of exception classes; return it as a tuple."""
    expected = "a list of exception classes"
    # A tuple is recognized first, because checking for an abstract class takes ten times as long.
    if not isinstance(errors, (tuple, Iterable)) or isinstance(errors, str):
        raise InvalidArgument("errors", errors, expected)
    classes = tuple(errors)
    for error in classes:
        if not isinstance(error, type) or not issubclass(error, BaseException):
            raise InvalidArgument("errors", error, expected)
    return classes
