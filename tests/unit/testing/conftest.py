"""pytest inside pytest: the plugin of perdure, loaded as in a user's project."""

from collections.abc import Callable
from importlib.metadata import entry_points

import pytest

# Loaded here, because the inner session forgets modules that it has imported.
from perdure import Runtime, Worker
from perdure.stores import MemoryStore, sqlite
from perdure.testing import Stubs, _stored_runs, explore_crashes, pytest_plugin

SHOP = """
import asyncio
import pytest
from perdure import Step, workflow

class ShippingDown(Exception): pass

calls = []

async def charge(cents):
    calls.append(cents)
    return "real receipt"

async def ship(receipt):
    calls.append(receipt)

@workflow("order")
async def order(step: Step, cents: int) -> str:
    receipt: str = await step("charge", charge, cents)
    await step.sleep("pack", "1 day")
    await step("ship", ship, receipt)
    return receipt
"""

Run = Callable[..., pytest.RunResult]

# Those of this session would run in the inner one as well, or would be imported for each test.
_LOUD = [
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest"),
    *("-p", "no:langsmith_plugin", "-p", "no:faker"),
]
_LOADED = (
    Runtime,
    Worker,
    MemoryStore,
    sqlite,
    Stubs,
    explore_crashes,
    pytest_plugin,
    _stored_runs,
)
_LOADERS = {
    "asyncio": [
        *("-p", "no:anyio", "-o", "asyncio_mode=auto"),
        *("-o", "asyncio_default_fixture_loop_scope=function"),
    ],
    "anyio": ["-p", "no:asyncio", "-o", "anyio_mode=auto"],
}


@pytest.fixture(params=["asyncio", "anyio"])
def loader(request: pytest.FixtureRequest) -> str:
    """The plugin that runs async tests."""
    return str(request.param)


@pytest.fixture
def run_tests(pytester: pytest.Pytester, loader: str) -> Run:
    """Run a file of tests with the sample shop in front of it."""

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(SHOP + source)
        return pytester.runpytest_inprocess(*_LOUD, *plugin(), *_LOADERS[loader], *options)

    return run


def plugin() -> list[str]:
    """The options that load the plugin, unless the installed perdure has an entry point for it."""
    names = [entry.name for entry in entry_points(group="pytest11")]
    return [] if "perdure" in names else ["-p", "perdure.testing.pytest_plugin"]
