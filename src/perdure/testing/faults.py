"""A store that fails on demand."""

import asyncio
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import NewMessage, RunSummary, Store, capabilities

How = Literal["before", "after", "hang"]


class Call(NamedTuple):
    """A call of a store: the method, and the ids of the runs in its arguments."""

    verb: str
    ids: tuple[str, ...]


class FaultyStore:
    """Passes every call to a store, and fails at one of them.

    `fail_at` is the number of the failing call, from 1; with `verbs`, only calls of these methods
    count. `"before"` raises without calling the store, `"after"` calls it and then raises, `"hang"`
    never returns. With `stays_down` every later call raises too, as if the process had crashed.
    `calls` contains all calls, `in_flight` is the number of calls that have not returned.

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
        self.in_flight = 0
        self._store = store
        self._how: How = how
        self._verbs = verbs
        self._error = error
        self._stays_down = stays_down
        self._count = 0

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Call `save` of the store, or fail."""
        await self._pass("save", id, snapshot)

    async def load(self, id: str, /) -> Snapshot | None:
        """Call `load` of the store, or fail."""
        snapshot: Snapshot | None = await self._pass("load", id)
        return snapshot

    async def delete(self, id: str, /) -> object:
        """Call `delete` of the store, or fail."""
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
        """Call `list` of the store, or fail."""
        runs: Sequence[RunSummary] = await self._pass(
            "list", prefix=prefix, limit=limit, status=status, workflow=workflow, after=after
        )
        return runs

    async def close(self) -> None:
        """Close the store; this never fails and is not counted."""
        await self._store.close()

    def __getattr__(self, name: str) -> Any:
        # Only the five methods are defined here; other methods exist if the wrapped store has them.
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
            raise self._error(f"planned failure before {verb}")
        self.in_flight += 1
        try:
            result = await getattr(self._store, verb)(*arguments, **options)
        finally:
            self.in_flight -= 1
        if how == "after":
            raise self._error(f"planned failure after {verb}")
        return result

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
        case ([*items], *_):
            return tuple(map(_id, items))
        case _:
            return ()


def _id(item: Any) -> str:
    match item:
        case str():
            return item
        case NewMessage():
            return item.to
        case _:
            return str(item.id)
