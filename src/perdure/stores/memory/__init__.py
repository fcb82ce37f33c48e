"""A store in this process's memory: the reference implementation of the contract."""

from typing import Any

from perdure.clock import Clock, SystemClock, check_clock
from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._handoff import HandoffShell
from perdure.stores._shell import NotifyShell, TransactionShell
from perdure.stores.memory.backend import MemoryBackend
from perdure.stores.memory.rows import Runs
from perdure.stores.memory.transaction import MemoryTransaction
from perdure.validation import check_prefix

__all__ = ["MemoryStore", "MemoryTransaction"]


class MemoryStore(
    NotifyShell[MemoryBackend], HandoffShell[MemoryBackend], TransactionShell[MemoryBackend]
):
    """Stores runs in this process's memory, encoded as in a database; they are lost when it ends.

    With `shares`, the store uses the runs of another one, like a second process that shares a
    database. A transactional step receives a `MemoryTransaction`: a mapping that stands for the
    tables of a database, so that workflows with transactions can be tested without one.

        async with MemoryStore() as store:
            await store.save("checkout-123", snapshot)
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        clock: Clock = SystemClock(),
        max_value_size: int = MAX_VALUE_SIZE,
        shares: "MemoryStore | None" = None,
    ) -> None:
        if shares is not None and not isinstance(shares, MemoryStore):
            raise InvalidArgument("shares", shares, "a MemoryStore")
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            queues=True,
            inbox=True,
            transaction=True,
            handoff=True,
            notify=True,
            maintenance=True,
            search=True,
            shared="process",
            survives="nothing",
            max_value_size=max_value_size,
        )
        runs = Runs() if shares is None else shares._backend.runs
        backend = MemoryBackend(runs, check_prefix(prefix), check_clock(clock))
        super().__init__(backend, "memory", capabilities, any_loop=True)

    @property
    def table(self) -> dict[str, Any]:
        """A copy of what transactional steps have committed."""
        return self._backend.runs.table.read()
