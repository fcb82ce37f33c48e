"""What the pages show."""

import re
import time
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from random import Random
from threading import get_ident
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from perdure import Runtime, Step, SystemClock, workflow
from perdure.dashboard import Dashboard
from perdure.durable.owners import new_owner
from perdure.insights import Insights, Redact
from perdure.operations import Operations
from perdure.presence import DefinitionDocument, worker_id
from perdure.presence.documents import write_definition
from perdure.snapshot import RunStatus
from perdure.store import LeaseRequest
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore
from perdure.urls import encode_id
from tests.unit.dashboard.visitor import (
    Visitor,
    as_person,
    dashboard,
    failed_run,
    order,
    text_of,
    waiting_run,
)
from tests.unit.insights.long_runs import create_long_run
from tests.unit.insights.runs import live_worker
from tests.unit.insights.samples import new_snapshot_json

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>/../..\u202e{{7*7}}"


async def test_a_list_of_runs_shows_each_with_its_status_and_detail() -> None:
    store = MemoryStore()
    await failed_run(store)
    await waiting_run(store)
    text = text_of(await Visitor(dashboard(store)).get("/runs"))
    assert "Failed order-1" in text
    assert "CarrierDown: 503 from carrier" in text
    assert "Waiting order-2" in text
    assert "for approved" in text


async def test_a_query_filters_the_list_and_appears_as_chips() -> None:
    store = MemoryStore()
    await failed_run(store)
    await waiting_run(store)
    page = await Visitor(dashboard(store)).get("/runs?q=status:failed+workflow:order")
    assert "order-1" in page.text
    assert "order-2" not in page.text
    assert 'href="/runs?q=workflow%3Aorder" title="Remove this term"' in page.text


async def test_a_query_that_cannot_be_understood_says_why() -> None:
    page = await Visitor(dashboard(MemoryStore())).get("/runs?q=status:fialed")
    assert page.status_code == 400
    assert "did you mean &#39;failed&#39;?" in page.text
    assert 'value="status:fialed"' in page.text
    assert "<h1>Runs</h1>" in page.text


async def test_an_empty_store_shows_a_program_or_offers_the_workflows_of_a_worker() -> None:
    store = MemoryStore()
    visitor = Visitor(dashboard(store))
    assert "from perdure import Runtime" in text_of(await visitor.get("/"))
    await live_worker(store, datetime.now(UTC))
    page = await visitor.get("/")
    assert 'href="/workflows/order/start">Start order…</a>' in page.text
    assert "from perdure import Runtime" not in text_of(page)


async def test_a_page_loads_a_large_run_once() -> None:
    store = FaultyStore(MemoryStore())

    @workflow("large")
    async def large(step: Step) -> int:
        return len(await step("read", lambda: "x" * 9_000_000))

    await Runtime(store, workflows=[large]).trigger(large, run_id="large")
    store.calls.clear()
    assert (await Visitor(dashboard(store)).get("/runs/large")).status_code == 200
    assert [call.verb for call in store.calls].count("load") == 1


async def test_a_list_without_runs_offers_to_search_for_more() -> None:
    page = await Visitor(dashboard(MemoryStore())).get("/runs?q=status:failed")
    assert "No runs match. Search without status:failed" in text_of(page)


async def test_a_list_without_runs_says_how_many_fewer_terms_find() -> None:
    store = MemoryStore()
    await failed_run(store)
    page = await Visitor(dashboard(store)).get("/runs?q=status:completed%20workflow:order")
    assert "Without status:completed there is 1. Search without" in text_of(page)


async def test_a_form_shows_the_whole_command_and_the_error_that_it_replaces() -> None:
    store = MemoryStore()
    await failed_run(store)
    page = await Visitor(dashboard(store)).get("/runs/order-1/do/complete_step?step=ship")
    assert "perdure complete-step order-1 ship VALUE --why REASON" in text_of(page)
    assert "The step now has the error CarrierDown: 503 from carrier" in text_of(page)


async def test_the_overview_shows_the_due_runs_of_a_workflow_and_their_lag() -> None:
    store = MemoryStore()
    await Runtime(store, workflows=[order]).trigger(order, {}, run_id="late", wait=False)
    overview = (await Visitor(dashboard(store)).get("/?format=json")).json()["overview"]
    assert overview["lags"]["order"]["due"] == 1
    assert re.search(r"order 0 1 \d+ ms", text_of(await Visitor(dashboard(store)).get("/")))


