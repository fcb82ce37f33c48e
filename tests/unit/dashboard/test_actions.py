"""What operators do with the forms of the dashboard."""

import json
import re
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from markupsafe import escape

from perdure import Runtime, Step, workflow
from perdure.dashboard import Dashboard
from perdure.dashboard.access import ALL_RIGHTS
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.operations.verbs import VERBS
from perdure.stores import MemoryStore
from perdure.urls import encode_id
from tests.unit.dashboard.visitor import (
    Visitor,
    as_person,
    dashboard,
    failed_run,
    text_of,
    waiting_run,
)


async def status_of(store: MemoryStore, run_id: str) -> str:
    return (await Insights(store).run(run_id)).run.status


async def test_a_run_is_retried_with_who_and_why() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    response = await visitor.post("/runs/order-1/do/retry", {"why": "carrier is back"})
    assert (response.status_code, response.headers["location"]) == (303, "/runs/order-1")
    facts = await Insights(store).run("order-1")
    assert facts.run.status == "queued"
    (act,) = facts.acts
    assert (act.verb, act.by, act.why, act.via) == ("retry", "ana", "carrier is back", "dashboard")


async def test_the_next_page_says_once_what_was_done() -> None:
    store = MemoryStore()
    await waiting_run(store)
    visitor = Visitor(dashboard(store))
    await visitor.post("/runs/order-2/do/pause")
    pages = [await visitor.get("/runs/order-2") for _ in range(2)]
    assert ['class="notice"' in page.text for page in pages] == [True, False]


FORMS: dict[str, dict[str, str]] = {
    "complete_step": {"step": "ship", "value": '"parcel 7"'},
    "skip_step": {"step": "ship"},
    "fail_step": {"step": "ship", "error": "lost"},
    "retry_step": {"step": "ship"},
    "rewind": {"at": "charge"},
    "fork": {"at": "ship", "new_id": "order-1-again"},
    "delete": {},
}


@pytest.mark.parametrize("verb", FORMS)
async def test_history_is_changed_with_a_reason(verb: str) -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    path = f"/runs/order-1/do/{verb}"
    refused = await visitor.post(path, FORMS[verb], form=f"{path}?step=ship")
    assert refused.status_code == 422
    assert "a reason" in text_of(refused)
    response = await visitor.post(path, {**FORMS[verb], "why": "ticket 4411"})
    assert response.status_code == 303
    acts = (await Insights(store).acts()).acts
    assert (acts[0].verb, acts[0].why) == (verb, "ticket 4411")


async def test_an_event_is_signalled_with_a_payload() -> None:
    store = MemoryStore()
    await waiting_run(store)
    visitor = Visitor(dashboard(store))
    fields = {"event": "approved", "payload": '{"by": "eva"}'}
    assert (await visitor.post("/runs/order-2/do/signal", fields)).status_code == 303
    assert await status_of(store, "order-2") != "waiting"
    assert "<span>signal " in (await visitor.get("/runs/order-2")).text


async def test_a_value_that_is_not_json_is_shown_again_with_the_reason() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    fields = {"step": "ship", "value": "{'a': 1}", "why": "typo"}
    response = await visitor.post("/runs/order-1/do/complete_step", fields)
    assert response.status_code == 422
    assert "expected JSON" in text_of(response)
    assert "{'a': 1}" in text_of(response)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999999x"])
async def test_constants_that_json_lacks_are_refused(value: str) -> None:
    store = MemoryStore()
    await failed_run(store)
    fields = {"step": "ship", "value": value, "why": "typo"}
    path = "/runs/order-1/do/complete_step"
    assert (await Visitor(dashboard(store)).post(path, fields)).status_code == 422


async def test_a_refusal_says_why() -> None:
    store = MemoryStore()
    await failed_run(store)
    response = await Visitor(dashboard(store)).post("/runs/order-1/do/pause")
    assert response.status_code == 422
    assert "refused" in text_of(response)


async def test_the_confirmation_lists_the_records_that_are_dropped() -> None:
    store = MemoryStore()
    await failed_run(store)
    text = text_of(await Visitor(dashboard(store)).get("/runs/order-1/do/rewind?step=charge"))
    assert "Dropped and run again: 2 charge ship" in text
    assert "perdure rewind order-1 charge" in text


async def test_an_input_is_edited_as_it_is_and_not_as_it_is_shown() -> None:
    """Saving a redacted input would replace secrets by their mask."""
    store = MemoryStore()
    await failed_run(store, api_key="s3cret")
    path = "/runs/order-1/do/edit_payload"
    assert "s3cret" in (await Visitor(dashboard(store)).get(path)).text
    blind = await Visitor(dashboard(store, "view", "override")).get(path)
    assert "s3cret" not in blind.text
    assert "•••" not in blind.text


async def test_selected_runs_are_changed_one_by_one() -> None:
    store = MemoryStore()
    await failed_run(store, "order-1")
    await waiting_run(store, "a/b")
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/bulk/selected?verb=retry&run=order-1&run=~YS9i")
    assert "Retry 2 runs" in text_of(page)
    response = await visitor.post(
        "/bulk/selected/retry",
        {"run": ["order-1", "~YS9i"]},
        form="/bulk/selected?verb=retry&run=order-1",
    )
    assert response.status_code == 303
    assert "1 run done, 1 refused" in text_of(await visitor.get("/preferences"))


