"""A store without a journal, for readers that need a complete snapshot at any time."""

from collections.abc import Sequence

from perdure.snapshot import RunStatus, Snapshot
from perdure.store import AsyncCloseable, Capabilities, RunSummary, Store, capabilities, check_store


class SnapshotOnlyStore(AsyncCloseable):
    """A store reduced to the five methods: `durable.run` saves the whole snapshot after each step.

    Use it for a table or collection that you share with another program, such as awaitly, which can
    then continue a run after a crash of this one. There are no leases, so you must ensure that the
    programs do not work on the same run at the same time.

        store = SnapshotOnlyStore(postgres("postgresql://localhost/mydb", table="snapshots"))
    """

    def __init__(self, store: Store) -> None:
        self._store = check_store(store)
        inner = capabilities(store)
        self.capabilities = Capabilities(
            shared=inner.shared, survives=inner.survives, max_value_size=inner.max_value_size
        )

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run with `snapshot`."""
        await self._store.save(id, snapshot)

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the snapshot, or `None`."""
        return await self._store.load(id)

    async def delete(self, id: str, /) -> object:
        """Delete the run; a missing run is not an error."""
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
        """Return up to `limit` runs, the most recently updated first."""
        return await self._store.list(
            prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )

    async def close(self) -> None:
        """Close the wrapped store."""
        await self._store.close()
