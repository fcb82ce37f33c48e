"""Pages follow the store by themselves, and keep what the reader is doing."""

import pytest
from playwright.async_api import expect

from perdure.operations import Operations
from perdure.store import Store
from tests.browser.conftest import OpenPage
from tests.browser.serving import ServedDashboard

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

RUN = "order-1180"


async def pause(store: Store) -> None:
    await Operations(store).pause(RUN, by="ana", why="seen live")


async def test_a_run_page_shows_a_change_without_being_loaded_again(
    shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs/{RUN}")
    await page.evaluate("window.loadedOnce = true")
    await expect(page.locator("#live")).to_have_attribute("data-state", "live")
    await shop.run(pause)
    await expect(page.locator("main")).to_contain_text("Paused by ana", timeout=3000)
    assert await page.evaluate("window.loadedOnce")


async def test_an_update_keeps_folds_focus_and_scroll_position(
    shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs/{RUN}", height=400)
    await expect(page.locator("#live")).to_have_attribute("data-state", "live")
    await page.locator("details[data-fold=details] > summary").click()
    await page.evaluate("window.scrollTo(0, 200)")
    await shop.run(pause)
    await expect(page.locator("main")).to_contain_text("Paused by ana", timeout=3000)
    assert await page.locator("details[data-fold=details]").get_attribute("open") is not None
    assert await page.evaluate("window.scrollY") == 200
    assert await page.evaluate("document.activeElement.textContent") == "Details"


async def test_eight_tabs_load_although_the_browser_has_six_connections(
    shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs/{RUN}")
    for _ in range(7):
        tab = await page.context.new_page()
        await tab.goto(f"{shop.url}/runs/{RUN}")
        await expect(tab.get_by_role("heading", level=1)).to_have_text(RUN)
