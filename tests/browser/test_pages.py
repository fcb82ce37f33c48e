"""Every page, in both themes and three widths: pictures, accessibility, no sideways scrolling."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from perdure import Step, workflow
from perdure.dashboard.server import OneTimeToken
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.store import Store
from tests.browser.accessibility import axe
from tests.browser.conftest import OpenPage, Serve, SharedPages
from tests.browser.gallery import THEMES, WIDTHS, Gallery, Theme
from tests.browser.pages import EMPTY, LIVE, MISSING, PAGES
from tests.browser.serving import ServedDashboard
from tests.browser.watching import Watch
from tests.unit.insights.long_runs import create_long_run

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

CHECKED_WIDTHS = (320, 1440)
HOSTILE = '"><script>alert(1)</script> 🎈'


@pytest.fixture(scope="module")
def gallery() -> Generator[Gallery]:
    gallery = Gallery()
    yield gallery
    gallery.write_index()


async def check(page: Page, name: str, gallery: Gallery) -> None:
    """Take the pictures of a page in both themes, and check it at its narrowest and widest."""
    for width, theme in product(WIDTHS, THEMES):
        await check_one(page, name, gallery, theme, width)


async def check_one(page: Page, name: str, gallery: Gallery, theme: Theme, width: int) -> None:
    """Take one picture of a page, and check what it shows."""
    await gallery.take(page, name, theme, width)
    assert await overflow(page) == 0, f"{name} scrolls sideways at {width} px"
    if width in CHECKED_WIDTHS:
        assert await axe(page) == [], f"{name}, {theme}, {width} px"


async def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than the window."""
    excess: int = await page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return excess


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_pages(
    seeded: ServedDashboard, empty: ServedDashboard, browser: Browser
) -> AsyncGenerator[SharedPages]:
    pages = SharedPages(browser)
    yield pages
    await pages.close()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServedDashboard]:
    """A dashboard on an empty store."""
    served = ServedDashboard(f"sqlite:///{tmp_path_factory.mktemp('empty')}/empty.db").start()
    yield served
    served.close()


@pytest.mark.parametrize("name", PAGES)
async def test_page(
    name: str, seeded: ServedDashboard, reuse_page: OpenPage, gallery: Gallery
) -> None:
    page = await reuse_page(seeded.url + PAGES[name])
    await check(page, name, gallery)


LOOKS = tuple(product(THEMES, CHECKED_WIDTHS))


# The first of them waits until the database is filled.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("look", LOOKS, ids=str)
async def test_pages_on_postgresql(
    look: tuple[Theme, int], postgres_seeded: ServedDashboard, open_page: OpenPage, gallery: Gallery
) -> None:
    """What a page shows depends on the store; how it looks does not, so the looks take turns."""
    page, first = await open_page(postgres_seeded.url), LOOKS.index(look)
    for name in [*PAGES][first :: len(LOOKS)]:
        response = await page.goto(postgres_seeded.url + PAGES[name])
        assert response is not None
        assert response.status == 200, name
        assert await page.get_by_role("heading", level=1).is_visible(), name
        await check_one(page, f"postgres-{name}", gallery, *look)


async def test_page_of_a_store_that_cannot_be_reached(
    serve: Serve, open_page: OpenPage, watch: Watch, gallery: Gallery
) -> None:
    watch.expected_statuses = {503}
    served = serve("postgresql://127.0.0.1:1/shop")
    page = await open_page(f"{served.url}/runs")
    await expect(page.locator("main")).to_contain_text("did not answer within 2 s")
    await check_one(page, "store-unreachable", gallery, "light", 1440)
    await check_one(page, "store-unreachable", gallery, "dark", 320)


@dataclass
class Parcel:
    city: str
    grams: int
    labels: dict[str, int]


@workflow("parcel")
async def parcel(step: Step, payload: Parcel) -> None: ...


