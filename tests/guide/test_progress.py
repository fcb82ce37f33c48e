"""Tags and progress: what a run reports about itself."""

import asyncio
import json
import logging
from datetime import timedelta
from typing import Any

import pytest

from perdure import Err, Runtime, Step, durable, workflow
from perdure.durable.reports import report_key
from perdure.errors import InvalidArgument
from perdure.store import Query
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock
from tests.guide.test_own_store import MyStore


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@workflow("import")
async def imports(step: Step) -> None:
    """Set tags and a report, and wait for an event."""
    step.tag(stage="loading", plan="pro")
    step.report(progress=0.25, note="loading")
    await step("load", lambda: None)
    step.tag(stage="waiting", plan=None)
    step.report(progress=0.5)
    await step.wait_for_event("go", "go")


async def waiting(store: MemoryStore, clock: TestClock, **options: Any) -> Any:
    """Return the metadata of a run that waits for its event."""
    runtime = Runtime(store, workflows=[imports], clock=clock, **options)
    await runtime.trigger(imports, run_id="i")
    for _ in range(5):
        await runtime.sweep()
    stored: Any = await store.load("i")
    return stored["metadata"]


async def test_a_run_is_found_by_the_tags_that_it_set(store: MemoryStore, clock: TestClock) -> None:
    await waiting(store, clock)
    page = await store.search(Query(tags=("stage=waiting",)), 10)
    assert [run.tags for run in page.runs] == [("stage=waiting",)]


async def test_tags_of_the_metadata_stay(store: MemoryStore) -> None:
    async def body(step: Step) -> None:
        step.tag(plan="pro")

    metadata = {"tags": {"customer": "42"}}
    await durable.run(None, body, id="t", store=store, metadata=metadata, keep=True)
    page = await store.search(Query(tags=("customer=42", "plan=pro")), 10)
    assert [run.id for run in page.runs] == ["t"]


async def test_the_last_report_is_stored_with_the_run(store: MemoryStore, clock: TestClock) -> None:
    report = {"progress": 0.5, "note": "", "at": "2030-01-01T00:00:00.000Z"}
    assert (await waiting(store, clock))["report"] == report


async def test_a_replay_ends_with_the_same_tags_and_report(
    store: MemoryStore, clock: TestClock
) -> None:
    metadata = await waiting(store, clock, always_replay=True)
    assert metadata["tags"] == {"stage": "waiting"}
    assert metadata["report"]["progress"] == 0.5


async def test_a_report_keeps_its_time_when_the_run_is_replayed(
    store: MemoryStore, clock: TestClock
) -> None:
    @workflow("nap")
    async def nap(step: Step) -> None:
        step.report(note="sleeping")
        await step.sleep("nap", "1d")

    runtime = Runtime(store, workflows=[nap], clock=clock)
    await runtime.trigger(nap, run_id="n")
    await clock.advance("1d")
    await runtime.sweep()
    stored: Any = await store.load("n")
    assert stored["metadata"]["report"]["at"] == "2030-01-01T00:00:00.000Z"


async def test_tags_and_reports_of_the_function_cost_no_write() -> None:
    async def body(step: Step) -> None:
        for n in range(10):
            step.tag(n=str(n))
            step.report(progress=n / 10)
        await step("work", lambda: None)

    store = FaultyStore(MemoryStore())
    await durable.run(None, body, id="r", store=store, keep=True)
    assert [call.verb for call in store.calls] == ["load", "acquire", "append", "append"]


@pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan"), float("inf"), True, "50%"])
async def test_progress_is_a_number_from_0_to_1(progress: Any) -> None:
    async def body(step: Step) -> None:
        step.report(progress=progress)

    result = await durable.run(None, body, id="p", store=MemoryStore())
    assert isinstance(result, Err)
    assert "progress: expected a number from 0 to 1" in str(result.error)


@pytest.mark.parametrize("tags", [{"plan": 7}, {"~plan": "pro"}, {"a=b": ""}, {"": ""}])
async def test_what_cannot_be_a_tag_is_refused(tags: Any) -> None:
    async def body(step: Step) -> None:
        step.tag(**tags)

    result = await durable.run(None, body, id="t", store=MemoryStore())
    assert isinstance(result, Err)
    assert isinstance(result.error, InvalidArgument)


