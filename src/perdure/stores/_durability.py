"""The `durability` option of some stores, and what each value promises."""

from typing import Literal, TypeAlias

from perdure.errors import InvalidArgument

Durability: TypeAlias = Literal["full", "normal"]


def check_durability(durability: object) -> None:
    """Raise `InvalidArgument` unless the value is a valid durability."""
    if durability not in ("full", "normal"):
        raise InvalidArgument("durability", durability, '"full" or "normal"')


def survives(durability: Durability) -> Literal["process_crash", "power_loss"]:
    """Return which failure a completed write survives."""
    return "power_loss" if durability == "full" else "process_crash"
