"""Every verb as an operator uses it, from the page of the run or step, with and without scripts."""

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from perdure import Runtime, Step, workflow
from perdure.insights import Insights, to_json
from perdure.insights.model import Act
from perdure.operations import Operations
from perdure.operations.verbs import VERBS
from perdure.store import Store, require_search
from tests.browser.conftest import OpenPage, SharedPages
from tests.browser.quiet import no_logs
from tests.browser.serving import ServedDashboard
from tests.servers.postgres import fresh_database
from tests.unit.insights.runs import live_worker

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

WHY = "ticket 4411"


@dataclass(frozen=True)
class Case:
    """A verb: how the run that it applies to ends, the step it is about, and what is filled in."""

    ends: str
    step: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "retry": Case("failed"),
    "unpause": Case("paused"),
    "signal": Case("waiting", fields={"Event": "approved", "Payload": '{"by": "eva"}'}),
    "approve": Case("asking", fields={"Value": '{"berth": 7}'}),
    "reject": Case("asking"),
    "answer": Case("calling", fields={"Answer": '{"signed": true}'}),
    "wake": Case("waiting"),
    "pause": Case("waiting"),
    "cancel": Case("waiting"),
    "complete_step": Case("failed", "ship", {"Value": '"parcel 7"'}),
    "skip_step": Case("failed", "ship"),
    "fail_step": Case("failed", "ship", {"Error": "lost"}),
    "retry_step": Case("failed", "ship"),
    "rewind": Case("failed", "charge"),
    "fork": Case("failed", fields={"Id of the new run": "{run}-fork"}),
    "edit_payload": Case("queued", fields={"Input": '{"ends": "well"}'}),
    "delete": Case("failed"),
}


async def charge() -> str:
    return "receipt 17"


async def ship() -> str:
    raise ConnectionError("503 from carrier")


@workflow("delivery")
async def delivery(step: Step, payload: dict[str, str]) -> None:
    await step("charge", charge)
    if payload["ends"] == "failed":
        await step("ship", ship)
    if payload["ends"] == "asking":
        await step.approval("berth", "Which berth?", to="ops", options=("north", "south"))
    if payload["ends"] == "calling":
        await step.callback("signed", timeout="1d")
    await step.wait_for_event("approval", "approved", timeout="2d")


async def create(store: Store, run_id: str, ends: str) -> None:
    runtime = Runtime(store, workflows=[delivery])
    await runtime.trigger(delivery, {"ends": ends}, run_id=run_id, wait=ends != "queued")
    if ends == "paused":
        await Operations(store).pause(run_id, by="eva")


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["sqlite", "postgres"])
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[ServedDashboard]:
    """An empty store behind a dashboard; each test creates its own run."""
    if request.param == "sqlite":
        folder: Path = tmp_path_factory.mktemp("actions")
        served = ServedDashboard(f"sqlite:///{folder}/runs.db").start()
        yield served
        served.close()
        return
    server = request.getfixturevalue("debian_postgres_server")
    with fresh_database(server) as url:
        served = ServedDashboard(url).start()
        yield served
        served.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_pages(served: ServedDashboard, browser: Browser) -> AsyncGenerator[SharedPages]:
    pages = SharedPages(browser)
    yield pages
    await pages.close()


async def open_form(page: Page, verb: str) -> None:
    """Follow the link to a verb from the page of a run or step."""
    link = page.get_by_role("link", name=f"{VERBS[verb].title}…", exact=True).first
    if not await link.is_visible():
        await page.locator("summary", has_text="More").click()
    await link.click()


async def act_of(served: ServedDashboard, run_id: str) -> Act:
    """Return the newest entry of the audit trail about a run."""

    async def read(store: Store) -> Act:
        page = await Insights(store).acts()
        return next(act for act in page.acts if act.run_id == run_id)

    return await served.run(read)


