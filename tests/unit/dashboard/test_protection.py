"""Protection against requests of other sites, and limits on sizes and rates."""

import pytest

from perdure.dashboard.protection import RateLimit
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.unit.dashboard.visitor import SAME_ORIGIN, Visitor, dashboard

PREFERENCES = {"theme": "dark"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": "http://dash.test.evil.test"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://dash.test"},
        {},
    ],
)
async def test_a_form_of_another_site_is_refused(headers: dict[str, str]) -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    response = await visitor.post("/preferences", PREFERENCES, headers=headers)
    assert response.status_code == 403


@pytest.mark.parametrize("headers", [SAME_ORIGIN, {"Origin": "http://dash.test"}])
async def test_a_form_of_the_same_site_is_accepted(headers: dict[str, str]) -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    response = await visitor.post("/preferences", PREFERENCES, headers=headers)
    assert response.status_code == 303


async def test_a_form_needs_its_token() -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    await visitor.get("/preferences")
    for token in ("", "0" * 80, "é"):
        data = {"form_token": token, **PREFERENCES}
        response = await visitor.http.post("/preferences", data=data, headers=SAME_ORIGIN)
        assert response.status_code == 403


async def test_a_token_is_for_one_form_and_one_session() -> None:
    visitor, other = Visitor(app := dashboard(MemoryStore())), Visitor(app)
    start = await visitor.post(
        "/preferences", PREFERENCES, form="/workflows/order/do/pause_workflow"
    )
    assert start.status_code == 403
    token = await visitor.token("/preferences")
    await other.get("/preferences")
    data = {"form_token": token, **PREFERENCES}
    stolen = await other.http.post("/preferences", data=data, headers=SAME_ORIGIN)
    assert stolen.status_code == 403


async def test_each_page_has_another_token() -> None:
    """Otherwise the size of compressed pages would reveal it, one character at a time."""
    visitor = Visitor(dashboard(MemoryStore()))
    assert await visitor.token("/preferences") != await visitor.token("/preferences")


async def test_a_foreign_host_name_is_refused() -> None:
    app = dashboard(MemoryStore(), hosts=["dash.test"])
    assert (await Visitor(app).get("/preferences")).status_code == 200
    assert (await Visitor(app, host="http://evil.test").get("/preferences")).status_code == 421


@pytest.mark.parametrize(
    "path", ["/preferences", "/nothing", "/static/x/dashboard.css", "/healthz"]
)
async def test_every_response_has_the_headers(path: str) -> None:
    headers = (await Visitor(dashboard(MemoryStore())).get(path)).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"


async def test_pages_are_not_kept_by_browsers() -> None:
    headers = (await Visitor(dashboard(MemoryStore())).get("/preferences")).headers
    assert headers["cache-control"] == "no-store"


async def test_cookies_are_for_the_server_alone() -> None:
    cookie = (await Visitor(dashboard(MemoryStore())).get("/preferences")).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


async def test_a_large_form_is_refused() -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    response = await visitor.post("/preferences", {"theme": "x" * 1_000_001})
    assert response.status_code == 413


async def test_a_form_with_very_many_fields_is_refused() -> None:
    visitor = Visitor(dashboard(MemoryStore()))
    response = await visitor.post("/preferences", {f"f{n}": "1" for n in range(400)})
    assert response.status_code == 413


def test_a_session_may_ask_twenty_times_per_second() -> None:
    clock = TestClock()
    limit = RateLimit(clock)
    assert [limit.allows("a") for _ in range(61)] == [True] * 60 + [False]
    assert limit.allows("b")


async def test_the_limit_recovers_with_time() -> None:
    clock = TestClock()
    limit = RateLimit(clock)
    for _ in range(61):
        limit.allows("a")
    await clock.advance(1)
    assert [limit.allows("a") for _ in range(21)] == [True] * 20 + [False]
