"""Runs that are whole in the store at every moment, for readers that know no journal."""

from collections.abc import Sequence

from perdure.snapshot import RunStatus, Snapshot
from perdure.store import AsyncCloseable, Capabilities, RunSummary, Store, capabilities, check_store


class SnapshotOnlyStore(AsyncCloseable):
    """A store seen by its five methods alone: `durable.run` saves the whole snapshot at each step.

    Meant for a table or collection that another program, such as awaitly, works on in turn: it may
    go on with a run wherever this one crashed. That program knows no leases either, so it is on you
    that they do not work on one run at the same time.

        store = SnapshotOnlyStore(postgres("postgresql://localhost/mydb", table="snapshots"))
    """

    def __init__(self, store: Store) -> None:
        self._store = check_store(store)
        inner = capabilities(store)
        self.capabilities = Capabilities(
            shared=inner.shared, survives=inner.survives, max_value_size=inner.max_value_size
        )

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`."""
        await self._store.save(id, snapshot)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the snapshot, or None."""
        return await self._store.load(id)

    async def delete(self, id: str, /) -> object:
        """Remove the run; a missing one is no error."""
        return await self._store.delete(id)

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Give runs newest first, at most `limit`."""
        return await self._store.list(
            prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )

    async def close(self) -> None:
        """Close the store within."""
        await self._store.close()