@pytest.mark.parametrize("javascript", [True, False], ids=["script", "no-script"])
@pytest.mark.parametrize("verb", CASES)
async def test_verb(
    verb: str, javascript: bool, served: ServedDashboard, reuse_page: OpenPage
) -> None:
    case, run_id = CASES[verb], f"{verb}-{javascript}".lower()
    with no_logs():
        await served.run(lambda store: create(store, run_id, case.ends))
    query = f"?step={case.step}" if case.step else ""
    page = await reuse_page(f"{served.url}/runs/{run_id}{query}", javascript=javascript)
    await open_form(page, verb)
    form = page.locator("form", has=page.get_by_label("Reason"))
    for label, value in {**case.fields, "Reason": WHY}.items():
        await form.get_by_label(label, exact=True).fill(value.replace("{run}", run_id))
    await form.get_by_role("button", name=VERBS[verb].title, exact=True).click()
    await expect(page.get_by_role("status").filter(has_text=".").first).to_be_visible()
    changed = f"{run_id}-fork" if verb == "fork" else run_id
    act = await act_of(served, changed)
    assert (act.verb, act.by, act.via, act.why) == (verb, "anonymous", "dashboard", WHY)


FORMS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("start", "/workflows/delivery/start", {"Payload": '{"ends": "well"}'}),
    ("pause_workflow", "/workflows/delivery/do/pause_workflow", {}),
    ("unpause_workflow", "/workflows/delivery/do/unpause_workflow", {}),
    ("pause_queue", "/queues/emails/do/pause_queue", {}),
    ("unpause_queue", "/queues/emails/do/unpause_queue", {}),
    ("set_limit", "/queues/emails/do/set_limit", {"Number": "2"}),
    ("pause_schedule", "/schedules/daily/do/pause_schedule", {}),
    ("unpause_schedule", "/schedules/daily/do/unpause_schedule", {}),
    ("trigger_schedule", "/schedules/daily/do/trigger_schedule", {}),
    ("backfill_schedule", "/schedules/daily/do/backfill_schedule", {"From": "2024-01-01T00:00"}),
    ("delete_schedule", "/schedules/daily/do/delete_schedule", {}),
    ("drain_worker", "/workers/w-1/do/drain_worker", {}),
    ("save_view", "/views/save?query=status:failed", {"Name": "broken"}),
    ("delete_view", "/views/broken/do/delete_view", {}),
    ("import_run", "/store", {"Or its text": "{bundle}", "Another id": "imported"}),
)


async def prepare(store: Store) -> str:
    """Create what the forms are about, and return a run as a file that can be imported."""
    every = timedelta(days=300)
    await Runtime(store, workflows=[delivery]).schedule("daily", delivery, {}, every=every)
    await live_worker(require_search(store, "the test"), datetime.now(UTC))
    await create(store, "exported", "waiting")
    return json.dumps(to_json(await Insights(store).export("exported")))


async def test_verbs_of_other_pages(served: ServedDashboard, open_page: OpenPage) -> None:
    """The forms of workflows, queues, schedules, workers, views and the store, without scripts."""
    bundle = await served.run(prepare)
    page = await open_page(served.url, javascript=False)
    for verb, path, fields in FORMS:
        await page.goto(served.url + path)
        button = page.get_by_role("button", name=VERBS[verb].title.removesuffix(" a run")).first
        form = page.locator("form", has=button)
        for label, value in {**fields, "Reason": WHY}.items():
            await form.get_by_label(label).first.fill(value.replace("{bundle}", bundle))
        await button.click()
        await expect(page.get_by_role("status").filter(has_text=".").first).to_be_visible()
        acts = (await served.run(lambda store: Insights(store).acts())).acts
        recorded = {"delete_schedule": "delete", "import_run": "import"}.get(verb, verb)
        recorded = recorded.removesuffix("_schedule") if "pause_sch" in verb else recorded
        assert (acts[0].verb, acts[0].why) == (recorded, WHY)


async def test_every_verb_has_a_case() -> None:
    assert {*CASES} == {verb.name for verb in VERBS.values() if verb.place == "runs"}
    others = {verb.name for verb in VERBS.values() if verb.place != "runs"}
    assert {verb for verb, _, _ in FORMS} == others
