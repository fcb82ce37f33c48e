"""The watch and axe notice what they are for. Otherwise the other tests would prove nothing."""

from urllib.parse import quote

import pytest

from tests.browser.accessibility import axe
from tests.browser.conftest import OpenPage
from tests.browser.watching import Watch

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

CSP = "<meta http-equiv='Content-Security-Policy' content=\"style-src 'none'\">"


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ("<img src='http://127.0.0.1:1/logo.png'>", "external request"),
        (CSP + "<p style='color: red'>", "console error"),
        ("<script>console.error('lost')</script>", "console error: lost"),
        ("<script>missing()</script>", "exception: missing is not defined"),
        ("<script>setTimeout(() => alert('hello'))</script>", "dialog: hello"),
    ],
)
async def test_the_watch_records(
    html: str, problem: str, open_page: OpenPage, watch: Watch
) -> None:
    page = await open_page(f"data:text/html,{quote(html)}")
    await page.wait_for_timeout(100)
    assert problem in "\n".join(watch.problems)
    watch.problems.clear()


async def test_axe_finds_a_picture_without_a_description(open_page: OpenPage) -> None:
    page = await open_page("data:text/html,<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>")
    assert "image-alt" in "\n".join(await axe(page))


async def test_a_page_without_problems_has_none(open_page: OpenPage, watch: Watch) -> None:
    html = "<!doctype html><html lang=en><title>fine</title><main><h1>Fine</h1></main></html>"
    page = await open_page(f"data:text/html,{html}")
    assert await axe(page) == []
    assert watch.problems == []
