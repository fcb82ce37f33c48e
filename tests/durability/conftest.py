"""A runtime with the test's store and clock, which optionally replays after every step."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime
from perdure.runtime.definition import Definition
from perdure.store import Store
from perdure.stores import open_store
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

MakeRuntime = Callable[..., Runtime]

LOCAL = {
    "memory": "memory://",
    "file": "file://{folder}/runs",
    "sqlite": "sqlite:///{folder}/runs.db",
}


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture(params=[*LOCAL, "postgres", "mysql", "mongo", "redis", "sqld"])
async def every_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, one after the other."""
    fixture = request.getfixturevalue
    match request.param:
        case "redis":
            opened = open_store(fixture("redis_url"), namespace=fixture("redis_prefix"))
        case "sqld":
            opened = open_store(f"libsql+{fixture('sqld_url')}")
        case name if name in LOCAL:
            opened = open_store(LOCAL[name].format(folder=tmp_path))
        case name:
            opened = open_store(fixture(f"{name}_url"))
    async with opened:
        yield opened


@pytest.fixture(params=[False, True], ids=["straight", "always_replay"])
def always_replay(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make_runtime(store: MemoryStore, clock: TestClock, always_replay: bool) -> MakeRuntime:
    """Return a function that creates a runtime as another process would: on the same store, with
    nothing in memory.
    """

    def make(*workflows: Definition[Any, Any], on: Store | None = None, **options: Any) -> Runtime:
        return Settling(
            store if on is None else on,
            workflows=workflows,
            clock=clock,
            always_replay=always_replay,
            **options,
        )

    return make


class Settling(Runtime):
    """A runtime that sweeps until `always_replay` has no more runs that are due."""

    async def trigger(self, *arguments: Any, **options: Any) -> Any:
        run = await super().trigger(*arguments, **options)
        return await self._settle(run) if options.get("wait", True) else run

    async def _continue(self, run_id: str, *, even_paused: bool) -> Any:
        return await self._settle(await super()._continue(run_id, even_paused=even_paused))

    async def retry(self, run_id: str, *, wait: bool = True) -> Any:
        run = await super().retry(run_id, wait=wait)
        return await self._settle(run) if wait else run

    async def sweep(self, *arguments: Any, **options: Any) -> Any:
        return [await self._settle(run) for run in await super().sweep(*arguments, **options)]

    async def _settle(self, run: Any) -> Any:
        if self.driver.always_replay:
            for _ in range(200):
                if not await super().sweep():
                    return await self.get_run(run.id)
            raise AssertionError(f"{run!r} does not come to rest")
        return run
