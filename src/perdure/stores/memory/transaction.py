"""The transactions of a memory store, on a separate table beside the runs."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from perdure import codec
from perdure.errors import StoreError
from perdure.validation import check_text

_current: ContextVar["MemoryTransaction | None"] = ContextVar(
    "perdure_memory_transaction", default=None
)


class MemoryTransaction(MutableMapping[str, Any]):
    """What a transactional step receives from a memory store: a mapping of names to values.

    The values may be any that a step can return without a type annotation, and are copied. Writes
    are committed with the step's record; `MemoryStore.table` contains what was committed.

        async def debit(transaction: MemoryTransaction, amount: int) -> None:
            transaction["balance"] -= amount
    """

    def __init__(self, table: "Table") -> None:
        self._table = table
        self._open_rows: dict[str, bytes] | None = dict(table.rows)

    def __getitem__(self, name: str) -> Any:
        return _read(self._rows[name])

    def __setitem__(self, name: str, value: object) -> None:
        name = check_text(name, "name", "a non-empty string")
        self._rows[name] = codec.dumps(codec.encode(value))

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def commit(self) -> None:
        """Publish the writes; the store calls this when it commits the step's record."""
        self._table.rows = self._rows

    def close(self) -> None:
        """Reject any further use."""
        self._open_rows = None

    def is_open_on(self, table: "Table") -> bool:
        """Return whether this is an open transaction of the table."""
        return self._table is table and self._open_rows is not None

    @property
    def _rows(self) -> dict[str, bytes]:
        if self._open_rows is None:
            raise StoreError("the transaction has ended; use it only inside the step's function")
        return self._open_rows


def _read(row: bytes) -> Any:
    return codec.decode(codec.loads(row))


class Table:
    """The committed rows of all memory stores that share them; one transaction at a time."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def read(self) -> dict[str, Any]:
        """Return a copy of the committed values."""
        return {name: _read(row) for name, row in self.rows.items()}

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[MemoryTransaction]:
        """Wait until no other transaction is open, and open one; it ends with the block."""
        self._check_not_inside()
        async with self._lock():
            transaction = MemoryTransaction(self)
            token = _current.set(transaction)
            try:
                yield transaction
            finally:
                _current.reset(token)
                transaction.close()

    def _check_not_inside(self) -> None:
        outer = _current.get()
        if outer is not None and outer.is_open_on(self):
            raise StoreError(
                "the store was called inside its own transaction, which would deadlock; "
                "use the mapping that the transaction provides"
            )

    def _lock(self) -> asyncio.Lock:
        # A lock belongs to an event loop, and a memory store may be used in several, one after
        # another.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._loop_lock = loop, asyncio.Lock()
        return self._loop_lock
