"""The names of the queues that have wake lines, in documents.

A name is listed after its lines were written. It is removed in two steps: it is marked, and then
removed if there are still no lines and the mark is still there. A process that writes lines in the
meantime finds the mark and clears it. A crash in between leaves a name without lines, which is
harmless.
"""

from collections.abc import Awaitable, Callable
from zlib import crc32

import msgspec

from perdure.stores.keyvalue.documents import Documents
from perdure.stores.keyvalue.layout import editing

_SHARDS = 64

_decode = msgspec.json.Decoder(dict[str, str]).decode


class QueueNames:
    """Names, each with the mark of the process that is removing it, or an empty string."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def all(self) -> list[str]:
        """Return the names of all queues that have lines, and possibly some that have none."""
        texts = await self._documents.read_many([_key(shard) for shard in range(_SHARDS)])
        return [name for text in texts for name in _names(text)]

    async def add(self, name: str) -> None:
        """List a name, clearing the mark of a pending removal."""
        await self._documents.change(
            _key_of(name), editing(_names, lambda names: names | {name: ""})
        )

    async def remove(self, name: str, has_lines: Callable[[], Awaitable[bool]]) -> None:
        """Remove a name, unless it has lines."""
        mark = self._documents.unique_name()
        await self._documents.change(
            _key_of(name),
            editing(_names, lambda names: names | dict.fromkeys(names.keys() & {name}, mark)),
        )
        if not await has_lines():
            await self._documents.change(
                _key_of(name), editing(_names, lambda names: _without((name, mark), names))
            )


def _without(entry: tuple[str, str], names: dict[str, str]) -> dict[str, str]:
    return dict(item for item in names.items() if item != entry)


def _key_of(name: str) -> str:
    return _key(crc32(name.encode()) % _SHARDS)


def _key(shard: int) -> str:
    return f"perdure:queues:{shard}"


def _names(text: str | None) -> dict[str, str]:
    return {} if text is None else _decode(text)
