"""Pages follow the store by themselves, and keep what the reader is doing."""

import shutil
from pathlib import Path

import pytest
from playwright.async_api import expect
from starlette.requests import Request
from starlette.responses import Response

from perdure.dashboard import Access
from perdure.operations import Operations
from perdure.store import Store
from tests.browser.conftest import OpenPage, Serve
from tests.browser.serving import ServedDashboard
from tests.browser.watching import Watch

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
    await page.locator("details[data-key=output] > summary").click()
    await page.evaluate("window.scrollTo(0, 200)")
    await shop.run(pause)
    await expect(page.locator("main")).to_contain_text("Paused by ana", timeout=3000)
    assert await page.locator("details[data-key=output]").get_attribute("open") is not None
    assert await page.evaluate("window.scrollY") == 200
    assert await page.evaluate("document.activeElement.textContent") == "Output"


async def test_eight_tabs_load_although_the_browser_has_six_connections(
    shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs/{RUN}")
    for _ in range(7):
        tab = await page.context.new_page()
        await tab.goto(f"{shop.url}/runs/{RUN}")
        await expect(tab.get_by_role("heading", level=1)).to_have_text(RUN)


async def test_new_runs_are_offered_and_not_inserted(
    shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs?q=workflow:order")
    first = page.locator("tbody tr").first
    before = await first.get_attribute("data-key")
    assert before
    await expect(page.locator("#live")).to_have_attribute("data-state", "live")
    await shop.run(lambda store: Operations(store).start("order", {}, run_id="order-new", by="ana"))
    offer = page.get_by_role("button", name="1 newer run")
    await expect(offer).to_be_visible()
    assert await first.get_attribute("data-key") == before
    await offer.click()
    await expect(first).to_have_attribute("data-key", "/runs/order-new")
    await expect(offer).to_have_count(0)


async def test_nothing_changes_while_runs_are_selected(
    shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs?q=status:waiting,paused")
    row, box = page.locator(f"tr[data-key='/runs/{RUN}']"), page.get_by_role("checkbox").first
    await expect(page.locator("#live")).to_have_attribute("data-state", "live")
    await box.check()
    await shop.run(pause)
    await expect(page.locator("#live")).to_have_text("Updates paused while you select")
    assert "Waiting" in await row.inner_text()
    await box.uncheck()
    await expect(row).to_contain_text("Paused")
    await expect(page.locator("#live")).to_have_text("Live")


async def test_a_page_that_cannot_be_read_again_stays_and_says_so(
    seeded_file: Path, tmp_path: Path, serve: Serve, open_page: OpenPage, watch: Watch
) -> None:
    watch.expected_statuses, is_down = {503}, False

    async def auth(request: Request) -> Access | Response:
        return Response("down", 503) if is_down else Access("ana")

    shutil.copy(seeded_file, tmp_path / "shop.db")
    served = serve(f"sqlite:///{tmp_path}/shop.db", auth=auth)
    page = await open_page(f"{served.url}/runs/{RUN}")
    await expect(page.locator("#live")).to_have_attribute("data-state", "live")
    is_down = True
    await served.run(pause)
    note = page.get_by_text("it answered 503. Showing data from")
    await expect(note).to_be_visible()
    await expect(page.locator("#live")).to_have_attribute("data-state", "offline")
    assert await page.get_by_role("heading", level=1).inner_text() == RUN
    is_down = False
    await expect(note).to_be_hidden(timeout=15_000)
    await expect(page.locator("main")).to_contain_text("Paused by ana")
