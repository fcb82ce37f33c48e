"""Later code replays runs that earlier code has stored, or reports why it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.snapshot import Snapshot
from perdure.stores import MemoryStore
from perdure.testing import replay_snapshot
from tests.durability.golden_runs import FOLDER, WORKFLOWS, double

PATHS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
async def test_a_run_of_earlier_code_is_replayed(path: Path) -> None:
    snapshot = json.loads(path.read_text())
    replay = await replay_snapshot(
        WORKFLOWS[path.stem], snapshot, run_id="golden", workflows=[*WORKFLOWS.values()]
    )
    assert replay.fits, replay.problem
    assert replay.unused == ()
    assert replay.next == (("long", "go") if path.stem == "golden-open" else ())


def test_there_is_a_run_of_each_kind() -> None:
    kinds = {
        record.get("kind", "step")
        for path in PATHS
        for record in json.loads(path.read_text())["steps"].values()
    }
    assert kinds >= {"step", "sleep", "event", "race", "call", "start", "result", "map"}


@workflow("w")
async def before(step: Step, n: int) -> int:
    await step("a", double, n)
    return await step("b", double, n + 1)


async def stored(*, is_over: bool = True) -> Snapshot:
    store = MemoryStore()
    await Runtime(store, workflows=[before]).trigger(before, 1, run_id="r")
    snapshot = await store.load("r")
    assert snapshot is not None
    if not is_over:
        del snapshot["steps"]["b"]
        snapshot["execution"] = {"status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z"}
    return snapshot


async def test_a_run_fits_the_code_that_it_was_made_with() -> None:
    assert await replay_snapshot(before, await stored()) == await replay_snapshot(
        before, await stored()
    )
    replay = await replay_snapshot(before, await stored(is_over=False))
    assert (replay.fits, replay.next) == (True, ("b",))


async def test_no_step_runs() -> None:
    async def unwanted(n: int) -> int:
        raise AssertionError("a replay runs no step")

    @workflow("w")
    async def after(step: Step, n: int) -> int:
        await step("new", unwanted, n)
        return await step("a", double, n)

    replay = await replay_snapshot(after, await stored())
    assert (replay.fits, replay.next, replay.unused) == (True, ("new",), ("a", "b"))


async def test_other_arguments_do_not_fit() -> None:
    @workflow("w")
    async def after(step: Step, n: int) -> int:
        return await step("a", double, n + 7)

    replay = await replay_snapshot(after, await stored())
    assert not replay.fits
    assert "other arguments" in replay.problem


async def test_another_end_does_not_fit() -> None:
    @workflow("w")
    async def after(step: Step, n: int) -> int:
        return await step("a", double, n) + await step("b", double, n + 1)

    assert (await replay_snapshot(after, await stored())).problem == (
        "the run ended with 4, and now with 6"
    )


async def test_a_type_that_the_record_does_not_have_does_not_fit() -> None:
    @workflow("w")
    async def after(step: Step, n: str) -> None:
        await step("a", double, 1)

    assert not (await replay_snapshot(after, await stored())).fits


@pytest.mark.parametrize("version", [1, 3])
async def test_another_version_does_not_fit_without_a_migration(version: int) -> None:
    snapshot = await stored()
    snapshot["metadata"]["version"] = 2
    options: Any = {"version": version}

    @workflow("w", **options)
    async def after(step: Step, n: int) -> int:
        return n

    replay = await replay_snapshot(after, snapshot)
    assert "was started by version 2" in replay.problem
