"""Rows as written by awaitly's libSQL store: JSON as text, and times without milliseconds."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from perdure import Err, Ok, Step, durable
from perdure.errors import StepError
from perdure.stores import libsql
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore

CREATE = """
    CREATE TABLE awaitly_snapshots (
        id TEXT PRIMARY KEY, snapshot TEXT NOT NULL, updated_at TEXT DEFAULT (datetime('now')))
"""
CAUSE = {"type": "error", "name": "RangeError", "message": "why", "stack": "RangeError: why"}
FAILED = {"ok": False, "error": "E", "cause": CAUSE, "meta": {"origin": "result"}}
STEPS = {"user:1": {"ok": True, "value": {"x": 1}}, "b": FAILED}
SNAPSHOT = {
    "formatVersion": 1,
    "workflowName": "run",
    "steps": STEPS,
    "execution": {"status": "running", "lastUpdated": "2024-05-01T09:30:00.000Z"},
    "metadata": {"version": 1, "stepOrder": ["user:1", "b"], "stepArgs": ["1k2bw4i", None]},
}
RESUME_STATE = {"kind": "ResumeState", "steps": list(STEPS.items())}


def query(url: str, *statements: tuple[Any, ...]) -> list[list[Any]]:
    """Return the rows of the last statement, read from the server directly."""
    requests = [
        {
            "type": "execute",
            "stmt": {"sql": sql, "args": [{"type": "text", "value": value} for value in values]},
        }
        for sql, *values in statements
    ]
    answer = httpx.post(f"{url}/v2/pipeline", json={"requests": requests}, verify=False)
    result = answer.json()["results"][-1]["response"]["result"]
    return [[cell.get("value") for cell in row] for row in result["rows"]]


@pytest.fixture(params=[SNAPSHOT, RESUME_STATE], ids=["snapshot", "resume-state"])
def rows_url(request: pytest.FixtureRequest, sqld_url: str) -> str:
    """Return the server, with a run of awaitly in its table."""
    text = json.dumps(request.param)
    insert = "INSERT INTO awaitly_snapshots VALUES ('run', ?, '2024-05-01 09:30:00')"
    query(sqld_url, (CREATE,), (insert, text))
    return sqld_url


@pytest.fixture
async def store(rows_url: str) -> AsyncIterator[Any]:
    async with libsql(rows_url, table="awaitly_snapshots") as store:
        yield store


async def workflow(step: Step) -> object:
    user = await step("user", never, key="user:1")
    return [user, await step("b", tell, "b")]


async def never() -> object:
    raise AssertionError("a recorded step ran")


async def tell(word: str) -> str:
    return word


async def test_a_run_can_be_continued(store: Any) -> None:
    """A finished step returns its recorded value, and the failed one runs again."""
    assert await durable.run({}, workflow, id="run", store=store) == Ok([{"x": 1}, "b"])


async def test_a_failure_is_read_with_its_cause(store: Any) -> None:
    result = await durable.run({}, workflow, id="run", store=store, replay_errors=True)
    assert isinstance(result, Err)
    assert result.error == "E"
    assert isinstance(result.cause, StepError)
    assert str(result.cause) == "RangeError: why"


async def test_the_row_is_written_as_awaitly_reads_it(store: Any, rows_url: str) -> None:
    """After each step the row contains the whole snapshot in format version 1, as JSON text."""
    observations: list[Any] = []

    async def look() -> None:
        observations.extend(query(rows_url, ("SELECT id, snapshot FROM awaitly_snapshots",)))

    async def function(step: Step) -> None:
        await workflow(step)
        await step("look", look)

    await durable.run({}, function, id="run", store=SnapshotOnlyStore(store))
    [[id, text]] = observations
    snapshot = json.loads(text)
    assert id == "run"
    assert snapshot["formatVersion"] == 1
    assert snapshot["steps"]["user:1"] == {"ok": True, "value": {"x": 1}}
    assert snapshot["steps"]["b"]["value"] == "b"
    assert snapshot["execution"]["status"] == "running"


async def test_its_time_is_listed(store: Any) -> None:
    [line] = await store.list()
    assert (line.id, line.updated_at) == ("run", datetime(2024, 5, 1, 9, 30, tzinfo=UTC))