async def test_a_run_has_at_most_16_tags(store: MemoryStore) -> None:
    async def body(step: Step) -> None:
        for n in range(17):
            step.tag(**{f"tag-{n}": "x"})

    result = await durable.run(None, body, id="t", store=store)
    assert isinstance(result, Err)
    assert "at most 16 tags of a run" in str(result.error)


class Download:
    """A step that reports its progress from inside, each time the test lets it continue."""

    def __init__(self) -> None:
        self.progress: asyncio.Queue[float | None] = asyncio.Queue()

    async def body(self, step: Step) -> None:
        await step("download", self.load, step)

    async def load(self, step: Step) -> None:
        while (progress := await self.progress.get()) is not None:
            step.report(progress=progress)


async def stored_report(store: MemoryStore, id: str = "d") -> Any:
    """Return the contents of the document with the report."""
    text = await store.documents.get(report_key(id))
    return None if text is None else json.loads(text)["progress"]


async def test_a_long_step_shows_its_progress_at_most_once_a_second(
    store: MemoryStore, clock: TestClock
) -> None:
    download, observations = Download(), []
    run = asyncio.create_task(durable.run(None, download.body, id="d", store=store, clock=clock))
    for progress in (0.1, 0.2, 0.3, 0.4):
        download.progress.put_nowait(progress)
        await clock.advance("400ms")
        observations.append(await stored_report(store))
    download.progress.put_nowait(None)
    await run
    assert observations == [0.1, 0.1, 0.3, 0.3]


async def test_nothing_stays_behind_when_the_run_ends(store: MemoryStore, clock: TestClock) -> None:
    """The document is deleted, and the report is stored with the run."""
    download = Download()
    for progress in (0.1, 0.9, None):
        download.progress.put_nowait(progress)
    tasks = asyncio.all_tasks()
    await durable.run(None, download.body, id="d", store=store, clock=clock, keep=True)
    assert asyncio.all_tasks() == tasks
    assert await store.documents.keys() == []
    stored: Any = await store.load("d")
    assert stored["metadata"]["report"]["progress"] == 0.9


async def test_the_report_of_a_process_that_died_expires_after_a_day(
    store: MemoryStore, clock: TestClock
) -> None:
    download = Download()
    run = asyncio.create_task(durable.run(None, download.body, id="d", store=store, clock=clock))
    download.progress.put_nowait(0.1)
    await clock.advance("2s")
    assert await stored_report(store) == 0.1
    await clock.advance(timedelta(days=1))
    assert await stored_report(store) is None
    run.cancel()
    await asyncio.wait([run])


async def test_a_step_in_a_thread_can_report(store: MemoryStore) -> None:
    def load(step: Step) -> None:
        step.report(progress=0.75, note="from a thread")

    async def body(step: Step) -> None:
        await step("load", load, step)

    await durable.run(None, body, id="t", store=store, keep=True)
    stored: Any = await store.load("t")
    assert stored["metadata"]["report"]["note"] == "from a thread"


async def test_a_store_without_documents_has_the_report_after_the_step() -> None:
    async def body(step: Step) -> None:
        await step("load", lambda: step.report(progress=1))

    store = MyStore()
    await durable.run(None, body, id="t", store=store, keep=True)
    stored: Any = await store.load("t")
    assert stored["metadata"]["report"]["progress"] == 1


class BrokenDocuments(MemoryStore):
    """A store that cannot write documents."""

    @property
    def documents(self) -> Any:
        raise OSError("no documents today")


async def test_a_report_that_cannot_be_written_harms_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(step: Step) -> str:
        await step("load", lambda: step.report(progress=1))
        return "done"

    with caplog.at_level(logging.DEBUG, "perdure"):
        result = await durable.run(None, body, id="t", store=BrokenDocuments())
    assert result.unwrap() == "done"
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize("id", ['o\'neill/"x" 🎈', "x" * 512, "ä" * 512])
async def test_any_run_id_can_report(id: str, clock: TestClock) -> None:
    store, download = MemoryStore(clock=clock), Download()
    run = asyncio.create_task(durable.run(None, download.body, id=id, store=store, clock=clock))
    download.progress.put_nowait(0.1)
    await clock.advance("1s")
    assert await stored_report(store, id) == 0.1
    download.progress.put_nowait(None)
    await run
