"""Saved views above the list of runs."""

from perdure.insights import Insights
from perdure.operations import Operations
from perdure.stores import MemoryStore
from tests.unit.dashboard.visitor import Visitor, dashboard, failed_run, text_of


async def test_a_query_is_saved_and_offered_to_everyone() -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/runs?q=status:failed")
    assert "/views/save?query=status%3Afailed" in page.text
    form = await visitor.get("/views/save?query=status:failed")
    assert 'name="query" value="status:failed"' in form.text
    fields = {"view": "broken", "query": "status:failed"}
    response = await visitor.post("/views/save", fields)
    assert (response.status_code, response.headers["location"]) == (303, "/views")
    others = Visitor(dashboard(store, "view"))
    assert 'href="/runs?q=status%3Afailed">broken</a>' in (await others.get("/runs")).text
    assert "broken status:failed ana" in text_of(await others.get("/views"))
    assert "order-1" in (await others.get("/runs?q=view:broken")).text


async def test_a_query_that_cannot_be_understood_is_not_saved() -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    page = await visitor.post("/views/save", {"view": "x", "query": "status:fialed"})
    assert page.status_code == 422
    assert "did you mean" in text_of(page)


async def test_a_view_is_deleted_with_an_entry_in_the_audit_trail() -> None:
    store = MemoryStore()
    await Operations(store).save_view("broken", "status:failed", by="ana")
    visitor = Visitor(dashboard(store))
    response = await visitor.post("/views/broken/do/delete_view")
    assert response.headers["location"] == "/views"
    assert await Insights(store).views() == ()
    acts = (await Insights(store).acts()).acts
    assert [(act.verb, act.step) for act in acts] == [
        ("delete_view", "broken"),
        ("save_view", "broken"),
    ]
