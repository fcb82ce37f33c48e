"""The documents that all runs of a key-value store share."""

from dataclasses import dataclass
from zlib import crc32

import msgspec

from perdure.stores._layout import check_layout
from perdure.stores.keyvalue.documents import Documents
from perdure.stores.keyvalue.layout import editing

# Layout 1 had no number: its heads have no queue, version, tags or summary, and there are no
# queues. It is read as it is, with default values.
_LAYOUT = 2
_LAYOUT_KEY = "perdure:layout"
_EPOCH_FLOOR = "perdure:epochs"
_CATALOG = "perdure:catalog"
_CATALOG_SHARDS = 64
_MAX_KNOWN = 4096

_decode_ids = msgspec.json.Decoder(list[str]).decode


@dataclass(slots=True)
class JournalEnd:
    """The end of a journal that this process writes, cached so that it is not read every time."""

    epoch: int
    documents: int
    numbers: set[int]


class Keyspace:
    """The documents of all runs: their catalog, the epoch floor, and the known journals."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self._journal_ends: dict[str, JournalEnd] = {}

    def journal_end(self, id: str) -> JournalEnd | None:
        """Return the cached end of a run's journal."""
        return self._journal_ends.get(id)

    def remember(self, id: str, end: JournalEnd) -> None:
        """Cache the end of a journal; the oldest one is evicted."""
        self._journal_ends[id] = end
        if len(self._journal_ends) > _MAX_KNOWN:
            del self._journal_ends[next(iter(self._journal_ends))]

    def forget(self, id: str) -> None:
        """Forget a journal that this process no longer writes."""
        self._journal_ends.pop(id, None)

    async def open(self) -> None:
        """Store the number of the layout, or raise if a newer perdure has written here."""
        text = await self.documents.read(_LAYOUT_KEY)
        number = 1 if text is None else int(text)
        check_layout("the key-value store", number, _LAYOUT, alternative="key-value store")
        if number < _LAYOUT:
            await self.documents.swap(_LAYOUT_KEY, text, f"{_LAYOUT}")

    async def epoch_floor(self) -> int:
        """Return the highest epoch of any deleted run, or a higher one."""
        return int(await self.documents.read(_EPOCH_FLOOR) or 0)

    async def raise_epoch_floor(self, epoch: int) -> None:
        """Make the floor at least `epoch`."""
        await self.documents.change(_EPOCH_FLOOR, lambda floor: str(max(int(floor or 0), epoch)))

    async def ids(self) -> list[str]:
        """Return the ids of all runs, possibly including some that no longer exist."""
        shards = [f"{_CATALOG}:{shard}" for shard in range(_CATALOG_SHARDS)]
        texts = await self.documents.read_many(shards)
        return [id for text in texts for id in _ids(text)]

    async def add_id(self, id: str) -> None:
        """Add an id to the catalog."""

        def add(ids: list[str]) -> list[str]:
            return ids if id in ids else [*ids, id]

        await self.documents.change(_shard(id), editing(_ids, add))

    async def remove_id(self, id: str) -> None:
        """Remove an id from the catalog."""

        def remove(ids: list[str]) -> list[str]:
            return [each for each in ids if each != id]

        await self.documents.change(_shard(id), editing(_ids, remove))


def _shard(id: str) -> str:
    return f"{_CATALOG}:{crc32(id.encode()) % _CATALOG_SHARDS}"


def _ids(text: str | None) -> list[str]:
    return [] if text is None else _decode_ids(text)
