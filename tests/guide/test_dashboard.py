"""The dashboard: mounted in an application, for people with rights."""

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from perdure import Runtime, Step, workflow
from perdure.dashboard import Access, Dashboard, allow_all
from perdure.insights import Insights
from perdure.stores import MemoryStore


@workflow("order")
async def order(step: Step, customer: str) -> str:
    await step("charge", lambda: "receipt 17")
    await step.wait_for_event("approval", "approved", timeout="2d")
    return "shipped"


def browser(dashboard: Dashboard) -> httpx.AsyncClient:
    app = Starlette(routes=[Mount("/perdure", dashboard)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop.test")


async def test_a_page_explains_the_state_of_a_run() -> None:
    runtime = Runtime(MemoryStore(), workflows=[order])
    await runtime.trigger(order, "acme", run_id="order-1")
    async with browser(Dashboard(runtime, auth=allow_all)) as visit:
        page = await visit.get("/perdure/runs/order-1")
    assert "Waiting for event &#34;approved&#34;" in page.text


async def test_a_dashboard_without_auth_is_closed() -> None:
    async with browser(Dashboard(MemoryStore())) as visit:
        assert (await visit.get("/perdure/runs")).status_code == 403


async def test_a_dashboard_shows_several_stores_by_name() -> None:
    shop, billing = Runtime(MemoryStore(), workflows=[order]), MemoryStore()
    await shop.trigger(order, "acme", run_id="order-1")
    async with browser(Dashboard({"shop": shop, "billing": billing}, auth=allow_all)) as visit:
        assert 'href="/perdure/billing/"' in (await visit.get("/perdure/")).text
        assert (await visit.get("/perdure/shop/runs/order-1")).status_code == 200
        assert (await visit.get("/perdure/billing/runs/order-1")).status_code == 404


async def test_the_audit_trail_records_who_saw_secrets() -> None:
    runtime = Runtime(MemoryStore(), workflows=[order])
    await runtime.trigger(order, "acme", run_id="order-1")
    async with browser(Dashboard(runtime, auth=allow_all, audit_reveals=True)) as visit:
        await visit.get("/perdure/runs/order-1?reveal=1")
    (act,) = (await Insights(runtime.store).acts()).acts
    assert (act.verb, act.by, act.run_id) == ("reveal", "anonymous", "order-1")


async def test_people_have_rights() -> None:
    async def auth(request: Request) -> Access:
        return Access("ben", frozenset({"view"}))

    runtime = Runtime(MemoryStore(), workflows=[order])
    await runtime.trigger(order, "acme", run_id="order-1")
    async with browser(Dashboard(runtime, auth=auth)) as visit:
        assert (await visit.get("/perdure/runs/order-1")).status_code == 200
        assert (await visit.get("/perdure/runs/order-1/do/cancel")).status_code == 403
