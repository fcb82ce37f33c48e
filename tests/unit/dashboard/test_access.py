"""A hook decides who may use the dashboard."""

import base64

import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import Mount

from perdure.dashboard import (
    Access,
    Dashboard,
    Right,
    allow_all,
    basic,
    hash_password,
    header,
    starlette_user,
)
from perdure.dashboard.server import OneTimeToken
from perdure.errors import InvalidArgument
from perdure.stores import MemoryStore
from tests.unit.dashboard.visitor import SAME_ORIGIN, Visitor, dashboard, text_of

PASSWORDS = {"ana": hash_password("correct horse"), "ben": hash_password("battery")}


def sign_in(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


async def test_a_dashboard_without_a_hook_is_closed() -> None:
    for path in ("/", "/runs", "/metrics", "/live", "/nothing"):
        response = await Visitor(Dashboard(MemoryStore())).get(path)
        assert response.status_code == 403
        assert "Pass auth=" in response.text


async def test_style_and_health_need_no_authentication() -> None:
    visitor = Visitor(Dashboard(MemoryStore()))
    assert (await visitor.get("/healthz")).text == "ok\n"
    style = await visitor.get("/static/any/dashboard.css")
    assert style.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert (await visitor.get("/static/../app.py")).status_code != 200


async def test_open_access_must_be_spelled_out() -> None:
    page = await Visitor(Dashboard(MemoryStore(), auth=allow_all)).get("/preferences")
    assert "anonymous" in page.text


async def test_basic_asks_for_a_password() -> None:
    visitor = Visitor(Dashboard(MemoryStore(), auth=basic(PASSWORDS)))
    refused = await visitor.get("/preferences")
    assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
    page = await visitor.get("/preferences", Authorization=sign_in("ana", "correct horse"))
    assert "ana" in text_of(page)


@pytest.mark.parametrize(
    "authorization",
    [
        sign_in("ana", "battery"),
        sign_in("eve", "correct horse"),
        sign_in("", ""),
        "Basic %%%",
        "Basic //8=",
        "Bearer x",
    ],
)
async def test_basic_refuses_what_is_wrong(authorization: str) -> None:
    visitor = Visitor(Dashboard(MemoryStore(), auth=basic(PASSWORDS)))
    assert (await visitor.get("/runs", Authorization=authorization)).status_code == 401


async def test_basic_has_rights_for_each_person() -> None:
    rights: dict[str, set[Right]] = {"ana": {"view", "operate"}}
    auth = basic(PASSWORDS, rights=rights)
    visitor = Visitor(Dashboard(MemoryStore(), auth=auth))
    ana, ben = sign_in("ana", "correct horse"), sign_in("ben", "battery")
    assert (await visitor.get("/preferences", Authorization=ana)).status_code == 200
    assert (await visitor.get("/preferences", Authorization=ben)).status_code == 403


async def test_a_header_is_accepted_only_from_a_trusted_proxy() -> None:
    proxy = header("X-Forwarded-User", trusted=["127.0.0.0/8"])
    elsewhere = header("X-Forwarded-User", trusted=["10.0.0.1"])
    for auth, status in ((proxy, 200), (elsewhere, 403)):
        visitor = Visitor(Dashboard(MemoryStore(), auth=auth))
        page = await visitor.get("/preferences", **{"X-Forwarded-User": "ana"})
        assert page.status_code == status
    assert (await Visitor(Dashboard(MemoryStore(), auth=proxy)).get("/runs")).status_code == 403


class Backend(AuthenticationBackend):
    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        return (AuthCredentials(), SimpleUser("ana")) if "x-user" in conn.headers else None


async def test_the_user_of_starlette_is_the_person() -> None:
    app = Starlette(
        routes=[Mount("/d", Dashboard(MemoryStore(), auth=starlette_user()))],
        middleware=[Middleware(AuthenticationMiddleware, backend=Backend())],
    )
    visitor = Visitor(app, "/d")
    assert "ana" in (await visitor.get("/preferences", **{"X-User": "1"})).text
    assert (await visitor.get("/preferences")).status_code == 403


async def test_a_token_lets_one_browser_in() -> None:
    app = Dashboard(MemoryStore(), auth=OneTimeToken("t0ken", person="ana", port=1))
    first, second = Visitor(app), Visitor(app)
    moved = await first.get("/?token=t0ken")
    assert (moved.status_code, moved.headers["location"]) == (303, "/")
    assert "HttpOnly" in moved.headers["set-cookie"]
    assert "SameSite=strict" in moved.headers["set-cookie"]
    assert (await first.get("/preferences")).status_code == 200
    assert (await second.get("/?token=t0ken")).status_code == 403
    assert (await second.get("/preferences")).status_code == 403


async def test_a_browser_without_the_token_is_asked_for_it() -> None:
    app = Dashboard(MemoryStore(), auth=OneTimeToken("t0ken", person="ana", port=1))
    visitor = Visitor(app)
    response = await visitor.get("/runs", Accept="text/html")
    assert (response.status_code, response.headers["location"]) == (303, "/login")
    assert "Enter the token" in text_of(await visitor.get("/login"))
    wrong = await visitor.http.post("/login", data={"token": "nope"}, headers=SAME_ORIGIN)
    assert (wrong.status_code, "has been used" in text_of(wrong)) == (403, True)
    foreign = await visitor.http.post("/login", data={"token": "t0ken"})
    assert "set-cookie" not in foreign.headers
    done = await visitor.http.post("/login", data={"token": " t0ken "}, headers=SAME_ORIGIN)
    assert (done.status_code, done.headers["location"]) == (303, "/")
    assert (await visitor.get("/login")).headers["location"] == "/"
    assert (await visitor.get("/runs")).status_code == 200


async def test_other_dashboards_have_no_page_to_sign_in() -> None:
    assert (await Visitor(dashboard(MemoryStore())).get("/login")).status_code == 404


async def test_a_browser_stays_signed_in_when_the_server_restarts() -> None:
    hooks = [OneTimeToken("t0ken", person="ana", port=1) for _ in range(2)]
    before, after = (Dashboard(MemoryStore(), auth=hook) for hook in hooks)
    browser = Visitor(before)
    await browser.get("/?token=t0ken")
    restarted = Visitor(after)
    restarted.http.cookies = browser.http.cookies
    assert (await restarted.get("/preferences")).status_code == 200


async def test_read_only_limits_everyone_to_viewing() -> None:
    visitor = Visitor(dashboard(MemoryStore(), read_only=True))
    assert "May view ." in text_of(await visitor.get("/preferences")).replace("view.", "view .")
    assert (await visitor.get("/workflows/order/start")).status_code == 403


@pytest.mark.parametrize("rights", ["view", {"look"}, None, {"view": "ana"}])
def test_unknown_rights_are_refused(rights: object) -> None:
    with pytest.raises(InvalidArgument, match="rights"):
        Access("ana", rights)  # type: ignore[arg-type]  # wrong on purpose


def test_a_password_in_plain_text_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgument, match="hash_password") as raised:
        basic({"ana": "correct horse"})
    assert "correct horse" not in str(raised.value)


def test_addresses_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="trusted"):
        header("X-User", trusted=["proxy.local"])
    with pytest.raises(InvalidArgument, match="trusted"):
        header("X-User", trusted="127.0.0.1")
