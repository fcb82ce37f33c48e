"""A dashboard of several stores: the name of each is the first segment of its paths."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from perdure import Runtime
from perdure.dashboard import Dashboard, allow_all
from perdure.errors import InvalidArgument
from perdure.insights import Insights
from perdure.stores import MemoryStore
from tests.unit.dashboard.visitor import Visitor, as_person, failed_run, order, text_of


async def two_stores() -> dict[str, Any]:
    """Return a store and a runtime, with one run each."""
    stores = {"shop": MemoryStore(), "billing-2": MemoryStore()}
    for name, store in stores.items():
        await failed_run(store, f"{name}-run")
    return {**stores, "billing-2": Runtime(stores["billing-2"], workflows=[order])}


@pytest.mark.parametrize("path", ["", "/a", "/a/b"])
async def test_the_root_lists_the_stores(path: str) -> None:
    app = Starlette(routes=[Mount(path, Dashboard(await two_stores(), auth=allow_all))])
    visitor = Visitor(app, path)
    page = await visitor.get("/")
    assert page.status_code == 200
    for name in ("shop", "billing-2"):
        assert f'href="{path}/{name}/"' in page.text
        assert (await visitor.get(f"/{name}")).status_code == 200
    style = page.text.partition('stylesheet" href="')[2].partition('"')[0]
    assert (await visitor.http.get(style)).status_code == 200


async def test_each_store_shows_its_own_runs() -> None:
    visitor = Visitor(Dashboard(await two_stores(), auth=allow_all))
    assert "shop-run" in (await visitor.get("/shop/runs")).text
    assert "shop-run" not in (await visitor.get("/billing-2/runs")).text
    assert (await visitor.get("/billing-2/runs/shop-run")).status_code == 404


async def test_links_stay_in_the_store_and_lead_back_to_the_list() -> None:
    page = await Visitor(Dashboard(await two_stores(), auth=allow_all)).get("/shop/runs")
    assert 'href="/shop/runs/shop-run"' in page.text
    assert '<a class="store" href="/" title="All stores">' in page.text
    assert " shop As of " in text_of(page)


async def test_a_form_changes_the_run_of_its_store() -> None:
    stores = await two_stores()
    stores["shop"] = MemoryStore()
    await failed_run(stores["shop"], "billing-2-run")
    visitor = Visitor(Dashboard(stores, auth=allow_all))
    response = await visitor.post("/billing-2/runs/billing-2-run/do/retry")
    assert response.headers["location"] == "/billing-2/runs/billing-2-run"
    assert (await Insights(stores["shop"]).run("billing-2-run")).run.status == "failed"
    assert (await Insights(stores["billing-2"].store).run("billing-2-run")).acts


@pytest.mark.parametrize("path", ["/runs", "/nothing/runs", "/live", "/metrics"])
async def test_a_path_without_the_name_of_a_store_does_not_exist(path: str) -> None:
    visitor = Visitor(Dashboard(await two_stores(), auth=allow_all))
    assert (await visitor.get(path)).status_code == 404


async def test_the_list_needs_the_right_to_view() -> None:
    stores = await two_stores()
    assert (await Visitor(Dashboard(stores)).get("/")).status_code == 403
    visitor = Visitor(Dashboard(stores, auth=as_person("operate")))
    assert (await visitor.get("/")).status_code == 403


@pytest.mark.parametrize("name", ["", "Shop", "a/b", "a b", "ü", "static", "healthz", "shop\n"])
def test_a_name_is_part_of_a_path(name: str) -> None:
    with pytest.raises(InvalidArgument, match="names of a-z, 0-9 and -"):
        Dashboard({name: MemoryStore()})


def test_there_is_at_least_one_store() -> None:
    with pytest.raises(InvalidArgument, match="stores by names"):
        Dashboard({})


async def test_one_store_without_a_name_has_no_list() -> None:
    page = await Visitor(Dashboard(MemoryStore(), auth=allow_all)).get("/")
    assert "Overview" in text_of(page)
