"""Tools for testing programs that use perdure.

These are a clock that a test advances, a store that fails on demand, crashes at every store call,
and the checks of the store contract.
"""

from typing import TYPE_CHECKING, Any

from perdure.testing.clock import NotFinished, TestClock
from perdure.testing.crashes import CrashFound, Exploration, explore_crashes
from perdure.testing.faults import FaultyStore

if TYPE_CHECKING:
    from perdure.testing.conformance import StoreConformance

__all__ = [
    "CrashFound",
    "Exploration",
    "FaultyStore",
    "NotFinished",
    "StoreConformance",
    "TestClock",
    "explore_crashes",
]


def __getattr__(name: str) -> Any:
    # The checks need pytest and hypothesis; the rest of this package does not.
    if name == "StoreConformance":
        from perdure.testing.conformance import StoreConformance

        return StoreConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
