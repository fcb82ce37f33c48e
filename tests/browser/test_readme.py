"""The pictures of the README: created here, and copied to docs/images by hand if they are good.

`cp build/screenshots/readme/*.png docs/images/`
"""

from pathlib import Path

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.gallery import FOLDER, THEMES
from tests.browser.pages import PAGES
from tests.browser.serving import ServedDashboard

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

KEPT = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1180, "height": 664}
MAX_BYTES = 120_000


async def test_the_pictures_of_the_readme(seeded: ServedDashboard, open_page: OpenPage) -> None:
    folder = FOLDER / "readme"
    folder.mkdir(parents=True, exist_ok=True)
    page = await open_page(seeded.url + PAGES["run-failed"])
    await page.set_viewport_size({"width": SIZE["width"], "height": SIZE["height"]})
    for theme in THEMES:
        await page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        await page.screenshot(path=folder / f"run-{theme}.png")


@pytest.mark.parametrize("theme", THEMES)
async def test_a_picture_is_a_small_file(theme: str) -> None:
    assert (KEPT / f"run-{theme}.png").stat().st_size <= MAX_BYTES
