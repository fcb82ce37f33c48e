"""Watching, exporting, comparing, the audit trail, findings, and answers as JSON."""

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from perdure import Runtime
from perdure.errors import InvalidArgument, RunNotFound, StoreUnavailable
from perdure.insights import (
    MASK,
    NOTHING_REDACTED,
    BulkProgress,
    Insights,
    InvalidQuery,
    RunFacts,
    Tally,
    read_bundle,
    to_json,
)
from perdure.operations import Operations
from perdure.presence import WorkflowSwitch, set_switch
from perdure.store import NewRun, SearchStore
from perdure.stores import MemoryStore, sqlite
from perdure.stores._shell import StoreShell
from perdure.testing import FaultyStore, TestClock
from tests.unit.insights.runs import live_worker, order, run_order
from tests.unit.insights.samples import new_snapshot_json


async def test_a_run_is_watched_until_it_is_over(store: StoreShell[Any]) -> None:
    runtime = Runtime(store, workflows=[order], suspend_after=0)
    await runtime.trigger(order, {"does": "wait"}, run_id="r")
    changes = Insights(store).watch("r")
    assert (await anext(changes)).run.status == "waiting"
    await runtime.signal("r", "approved")
    await runtime.resume("r")
    statuses = [facts.run.status async for facts in changes]
    assert statuses[-1] == "completed"


async def test_a_missing_run_cannot_be_watched() -> None:
    with pytest.raises(RunNotFound):
        await anext(Insights(MemoryStore()).watch("r"))


async def test_a_bundle_is_redacted_and_has_a_checksum(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "fail", password="x", note="a://b:hunter2@c")
    bundle = await Insights(store).export("r")
    text = msgspec.json.encode(to_json(bundle)).decode()
    assert "hunter2" not in text
    assert '"abc"' not in text
    assert bundle.redacted
    assert read_bundle(msgspec.json.decode(text)) == bundle


