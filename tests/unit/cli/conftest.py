"""A store with one run in each of several states, and the command in this process."""

import asyncio
import os
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest
from click.testing import CliRunner, Result

from perdure import Runtime
from perdure.cli.app import root
from perdure.stores import sqlite
from tests.unit.cli import shop

RUNS: dict[str, dict[str, str]] = {
    "done": {},
    "broken": {"carrier": "down"},
    "asleep": {"settle": "36525 days"},
    "asking": {"approver": "ana"},
}


class Perdure(Protocol):
    """Calls the command; `code` is the exit code that it must have."""

    def __call__(self, *arguments: str, code: int = 0, **options: Any) -> Result: ...


async def seed(path: Path) -> None:
    """Make one run in each state, always at the same times."""
    clock = shop.clock = shop.new_clock()
    async with sqlite(path, clock=clock) as store:
        runtime = Runtime(store, workflows=[shop.order], clock=clock, random=Random(14))
        for run_id, payload in RUNS.items():
            tags = {"customer": "acme"} if run_id == "broken" else {}
            await runtime.trigger("order", payload, run_id=run_id, tags=tags)
            await clock.advance(1)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep settings of this machine out of the tests."""
    for name in [name for name in os.environ if name.startswith("PERDURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a store with the runs of `RUNS`."""
    asyncio.run(seed(tmp_path / "shop.db"))
    return "sqlite:///shop.db"


@pytest.fixture
def perdure(url: str) -> Perdure:
    """Return a function that calls the command on the store."""

    def call(*arguments: str, code: int = 0, **options: Any) -> Result:
        env = {"PERDURE_STORE": url, "PERDURE_BY": "ana", **options.pop("env", {})}
        result = CliRunner().invoke(root, arguments, env=env, prog_name="perdure", **options)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (result.stdout, result.stderr)
        return result

    return call
