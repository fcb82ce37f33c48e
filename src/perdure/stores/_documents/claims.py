"""Claims of runs that are stored as documents."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from perdure.store import Due, SupportedVersions
from perdure.stores._documents.due import DueSearch, Planner, wake_time
from perdure.stores._documents.leases import DocumentLeases, after
from perdure.stores._documents.records import H, Wake
from perdure.stores._documents.storage import Storage
from perdure.stores._reading import Granted
from perdure.stores._timestamps import from_microseconds


class DocumentClaims(DocumentLeases[H]):
    """Finds and claims the runs that need a worker."""

    def __init__(self, storage: Storage[H], prefix: str) -> None:
        super().__init__(storage, prefix)
        self._planner = Planner(storage)

    async def due(
        self,
        at: int,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
        now: int,
    ) -> list[Due]:
        """Return the runs that need a worker at time `at`, earliest first."""
        async with self.wakes.gate():
            wakes = await self._search(supports, queues, at, now).next(limit, queues)
        return [Due(self.public_id(wake.id), from_microseconds(wake.at)) for wake in wakes]

    async def queues(self, at: int, limit: int, low: str, high: str | None, now: int) -> list[str]:
        """Return the queues whose runs need a worker at time `at`, by name."""
        all_names = await self.wakes.queues()
        names = sorted(name for name in all_names if name >= low and (high is None or name < high))
        due_queues: list[str] = []
        while names and len(due_queues) < limit:
            count = max(limit - len(due_queues), self.storage.read_ahead)
            search = self._search(None, names[:count], at, now)
            async with self.wakes.gate():
                due_queues += await search.queues()
            # No claim reads a queue that is not listed, so nothing else would remove its lines.
            await search.tidy()
            names = names[count:]
        return due_queues[:limit]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
        now: int,
    ) -> list[Granted]:
        """Lease and load runs that need a worker, earliest first."""
        search = self._search(supports, queues, now, now)
        end = after(now, ttl)
        grants: list[Granted] = []
        quotas = dict(queues)
        async with self.wakes.gate():
            while wakes := await search.next(limit - len(grants), quotas):
                # Before the lease: if this worker dies, the line is how another one finds the run.
                await self.wakes.add([wake._replace(at=end) for wake in wakes], now)
                answers = await self._each(lambda wake: self._claim(wake, owner, ttl, now), wakes)
                for wake, grant in zip(wakes, answers, strict=True):
                    search.mark_claimed(wake)
                    if grant is not None:
                        grants.append(grant)
                        quotas[wake.queue] -= 1
        await search.tidy()
        return grants

    async def _claim(self, wake: Wake, owner: str, ttl: timedelta, now: int) -> Granted | None:
        run = self.storage.run(wake.id)
        async with run.lock():
            head = await run.head()
            # Another process may have saved or recreated the run in the meantime.
            if head is None or head.wake(wake.at) != wake:
                return None
            wake_at = await wake_time(run, head)
            if wake_at is None or wake_at > now:
                return None
            return await self._grant(run, head, owner, ttl, now)

    def _search(
        self, supports: Sequence[SupportedVersions] | None, queues: Iterable[str], at: int, now: int
    ) -> DueSearch[H]:
        return DueSearch(self.storage, self._planner, self.prefix, supports, queues, at, now)
