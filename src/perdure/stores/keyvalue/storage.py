"""Runs as documents in a key-value store."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from perdure.errors import StoreCorrupted
from perdure.stores.keyvalue.documents import Documents, concurrently
from perdure.stores.keyvalue.keyspace import Keyspace
from perdure.stores.keyvalue.layout import KeyValueHead, RunKeys, decode_head
from perdure.stores.keyvalue.run import KeyValueRun
from perdure.stores.keyvalue.wakes import KeyValueWakes

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class KeyValueStorage:
    """A `Storage` in a key-value store."""

    # Read in one round trip: if most wake lines are out of date, one per head would take too long.
    read_ahead = 100

    def __init__(self, documents: Documents) -> None:
        self.wakes = KeyValueWakes(documents)
        self._documents = documents
        self._keyspace = Keyspace(documents)

    async def open(self) -> None:
        await self._keyspace.open()

    def run(self, id: str) -> KeyValueRun:
        return KeyValueRun(self._keyspace, id)

    async def heads(self, ids: Sequence[str]) -> list[KeyValueHead | StoreCorrupted | None]:
        texts = await self._documents.read_many([RunKeys(id).head for id in ids])
        return [_head(id, text) for id, text in zip(ids, texts, strict=True)]

    async def all_heads(self, prefix: str) -> list[KeyValueHead]:
        ids = [id for id in await self._keyspace.ids() if id.startswith(prefix)]
        heads: list[KeyValueHead] = []
        for head in await self.heads(ids):
            if isinstance(head, StoreCorrupted):
                logger.error("%s; the run is not listed", head, exc_info=head)
            elif head is not None:
                heads.append(head)
        return heads

    async def gather(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T]
    ) -> list[R]:
        return await concurrently(work, items)

    async def execute(
        self, verb: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **options: P.kwargs
    ) -> R:
        """Run an operation, and translate the errors that damaged documents cause."""
        try:
            return await verb(*args, **options)
        except msgspec.MsgspecError as error:
            raise StoreCorrupted(f"a document of the store cannot be read: {error}") from error

    async def close(self) -> None:
        """Do nothing: the key-value store belongs to the caller."""


def _head(id: str, text: str | None) -> KeyValueHead | StoreCorrupted | None:
    try:
        return None if text is None else decode_head(id, text)
    except StoreCorrupted as error:
        return error
