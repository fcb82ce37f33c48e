"""Workers are killed while ten callers answer each question: one counts, nine are refused.

`python -m tests.durability.answer_chaos URL` does the same with 1,000 questions.
"""

from pathlib import Path

import pytest

from perdure import Runtime, Worker
from perdure.stores import open_store
from perdure.stores.memory import MemoryStore
from tests.durability.answer_chaos import Workers, answered, ask_and_answer
from tests.durability.places import Place, place_of

WAITS = 40


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/answers.db"


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


async def test_one_answer_counts_while_workers_are_killed(place: Place) -> None:
    store, workers = open_store(place.url, **place.options), Workers(*place)
    try:
        tally = await ask_and_answer(store, WAITS, workers, 5)
    finally:
        workers.stop()
        await store.close()
    tally.check()
    assert tally.kills > 1
    assert len(tally.outputs) == WAITS


async def test_one_answer_counts_in_one_process() -> None:
    store = MemoryStore()
    async with Worker(Runtime(store, workflows=[answered], suspend_after=0.05)):
        tally = await ask_and_answer(store, WAITS)
    tally.check()
