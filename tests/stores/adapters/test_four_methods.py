"""A four-method store as a `Store`, with and without its optional lease."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from perdure import Ok, Runtime, Step, durable
from perdure.errors import AlreadyRunning, InvalidArgument, MissingAbility
from perdure.stores.adapters.four_methods import StoredRun, runs


class Four:
    """Four methods over a dict."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}

    async def save(self, run: StoredRun) -> None:
        self.runs[run["run_id"]] = run

    async def load(self, run_id: str) -> StoredRun | None:
        return self.runs.get(run_id)

    async def delete(self, run_id: str) -> None:
        self.runs.pop(run_id, None)

    async def due(self, now: datetime, limit: int) -> list[str]:
        return []


class FourAndLease(Four):
    """With the optional lease: the token of the run's owner."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, str] = {}

    async def acquire(self, run_id: str, token: str, ttl: timedelta) -> bool:
        return self.tokens.setdefault(run_id, token) == token

    async def release(self, run_id: str, token: str) -> None:
        if self.tokens.get(run_id) == token:
            del self.tokens[run_id]


@pytest.mark.parametrize("kind", [Four, FourAndLease])
async def test_a_failed_run_continues_where_it_failed(kind: Any) -> None:
    """`durable.run` saves each step, and the next call uses the saved results."""
    store, done, broken = kind(), [], True

    async def record(text: str) -> str:
        done.append(text)
        if text == "b" and broken:
            raise ConnectionError("down")
        return text

    async def both(step: Step) -> str:
        await step("a", record, "a")
        return await step("b", record, "b")

    assert not (await durable.run({}, both, id="run", store=runs(store))).ok
    assert store.runs["run"]["status"] == "failed"
    broken = False
    assert await durable.run({}, both, id="run", store=runs(store)) == Ok("b")
    assert done == ["a", "b", "b"]
    assert store.runs == {}


async def test_a_lease_excludes_a_second_owner() -> None:
    """A run that is leased with another token is not run."""
    store = FourAndLease()
    store.tokens["run"] = "another owner"

    async def never(step: Step) -> None:
        raise AssertionError("not called")

    result = await durable.run({}, never, id="run", store=runs(store))
    assert not result.ok
    assert isinstance(result.error, AlreadyRunning)


async def test_missing_abilities_are_named() -> None:
    """A runtime needs more than four methods."""
    with pytest.raises(MissingAbility, match="'journal'"):
        Runtime(runs(FourAndLease()))
    with pytest.raises(MissingAbility, match="'list'"):
        await runs(Four()).list()
    with pytest.raises(InvalidArgument, match="the method save"):
        runs(object())  # type: ignore[arg-type]
