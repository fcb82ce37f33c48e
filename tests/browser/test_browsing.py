"""What an operator does on the pages, besides acting on one run."""

import asyncio
import json
import re
from html import unescape
from itertools import count
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect
from starlette.requests import Request

from perdure import Runtime, Step, workflow
from perdure.dashboard import Access
from perdure.insights import Insights
from perdure.insights.model import WorkerRow
from perdure.store import Store
from tests.browser.conftest import OpenPage, Serve
from tests.browser.pages import PAGES
from tests.browser.serving import ServedDashboard
from tests.browser.watching import Watch

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

CARD = re.compile(r"4111 1111 1111 \d{4}")
with_and_without_scripts = pytest.mark.parametrize(
    "javascript", [True, False], ids=["script", "no-script"]
)


async def visit_all(page: Page, served: ServedDashboard) -> None:
    for path in PAGES.values():
        response = await page.goto(served.url + path)
        assert response is not None
        assert response.status == 200, path
        assert await page.get_by_role("heading", level=1).is_visible(), path


async def test_every_page_is_readable_without_scripts(
    seeded: ServedDashboard, open_page: OpenPage
) -> None:
    await visit_all(await open_page(seeded.url, javascript=False), seeded)


async def test_no_link_is_dead(seeded_file: Path, serve: Serve) -> None:
    people = count()

    async def let_in(request: Request) -> Access:
        # Each request is another person's: one may send 20 per second.
        return Access(f"person {next(people)}")

    served, links = serve(f"sqlite:///{seeded_file}", auth=let_in), dict[str, str]()
    for path in PAGES.values():
        page_links = re.findall(r'href="(/[^"]*)"', (await get(served, path)).text)
        links |= {shape_of(link): unescape(link) for link in page_links}
    assert len(links) > 40
    for link in links.values():
        assert (await get(served, link)).status_code == 200, link


async def get(served: ServedDashboard, path: str) -> httpx.Response:
    # Loading the certificates takes longer than a page, and nothing is encrypted here.
    async with httpx.AsyncClient(base_url=served.url, timeout=10, verify=False) as client:
        return await client.get(path, follow_redirects=True)


def shape_of(link: str) -> str:
    """Return the same for links that differ only in numbers, such as those of run ids."""
    return re.sub(r"[0-9]+", "0", link)


