"""Real workers that are killed in the middle of rollbacks."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.stores import open_store
from tests.durability.forked import forked
from tests.durability.places import Place, place_of
from tests.durability.saga_process import PARTS, trip, work

RUNS, KILLS = 12, 6


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/trips.db"


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


async def test_a_killed_worker_undoes_each_step(place: Place, tmp_path: Path) -> None:
    """Each booking is cancelled, and again at most once for each kill, with the same key."""
    log = tmp_path / "log"
    store = open_store(place.url, **place.options)
    runtime = Runtime(store, workflows=[trip])
    await runtime.trigger_many(trip, [str(log)] * RUNS, run_ids=[f"t{n}" for n in range(RUNS)])
    for _ in range(KILLS):
        worker = forked().Process(target=work, args=tuple(place))
        worker.start()
        await asyncio.sleep(0.35)
        worker.kill()
        worker.join()
    last = forked().Process(target=work, args=tuple(place))
    last.start()
    try:
        async with asyncio.timeout(40):
            for n in range(RUNS):
                with pytest.raises(ValueError, match="no funds"):
                    await runtime.result(f"t{n}")
    finally:
        last.kill()
        last.join()
    runs = [await runtime.get_run(f"t{n}") for n in range(RUNS)]
    await store.close()
    for run in runs:
        assert run is not None
        undone = [step.key for step in run.history if step.kind == "undo"]
        assert undone == [f"~undo:{part}" for part in reversed(PARTS)]
    cancelled = [line.split() for line in log.read_text().splitlines() if line[0] == "c"]
    times = Counter((run_id, part) for _, run_id, part, _ in cancelled)
    assert len(times) == RUNS * len(PARTS)
    assert max(times.values()) <= 1 + KILLS
    assert len({key for *_, key in cancelled}) == len(times)
