"""A cache in any key-value store."""

from datetime import timedelta
from typing import cast

from perdure import codec
from perdure.clock import Duration, parse_duration
from perdure.errors import CodecError, InvalidArgument, StoreCorrupted
from perdure.keyvalue import AsyncKeyValue, KeyValueStore, as_keyvalue
from perdure.snapshot import StepRecord


class KeyValueCache:
    """Keeps records as JSON under `prefix` + key.

    `kv` is a `KeyValueStore` or a `py-key-value-aio` driver; the cache does not close it.
    """

    def __init__(
        self,
        kv: KeyValueStore | AsyncKeyValue,
        *,
        prefix: str = "workflow:",
        ttl: Duration | None = None,
    ) -> None:
        self._kv = as_keyvalue(kv, "kv")
        if not isinstance(prefix, str):
            raise InvalidArgument("prefix", prefix, "a string")
        self._prefix = prefix
        self._ttl = None if ttl is None else parse_duration(ttl, "ttl")

    async def get(self, key: str, /) -> StepRecord | None:
        """Return the record, or `None`."""
        text = await self._kv.get(self._prefix + key)
        if text is None:
            return None
        try:
            return cast("StepRecord", codec.loads(text.encode()))
        except CodecError as error:
            raise StoreCorrupted(
                f"the cache entry under {self._prefix + key!r} is not a step record; delete it"
            ) from error

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        """Store the record; `ttl` takes precedence over the cache's own."""
        text = codec.dumps(record).decode()
        ttl = self._ttl if ttl is None else ttl
        # A user's own key-value store may not support `ttl`, so it is passed only if needed.
        if ttl is None:
            await self._kv.set(self._prefix + key, text)
        else:
            await self._kv.set(self._prefix + key, text, ttl=ttl)

    async def has(self, key: str, /) -> bool:
        """Return whether there is a record."""
        return await self._kv.exists(self._prefix + key)

    async def delete(self, key: str, /) -> bool:
        """Delete the record, so that the step runs again; return whether it existed."""
        return await self._kv.delete(self._prefix + key)

    async def clear(self) -> None:
        """Delete all records under the prefix."""
        for key in await self._kv.keys(self._prefix + "*"):
            # A `*` in the prefix itself would match more than the prefix.
            if key.startswith(self._prefix):
                await self._kv.delete(key)
