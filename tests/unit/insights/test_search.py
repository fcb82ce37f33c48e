"""Pages of runs: the index and the filters, the limits of a search, hostile ids and values."""

import json
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.durable.owners import new_owner
from perdure.errors import InvalidArgument, MissingAbility
from perdure.insights import Tally, search
from perdure.insights.insights import Insights
from perdure.insights.redaction import MASK, NOTHING_REDACTED
from perdure.presence import worker_id
from perdure.store import LeaseRequest, NewRun, SearchStore
from perdure.stores import MemoryStore
from perdure.stores._shell import StoreShell
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore
from perdure.testing import TestClock
from tests.unit.insights.runs import CarrierDown, live_worker

STRANGE_IDS = ("a b", 'quo"te\\', "colon:1", "sl/ash", "émoji 🐍", "x" * 512, "<script>", "%_*")


@workflow("order")
async def order(step: Step, payload: dict[str, Any]) -> None:
    await step("check", lambda: None)
    if payload.get("fails"):
        await step("ship", _ship)
    await step.wait_for_event("approval", "approved")


def _ship() -> None:
    raise CarrierDown("503 from https://ana:hunter2@carrier")


async def fill(store: SearchStore, payloads: dict[str, dict[str, Any]], **tags: str) -> None:
    runtime = Runtime(store, workflows=[order])
    for run_id, payload in payloads.items():
        await runtime.trigger(order, payload, run_id=run_id, tags=tags or None)


async def ids(insights: Insights, query: str, **options: Any) -> list[str]:
    return sorted(run.id for run in (await insights.runs(query, **options)).runs)


async def test_the_index_answers(store: StoreShell[Any]) -> None:
    await fill(store, {"a1": {}, "a2": {"fails": 1}, "b1": {}}, customer="acme")
    insights = Insights(store)
    assert await ids(insights, "status:waiting a") == ["a1"]
    assert await ids(insights, "tag:customer=acme status:failed") == ["a2"]
    assert await ids(insights, "since:1h workflow:order") == ["a1", "a2", "b1"]


async def test_pages_continue_without_gaps(store: StoreShell[Any]) -> None:
    await fill(store, {f"r{n}": {"fails": n % 2} for n in range(7)})
    insights, ids, after = Insights(store), [], None
    while True:
        page = await insights.runs("error:carrier", limit=2, after=after)
        ids += [run.id for run in page.runs]
        if (after := page.cursor) is None:
            break
    assert ids == ["r5", "r3", "r1"]


async def test_headers_are_filtered_by_wait_error_step_and_version(store: StoreShell[Any]) -> None:
    await fill(store, {"w": {}, "f": {"fails": 1}})
    insights = Insights(store)
    assert await ids(insights, "waiting:approved") == ["w"]
    assert await ids(insights, "error:CARRIERdown") == ["f"]
    assert await ids(insights, "step:ship version:1") == ["f"]
    assert await ids(insights, "version:2") == []


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("payload.total:>100", ["big"]),
        ("payload.total:<=100", ["small"]),
        ("payload.total:250.0", ["big"]),
        ("payload.customer.id:c-1", ["small"]),
        ("payload.lines.0.sku:x", ["small"]),
        ("payload.gift:true", ["big"]),
        ("payload.none:null", ["small"]),
        ('payload.empty:""', ["small"]),
        ("payload.id:9007199254740993", ["big"]),
        ("payload.id:9007199254740992", []),
        ("payload.customer:c-1", []),
    ],
)
async def test_payloads_are_filtered_by_path(query: str, found: list[str]) -> None:
    store = MemoryStore()
    small = {"total": 100, "customer": {"id": "c-1"}, "lines": [{"sku": "x"}], "none": None}
    big = {"total": 250, "gift": True, "id": 9007199254740993}
    await fill(store, {"small": {**small, "empty": ""}, "big": big})
    assert await ids(Insights(store), query) == found