async def test_all_matches_are_changed_in_the_background() -> None:
    store = MemoryStore()
    for n in range(5):
        await failed_run(store, f"order-{n}")
    visitor = Visitor(dashboard(store))
    form = "/bulk/all?verb=retry&q=status:failed"
    assert "matches 5 runs" in text_of(await visitor.get(form))
    response = await visitor.post("/bulk/all/retry", {"q": "status:failed"}, form=form)
    assert response.status_code == 303
    (progress,) = await finished(store)
    assert (progress.done, progress.refused, progress.by) == (5, 0, "ana")
    assert "5 done, 0 refused" in text_of(await visitor.get(response.headers["location"]))


async def finished(store: MemoryStore) -> Any:
    for _ in range(500):
        operations = await Insights(store).bulks()
        if operations and operations[0].state == "done":
            return operations
        await Operations(store).clock.sleep(0.01)
    raise AssertionError("the bulk operation did not end")


async def test_old_runs_are_counted_before_they_are_deleted() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    assert "0 runs would be deleted" in text_of(await visitor.get("/store?older_than=1d"))


def test_each_verb_is_one_of_operations() -> None:
    for name in VERBS:
        assert callable(getattr(Operations, name))


async def test_a_form_that_is_shown_again_keeps_the_step_and_what_was_entered() -> None:
    store = MemoryStore()
    await failed_run(store)
    fields = {"step": encode_id("ship it/ü"), "value": '{"a": 1'}
    page = await Visitor(dashboard(store)).post("/runs/order-1/do/complete_step", fields)
    assert page.status_code == 422
    assert f'name="step" value="{fields["step"]}"' in page.text
    assert "<code>ship it/ü</code>" in page.text
    assert "{&#34;a&#34;: 1</textarea>" in page.text


async def test_a_bulk_form_that_is_shown_again_keeps_its_runs() -> None:
    store = MemoryStore()
    await failed_run(store, "a/b")
    run = encode_id("a/b")
    page = await Visitor(dashboard(store)).post(
        "/bulk/selected/delete", {"run": run}, form=f"/bulk/selected?verb=delete&run={run}"
    )
    assert page.status_code == 422
    assert f'name="run" value="{run}"' in page.text
    assert "a reason" in text_of(page)


async def test_a_stopped_bulk_operation_resumes_at_another_rate() -> None:
    store = MemoryStore()
    for n in range(3):
        await failed_run(store, f"order-{n}")
    async with aclosing(Operations(store).bulk("status:failed", "retry", by="ana")) as steps:
        bulk = await anext(steps)
    await Operations(store).stop_bulk(bulk.id, by="ana")
    visitor, page = Visitor(dashboard(store)), f"/bulk/{bulk.id}"
    assert "Runs per second" in text_of(await visitor.get(page))
    await visitor.post(f"{page}/resume/retry", {"rate": "62.5"}, form=page)
    (progress,) = await finished(store)
    assert (progress.done, progress.rate) == (3, 62.5)


HOSTILE = '"><script>alert(1)</script> 🎈'


@dataclass
class Parcel:
    city: str
    grams: int
    labels: dict[str, int] = field(default_factory=dict)


@workflow("parcel")
async def parcel(step: Step, payload: Parcel) -> None: ...


async def refused_start(payload: str) -> Any:
    runtime = Runtime(MemoryStore(), workflows=[parcel])
    visitor = Visitor(Dashboard(runtime, auth=as_person(*ALL_RIGHTS)))
    return await visitor.post("/workflows/parcel/start", {"payload": payload})


async def test_a_form_lists_each_problem_of_its_payload_and_keeps_what_was_typed() -> None:
    typed = json.dumps({"grams": "7", "labels": {HOSTILE: "x"}}, ensure_ascii=False)
    page = await refused_start(typed)
    assert page.status_code == 422
    text = text_of(page)
    assert "city: missing" in text
    assert "grams: Expected `int`, got `str`" in text
    assert f"labels[{json.dumps(HOSTILE, ensure_ascii=False)}]: Expected `int`" in text
    assert "<script>alert" not in page.text
    assert f"{escape(typed)}</textarea>" in page.text


async def test_the_problems_of_a_payload_describe_its_text_area() -> None:
    page = await refused_start("{}")
    [area] = re.findall(r"<textarea[^>]*>", page.text)
    assert 'aria-describedby="error hint-payload" aria-invalid="true"' in area
    assert re.search(r'<ul class="problems" id="error"><li>city: missing</li>', page.text)
    assert page.text.count('id="error"') == 1


async def test_a_payload_that_is_not_json_is_described_by_the_reason() -> None:
    page = await refused_start("{")
    assert re.search(
        r'<p class="problem" id="error" role="alert">payload: expected JSON', page.text
    )
    assert 'aria-describedby="error hint-payload" aria-invalid="true"' in page.text
    assert page.text.count('aria-invalid="true"') == 1


async def test_an_input_that_does_not_fit_lists_its_problems_too() -> None:
    runtime = Runtime(MemoryStore(), workflows=[parcel])
    await runtime.trigger(parcel, Parcel("Wien", 7), run_id="p", wait=False)
    visitor = Visitor(Dashboard(runtime, auth=as_person(*ALL_RIGHTS)))
    fields = {"payload": '{"city": 7}', "why": "typo"}
    page = await visitor.post("/runs/p/do/edit_payload", fields)
    assert "grams: missing city: Expected `str`, got `int`" in text_of(page)
