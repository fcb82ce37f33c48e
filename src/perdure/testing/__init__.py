"""Tools for testing programs that use perdure.

They include a clock that a test advances, a store that fails on demand, crashes at every store
call, replays of stored runs, stubs for steps, and the checks of the store contract.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.testing.clock import NotFinished, TestClock
    from perdure.testing.conformance import StoreConformance
    from perdure.testing.crashes import CrashFound, Exploration, explore_crashes
    from perdure.testing.faults import FaultyStore
    from perdure.testing.replays import Replay, replay_snapshot
    from perdure.testing.stubs import Stubs

__all__ = [
    "CrashFound",
    "Exploration",
    "FaultyStore",
    "NotFinished",
    "Replay",
    "StoreConformance",
    "Stubs",
    "TestClock",
    "explore_crashes",
    "replay_snapshot",
]

# Imported on first use: pytest loads the plugin of this package in every session, and the checks
# need pytest and hypothesis.
_MODULE_OF = {
    "CrashFound": "crashes",
    "Exploration": "crashes",
    "FaultyStore": "faults",
    "NotFinished": "clock",
    "Replay": "replays",
    "StoreConformance": "conformance",
    "Stubs": "stubs",
    "TestClock": "clock",
    "explore_crashes": "crashes",
    "replay_snapshot": "replays",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