async def test_runs_are_found_by_the_worker_that_has_them(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    await fill(store, {"a": {}, "b": {}, "c": {}})
    owner = new_owner(Random(1))
    ttl = timedelta(seconds=30)
    requests = [LeaseRequest("a", owner, ttl), LeaseRequest("b", "o-1", ttl)]
    await store.acquire(requests)
    await live_worker(store, clock.now(), "w-1", owners=("o-1",))
    insights = Insights(store, clock=clock)
    assert await ids(insights, f'owner:"{worker_id(owner)}"') == ["a"]
    assert await ids(insights, "owner:w-1") == ["b"]


async def test_a_revision_differs_after_each_change(store: StoreShell[Any]) -> None:
    await fill(store, {"a": {}})
    insights = Insights(store)
    before = await insights.revisions(["a", "missing"])
    await Runtime(store, workflows=[order]).signal("a", "other")
    after = await insights.revisions(["a"])
    assert list(before) == ["a"]
    assert before != after


async def test_redacted_values_never_match() -> None:
    store = MemoryStore()
    await fill(store, {"a": {"password": "x", "fails": 1}}, api_key="k")
    insights = Insights(store)
    for query in ("payload.password:x", f"payload.password:{MASK}", "error:hunter2"):
        assert await ids(insights, query) == []
    assert await ids(insights, "tag:api_key=k") == []
    assert await ids(Insights(store, redact=NOTHING_REDACTED), "payload.password:x") == ["a"]


async def test_lists_hide_secrets_in_errors_and_tags(store: StoreShell[Any]) -> None:
    await fill(store, {"a": {"fails": 1}}, api_key="k")
    (run,) = (await Insights(store).runs()).runs
    assert run.error == f"CarrierDown: 503 from https://ana:{MASK}@carrier"
    assert run.tags == {"api_key": MASK}


async def test_a_search_stops_after_its_time_and_says_how_far_it_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, clock = MemoryStore(), TestClock()
    await fill(store, {f"r{n}": {"n": n} for n in range(6)})
    monkeypatch.setattr(search, "LOADS", 2)
    monkeypatch.setattr(search, "TIME", 0.0)
    page = await Insights(store, clock=clock).runs("payload.n:0")
    assert (page.runs, page.examined) == ((), 2)
    assert page.searched_until is not None
    monkeypatch.undo()
    page = await Insights(store, clock=clock).runs("payload.n:0", after=page.cursor)
    assert [run.id for run in page.runs] == ["r0"]
    assert (page.cursor, page.examined, page.searched_until) == (None, 4, None)


async def test_a_search_stops_after_a_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await fill(store, {f"r{n}": {} for n in range(6)})
    monkeypatch.setattr(search, "BATCH", 2)
    monkeypatch.setattr(search, "EXAMINED", 4)
    page = await Insights(store).runs("error:x")
    assert page.examined == 4
    assert page.searched_until == (await store.summaries(["r2"]))[0].updated_at  # type: ignore[union-attr]  # the run exists


@pytest.mark.parametrize("run_id", STRANGE_IDS)
async def test_unusual_ids_are_found_by_their_quoted_text(
    store: StoreShell[Any], run_id: str
) -> None:
    quoted = json.dumps(run_id, ensure_ascii=False)
    await store.enqueue([NewRun(run_id, "order", _snapshot())])
    assert await ids(Insights(store), quoted) == [run_id]


def _snapshot() -> bytes:
    execution = {"status": "running", "lastUpdated": "2026-11-03T09:00:00.000Z"}
    return json.dumps({"formatVersion": 1, "steps": {}, "execution": execution}).encode()


async def test_a_store_that_cannot_be_searched_is_refused() -> None:
    with pytest.raises(MissingAbility, match="Insights needs"):
        Insights(SnapshotOnlyStore(MemoryStore()))


async def test_bad_arguments_are_refused() -> None:
    insights = Insights(MemoryStore())
    with pytest.raises(InvalidArgument, match="limit"):
        await insights.runs(limit=0)
    with pytest.raises(InvalidArgument, match="redact"):
        Insights(MemoryStore(), redact=None)  # type: ignore[arg-type]  # wrong on purpose


@workflow("parent")
async def parent(step: Step, payload: dict[str, Any]) -> None:
    if payload.get("asks"):
        await step.approval("ship", "Ship it?", to="ops")
    elif payload.get("calls back"):
        await step.callback("signed")
    elif payload.get("calls"):
        await step.call("pay", order, {})
    else:
        await step.wait_for_event("first", "approved")


@pytest.mark.parametrize(
    ("payload", "waits_for"),
    [
        ({"asks": True}, "an approval"),
        ({"calls back": True}, "a callback"),
        ({"calls": True}, "child runs"),
        ({}, "approved"),
    ],
)
async def test_a_row_says_what_its_run_waits_for(payload: dict[str, Any], waits_for: str) -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[order, parent]).trigger(parent, payload, run_id="r")
    [row] = (await Insights(store).runs("workflow:parent")).runs
    assert row.waits_for == waits_for


async def test_an_empty_page_says_what_fewer_terms_would_find() -> None:
    store = MemoryStore()
    await fill(store, {"a-1": {}, "a-2": {}})
    insights = Insights(store)
    page = await insights.runs("status:failed workflow:order error:Other")
    assert page.without == {"error:Other": Tally(0)}, "a search without it needs no scan"
    page = await insights.runs("status:failed a-", limit=1)
    assert page.without == {"status:failed": Tally(1, capped=True), "a-": Tally(0)}
    assert (await insights.runs("a-")).without == {}
