"""Fixtures for pytest: a store, a clock, a runtime, a worker, crashes, and replays of stored runs.

pytest loads this module in every session in an environment where perdure is installed, so it
imports nothing else from perdure until a fixture is used. All fixtures are synchronous: they work
with pytest-asyncio, with anyio's plugin, and in tests that call `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from perdure.clock import Clock
    from perdure.runtime.definition import Definition
    from perdure.runtime.runtime import Runtime
    from perdure.stores import OpenedStore
    from perdure.testing import Exploration, Stubs, TestClock
    from perdure.worker import Worker

_MARK = "perdure"
_MEMORY = "memory://"
# Other stores use the time of their server.
_TAKE_A_CLOCK = ("memory", "file", "sqlite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("perdure", "durable workflows")
    group.addoption(
        "--perdure-store",
        metavar="URL",
        default=_MEMORY,
        help="the URL of perdure_store, which gets a prefix for each test; memory:// by default",
    )
    group.addoption(
        "--perdure-always-replay",
        action="store_true",
        help="suspend and replay runs after every step, to find code that is not deterministic",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "perdure(steps={}, workflows=()): stubs for steps by id (a value, an exception or a "
        "function), and the workflows of perdure_runtime",
    )


@pytest.fixture
def perdure_clock(request: pytest.FixtureRequest) -> TestClock:
    """A clock that stands still until the test advances it; the store and the runtime use it."""
    if not _takes_a_clock(request.config):
        scheme = _url(request.config).partition(":")[0]
        pytest.skip(f"the time of a {scheme} store cannot be advanced")
    from perdure.testing import TestClock

    return TestClock()


@pytest.fixture
def perdure_store(request: pytest.FixtureRequest) -> Iterator[OpenedStore]:
    """An empty store: in memory, or in the database of `--perdure-store`.

    It is closed after the test, and runs of the test are deleted.
    """
    from perdure.stores import open_store

    url = _url(request.config)
    store = open_store(url, clock=_clock(request), prefix="" if url == _MEMORY else _prefix())
    cleanup = _Cleanup(store)
    cleanup.wrap(request.node)
    yield store
    cleanup.finish()


@pytest.fixture
def perdure_deps() -> object:
    """The dependencies for `perdure_runtime` and `perdure_crashes`; override it in your tests."""
    return None


@pytest.fixture
def perdure_runtime(
    request: pytest.FixtureRequest,
    perdure_store: OpenedStore,
    perdure_deps: object,
    _perdure_stubs: list[Stubs],
) -> Runtime:
    """A runtime on `perdure_store`, with the workflows and stubs of the marker."""
    from perdure.runtime.runtime import SUSPEND_AFTER, Runtime

    return Runtime(
        perdure_store,
        workflows=_workflows(request.node),
        deps=perdure_deps,
        around=_perdure_stubs,
        clock=_clock(request),
        # A wait in memory would never end on a clock that stands still.
        suspend_after=0 if _takes_a_clock(request.config) else SUSPEND_AFTER,
        always_replay=_always_replay(request.config),
    )


@pytest.fixture
def perdure_worker(perdure_runtime: Runtime) -> Worker:
    """A worker of `perdure_runtime`: `await perdure_worker.run_until_idle()`."""
    from perdure.worker import Worker

    return Worker(perdure_runtime)


@pytest.fixture
def perdure_crashes(
    request: pytest.FixtureRequest, perdure_deps: object, _perdure_stubs: list[Stubs]
) -> Callable[..., Awaitable[Exploration]]:
    """`explore_crashes` with the workflows and stubs of the marker, on a store in memory."""
    from perdure.testing import explore_crashes

    return functools.partial(
        explore_crashes,
        deps=perdure_deps,
        around=_perdure_stubs,
        workflows=_workflows(request.node),
        always_replay=_always_replay(request.config),
    )


@pytest.fixture
def _perdure_stubs(request: pytest.FixtureRequest) -> Iterator[list[Stubs]]:
    """The stubs of the test, with a warning for stubs of its own marker that no step used."""
    stubs = _stubs(request.node)
    yield stubs
    # Not every test has to use the stubs of its module. If no step ran without a stub, nothing
    # happened that a stub should have prevented.
    own = [mark for mark in request.node.own_markers if mark.name == _MARK]
    marked_steps = {step for mark in own for step in mark.kwargs.get("steps", ())}
    for each in stubs:
        if each.executed and (unused := each.unused & marked_steps):
            warnings.warn(
                f"stubs that no step used: {_join_names(unused)}; "
                f"steps that ran without a stub: {_join_names(each.executed)}",
                pytest.PytestWarning,
                stacklevel=1,
            )


def _join_names(steps: set[str]) -> str:
    return ", ".join(map(repr, sorted(steps)))


@pytest.fixture
def perdure_replay(request: pytest.FixtureRequest, perdure_deps: object) -> Callable[..., None]:
    """Check that stored runs fit the current code: `perdure_replay("runs/*.json", order)`.

    The files are snapshots, or runs that `perdure export --reveal` printed; the pattern is relative
    to the file of the test. No step runs. Pass all versions of the workflow that have runs, and the
    workflows that it starts.
    """
    return functools.partial(_replay, request.path.parent, perdure_deps)


def _replay(folder: Path, deps: object, pattern: str, *workflows: Definition[Any, Any]) -> None:
    from perdure.testing._stored_runs import problems_of

    if not workflows:
        pytest.fail("pass the workflow: perdure_replay('runs/*.json', order)", pytrace=False)
    files = [*folder.glob(pattern)]
    if not files:
        pytest.fail(f"no file in {folder} matches {pattern!r}", pytrace=False)
    problems = asyncio.run(problems_of(files, workflows, deps))
    if problems:
        count = f"{len(problems)} of {len(files)} stored runs do not fit the code"
        pytest.fail("\n  ".join([f"{count}:", *problems]), pytrace=False)


def _always_replay(config: pytest.Config) -> bool:
    return bool(config.getoption("--perdure-always-replay"))


def _url(config: pytest.Config) -> str:
    return str(config.getoption("--perdure-store"))


def _takes_a_clock(config: pytest.Config) -> bool:
    return _url(config).partition(":")[0] in _TAKE_A_CLOCK


def _clock(request: pytest.FixtureRequest) -> Clock:
    from perdure.clock import SystemClock

    # A test that uses the clock fixture is skipped before its store is opened.
    if _takes_a_clock(request.config) or "perdure_clock" in request.fixturenames:
        clock: Clock = request.getfixturevalue("perdure_clock")
        return clock
    return SystemClock()


def _prefix() -> str:
    return f"test-{SystemRandom().getrandbits(64):016x}:"


def _workflows(item: pytest.Item) -> list[Any]:
    return [each for mark in item.iter_markers(_MARK) for each in mark.kwargs.get("workflows", ())]


def _stubs(item: pytest.Item) -> list[Stubs]:
    """Return the stubs of a test; its own marker takes precedence over its module's."""
    steps: dict[str, Any] = {}
    for mark in reversed([*item.iter_markers(_MARK)]):
        unknown = {*mark.kwargs} - {"steps", "workflows"}
        if mark.args or unknown:
            pytest.fail("use @pytest.mark.perdure(steps={…}, workflows=[…])", pytrace=False)
        steps.update(mark.kwargs.get("steps", {}))
    if not steps:
        return []
    from perdure.testing import Stubs

    return [Stubs(steps)]