async def test_the_overview_says_that_durations_are_estimates() -> None:
    store = MemoryStore()
    await failed_run(store)
    text = text_of(await Visitor(dashboard(store)).get("/"))
    assert "Workflows durations are estimates of the last 24 h All workflows" in text


async def test_a_run_that_a_worker_executes_links_to_its_worker() -> None:
    store, now = MemoryStore(), SystemClock().now()
    owner, snapshot = new_owner(Random(1)), new_snapshot_json("order")
    await store.acquire([LeaseRequest("r", owner, timedelta(minutes=1), snapshot, "order")])
    await live_worker(store, now, worker_id(owner), owners=(owner,))
    visitor = Visitor(dashboard(store))
    assert owner not in (await visitor.get("/runs")).text
    [link] = re.findall(r'href="(/workers/[^"]+)"', (await visitor.get("/runs/r")).text)
    assert (await visitor.get(link)).status_code == 200


async def test_a_list_of_an_empty_store_does_not_speak_of_a_search() -> None:
    page = await Visitor(dashboard(MemoryStore())).get("/runs")
    assert "No runs yet. Runs appear here" in text_of(page)


async def test_a_long_list_has_pages() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[sleepy])
    for n in range(60):
        await runtime.trigger(sleepy, run_id=f"nap-{n:02}", wait=False)
    visitor = Visitor(dashboard(store))
    first = await visitor.get("/runs")
    after = (await Insights(store).runs("")).cursor
    second = await visitor.get(f"/runs?after={quote(after or '')}")
    counts = [sum(f'/runs/nap-{n:02}"' in page.text for n in range(60)) for page in (first, second)]
    assert counts == [50, 10]
    assert "Next page" in text_of(first)
    assert "First page" in text_of(second)


@workflow("sleepy")
async def sleepy(step: Step) -> None:
    await step.sleep("nap", timedelta(days=1))


async def test_a_long_run_says_which_part_of_its_steps_is_shown() -> None:
    store = MemoryStore()

    @workflow("long")
    async def long(step: Step) -> None:
        await step.map("pack", [*range(250)], lambda number: number)

    await Runtime(store, workflows=[long]).trigger(long, run_id="r")
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/runs/r")
    assert "1 to 100 of 250 Steps over time 250 steps, 0 failed, at most " in text_of(page)
    [link] = re.findall(r'href="([^"]+)">Later steps', page.text)
    assert "101 to 200 of 250 " in text_of(await visitor.get(unescape(link)))


async def test_the_strip_above_a_long_timeline_marks_failures_and_the_listed_steps() -> None:
    store = MemoryStore()
    await create_long_run(store, "long", 1000, fails_every=500)
    page = await Visitor(dashboard(store)).get("/runs/long")
    [strip] = re.findall(r'<svg class="strip-bars".*?</svg>', page.text, re.DOTALL)
    assert strip.count('class="look-failed"') == 2
    assert strip.count('class="look-listed"') == 1
    assert "100 steps listed</title>" in strip
    assert "<desc>1,000 steps, 2 failed, at most " in strip


async def test_a_run_with_few_steps_has_no_strip() -> None:
    store = MemoryStore()
    await create_long_run(store, "short", 100)
    assert "strip-bars" not in (await Visitor(dashboard(store)).get("/runs/short")).text


async def test_a_page_of_very_many_steps_stays_small() -> None:
    store = MemoryStore()
    await create_long_run(store, "long", 10_000, fails_every=7)
    page = await Visitor(dashboard(store)).get("/runs/long")
    assert len(page.content) <= 120 * 1024


async def test_a_run_explains_its_state() -> None:
    store = MemoryStore()
    await failed_run(store)
    text = text_of(await Visitor(dashboard(store)).get("/runs/order-1"))
    assert 'Step "ship" failed' in text
    assert "Nothing will happen until the run is retried." in text


async def test_the_step_that_ended_a_run_is_shown_first() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    text = text_of(await visitor.get("/runs/order-1"))
    assert "CarrierDown : 503 from carrier" in text
    assert "in ship" in text
    assert "frames inside perdure" in text
    assert '"receipt"' in text_of(await visitor.get("/runs/order-1?step=charge"))


async def test_a_pending_wait_can_be_signalled_and_woken() -> None:
    store = MemoryStore()
    await waiting_run(store)
    page = await Visitor(dashboard(store)).get("/runs/order-2")
    assert "for event approved since" in text_of(page)
    assert "/runs/order-2/do/signal?event=approved" in page.text
    assert "/runs/order-2/do/wake?wait=approval" in page.text


