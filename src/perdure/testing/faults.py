"""A store that fails when it is told to."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import RunSummary, Store, capabilities

How = Literal["before", "after", "hang"]


class Call(NamedTuple):
    """One call of a store: its verb, and the ids of the runs it named."""

    verb: str
    ids: tuple[str, ...]


class FaultyStore:
    """Passes every call on to a store, and breaks at the one it is told.

    `fail_at` counts calls from 1, only those of `verbs` when these are given. `"before"` raises
    without doing the work, `"after"` does it and raises all the same, `"hang"` never answers. With
    `stays_down` every later call raises too, as if the process had died. `calls` holds all calls.

        FaultyStore(MemoryStore(), fail_at=3, how="after", verbs={"append"})
    """

    def __init__(
        self,
        store: Store,
        *,
        fail_at: int | None = None,
        how: How = "before",
        verbs: Collection[str] | None = None,
        error: Callable[[str], BaseException] = StoreUnavailable,
        stays_down: bool = False,
    ) -> None:
        self.capabilities = capabilities(store)
        self.calls: list[Call] = []
        self.fail_at = fail_at
        self.failed = False
        self._store = store
        self._how: How = how
        self._verbs = verbs
        self._error = error
        self._stays_down = stays_down
        self._count = 0

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Pass `save` on, or fail."""
        await self._pass("save", id, snapshot)

    async def load(self, id: str, /) -> Snapshot | None:
        """Pass `load` on, or fail."""
        loaded: Snapshot | None = await self._pass("load", id)
        return loaded

    async def delete(self, id: str, /) -> object:
        """Pass `delete` on, or fail."""
        return await self._pass("delete", id)

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Pass `list` on, or fail."""
        listed: Sequence[RunSummary] = await self._pass(
            "list", prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )
        return listed

    async def close(self) -> None:
        """Close the store; this never fails, and is not counted."""
        await self._store.close()

    def __getattr__(self, name: str) -> Any:
        # Only the five methods are written out: a store has its other verbs when what it wraps has.
        attribute = getattr(self._store, name)
        if name.startswith("_") or not inspect.iscoroutinefunction(attribute):
            return attribute

        async def verb(*arguments: Any, **options: Any) -> Any:
            return await self._pass(name, *arguments, **options)

        return verb

    async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
        self.calls.append(Call(verb, _ids(verb, arguments)))
        how = self._fault(verb)
        if how == "hang":
            await asyncio.get_running_loop().create_future()
        if how == "before":
            raise self._error(f"{verb} failed as it was told, before it did anything")
        answer = await getattr(self._store, verb)(*arguments, **options)
        if how == "after":
            raise self._error(f"{verb} failed as it was told, after it had done its work")
        return answer

    def _fault(self, verb: str) -> How | None:
        if self.failed and self._stays_down:
            return "before"
        if self._verbs is not None and verb not in self._verbs:
            return None
        self._count += 1
        if self._count != self.fail_at:
            return None
        self.failed = True
        return self._how


def _ids(verb: str, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    match arguments:
        case (str(id), *_) if verb != "claim":
            return (id,)
        case ([*named], *_):
            return tuple(item.id for item in named)
        case _:
            return ()