class _Cleanup:
    """Empties and closes the store of one test, in the event loop in which the test used it.

    This happens at the end of the test function, because anyio's plugin ends the loop there. If
    another async fixture depends on ours, it may still use the store, which is then closed later.
    """

    def __init__(self, store: OpenedStore) -> None:
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_done = False

    def wrap(self, item: pytest.Item) -> None:
        """Wrap an async test so that it cleans up in its own event loop."""
        if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.obj):
            return
        test, is_last = item.obj, not _is_used_by_async_fixtures(item)

        @functools.wraps(test)
        async def wrapper(**arguments: Any) -> None:
            await self._call(test(**arguments), is_last)

        item.obj = wrapper

    async def _call(self, test: Awaitable[None], is_last: bool) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await test
        finally:
            if is_last:
                await self._clean_up()

    def finish(self) -> None:
        """Clean up, unless that was already done."""
        if self._is_done:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.run_until_complete(self._clean_up())
        else:
            asyncio.run(self._clean_up())

    async def _clean_up(self) -> None:
        from perdure.store import capabilities

        self._is_done = True
        if capabilities(self._store).survives != "nothing":
            while runs := await self._store.list(limit=1000):
                for run in runs:
                    await self._store.delete(run.id)
        await self._store.close()


def _is_used_by_async_fixtures(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(
        inspect.isasyncgenfunction(each[-1].func)
        and any(name.startswith("perdure_") for name in each[-1].argnames)
        for each in definitions
    )
