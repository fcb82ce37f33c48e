"""The built-in stores, each imported on first use, and `open_store`."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import unquote

from perdure.errors import InvalidArgument
from perdure.store import Store

if TYPE_CHECKING:
    from perdure.stores.file import FileStore
    from perdure.stores.keyvalue import keyvalue
    from perdure.stores.libsql import libsql
    from perdure.stores.memory import MemoryStore
    from perdure.stores.mongo import mongo
    from perdure.stores.mysql import mysql
    from perdure.stores.postgres import postgres
    from perdure.stores.redis import redis
    from perdure.stores.sql import SqlStore
    from perdure.stores.sqlite import sqlite

__all__ = [
    "FileStore",
    "MemoryStore",
    "SqlStore",
    "keyvalue",
    "libsql",
    "mongo",
    "mysql",
    "open_store",
    "postgres",
    "redis",
    "sqlite",
]

_MODULES = {
    "FileStore": "file",
    "MemoryStore": "memory",
    "SqlStore": "sql",
    "keyvalue": "keyvalue",
    "libsql": "libsql",
    "mongo": "mongo",
    "mysql": "mysql",
    "postgres": "postgres",
    "redis": "redis",
    "sqlite": "sqlite",
}

# For each URL scheme: the function that opens it, and the scheme that this function expects.
_SERVERS = {
    "libsql": ("libsql", "libsql"),
    "libsql+http": ("libsql", "http"),
    "libsql+https": ("libsql", "https"),
    "mariadb": ("mysql", "mysql"),
    "mongodb": ("mongo", "mongodb"),
    "mongodb+srv": ("mongo", "mongodb+srv"),
    "mysql": ("mysql", "mysql"),
    "postgres": ("postgres", "postgres"),
    "postgresql": ("postgres", "postgresql"),
    "redis": ("redis", "redis"),
    "redis+cluster": ("redis", "redis+cluster"),
    "rediss": ("redis", "rediss"),
    "rediss+cluster": ("redis", "rediss+cluster"),
}
_SCHEMES = sorted({"memory", "file", "sqlite", *_SERVERS})


class _Names(ModuleType):
    """Imports a store's module on first use of its name.

    Some modules have the same name as their function. Importing such a module would normally
    replace the function in this namespace; this class keeps the function.
    """

    def __getattr__(self, name: str) -> Any:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{module}"), name)

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType):
            value = getattr(value, name) if name in _MODULES else value
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Names


class OpenedStore(Store, Protocol):
    """A store that can be used with `async with`, which closes it."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


def open_store(url: str, **options: Any) -> OpenedStore:
    """Open the store at a URL; `options` are passed to its constructor.

    URLs are `memory://`, `file:///directory`, `sqlite:///relative.db`, `sqlite:////absolute.db` and
    the usual server URLs; a libSQL server over plain HTTP is `libsql+http://host:8080`.

        store = open_store("sqlite:///workflow.db", prefix="orders:")
    """
    scheme, separator, rest = str(url).partition("://")
    scheme = scheme.lower()
    if not isinstance(url, str) or not separator or scheme not in _SCHEMES:
        expected = "a URL that starts with one of: " + ", ".join(f"{name}://" for name in _SCHEMES)
        raise InvalidArgument("url", _without_password(url), expected, _hint(url, scheme))
    if scheme in _SERVERS:
        opener, native_scheme = _SERVERS[scheme]
        return _open(opener, f"{native_scheme}://{rest}", **options)
    if scheme == "memory":
        return _open("MemoryStore", **options)
    path = _path(url, rest)
    if scheme == "file":
        return _open("FileStore", path, **options)
    return _open("sqlite", path.removeprefix("/") or ":memory:", **options)


def _hint(url: object, scheme: str) -> str:
    if isinstance(url, str) and "://" not in url:
        name, colon, path = url.partition(":")
        if colon and name in _SCHEMES and name != "sqlite":
            return f"Write {name}://…"
        return f"A SQLite file is sqlite:///{path if colon and name == 'sqlite' else url}"
    # SQLAlchemy's URLs name the driver, as in postgresql+asyncpg://.
    database = scheme.partition("+")[0]
    return f"Leave out the driver: {database}://…" if database in _SCHEMES else ""


def _without_password(url: object) -> object:
    return re.sub(r":[^:@/]*@", ":…@", url) if isinstance(url, str) else url


def _open(opener: str, *arguments: str, **options: Any) -> OpenedStore:
    make: Callable[..., OpenedStore] = getattr(sys.modules[__name__], opener)
    return make(*arguments, **options)


def _path(url: str, rest: str) -> str:
    if "?" in rest or "#" in rest:
        hint = "Pass options as keyword arguments; in a path write %3F for ? and %23 for #"
        raise InvalidArgument("url", url, "a URL without a query or fragment", hint)
    return unquote(rest)