async def test_a_person_without_rights_is_offered_no_actions() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store, "view"))
    for path in ("/runs", "/runs/order-1"):
        page = await visitor.get(path)
        assert "/do/" not in page.text
        assert "/bulk/" not in page.text


async def test_the_header_names_the_store_and_the_time_zone() -> None:
    store = MemoryStore()
    assert " memory As of " in text_of(await Visitor(dashboard(store)).get("/runs"))
    visitor = Visitor(dashboard(store, url="postgresql://ana:hunter2@db:5432/shop?sslmode=require"))
    await visitor.post("/preferences", {"theme": "dark", "zone": "Asia/Tokyo"})
    page = await visitor.get("/runs")
    assert re.search(r" db/shop As of [\d:]+ JST Asia/Tokyo dark theme ", text_of(page))
    assert "hunter2" not in page.text


async def test_a_runtime_knows_the_name_of_its_store(tmp_path: Path) -> None:
    async with Runtime(f"sqlite:///{tmp_path}/a%20shop.db") as runtime:
        page = await Visitor(Dashboard(runtime, auth=as_person("view"))).get("/runs")
    assert " a shop.db As of " in text_of(page)


async def test_the_source_of_a_workflow_is_shown_if_that_is_wanted() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[order, workflow("generated")(generated())])
    for name in ("order", "generated"):
        definition = DefinitionDocument(workflow=name, version=1, seen_at=SystemClock().now())
        await write_definition(store, definition)
    for shows in (True, False):
        visitor = Visitor(Dashboard(runtime, auth=as_person("view"), show_source=shows))
        page = await visitor.get("/workflows/order")
        assert ("async def order(step: Step" in text_of(page)) == shows
        assert "Source" not in text_of(await visitor.get("/workflows/generated"))


def generated() -> Any:
    names: dict[str, Any] = {}
    exec("async def run(step): pass", names)
    return names["run"]


async def test_a_form_says_that_a_run_has_ended() -> None:
    store = MemoryStore()
    await failed_run(store)
    page = await Visitor(dashboard(store)).get("/runs/order-1/do/cancel")
    assert re.search(r"The run ended \d+ s ago and cannot be cancelled\.", text_of(page))


async def test_a_run_that_was_deleted_says_by_whom() -> None:
    store = MemoryStore()
    await failed_run(store, "order-1")
    await failed_run(store, "order-10")
    await Operations(store).delete("order-1", by="ana", why="a test order")
    await Operations(store).delete("order-10", by="ben", why="another")
    text = text_of(await Visitor(dashboard(store)).get("/runs/order-1"))
    assert "ana Delete order-1 a test order" in text
    assert "ben" not in text
    text = text_of(await Visitor(dashboard(store)).get("/runs/order-2"))
    assert "Either it never existed, or its retention period is over." in text


async def test_an_unknown_run_suggests_runs_with_similar_ids() -> None:
    store = MemoryStore()
    await failed_run(store)
    page = await Visitor(dashboard(store)).get("/runs/order-17")
    assert page.status_code == 404
    assert "order-1" in page.text


async def test_a_page_is_also_json() -> None:
    store = MemoryStore()
    await failed_run(store)
    response = await Visitor(dashboard(store)).get("/runs?format=json")
    assert response.headers["content-type"] == "application/json"
    assert [run["id"] for run in response.json()["runs"]] == ["order-1"]


async def test_a_whole_value_can_be_downloaded() -> None:
    store = MemoryStore()
    await failed_run(store, note="x" * 10_000)
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/runs/order-1")
    assert "Download the whole value" in page.text
    assert len(page.content) < 60_000
    value = await visitor.get("/runs/order-1/value?part=payload")
    assert value.json() == {"note": "x" * 10_000}
    assert "attachment" in value.headers["content-disposition"]


async def test_of_a_large_value_only_the_beginning_is_read() -> None:
    """Redacting all of it takes seconds, in which an app that mounts the dashboard would stand."""
    store, rows = MemoryStore(), [{"id": n, "token": "t"} for n in range(200_000)]
    await failed_run(store, rows=rows)
    visitor = Visitor(dashboard(store))
    await visitor.get("/runs/order-1")
    began = time.process_time()
    page = await visitor.get("/runs/order-1")
    assert time.process_time() - began < 0.25
    assert "… 199," in text_of(page)
    value = (await visitor.get("/runs/order-1/value?part=payload")).json()
    assert value["rows"] == [{"id": n, "token": "•••"} for n in range(200_000)]


