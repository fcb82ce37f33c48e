"""The store at a glance, failures in groups, and what comes next."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument, InvalidDuration
from perdure.insights import Insights, Tally, overview
from perdure.insights.attention import lost_workers
from perdure.insights.grouping import normalize
from perdure.insights.model import WorkerRow
from perdure.presence import WorkflowSwitch, set_switch
from perdure.store import LeaseRequest, NewRun, Rest
from perdure.stores import MemoryStore
from perdure.stores._shell import StoreShell
from perdure.testing import TestClock
from tests.unit.insights.runs import live_worker, run_order
from tests.unit.insights.samples import new_snapshot_json


async def fail_with(store: StoreShell[Any], run_id: str, error: str, step: str = "ship") -> None:
    summary = b'{"steps":1,"failed":1,"last_step":"%s","error":"%s"}'
    new = NewRun(
        run_id,
        "order",
        new_snapshot_json("order"),
        summary=summary % (step.encode(), error.encode()),
        rest=Rest("failed"),
    )
    await store.enqueue([new])


async def test_counts_and_the_newest_failures(store: StoreShell[Any], clock: TestClock) -> None:
    await run_order(store, "old", clock=clock)
    await clock.advance(timedelta(days=2))
    for run_id, does in {"a": "", "b": "fail", "c": "sleep"}.items():
        await run_order(store, run_id, does, clock)
    overview = await Insights(store, clock=clock).overview()
    assert overview.counts == {"completed": Tally(2), "failed": Tally(1), "suspended": Tally(1)}
    assert overview.last_day == {"completed": Tally(1), "failed": Tally(1), "cancelled": Tally(0)}
    assert [run.id for run in overview.failures] == ["b"]
    assert (overview.due, overview.oldest_due, overview.attention) == (0, None, ())


async def test_due_runs_without_a_worker_need_attention(
    store: StoreShell[Any], clock: TestClock
) -> None:
    snapshot = new_snapshot_json("order")
    await store.enqueue([NewRun(f"r{n}", "order", snapshot, version=3) for n in range(2)])
    insights = Insights(store, clock=clock)
    overview = await insights.overview()
    assert [each.text for each in overview.attention] == ["2 runs are due; no worker is running"]
    await live_worker(store, clock.now())
    overview = await insights.overview()
    (only,) = overview.attention
    assert only.text == "2 runs of order v3 are due; no live worker knows it"
    assert {run.id for run in (await insights.runs(only.query)).runs} == {"r0", "r1"}
    assert overview.due == 2
    assert overview.oldest_due is not None
    assert clock.now() - overview.oldest_due < timedelta(seconds=1)


async def test_a_due_run_of_an_owner_that_is_gone_is_counted_everywhere(
    store: StoreShell[Any], clock: TestClock
) -> None:
    """Its lease has expired, so that any worker can take it."""
    snapshot = new_snapshot_json("order")
    await store.enqueue([NewRun(f"r{n}", "order", snapshot) for n in range(2)])
    await store.acquire([LeaseRequest("r0", "gone", timedelta(minutes=1))])
    await clock.advance(timedelta(minutes=3))
    overview = await Insights(store, clock=clock).overview()
    assert [each.text for each in overview.attention] == ["2 runs are due; no worker is running"]
    assert (overview.due, overview.lags["order"].due) == (2, 2)


async def test_a_run_whose_lease_expired_lags_since_then(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await store.enqueue([NewRun("r", "order", new_snapshot_json("order"))])
    await store.acquire([LeaseRequest("r", "gone", timedelta(minutes=1))])
    expiry = clock.now() + timedelta(minutes=1)
    await clock.advance(timedelta(minutes=3))
    overview = await Insights(store, clock=clock).overview()
    assert abs(overview.lags["order"].oldest - expiry) < timedelta(seconds=1)


async def test_numbers_that_are_not_complete_say_so(
    monkeypatch: pytest.MonkeyPatch, clock: TestClock
) -> None:
    monkeypatch.setattr(overview, "DUE", 3)
    store = MemoryStore(clock=clock)
    snapshot = new_snapshot_json("order")
    await store.enqueue([NewRun(f"r{n}", "order", snapshot) for n in range(5)])
    answer = await Insights(store, clock=clock).overview()
    assert (answer.due, answer.due_capped) == (3, True)
    assert [each.text for each in answer.attention] == ["3+ runs are due; no worker is running"]


async def test_runs_in_queues_are_due_too(store: StoreShell[Any], clock: TestClock) -> None:
    await store.enqueue([NewRun("r", "order", new_snapshot_json("order"), queue="emails/ana")])
    assert (await Insights(store, clock=clock).overview()).due == 1


async def test_long_waits_need_attention(store: StoreShell[Any], clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    await clock.advance(timedelta(days=2))
    insights = Insights(store, clock=clock)
    (only,) = (await insights.overview()).attention
    assert only.text == '1 run has waited for "approved" for over a day'
    assert [run.id for run in (await insights.runs(only.query)).runs] == ["r"]


async def test_paused_workflows_need_attention(store: StoreShell[Any], clock: TestClock) -> None:
    await set_switch(store, WorkflowSwitch("send it", True, "ana", "", clock.now()))
    (only,) = (await Insights(store, clock=clock).overview()).attention
    assert (only.text, only.query) == ('Workflow "send it" is paused', 'workflow:"send it"')


async def test_due_runs_of_a_paused_workflow_are_not_reported_as_unknown(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await store.enqueue([NewRun("r", "order", new_snapshot_json("order"), version=3)])
    await live_worker(store, clock.now())
    await set_switch(store, WorkflowSwitch("order", True, "ana", "", clock.now()))
    overview = await Insights(store, clock=clock).overview()
    assert [each.text for each in overview.attention] == ['Workflow "order" is paused']


async def test_failures_are_grouped_and_found_by_the_query_of_their_group(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await fail_with(store, "a", "CarrierDown: parcel 17 refused")
    await clock.advance(timedelta(hours=3))
    await fail_with(store, "b", "CarrierDown: parcel 4 refused")
    await fail_with(store, "c", "CarrierDown: parcel 4 lost")
    await fail_with(store, "d", "CarrierDown: parcel 4 refused", step="label")
    insights = Insights(store, clock=clock)
    groups = await insights.errors("4h")
    first, *others = groups.groups
    assert (first.count, first.message, first.step) == (2, "parcel # refused", "ship")
    assert first.by_hour == (1, 0, 0, 1)
    assert [group.count for group in others] == [1, 1]
    assert {run.id for run in (await insights.runs(first.query)).runs} == {"a", "b"}
    assert (groups.examined, groups.is_complete) == (4, True)


async def test_a_group_names_the_step_that_ended_its_runs(
    store: StoreShell[Any], clock: TestClock
) -> None:
    """Not one that failed and was handled, nor the one that was recorded last."""

    def refuse() -> None:
        raise ValueError("no")

    @workflow("order")
    async def order(step: Step, fails: bool) -> None:
        with suppress(ValueError):
            await step("quote", refuse)
        try:
            await step("charge", refuse if fails else lambda: None)
        finally:
            await step("notify", lambda: None)
        raise LookupError("the function itself")

    runtime = Runtime(store, workflows=[order], clock=clock)
    for run_id, fails in (("a", True), ("b", False)):
        await runtime.trigger(order, fails, run_id=run_id)
    insights = Insights(store, clock=clock)
    groups = {group.type: group for group in (await insights.errors("1h")).groups}
    assert {name: group.step for name, group in groups.items()} == {
        "ValueError": "charge",
        "LookupError": "",
    }
    for name, run_id in (("ValueError", "a"), ("LookupError", "b")):
        page = await insights.runs(groups[name].query)
        assert [run.id for run in page.runs] == [run_id]


async def test_failures_before_the_window_are_left_out(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await fail_with(store, "a", "x")
    await clock.advance(timedelta(hours=2))
    assert (await Insights(store, clock=clock).errors("1h")).groups == ()


def test_numbers_and_ids_in_messages_are_ignored_in_groups() -> None:
    assert normalize("order 12 of 3f2a9bc04d1e: a1 beef") == "order # of #: a# beef"


async def test_the_agenda_lists_wakes_and_awaited_events(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await run_order(store, "s", "sleep", clock)
    await run_order(store, "w", "wait", clock)
    agenda = await Insights(store, clock=clock).agenda(hours=12)
    assert [run.id for run in agenda.next] == ["s"]
    assert [(hour.hour.hour, hour.count) for hour in agenda.hours] == [(6, 1)]
    (event,) = agenda.events
    assert (event.event, event.count, event.run_ids) == ("approved", 1, ("w",))
    assert agenda.is_complete


async def test_the_agenda_names_the_runs_that_wait_longest_for_an_event(
    store: StoreShell[Any], clock: TestClock
) -> None:
    for n in range(5):
        await run_order(store, f"w{n}", "wait", clock)
        await clock.advance(timedelta(minutes=1))
    (event,) = (await Insights(store, clock=clock).agenda()).events
    assert (event.count, event.run_ids) == (5, ("w0", "w1", "w2"))


async def test_owned_runs_are_not_on_the_agenda(store: StoreShell[Any], clock: TestClock) -> None:
    snapshot = new_snapshot_json("order")
    await store.enqueue([NewRun(id, "order", snapshot) for id in ("owned", "free")])
    await store.acquire([LeaseRequest("owned", "w-1", timedelta(minutes=1))])
    assert [run.id for run in (await Insights(store, clock=clock).agenda()).next] == ["free"]


async def test_timeouts_of_waits_are_on_the_agenda(
    store: StoreShell[Any], clock: TestClock
) -> None:
    await run_order(store, "w", "wait", clock)
    agenda = await Insights(store, clock=clock).agenda(hours=80)
    assert [run.id for run in agenda.next] == ["w"]


async def test_windows_must_be_positive(store: StoreShell[Any]) -> None:
    insights = Insights(store)
    with pytest.raises(InvalidDuration, match="window"):
        await insights.errors(0)
    with pytest.raises(InvalidArgument, match="hours"):
        await insights.agenda(0)


def test_many_lost_workers_are_one_sentence() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    workers = [WorkerRow(f"w-{n}", "lost", "", 0, now, now) for n in range(5)]
    [attention] = lost_workers(workers)
    assert attention.text == "5 workers disappeared without stopping"
    assert len([*lost_workers(workers[:3])]) == 3
