"""Durations in 26 classes that double: small enough to store every minute, and to chart.

Class `n` counts durations from `2ⁿ` to below `2ⁿ⁺¹` milliseconds; the first also counts shorter
ones, the last everything from 9 hours on. Trailing zeros are not stored.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeAlias

CLASSES = 26

Durations: TypeAlias = tuple[int, ...]
"""The number of durations in each class, up to the last class that has any."""

_LONGEST = timedelta(days=1)


def class_of(milliseconds: float) -> int:
    """Return the class of a duration."""
    # Without `min` and `max`, because this is called for every run that ends.
    number = int(milliseconds).bit_length() - 1 if milliseconds >= 1 else 0
    return number if number < CLASSES else CLASSES - 1


def upper_bound(number: int) -> timedelta:
    """Return the upper bound of the durations in a class; a day for the last class."""
    last = number >= CLASSES - 1
    return _LONGEST if last else timedelta(milliseconds=2 ** (number + 1))


def add_duration(classes: list[int], milliseconds: float) -> None:
    """Count a duration."""
    number = class_of(milliseconds)
    if number >= len(classes):
        classes += [0] * (number + 1 - len(classes))
    classes[number] += 1


def total(many: Iterable[Sequence[int]]) -> Durations:
    """Add up durations that were counted separately."""
    summed = [0] * CLASSES
    for classes in many:
        for number, count in enumerate(classes[:CLASSES]):
            summed[number] += count
    while summed and not summed[-1]:
        summed.pop()
    return tuple(summed)


def percentile(classes: Sequence[int], percent: int) -> timedelta | None:
    """Return an estimate of the given percentile, or `None` if there are no durations.

    The durations of a class are assumed to be spread evenly over it.
    """
    rank = sum(classes) * percent / 100
    for number, count in enumerate(classes):
        if count and rank <= count:
            lower = upper_bound(number - 1) if number else timedelta(0)
            return lower + (upper_bound(number) - lower) * (rank / count)
        rank -= count
    return None
