"""The agenda: what happens next, and what people can do about it."""

import re
from html import unescape

from perdure import Runtime, Step, workflow
from perdure.errors import StoreUnavailable
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore
from tests.unit.dashboard.visitor import Visitor, dashboard, text_of, waiting_run

HOSTILE = '"><script>alert(1)</script> 🎈'


@workflow("shipping")
async def shipping(step: Step, event: str) -> None:
    if event == "ask":
        await step.approval("ship", f"Ship it? {HOSTILE}", to="ops")
    await step.wait_for_event("wait", event)


async def wait_for(store: MemoryStore, event: str, run_id: str) -> Runtime:
    runtime = Runtime(store, workflows=[shipping])
    await runtime.trigger(shipping, event, run_id=run_id)
    return runtime


async def test_a_run_that_waits_for_an_event_can_be_signalled() -> None:
    store = MemoryStore()
    await waiting_run(store)
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/agenda")
    path = "/runs/order-2/do/signal?event=approved"
    assert f'data-dialog href="{path}">Signal…</a>' in page.text
    assert 'name="event" value="approved"' in (await visitor.get(path)).text


async def test_the_name_of_a_hostile_event_arrives_in_the_form() -> None:
    store = MemoryStore()
    runtime = await wait_for(store, HOSTILE, HOSTILE)
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/agenda")
    assert "<script>alert" not in page.text
    [link] = re.findall(r'href="([^"]+)">Signal…', page.text)
    form = await visitor.get(unescape(link))
    [event] = re.findall(r'name="event" value="([^"]*)"', form.text)
    assert unescape(event) == HOSTILE
    await visitor.post(unescape(link).partition("?")[0], {"event": unescape(event)})
    await runtime.sweep()
    run = await runtime.get_run(HOSTILE)
    assert run is not None
    assert run.status == "completed"


async def test_an_event_that_many_runs_wait_for_offers_the_first_ones_and_links_to_all() -> None:
    store = MemoryStore()
    for n in range(5):
        await wait_for(store, "paid", f"r{n}")
    page = await Visitor(dashboard(store)).get("/agenda")
    assert re.findall(r"/runs/(r.)/do/signal", page.text) == ["r0", "r1", "r2"]
    assert 'href="/runs?q=waiting%3Apaid">2 more</a>' in page.text


async def test_an_approval_is_answered_from_the_agenda() -> None:
    store = MemoryStore()
    await wait_for(store, "ask", "s")
    page = await Visitor(dashboard(store)).get("/agenda")
    assert f"Ship it? {HOSTILE}" in text_of(page)
    assert "<script>alert" not in page.text
    for verb in ("approve", "reject"):
        assert f'href="/runs/s/do/{verb}?wait=ship"' in page.text


async def test_a_person_who_may_only_view_is_offered_no_answers() -> None:
    store = MemoryStore()
    await wait_for(store, "ask", "s")
    await waiting_run(store)
    page = await Visitor(dashboard(store, "view")).get("/agenda")
    assert "Ship it?" in text_of(page)
    assert "order-2" in page.text
    assert "/do/" not in page.text


async def test_an_agenda_with_nothing_says_so() -> None:
    page = await Visitor(dashboard(MemoryStore())).get("/agenda")
    assert "Nothing is scheduled." in text_of(page)
    assert "<section" not in page.text


async def test_approvals_are_shown_even_if_the_wake_times_cannot_be_read() -> None:
    store = MemoryStore()
    await wait_for(store, "ask", "s")
    faulty = FaultyStore(store, fail_at=1, verbs={"due"}, error=StoreUnavailable)
    page = await Visitor(dashboard(faulty)).get("/agenda")
    assert page.status_code == 200
    assert "Could not read from the store" in text_of(page)
    assert "/runs/s/do/approve" in page.text