async def test_a_bundle_hides_secrets_in_reasons_acts_and_waits(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await run_order(store, "r", "wait", clock)
    await Operations(store, clock=clock).pause("r", by="ana", why="see a://b:hunter2@c")
    bundle = await Insights(store, clock=clock).export("r")
    assert "hunter2" not in msgspec.json.encode(to_json(bundle)).decode()
    assert bundle.snapshot["execution"]["state"] == "paused"


async def test_a_bundle_without_redaction_is_the_snapshot(store: StoreShell[Any]) -> None:
    await run_order(store, "r", "fail", password="x")
    bundle = await Insights(store, redact=NOTHING_REDACTED).export("r")
    assert (bundle.snapshot, bundle.redacted) == (await store.load("r"), False)


async def test_a_bundle_has_the_inbox(store: StoreShell[Any], clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    await Runtime(store, workflows=[order]).signal("r", "other", {"token": 1, "n": 2})
    (message,) = (await Insights(store, clock=clock).export("r")).inbox
    assert (message.event, message.payload) == ("other", {"token": MASK, "n": 2})


async def test_a_changed_bundle_is_refused() -> None:
    store = MemoryStore()
    await run_order(store, "r")
    data = to_json(await Insights(store).export("r"))
    with pytest.raises(InvalidArgument, match="checksum does not match"):
        read_bundle({**data, "version": 2})
    with pytest.raises(InvalidArgument, match="a bundle"):
        read_bundle({"format": "other"})


async def test_two_runs_are_compared(store: StoreShell[Any]) -> None:
    await run_order(store, "a", "fail", total=1, password="x")
    await run_order(store, "b", "", total=2, password="y", gift=[1])
    comparison = await Insights(store).compare("a", "b")
    assert [(each.where, each.left, each.right, each.kind) for each in comparison.payload] == [
        ("payload.does", "fail", "", "changed"),
        ("payload.total", 1, 2, "changed"),
        ("payload.gift", None, [1], "only_right"),
    ]
    (step,) = comparison.steps
    assert (step.where, step.left, step.kind) == (
        "ship",
        {"error": "CarrierDown: 503 from carrier"},
        "only_left",
    )
    assert comparison.first == "ship"


async def test_the_audit_trail_is_searched_and_paged(
    store: StoreShell[Any], clock: TestClock
) -> None:
    operations = Operations(store, clock=clock)
    for day, by in enumerate(("ana", "bob", "ana")):
        await run_order(store, f"r{day}", "wait", clock)
        await operations.pause(f"r{day}", by=by, why="password=x")
        await clock.advance(timedelta(days=3))
    insights = Insights(store, clock=clock)
    first = await insights.acts(limit=2)
    assert [(act.run_id, act.by) for act in first.acts] == [("r2", "ana"), ("r1", "bob")]
    rest = await insights.acts(limit=2, after=first.cursor)
    assert ([act.run_id for act in rest.acts], rest.cursor) == (["r0"], None)
    assert rest.acts[0].why == f"password={MASK}"
    for query, expected_steps in {
        "by:ana": ["r2", "r0"],
        "verb:pause since:4d": ["r2"],
        "verb:retry": [],
        "older:5d": ["r1", "r0"],
        "r1": ["r1"],
    }.items():
        assert [act.run_id for act in (await insights.acts(query)).acts] == expected_steps, query


async def test_acts_of_earlier_months_are_found(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    operations = Operations(store, clock=clock)
    for name in ("a", "b", "c"):
        await operations.pause_workflow(name, by="ana")
        await clock.advance("150d")
    insights = Insights(store, clock=clock)
    steps = [act.step for act in (await insights.acts()).acts]
    assert steps == ["c", "b"], "those of more than 400 days ago have expired"


async def test_acts_of_the_same_day_are_distinguished_by_their_time(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await run_order(store, "r", "wait", clock)
    operations = Operations(store, clock=clock)
    await operations.pause("r", by="ana")
    await clock.advance("3h")
    await operations.unpause("r", by="ana")
    insights = Insights(store, clock=clock)
    assert [act.verb for act in (await insights.acts("since:1h")).acts] == ["unpause"]
    assert [act.verb for act in (await insights.acts("older:1h")).acts] == ["pause"]


async def test_bad_queries_of_acts_are_refused() -> None:
    insights = Insights(MemoryStore())
    with pytest.raises(InvalidQuery, match="unknown field 'status'"):
        await insights.acts("status:failed")
    with pytest.raises(InvalidArgument, match="cursor"):
        await insights.acts(after="x")


async def test_bulk_operations_are_read_from_their_documents(clock: TestClock) -> None:
    store, now = MemoryStore(clock=clock), clock.now()
    progress = BulkProgress("7", "status:failed", "retry", "ana", "", now, seen_at=now)
    await store.documents.set("bulk:7", msgspec.json.encode(progress).decode())
    await store.documents.set("bulk:8", "broken")
    insights = Insights(store, clock=clock)
    assert await insights.bulk("7") == progress
    assert await insights.bulk("8") is None
    assert await insights.bulks() == (progress,)


async def test_a_bulk_operation_without_a_process_is_interrupted(clock: TestClock) -> None:
    store, now = MemoryStore(clock=clock), clock.now()
    progress = BulkProgress("7", "status:failed", "retry", "ana", "", now, seen_at=now)
    await store.documents.set("bulk:7", msgspec.json.encode(progress).decode())
    await clock.advance("16s")
    operation = await Insights(store, clock=clock).bulk("7")
    assert operation is not None
    assert operation.state == "interrupted"


async def test_the_store_is_described_without_its_password() -> None:
    facts = await Insights(MemoryStore(), url="postgresql://ana:x@db/shop").store()
    assert (facts.kind, facts.url) == ("memory", f"postgresql://ana:{MASK}@db/shop")
    assert facts.capabilities["lease"] == "atomic"
    assert "Runs are lost when the process ends." in facts.sentences


async def test_a_healthy_store_has_no_findings(clock: TestClock, tmp_path: Path) -> None:
    async with sqlite(tmp_path / "runs.db", clock=clock) as store:
        assert await Insights(store, clock=clock).check() == ()


async def test_findings_name_what_is_wrong_and_how_to_fix_it(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await store.enqueue([NewRun("r", "order", new_snapshot_json("order"), version=3)])
    await set_switch(store, WorkflowSwitch("invoice", True, "ana", "", clock.now()))
    await clock.advance(timedelta(minutes=1))
    await live_worker(store, clock.now())
    findings = await Insights(store, clock=clock).check()
    assert [each.code for each in findings] == ["durability", "no_worker", "workflow_paused"]
    assert findings[1].text == "1 run of order v3 is due; no live worker knows it."
    assert all(each.fix for each in findings)


async def test_a_clock_that_is_ahead_is_found(clock: TestClock) -> None:
    ahead = TestClock(clock.now() + timedelta(minutes=2))
    store = MemoryStore(clock=ahead)
    await store.enqueue([NewRun("r", "order", new_snapshot_json("order"))])
    findings = await Insights(store, clock=clock).check()
    assert "clock_drift" in [each.code for each in findings]


async def test_an_unreachable_store_is_one_finding() -> None:
    error = StoreUnavailable("cannot connect to postgres://ana:hunter2@db")
    store = FaultyStore(MemoryStore(), fail_at=1, stays_down=True, error=lambda _: error)
    (only,) = await Insights(store).check()
    assert (only.code, only.severity) == ("store", "error")
    assert "hunter2" not in only.text


READS = {"search", "summaries", "counts", "due", "queues"}


async def test_lists_read_no_snapshot_and_nothing_is_written() -> None:
    store = FaultyStore(MemoryStore())
    await run_order(cast(SearchStore, store), "r", "wait")
    store.calls.clear()
    insights = Insights(store)
    for answer in (
        insights.overview(),
        insights.runs("workflow:order waiting:approved error:x"),
        insights.errors(),
        insights.agenda(),
        insights.acts(),
        insights.store(),
        insights.check(),
    ):
        await answer
    assert {call.verb for call in store.calls} <= READS
    for one in (insights.run("r"), insights.steps("r"), insights.step("r", "reserve")):
        await one
    await insights.export("r")
    assert {call.verb for call in store.calls} <= {*READS, "load", "inbox"}
    assert [call.verb for call in store.calls].count("load") == 1


async def test_answers_become_json_with_seconds_and_utc_times() -> None:
    store = MemoryStore()
    await run_order(store, "r")
    facts: RunFacts = await Insights(store).run("r")
    data = to_json(facts)
    assert data["run"]["updated_at"].endswith("Z")
    assert isinstance(data["groups"][0]["p50"], float)
    assert msgspec.json.decode(msgspec.json.encode(data)) == data
    assert to_json({1: Tally(2)}) == {"1": {"count": 2, "capped": False}}
