"""The option `durability` of the stores that have it, and what it promises."""

from typing import Literal, TypeAlias

from perdure.errors import InvalidArgument

Durability: TypeAlias = Literal["full", "normal"]


def check_durability(durability: object) -> None:
    """Raise unless the value is a durability."""
    if durability not in ("full", "normal"):
        raise InvalidArgument("durability", durability, '"full" or "normal"')


def survives(durability: Durability) -> Literal["process_crash", "power_loss"]:
    """Return which failure a write survives once it has returned."""
    return "power_loss" if durability == "full" else "process_crash"
