"""Every verb as an operator uses it, from the page of the run or step, with and without scripts."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from perdure import Runtime, Step, workflow
from perdure.insights import Insights
from perdure.insights.model import Act
from perdure.operations import Operations
from perdure.operations.verbs import VERBS
from perdure.store import Store
from tests.browser.conftest import OpenPage
from tests.browser.quiet import no_logs
from tests.browser.serving import ServedDashboard
from tests.servers.postgres import fresh_database

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
    verb: str, javascript: bool, served: ServedDashboard, open_page: OpenPage
) -> None:
    case, run_id = CASES[verb], f"{verb}-{javascript}".lower()
    with no_logs():
        await served.run(lambda store: create(store, run_id, case.ends))
    query = f"?step={case.step}" if case.step else ""
    page = await open_page(f"{served.url}/runs/{run_id}{query}", javascript=javascript)
    await open_form(page, verb)
    form = page.locator("form", has=page.get_by_label("Reason"))
    for label, value in {**case.fields, "Reason": WHY}.items():
        await form.get_by_label(label, exact=True).fill(value.replace("{run}", run_id))
    await form.get_by_role("button", name=VERBS[verb].title, exact=True).click()
    await expect(page.get_by_role("status").filter(has_text=".").first).to_be_visible()
    changed = f"{run_id}-fork" if verb == "fork" else run_id
    act = await act_of(served, changed)
    assert (act.verb, act.by, act.via, act.why) == (verb, "anonymous", "dashboard", WHY)


async def test_every_verb_has_a_case() -> None:
    """Those of other pages than a run's are used by `test_browsing` and `test_fleet`."""
    assert {*CASES} == {verb.name for verb in VERBS.values() if verb.place == "runs"}
