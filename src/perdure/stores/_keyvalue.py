"""What the key-value stores on databases have in common: checks, lifecycle and compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import AsyncCloseable
from perdure.stores._lifecycle import Lifecycle


async def _no_set_up() -> None:
    """Connections are opened when they are needed."""


class DatabaseKeyValue(AsyncCloseable, ABC):
    """A `KeyValueStore` with compare-and-set, in a database.

    `name` is the database's, for messages; `set_up`, `close`, `forget_loop` and `any_loop` are
    about its connections, as in `Lifecycle`. A subclass implements one underscored method per
    operation, and may rely on arguments that have been checked.
    """

    def __init__(
        self,
        name: str,
        *,
        set_up: Callable[[], Awaitable[None]] = _no_set_up,
        close: Callable[[], Awaitable[None]],
        forget_loop: Callable[[], object] = lambda: None,
        any_loop: bool = False,
    ) -> None:
        life_name = f"{name} key-value"
        self._life = Lifecycle(life_name, set_up, on_move=forget_loop, any_loop=any_loop)
        self._disconnect = close

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if the key is missing or has expired."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Return the value of each key, in order."""
        for key in keys:
            self._check(key, "key")
        await self._life.ready()
        values = await self._get(keys) if keys else {}
        return [values.get(key) for key in keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value: for `ttl`, or until it is deleted."""
        lifetime = None if ttl is None else parse_duration(ttl, "ttl")
        self._check(key, "key")
        self._check(value, "value")
        await self._life.ready()
        await self._set(key, value, lifetime)

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        self._check(key, "key")
        await self._life.ready()
        return await self._delete(key)

    async def exists(self, key: str, /) -> bool:
        """Return whether the key exists and has not expired."""
        self._check(key, "key")
        await self._life.ready()
        return await self._exists(key)

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the keys that match, in order; `*` matches any string, nothing else is special."""
        self._check(pattern, "pattern")
        await self._life.ready()
        return await self._keys(pattern)

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Replace `old` by `new` atomically, if it is the value; `None` stands for a missing key.

        Return whether it was replaced.
        """
        for parameter, value in (("old", old), ("new", new)):
            if value is not None:
                self._check(value, parameter)
        if old is None and new is None:
            return not await self.exists(key)
        self._check(key, "key")
        await self._life.ready()
        return await self._replace(key, old, new)

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open."""
        if self._life.close():
            await self._disconnect()

    def _check(self, value: object, parameter: str) -> None:
        if not isinstance(value, str):
            raise InvalidArgument(parameter, value, "a string")

    @abstractmethod
    async def _get(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Return the values of the keys that exist and have not expired."""

    @abstractmethod
    async def _set(self, key: str, value: str, ttl: timedelta | None) -> None:
        """Store the value and its time to live in place of previous ones."""

    @abstractmethod
    async def _delete(self, key: str) -> bool:
        """Delete the key; return whether it existed and had not expired."""

    async def _exists(self, key: str) -> bool:
        """Return whether the key exists and has not expired."""
        return key in await self._get([key])

    @abstractmethod
    async def _keys(self, pattern: str) -> list[str]:
        """Return the keys that match and have not expired, in order."""

    @abstractmethod
    async def _replace(self, key: str, old: str | None, new: str | None) -> bool:
        """Replace the value if it is `old`; return whether it was. Not both of them are `None`."""