@pytest.mark.parametrize("javascript", [True, False], ids=["script", "no-script"])
async def test_page_of_a_payload_that_does_not_fit(
    javascript: bool,
    tmp_path: Path,
    serve: Serve,
    open_page: OpenPage,
    watch: Watch,
    gallery: Gallery,
) -> None:
    watch.expected_statuses = {422}
    served = serve(f"sqlite:///{tmp_path}/empty.db", workflows=[parcel])
    page = await open_page(f"{served.url}/workflows/parcel/start", javascript=javascript)
    area, typed = page.get_by_label("Payload"), json.dumps({"grams": "7", "labels": {HOSTILE: "x"}})
    await area.fill(typed)
    await page.get_by_role("button", name="Start a run").click()
    await expect(page.get_by_role("alert").filter(has_text="not valid")).to_be_visible()
    await expect(page.locator(".problems li")).to_have_count(3)
    await expect(area).to_have_accessible_description(re.compile("city: missing.*grams: .*🎈"))
    await expect(area).to_have_value(typed)
    if javascript:
        await check(page, "start-refused", gallery)


async def test_page_of_a_run_with_very_many_steps(
    tmp_path: Path, serve: Serve, open_page: OpenPage, gallery: Gallery
) -> None:
    served = serve(f"sqlite:///{tmp_path}/long.db")
    await served.run(lambda store: create_long_run(store, "long", 2_000, fails_every=310))
    page = await open_page(f"{served.url}/runs/long")
    strip, listed = page.get_by_role("img", name="Steps over time"), page.locator(".look-listed")
    await expect(strip).to_be_visible()
    first = await strip.locator(listed).bounding_box()
    await check(page, "run-long", gallery)
    await page.set_viewport_size({"width": 1440, "height": 900})
    await page.get_by_role("link", name="Later steps").click()
    await expect(page.locator(".strip")).to_contain_text("101 to 200 of 2,000")
    later = await strip.locator(listed).bounding_box()
    assert first is not None
    assert later is not None
    assert later["x"] > first["x"]


async def test_page_that_asks_for_the_token(
    tmp_path: Path, serve: Serve, open_page: OpenPage, gallery: Gallery
) -> None:
    served = serve(f"sqlite:///{tmp_path}/empty.db", auth=OneTimeToken("t", person="ana", port=1))
    page = await open_page(f"{served.url}/runs")
    await check_one(page, "login", gallery, "light", 1440)
    await check_one(page, "login", gallery, "dark", 320)
    await page.get_by_label("Token").fill("t")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


async def test_pages_while_a_worker_works(
    seeded_file: Path, tmp_path: Path, serve: Serve, open_page: OpenPage, gallery: Gallery
) -> None:
    shutil.copy(seeded_file, tmp_path / "shop.db")
    served = serve(f"sqlite:///{tmp_path}/shop.db", works=True)
    await served.run(lambda store: start_runs(store, ("labels-20", "labels-21")))
    for name, path in LIVE.items():
        page = await open_page(served.url + path)
        await expect(page.locator("#live")).to_have_attribute("data-state", "live")
        await check_one(page, name, gallery, "light", 1440)
        await check_one(page, name, gallery, "dark", 320)


async def start_runs(store: Store, run_ids: Sequence[str]) -> None:
    """Start runs that take minutes, and return when a worker says that it executes them."""
    operations = Operations(store)
    for run_id in run_ids:
        await operations.start("print-labels", 400, run_id=run_id, by="ana")
    while not any(worker.running for worker in await Insights(store).workers()):
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", MISSING)
async def test_page_that_does_not_exist(
    name: str, seeded: ServedDashboard, open_page: OpenPage, watch: Watch, gallery: Gallery
) -> None:
    watch.expected_statuses = {404}
    page = await open_page(seeded.url + MISSING[name])
    await check(page, name, gallery)


@pytest.mark.parametrize("name", EMPTY)
async def test_page_of_an_empty_store(
    name: str, empty: ServedDashboard, reuse_page: OpenPage, gallery: Gallery
) -> None:
    page = await reuse_page(empty.url + PAGES[name])
    await check(page, f"empty-{name}", gallery)
