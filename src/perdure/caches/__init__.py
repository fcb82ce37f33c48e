"""The built-in caches, each imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.caches.file import FileCache
    from perdure.caches.keyvalue import KeyValueCache
    from perdure.caches.memory import MemoryCache

__all__ = ["FileCache", "KeyValueCache", "MemoryCache"]

_MODULES = {
    "FileCache": "perdure.caches.file",
    "KeyValueCache": "perdure.caches.keyvalue",
    "MemoryCache": "perdure.caches.memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