@pytest.mark.parametrize("width", [390, 1024, 1200, 1280, 1440])
async def test_the_workflows_of_the_overview_fit_in_their_panel(
    width: int, seeded: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(seeded.url, width=width)
    panel = page.locator(".panel", has=page.get_by_role("heading", name="Workflows", exact=True))
    await expect(panel).to_contain_text("import-catalogue")
    for part in (panel, *await panel.locator(".scroll").all()):
        assert await part.evaluate("part => part.scrollWidth - part.clientWidth") == 0


@with_and_without_scripts
async def test_a_search_finds_runs_by_a_query(
    javascript: bool, seeded: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(seeded.url, javascript=javascript)
    search = page.get_by_label("Search runs")
    await search.fill("status:failed workflow:nightly-report")
    await search.press("Enter")
    await expect(page.get_by_role("link", name="report-03-02")).to_be_visible()
    await expect(page.get_by_role("link", name="order-1121")).to_have_count(0)


async def test_a_query_with_a_mistake_says_what_is_wrong(
    seeded: ServedDashboard, open_page: OpenPage, watch: Watch
) -> None:
    watch.expected_statuses = {400}
    page = await open_page(f"{seeded.url}/runs")
    await page.get_by_label("Search runs").fill("statos:failed")
    await page.get_by_label("Search runs").press("Enter")
    await expect(page.get_by_role("alert").filter(has_text="status")).to_be_visible()


async def test_card_numbers_are_shown_only_when_they_are_asked_for(
    seeded: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{seeded.url}/runs/order-1121")
    assert not CARD.search(await page.content())
    await page.locator("summary", has_text="More").click()
    await page.get_by_role("link", name="Show secrets").click()
    await expect(page.locator("main")).to_contain_text(CARD)


@with_and_without_scripts
async def test_the_theme_is_remembered(
    javascript: bool, shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/preferences", javascript=javascript)
    await page.get_by_label("Dark", exact=True).check()
    await page.get_by_role("button", name="Save").click()
    await page.goto(f"{shop.url}/runs")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


@with_and_without_scripts
async def test_selected_runs_are_retried_together(
    javascript: bool, shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/runs?q=status:failed", javascript=javascript)
    boxes = page.get_by_role("checkbox")
    for number in range(2):
        await boxes.nth(number).check()
    await page.get_by_label("Action").select_option("retry")
    await page.get_by_role("button", name="Selected…").click()
    await page.get_by_label("Reason").fill("the carrier is back")
    await page.get_by_role("button", name="Retry", exact=True).click()
    await expect(page.get_by_text("2 done").or_(page.get_by_text("2 runs")).first).to_be_visible()
    queued = await shop.run(lambda store: count_of(store, "status:queued workflow:order"))
    assert queued == 2


async def count_of(store: Store, query: str) -> int:
    return len((await Insights(store).runs(query)).runs)


@with_and_without_scripts
async def test_a_whole_group_of_errors_is_retried(
    javascript: bool, shop: ServedDashboard, open_page: OpenPage
) -> None:
    failed = await shop.run(lambda store: count_of(store, "status:failed error:CarrierDown"))
    page = await open_page(
        f"{shop.url}/bulk/all?verb=retry&q=status:failed+error:CarrierDown", javascript=javascript
    )
    await page.get_by_label("Reason").fill("the carrier is back")
    await page.get_by_role("button", name="Retry", exact=True).click()
    await page.wait_for_url("**/bulk/*")
    for _ in range(20):
        if await page.get_by_text(f"Done: {failed} done").count():
            break
        await page.wait_for_timeout(200)
        await page.reload()
    await expect(page.get_by_text(f"Done: {failed} done")).to_be_visible()


@with_and_without_scripts
async def test_a_run_is_started_with_a_form(
    javascript: bool, shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/workflows/print-labels/start", javascript=javascript)
    await page.get_by_label("Payload").fill(json.dumps(7))
    await page.get_by_label("Id of the run").fill("labels-7")
    await page.get_by_role("button", name="Start a run", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("labels-7")
    assert await shop.run(lambda store: count_of(store, "labels-7")) == 1


@with_and_without_scripts
async def test_an_event_is_signalled_and_an_approval_given_from_the_agenda(
    javascript: bool, tmp_path: Path, serve: Serve, open_page: OpenPage
) -> None:
    served = serve(f"sqlite:///{tmp_path}/agenda.db")
    await served.run(ask_and_wait)
    page = await open_page(f"{served.url}/agenda", javascript=javascript)
    await page.get_by_role("link", name="Signal…").click()
    await expect(page.get_by_label("Event")).to_have_value(HOSTILE_EVENT)
    await page.get_by_role("button", name="Signal", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("waiting")
    await page.goto(f"{served.url}/agenda")
    await page.get_by_role("link", name="Approve…").click()
    await page.get_by_role("button", name="Approve", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("asking")
    acts = (await served.run(lambda store: Insights(store).acts())).acts
    assert [(act.verb, act.run_id) for act in acts] == [
        ("approve", "asking"),
        ("signal", "waiting"),
    ]


HOSTILE_EVENT = '"><script>alert(1)</script> 🎈'


@workflow("patient")
async def patient(step: Step, asks: bool) -> None:
    if asks:
        await step.approval("ship", "Ship it?", to="ops")
    await step.wait_for_event("wait", HOSTILE_EVENT)


async def ask_and_wait(store: Store) -> None:
    runtime = Runtime(store, workflows=[patient])
    await runtime.trigger(patient, True, run_id="asking")
    await runtime.trigger(patient, False, run_id="waiting")


@with_and_without_scripts
async def test_a_workflow_is_paused(
    javascript: bool, shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/workflows/order", javascript=javascript)
    await page.get_by_role("link", name="Pause…", exact=True).click()
    await page.get_by_label("Reason").fill("carrier outage")
    await page.get_by_role("button", name="Pause workflow").click()
    await expect(page.locator("main")).to_contain_text("aused")
    overview = await shop.run(lambda store: Insights(store).overview())
    assert 'Workflow "order" is paused' in [each.text for each in overview.attention]


@with_and_without_scripts
async def test_a_schedule_is_paused_and_backfilled(
    javascript: bool, shop: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{shop.url}/schedules", javascript=javascript)
    await page.get_by_role("link", name="nightly-report", exact=True).click()
    await page.get_by_role("link", name="Pause…", exact=True).click()
    await page.get_by_label("Reason").fill("stocktaking")
    await page.get_by_role("button", name="Pause schedule").click()
    await expect(page.locator("main")).to_contain_text("by anonymous: stocktaking")
    await page.get_by_role("link", name="Backfill…", exact=True).click()
    await page.get_by_label("From").fill("2024-01-01T00:00")
    await page.get_by_label("To", exact=True).fill("2024-01-03T00:00")
    await page.get_by_role("button", name="Backfill").click()
    await expect(page.get_by_text("has 2 runs in this period")).to_be_visible()


@with_and_without_scripts
async def test_a_limit_of_a_queue_is_changed(
    javascript: bool, tmp_path: Path, serve: Serve, open_page: OpenPage
) -> None:
    served = serve(f"sqlite:///{tmp_path}/shop.db", works=True)
    await served.run(first_worker)
    page = await open_page(f"{served.url}/queues/emails", javascript=javascript)
    await page.get_by_role("link", name="Change…").first.click()
    await page.get_by_label("Number").fill("2")
    await page.get_by_role("button", name="Set limit").click()
    await page.wait_for_url("**/queues")
    await expect(page.locator("main")).to_contain_text("concurrency 0 of 2")


async def first_worker(store: Store) -> WorkerRow:
    """Return the first worker that reports to the store."""
    while not (workers := await Insights(store).workers()):
        await asyncio.sleep(0.05)
    return workers[0]


@with_and_without_scripts
async def test_a_worker_is_drained(
    javascript: bool, tmp_path: Path, serve: Serve, open_page: OpenPage
) -> None:
    served = serve(f"sqlite:///{tmp_path}/shop.db", works=True)
    worker = await served.run(first_worker)
    page = await open_page(f"{served.url}/workers/{worker.id}", javascript=javascript)
    await page.get_by_role("link", name="Drain…", exact=True).click()
    await page.get_by_label("Reason").fill("new machine")
    await page.get_by_role("button", name="Drain worker").click()
    await expect(page.get_by_role("status").filter(has_text=".").first).to_be_visible()
    acts = await served.run(lambda store: Insights(store).acts("verb:drain_worker"))
    assert [act.why for act in acts.acts] == ["new machine"]


async def test_the_keyboard_moves_between_rows_and_pages(
    seeded: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{seeded.url}/runs")
    await page.keyboard.press("/")
    await expect(page.get_by_label("Search runs")).to_be_focused()
    await page.keyboard.press("Escape")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/runs/*")
    await page.keyboard.press("g")
    await page.keyboard.press("e")
    await page.wait_for_url("**/errors")


async def test_a_dialog_closes_with_escape_and_returns_the_focus(
    seeded: ServedDashboard, open_page: OpenPage
) -> None:
    page = await open_page(f"{seeded.url}/runs/order-1180")
    link = page.get_by_role("link", name="Signal…").first
    await link.click()
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await expect(link).to_be_focused()
