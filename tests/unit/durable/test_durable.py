"""`durable.run` at its edges: versions that change, runs that begin twice, news that is awaited."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Err, Ok, Step, durable
from perdure.errors import CodecError, InvalidArgument, StoreError, VersionMismatch
from perdure.events import PersistError, PersistSuccess
from perdure.store import Grant, LeaseRequest, Store
from perdure.stores import MemoryStore, sqlite
from perdure.testing.faults import FaultyStore

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    kept = MemoryStore() if request.param == "memory" else sqlite(tmp_path / "runs.db")
    async with kept:
        yield kept


async def note(what: str) -> str:
    calls.append(what)
    return what


async def half(step: Step) -> None:
    """What version 1 does: one step, and then it fails."""
    await step("first", note, "first")
    raise ValueError("version 1 is broken")


async def whole(step: Step) -> list[str]:
    """What version 2 does."""
    return [await step("first", note, "first"), await step("second", note, "second")]


async def dies(step: Step) -> None:
    """What version 2 does in a process that dies after its first new step."""
    await step("second", note, "second")
    raise ConnectionError("gone")


async def run(fn: Any, store: Store, **options: Any) -> Any:
    return await durable.run({}, fn, id="run", store=store, **options)


async def test_nothing_is_left_of_a_run_that_is_done(store: Any) -> None:
    """Neither a row nor a line of the list; the same id begins anew."""
    assert await run(whole, store) == Ok(["first", "second"])
    assert await store.load("run") is None
    assert await store.list() == []
    assert await run(whole, store) == Ok(["first", "second"])
    assert len(calls) == 4


async def test_a_migration_is_stored_before_anything_runs(store: Any) -> None:
    """A crash of the new version resumes as the new version; the migration is asked once."""
    await run(half, store, version=1)
    asked: list[tuple[int, int]] = []

    def migrate(gap: durable.VersionGap) -> Any:
        asked.append((gap.stored, gap.requested))
        return {**gap.snapshot, "steps": {}}

    assert not (await run(dies, store, version=2, on_version_mismatch=migrate)).ok
    stored = await store.load("run")
    assert stored["metadata"]["version"] == 2
    assert list(stored["steps"]) == ["second"]
    assert await run(whole, store, version=2, on_version_mismatch=migrate)
    assert asked == [(1, 2)]


async def test_a_clearing_is_stored_before_anything_runs(store: Any) -> None:
    """A crash of the new version does not bring back what was cleared."""
    await run(half, store, version=1)
    assert not (await run(dies, store, version=2, on_version_mismatch="clear")).ok
    stored = await store.load("run")
    assert stored["metadata"]["version"] == 2
    assert list(stored["steps"]) == ["second"]


@pytest.mark.parametrize("answer", ["error", "later", {"formatVersion": 2}])
async def test_a_mismatch_lets_the_run_go(store: Any, answer: Any) -> None:
    """Its own version goes on with it at once, without waiting for a lease to end."""
    await run(half, store, version=1)
    refused = await run(whole, store, version=2, on_version_mismatch=lambda gap: answer)
    assert not refused.ok
    assert await run(whole, store, version=1) == Ok(["first", "second"])


async def test_a_run_that_began_meanwhile_is_gone_on_with(store: Any) -> None:
    """What another process recorded between the look and the lease is not done again."""

    class Meanwhile(FaultyStore):
        async def acquire(self, wants: Sequence[LeaseRequest]) -> Sequence[Grant | None]:
            await run(half, store)
            return await store.acquire(wants)  # type: ignore[no-any-return]

    assert await run(whole, Meanwhile(store)) == Ok(["first", "second"])
    assert calls == ["first", "second"]


async def test_listeners_have_heard_all_when_it_returns(store: Any) -> None:
    """Also an async one, also of records becoming durable."""
    heard: list[Any] = []

    async def listen(event: Any) -> None:
        await asyncio.sleep(0)
        heard.append(event)

    await run(whole, store, on_event=listen)
    assert [event.key for event in heard if isinstance(event, PersistSuccess)] == [
        "first", "second",
    ]  # fmt: skip
    assert heard[-1].type == "workflow_success"


async def test_a_record_that_cannot_be_written_is_told(store: Any) -> None:
    """And the run stops with the store's error."""
    heard: list[Any] = []
    faulty = FaultyStore(store, fail_at=1, verbs={"append"}, error=StoreError)
    result = await run(whole, faulty, on_event=heard.append)
    assert isinstance(result, Err)
    assert isinstance(result.error, StoreError)
    assert [event.key for event in heard if isinstance(event, PersistError)] == ["first"]
    assert calls == ["first"]


async def test_an_output_that_cannot_be_recorded_is_a_failure(store: Any) -> None:
    """It names the run; nothing is left that would be tried again for ever."""

    async def deep(step: Step) -> Any:
        nested: list[Any] = []
        for _ in range(200):
            nested = [nested]
        return nested

    result = await run(deep, store, keep=True)
    assert isinstance(result.error, CodecError)
    assert "the output of run 'run' cannot be recorded" in str(result.error)
    assert [line.status for line in await store.list()] == ["failed"]
    assert (await durable.run({}, deep, id="deleted", store=store)).ok


async def test_an_output_is_the_same_the_first_time(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What is kept of it is what the call gives, and the log tells what was lost."""

    async def lossy(step: Step) -> Any:
        return {"it": object()}

    first = await run(lossy, store, keep=True)
    assert await run(lossy, store, keep=True) == first
    assert "its output" in caplog.text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("id", ""), ("id", 5), ("id", "x" * 513), ("id", "a\0b"), ("store", 5), ("store", "sqlite"),
        ("version", "1"), ("version", -1), ("version", True), ("metadata", 5), ("on_event", 5),
        ("errors", [5]), ("lease_ttl", "soon"), ("lease_ttl", 0), ("on_version_mismatch", "retry"),
        ("idempotency_key", ""), ("idempotency_key", 5), ("clock", 5), ("keep", "yes"),
        ("replay_errors", 1), ("allow_concurrent", None),
    ],
)  # fmt: skip
async def test_bad_options(option: str, value: Any) -> None:
    """Each is named, with what came and what was wanted."""
    options: dict[str, Any] = {"id": "run", "store": MemoryStore(), option: value}
    with pytest.raises(InvalidArgument) as raised:
        await durable.run({}, whole, **options)
    assert raised.value.parameter == option


async def test_a_mismatch_names_both_versions(store: Any) -> None:
    """And says what can be done."""
    await run(half, store, version=1)
    result = await run(whole, store, version=3)
    assert isinstance(result.error, VersionMismatch)
    assert "started by version 1, but this is version 3" in str(result.error)
