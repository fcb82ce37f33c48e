"""The public methods of key-value stores on databases, and of the documents of stores.

`KeyValueShell` checks arguments, sets the backend up on first use, adds its prefix and matches
patterns. A `KeyValueBackend` contains what is specific to one database.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.keyvalue import glob_match
from perdure.store import AsyncCloseable
from perdure.stores._lifecycle import Lifecycle
from perdure.validation import check_id, is_encodable

MAX_KEY_BYTES = 2_500
"""The longest stored key of a document: indexes of PostgreSQL and MySQL cannot hold more."""

SETS_PER_SWEEP = 100
"""Some stores delete expired keys once per this many writes; doing so each time is too slow."""


class KeyValueBackend(ABC):
    """Strings under keys in one table, collection or directory of a database.

    All keys begin with `prefix`, in arguments and results alike. Expired keys are invisible at
    once, and removed eventually.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    @abstractmethod
    async def set_up(self) -> None:
        """Create the table. Called before any other method, possibly concurrently."""

    @abstractmethod
    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Return the values of the keys that exist and have not expired; `keys` is not empty."""

    @abstractmethod
    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        """Store the value and its time to live, replacing previous ones."""

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Delete the key; return whether it existed and had not expired."""

    async def exists(self, key: str) -> bool:
        """Return whether the key exists and has not expired."""
        return key in await self.get([key])

    @abstractmethod
    async def keys(self, prefix: str) -> Iterable[str]:
        """Return the keys that begin with `prefix` and have not expired, in any order."""

    @abstractmethod
    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        """Replace the value if it is `old`; return whether it was.

        The new value has no time to live. `old` and `new` are not both `None`.
        """


class KeyValueShell:
    """The public methods. Each of them calls `ready` first."""

    def __init__(self, backend: KeyValueBackend, ready: Callable[[], Awaitable[None]]) -> None:
        self._backend = backend
        self._ready = ready

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if the key is missing or has expired."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Return the value of each key, in order."""
        stored_keys = [self._key(key) for key in keys]
        await self._ready()
        values = await self._backend.get(stored_keys) if stored_keys else {}
        return [values.get(key) for key in stored_keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value: for `ttl`, or until it is deleted."""
        lifetime = None if ttl is None else parse_duration(ttl, "ttl")
        stored_key = self._key(key)
        self._check(value, "value")
        await self._ready()
        self._check_size(key, value)
        await self._backend.set(stored_key, value, lifetime)

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        stored_key = self._key(key)
        await self._ready()
        return await self._backend.delete(stored_key)

    async def exists(self, key: str, /) -> bool:
        """Return whether the key exists and has not expired."""
        stored_key = self._key(key)
        await self._ready()
        return await self._backend.exists(stored_key)

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the keys that match, in order; `*` matches any string, nothing else is special.

        Only keys that begin with the part before the first `*` are read.
        """
        self._check(pattern, "pattern")
        await self._ready()
        prefix = self._backend.prefix
        literal = pattern.partition("*")[0]
        stored_keys = await self._backend.keys(prefix + literal)
        keys = sorted({key[len(prefix) :] for key in stored_keys})
        return keys if pattern == f"{literal}*" else [k for k in keys if glob_match(pattern, k)]

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Replace the value atomically if it is `old`; `None` stands for a missing key.

        Return whether it was replaced. The new value has no time to live.
        """
        for parameter, value in (("old", old), ("new", new)):
            if value is not None:
                self._check(value, parameter)
        if old is None and new is None:
            return not await self.exists(key)
        stored_key = self._key(key)
        await self._ready()
        self._check_size(key, new or "")
        return await self._backend.replace(stored_key, old, new)

    def _key(self, key: str) -> str:
        """Check the key and return it with the prefix."""
        self._check(key, "key")
        return self._backend.prefix + key

    def _check(self, value: object, parameter: str) -> None:
        if not isinstance(value, str):
            raise InvalidArgument(parameter, value, "a string")

    def _check_size(self, key: str, value: str) -> None:
        """Raise if the value is larger than the database accepts."""


class DatabaseKeyValue(KeyValueShell, AsyncCloseable):
    """A `KeyValueStore` with compare-and-set, which has its own connections to a database.

    `name` is the database's name in messages; `open`, `close`, `forget_loop` and `any_loop` manage
    the connections, as in `Lifecycle`.
    """

    def __init__(
        self,
        name: str,
        backend: KeyValueBackend,
        *,
        open: Callable[[], Awaitable[None]] | None = None,
        close: Callable[[], Awaitable[None]],
        forget_loop: Callable[[], object] = lambda: None,
        any_loop: bool = False,
    ) -> None:
        async def set_up() -> None:
            if open is not None:
                await open()
            await backend.set_up()

        life_name = f"{name} key-value"
        self._life = Lifecycle(life_name, set_up, on_move=forget_loop, any_loop=any_loop)
        self._disconnect = close
        super().__init__(backend, self._life.ready)

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open."""
        if self._life.close():
            await self._disconnect()


class StoreDocuments(KeyValueShell):
    """The documents of a store, with the same limits on keys and values for every database.

    `check_size` raises for a value that the store does not accept.
    """

    def __init__(
        self,
        backend: KeyValueBackend,
        ready: Callable[[], Awaitable[None]],
        check_size: Callable[[str, bytes], None],
    ) -> None:
        super().__init__(backend, ready)
        self._check_bytes = check_size

    def _key(self, key: str) -> str:
        stored_key = self._backend.prefix + check_id(key, "key")
        if 4 * len(stored_key) > MAX_KEY_BYTES and len(stored_key.encode()) > MAX_KEY_BYTES:
            expected = f"at most {MAX_KEY_BYTES:,} bytes including the store's prefix"
            raise InvalidArgument("key", key, expected)
        return stored_key

    def _check(self, value: object, parameter: str) -> None:
        if not isinstance(value, str) or "\0" in value or not is_encodable(value):
            raise InvalidArgument(parameter, value, "a string without NUL")

    def _check_size(self, key: str, value: str) -> None:
        self._check_bytes(f"the document {key!r}", value.encode())


async def keys_with_prefix(
    keys: Callable[[str], Awaitable[Iterable[str]]], prefix: str
) -> Iterable[str]:
    """Return the keys that begin with a prefix; a `*` in the prefix is literal."""
    candidates = await keys(prefix.partition("*")[0] + "*")
    return [key for key in candidates if key.startswith(prefix)]


def scope_of(prefix: str) -> str:
    """Return the prefix of a store's documents, which no other store shares.

    With the bare prefix, a store whose prefix is empty would see the documents of all others.
    """
    return f"{len(prefix)}:{prefix}"