@pytest.mark.parametrize("path", ["/runs/order-1/export", "/compare?a=order-1&b=order-1"])
async def test_a_whole_run_is_redacted_outside_of_the_event_loop(path: str) -> None:
    threads: set[int] = set()

    def hides(path: tuple[str, ...], value: Any) -> bool:
        threads.add(get_ident())
        return False

    store, redact = MemoryStore(), Redact(function=hides)
    await failed_run(store, rows=[1, 2])
    assert (await Visitor(dashboard(store, redact=redact)).get(path)).status_code == 200
    assert threads
    assert get_ident() not in threads


async def test_a_page_that_has_not_changed_is_not_sent_again() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    part = {"X-Perdure-Part": "main"}
    first = await visitor.get("/runs/order-1", **part)
    assert first.text.startswith("<main")
    again = await visitor.get("/runs/order-1", **part, **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.text) == (304, "")
    await Operations(store).retry("order-1", by="ana")
    changed = await visitor.get("/runs/order-1", **part, **{"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200


async def test_an_unreachable_store_is_a_page() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, verbs={"summaries"})
    page = await Visitor(dashboard(store)).get("/runs/order-1")
    assert page.status_code == 503
    assert "Store unavailable" in text_of(page)


async def test_a_wait_says_since_when_it_lasts() -> None:
    store = MemoryStore()
    await waiting_run(store)
    text = text_of(await Visitor(dashboard(store)).get("/runs/order-2"))
    assert re.search(r"for event approved since \d\d:\d\d:\d\d UTC , times out in 1 day", text)


async def test_hostile_ids_values_and_errors_are_text_on_every_page() -> None:
    store = MemoryStore()
    runtime = Runtime(store, workflows=[hostile])
    await runtime.trigger(hostile, {HOSTILE: HOSTILE}, run_id=HOSTILE, tags={"x": HOSTILE[:60]})
    await Operations(store).retry(HOSTILE, by=HOSTILE[:90], why=HOSTILE)
    visitor = Visitor(dashboard(store, environment=HOSTILE))
    run = f"/runs/{encode_id(HOSTILE)}"
    paths = ["/runs", run, f"{run}/do/fork", "/errors", "/acts", f"/runs?q={HOSTILE}"]
    for path in paths:
        page = await visitor.get(path)
        assert "<script>alert" not in page.text
        assert "<img" not in page.text
        assert "\u202e" not in page.text
        assert ">49<" not in page.text
    assert (await visitor.get(run)).status_code == 200


@workflow("hostile")
async def hostile(step: Step, payload: dict[str, str]) -> None:
    async def fail() -> None:
        raise RuntimeError(HOSTILE)

    await step(HOSTILE, fail)


async def test_preferences_are_rendered_by_the_server() -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    fields = {"theme": "dark", "zone": "Asia/Tokyo", "density": "compact", "keys": "off"}
    assert (await visitor.post("/preferences", fields)).status_code == 303
    page = await visitor.get("/preferences")
    assert 'data-theme="dark" data-density="compact" data-keys="off"' in page.text
    assert "JST" in page.text


@pytest.mark.parametrize(
    "fields", [{"zone": "Mars/Olympus"}, {"zone": "../../etc/passwd"}, {"theme": "neon"}]
)
async def test_preferences_that_make_no_sense_are_ignored(fields: dict[str, str]) -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    await visitor.post("/preferences", fields)
    assert 'data-theme="system"' in (await visitor.get("/preferences")).text


async def test_metrics_count_runs_by_status() -> None:
    store = MemoryStore()
    await failed_run(store)
    response = await Visitor(dashboard(store)).get("/metrics")
    assert 'perdure_runs{status="failed"} 1' in response.text
    assert response.text.endswith("# EOF\n")


async def test_the_search_box_completes() -> None:
    candidates = (await Visitor(dashboard(MemoryStore())).get("/complete?q=status:fa")).json()
    assert [each["value"] for each in candidates] == ["status:failed"]


STATUSES: tuple[RunStatus, ...] = ("failed", "waiting")


@pytest.mark.parametrize("status", STATUSES)
async def test_an_export_can_be_read_elsewhere(status: RunStatus) -> None:
    store = MemoryStore()
    await (failed_run if status == "failed" else waiting_run)(store, "order-7")
    response = await Visitor(dashboard(store)).get("/runs/order-7/export")
    bundle: dict[str, Any] = msgspec.json.decode(response.content)
    assert (bundle["run_id"], bundle["status"]) == ("order-7", status)
