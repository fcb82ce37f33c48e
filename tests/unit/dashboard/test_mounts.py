"""The dashboard under any path, in any framework, behind a proxy."""

import re
from typing import Any

import pytest
from django.conf import settings  # type: ignore[import-untyped]  # it publishes no types
from django.core.asgi import get_asgi_application  # type: ignore[import-untyped]  # as above
from fastapi import FastAPI
from litestar import Litestar, asgi
from litestar.types import Receive, Scope, Send
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from perdure.dashboard import Dashboard
from perdure.stores import MemoryStore
from tests.unit.dashboard.visitor import Visitor, dashboard, failed_run

PATHS = ("", "/a", "/a/b")
LINK = re.compile(r'(?:href|src|action)="([^"]*)"')
ODD = "a/b ü"


def in_starlette(app: Dashboard, path: str) -> ASGIApp:
    return Starlette(routes=[Mount(path, app)])


def in_nested_starlette(app: Dashboard, path: str) -> ASGIApp:
    inner = Starlette(routes=[Mount(path, app)])
    return Starlette(routes=[Mount("/", inner)])


def in_fastapi(app: Dashboard, path: str) -> ASGIApp:
    api = FastAPI()
    api.mount(path, app)
    return api


def in_litestar(app: Dashboard, path: str) -> Any:
    @asgi(path or "/", is_mount=True, copy_scope=True)
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)  # type: ignore[arg-type]  # the same protocol, other types

    # Its default configuration would start a thread, and change the logging of this process.
    return Litestar([mounted], logging_config=None)


def in_django(app: Dashboard, path: str) -> ASGIApp:
    """Django has no mounts: its application is mounted beside the dashboard."""
    if not settings.configured:
        settings.configure(SECRET_KEY="x", ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"])
    django: Any = get_asgi_application()
    return Starlette(routes=[Mount(path, app), Mount("/", django)])


urlpatterns: list[object] = []
FRAMEWORKS = [in_starlette, in_nested_starlette, in_fastapi, in_litestar, in_django]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_every_link_leads_back_into_the_dashboard(framework: Any, path: str) -> None:
    store = MemoryStore()
    await failed_run(store, ODD)
    visitor = Visitor(framework(dashboard(store), path), path)
    page = await visitor.get("/runs/~YS9iIMO8")
    assert page.status_code == 200
    links = {link for link in LINK.findall(page.text) if link[:1] == "/"}
    assert links
    assert all(link.startswith(f"{path}/") for link in links)
    style = next(link for link in links if link.endswith(".css"))
    assert (await visitor.http.get(style)).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_forms_and_their_cookies_work(framework: Any, path: str) -> None:
    store = MemoryStore()
    await failed_run(store)
    visitor = Visitor(framework(dashboard(store), path), path)
    response = await visitor.post("/runs/order-1/do/retry")
    assert (response.status_code, response.headers["location"]) == (303, f"{path}/runs/order-1")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_the_first_page_is_at_the_path_itself(framework: Any, path: str) -> None:
    visitor = Visitor(framework(dashboard(MemoryStore()), path), path)
    page = await visitor.get("/")
    assert page.status_code == 200
    assert f'data-base="{path}"' in page.text


@pytest.mark.parametrize("mount", PATHS)
async def test_a_proxy_may_remove_a_prefix(mount: str) -> None:
    visitor = Visitor(in_starlette(dashboard(MemoryStore()), mount), mount)
    page = await visitor.get("/runs", **{"X-Forwarded-Prefix": "/ops/"})
    assert f'href="/ops{mount}/errors"' in page.text


@pytest.mark.parametrize("prefix", ["//evil.test", "https://evil.test", "/a\\b", '/"><script>'])
async def test_a_prefix_that_is_not_a_path_is_ignored(prefix: str) -> None:
    page = await Visitor(dashboard(MemoryStore())).get("/runs", **{"X-Forwarded-Prefix": prefix})
    assert 'data-base=""' in page.text


async def test_no_lifespan_is_needed_and_one_is_answered() -> None:
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await dashboard(MemoryStore())({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
