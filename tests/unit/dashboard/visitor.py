"""A browser without scripts: it sends what a form on a page would send."""

import re
from collections.abc import Mapping
from html import unescape
from typing import Any

import httpx
from starlette.types import ASGIApp

from perdure import Runtime, Step, workflow
from perdure.dashboard import Access, Dashboard, Right
from perdure.dashboard.access import ALL_RIGHTS, Auth
from perdure.store import Store

HOST = "http://dash.test"
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}
TOKEN = re.compile(r'name="form_token" value="([0-9a-f]+)"')


def as_person(*rights: Right, name: str = "ana") -> Auth:
    """Return a hook that lets everyone in with these rights."""

    async def auth(request: object) -> Access:
        return Access(name, frozenset(rights))

    return auth


class Visitor:
    """Visits an ASGI app in this process and keeps its cookies."""

    def __init__(self, app: ASGIApp, base: str = "", host: str = HOST) -> None:
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url=host)
        self.base = base

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(self.base + path, headers=headers)

    async def token(self, path: str) -> str:
        """Return the token of the form on a page."""
        token_match = TOKEN.search((await self.get(path)).text)
        return token_match[1] if token_match else ""

    async def post(
        self,
        path: str,
        fields: Mapping[str, Any] | None = None,
        *,
        form: str | None = None,
        headers: Mapping[str, str] = SAME_ORIGIN,
    ) -> httpx.Response:
        """Send a form; `form` is the page that contains it, if that is another one."""
        token = await self.token(path if form is None else form)
        data = {"form_token": token, **(fields or {})}
        return await self.http.post(self.base + path, data=data, headers=dict(headers))


def text_of(response: httpx.Response) -> str:
    """Return the words of a page, without tags."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", response.text)).split())


def dashboard(store: Store, *rights: Right, **options: Any) -> Dashboard:
    """Return a dashboard for a person with these rights, or with all."""
    return Dashboard(store, auth=as_person(*(rights or ALL_RIGHTS)), **options)


class CarrierDown(Exception):
    pass


def ship() -> str:
    raise CarrierDown("503 from carrier")


@workflow("order")
async def order(step: Step, payload: dict[str, Any]) -> str:
    await step("charge", lambda: {"receipt": 17, "api_key": "s3cret"})
    if payload.get("waits"):
        await step.wait_for_event("approval", "approved", timeout="2d")
    return await step("ship", ship)


async def failed_run(store: Store, run_id: str = "order-1", **payload: Any) -> None:
    """Create a run whose step "ship" has failed."""
    await Runtime(store, workflows=[order]).trigger(order, payload, run_id=run_id)


async def waiting_run(store: Store, run_id: str = "order-2") -> None:
    """Create a run that waits for the event "approved"."""
    await Runtime(store, workflows=[order]).trigger(order, {"waits": True}, run_id=run_id)
