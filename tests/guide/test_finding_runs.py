"""Finding runs: by workflow, status, tag or time, without reading their snapshots."""

import pytest

from perdure import Runtime, Step, workflow
from perdure.snapshot.summary import read_summary
from perdure.store import Query
from perdure.stores import MemoryStore


@workflow("invoice")
async def invoice(step: Step, customer: str) -> str:
    await step("render", lambda: f"invoice for {customer}")
    await step.wait_for_event("payment", "paid", timeout="14d")
    return "paid"


@workflow("reminder")
async def reminder(step: Step) -> None:
    await step("fail", lambda: 1 // 0)


@pytest.fixture
async def store() -> MemoryStore:
    """Return a store with a waiting, a queued and a failed run."""
    store = MemoryStore()
    runtime = Runtime(store, workflows=[invoice, reminder])
    await runtime.trigger(invoice, "ada", run_id="invoice-1")
    await runtime.trigger(invoice, "bob", run_id="invoice-2", wait=False)
    await runtime.trigger(reminder, run_id="reminder-1")
    return store


async def test_runs_are_found_by_workflow_and_status(store: MemoryStore) -> None:
    """Any of the workflows, and any of the statuses."""
    query = Query(workflows=("invoice", "other"), statuses=("waiting", "completed"))
    assert [run.id for run in (await store.search(query, 50)).runs] == ["invoice-1"]


async def test_a_run_that_waits_for_a_worker_is_queued(store: MemoryStore) -> None:
    """`wait=False` creates a run, and a worker claims it."""
    page = await store.search(Query(statuses=("queued",)), 50)
    assert [run.id for run in page.runs] == ["invoice-2"]
    runtime = Runtime(store)
    run = await runtime.get_run("invoice-2")
    assert run is not None
    assert run.status == "queued"


async def test_a_search_continues_with_its_cursor(store: MemoryStore) -> None:
    """`None` means that there is nothing more."""
    first = await store.search(Query(oldest_first=True), 2)
    second = await store.search(Query(oldest_first=True), 2, after=first.cursor)
    ids = [run.id for run in (*first.runs, *second.runs)]
    assert sorted(ids) == ["invoice-1", "invoice-2", "reminder-1"]
    assert second.cursor is None


async def test_a_summary_shows_what_happened(store: MemoryStore) -> None:
    """Lists do not read snapshots."""
    waiting, failed = await store.summaries(["invoice-1", "reminder-1"])
    assert waiting is not None
    assert failed is not None
    assert read_summary(waiting.summary).last_step == "render"
    summary = read_summary(failed.summary)
    assert (summary.steps, summary.failed) == (1, 1)
    assert summary.error is not None
    assert summary.error.startswith("ZeroDivisionError: ")


async def test_runs_are_counted_by_workflow_and_status(store: MemoryStore) -> None:
    """Up to a cap."""
    counts = await store.counts(Query(), 1000)
    assert {(each.workflow, each.status): each.count for each in counts} == {
        ("invoice", "waiting"): 1,
        ("invoice", "queued"): 1,
        ("reminder", "failed"): 1,
    }


async def test_documents_are_kept_beside_the_runs(store: MemoryStore) -> None:
    """Small strings in the same database, which no list shows."""
    await store.documents.set("view:overdue", "{}", ttl="400d")
    assert await store.documents.replace("view:overdue", "{}", "[]")
    assert await store.documents.get("view:overdue") == "[]"
    assert len(await store.list()) == 3
