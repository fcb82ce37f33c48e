"""A real browser and dashboards on seeded stores.

The tests of this package share one event loop, in which the browser lives; dashboards run in
threads of their own.
"""

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from perdure.demo.history import SEEDED_TIME, seed
from perdure.stores import open_store
from perdure.testing import TestClock
from tests.browser.gallery import Theme
from tests.browser.serving import ServedDashboard
from tests.browser.watching import Watch
from tests.servers.fixtures import started
from tests.servers.postgres import fresh_database
from tests.servers.process import Server, program

OpenPage: TypeAlias = Callable[..., Awaitable[Page]]
Serve: TypeAlias = Callable[..., ServedDashboard]

BROWSER = "chromium-headless-shell"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
TIMEOUT_MS = 20_000


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncGenerator[Browser]:
    """Debian's Chromium without its windows, which needs half the CPU time."""
    path = started(lambda: program(BROWSER, package=BROWSER))
    fonts: dict[str, str | float | bool] = {
        **os.environ,
        "FONTCONFIG_FILE": str(Path(__file__).with_name("fonts.conf")),
    }
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS, env=fonts)
        yield browser
        await browser.close()


async def fill(url: str) -> str:
    """Fill an empty store with the history of the sample shop, and return its URL."""
    clock = TestClock(datetime.now(UTC) - SEEDED_TIME)
    async with open_store(url, clock=clock) as store:
        await seed(store, clock)
    return url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def seeded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the history of the sample shop; tests use copies of it."""
    path = tmp_path_factory.mktemp("seeded") / "shop.db"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        await fill(f"sqlite:///{path}")
        return path
    # Filling it takes long: the first process does it for all of them.
    shared = tmp_path_factory.getbasetemp().parent / "shop.db"
    with shared.with_suffix(".lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not shared.exists():
            await fill(f"sqlite:///{path}")
            shutil.copy(path, shared)
        shutil.copy(shared, path)
    return path


@pytest.fixture
def serve() -> Generator[Serve]:
    """A function that serves a dashboard on the store at a URL until the test ends."""
    with ExitStack() as stack:

        def start(store_url: str, **options: Any) -> ServedDashboard:
            served = ServedDashboard(store_url, **options).start()
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="session")
def seeded(seeded_file: Path) -> Generator[ServedDashboard]:
    """A dashboard on the seeded SQLite file, for tests that only look."""
    served = ServedDashboard(f"sqlite:///{seeded_file}").start()
    yield served
    served.close()


@pytest.fixture
def shop(seeded_file: Path, tmp_path: Path, serve: Serve) -> ServedDashboard:
    """A dashboard on a copy of the seeded SQLite file, for tests that act."""
    shutil.copy(seeded_file, tmp_path / "shop.db")
    return serve(f"sqlite:///{tmp_path}/shop.db")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def postgres_seeded(debian_postgres_server: Server) -> AsyncGenerator[ServedDashboard]:
    """A dashboard on a seeded PostgreSQL database, for tests that only look."""
    with fresh_database(debian_postgres_server) as url:
        await fill(url)
        served = ServedDashboard(url).start()
        yield served
        served.close()


@pytest_asyncio.fixture(loop_scope="session")
async def watch() -> AsyncGenerator[Watch]:
    """Fails the test if a page did what no page may do."""
    watch = Watch()
    yield watch
    assert watch.problems == []


async def new_context(browser: Browser, *, javascript: bool = True) -> BrowserContext:
    """Start a session of the browser."""
    context = await browser.new_context(
        java_script_enabled=javascript, reduced_motion="reduce", timezone_id="UTC"
    )
    context.set_default_timeout(TIMEOUT_MS)
    return context


async def load(
    page: Page, watch: Watch, url: str, theme: Theme = "light", width: int = 1440, height: int = 900
) -> None:
    """Load a page at this size in this theme."""
    await page.set_viewport_size({"width": width, "height": height})
    await page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    response = await page.goto(url)
    status = 200 if response is None else response.status
    assert status in {200, *watch.expected_statuses}, f"{status} for {url}"


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser: Browser, watch: Watch) -> AsyncGenerator[OpenPage]:
    """A function that opens a page in a new session of the browser, and watches it."""
    contexts = []

    async def open_page(url: str, *, javascript: bool = True, **look: Any) -> Page:
        context = await new_context(browser, javascript=javascript)
        contexts.append(context)
        watch.attach(context, urlsplit(url).netloc)
        page = await context.new_page()
        await load(page, watch, url, **look)
        return page

    yield open_page
    for context in contexts:
        await context.close()


class SharedPages:
    """Pages that tests use one after the other: with scripts, and without.

    A new session of the browser takes longer than loading a page. This is for tests of one server
    that leave nothing in the browser.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._pages: dict[bool, Page] = {}

    async def get(self, *, javascript: bool) -> Page:
        if javascript not in self._pages:
            context = await new_context(self._browser, javascript=javascript)
            self._pages[javascript] = await context.new_page()
        return self._pages[javascript]

    async def close(self) -> None:
        for page in self._pages.values():
            await page.context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def reuse_page(shared_pages: SharedPages, watch: Watch) -> AsyncGenerator[OpenPage]:
    """Like `open_page`, with a page of the module's fixture `shared_pages`."""
    detach: list[Callable[[], None]] = []

    async def reuse_page(url: str, *, javascript: bool = True, **look: Any) -> Page:
        page = await shared_pages.get(javascript=javascript)
        detach.append(watch.attach(page.context, urlsplit(url).netloc))
        await load(page, watch, url, **look)
        return page

    yield reuse_page
    for end in detach:
        end()
