"""Hostile ids, names, payloads, errors, events, tags and reasons stay text on every page."""

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.urls import encode_id
from tests.browser import hostile
from tests.browser.conftest import OpenPage, Serve
from tests.browser.quiet import no_logs
from tests.browser.serving import ServedDashboard
from tests.browser.test_pages import overflow
from tests.servers.postgres import fresh_database

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


def paths() -> Iterator[str]:
    """Yield the pages that show the hostile texts."""
    yield from ("/", "/runs", "/errors", "/agenda", "/workflows", "/acts", "/workers", "/store")
    yield from ("/queues", "/schedules", "/approvals")
    for text in hostile.TEXTS:
        yield f"/runs/{encode_id(text)}"
        yield f"/runs/{encode_id('p ' + text[:500])}"
    for text in hostile.ATTACKS:
        yield f"/runs/{encode_id('w ' + text)}"
        yield f"/runs/{encode_id(text)}/do/retry"
        yield f"/workflows/{encode_id(text)}"
        yield f"/runs/{encode_id('c ' + text)}"
        yield f"/runs/{encode_id('a ' + text)}"
        yield f"/runs/{encode_id('a ' + text)}/do/approve"
        yield f"/schedules/{encode_id(text)}"
        yield f"/schedules/{encode_id(text)}/do/backfill_schedule"
        yield f"/queues/{encode_id(hostile.queue_name(text))}"
        yield f"/queues/{encode_id(hostile.queue_name(text))}/do/set_limit"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/hostile.db"
    else:
        with fresh_database(request.getfixturevalue("debian_postgres_server")) as url:
            yield url


@pytest_asyncio.fixture(loop_scope="session")
async def served(url: str, serve: Serve) -> AsyncGenerator[ServedDashboard]:
    served = serve(url)
    with no_logs():
        await served.run(hostile.fill)
    yield served
    served.close()


async def test_no_page_executes_or_is_broken_by_them(
    served: ServedDashboard, open_page: OpenPage
) -> None:
    page, wide = await open_page(served.url, width=320), dict[str, int]()
    for path in paths():
        response = await page.goto(served.url + path)
        assert response is not None
        assert response.status == 200, path
        assert await page.locator("main").count() == 1, path
        if excess := await overflow(page):
            wide[path] = excess
    assert wide == {}
