"""The dashboard: an ASGI app that can be mounted under any path.

Every request passes `Dashboard._answer` and `_check`: the host, the person, their rights and the
origin of a form are checked before a view is called. Nothing depends on a lifespan, since
frameworks do not run the lifespan of a mounted app.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any, Literal

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from perdure import errors
from perdure.clock import Clock, SystemClock
from perdure.dashboard import protection
from perdure.dashboard.access import Access, Auth, refuse_all
from perdure.dashboard.board import Board, Stores, new_boards, problem_of
from perdure.dashboard.live import Live
from perdure.dashboard.rendering import environment, render, static_response
from perdure.dashboard.routes import ROUTES, Route
from perdure.dashboard.visit import PREFERENCES_COOKIE, Preferences, Visit, base_of
from perdure.insights import Redact
from perdure.insights.redaction import DEFAULT_REDACTION
from perdure.urls import split_path
from perdure.validation import check_flag, check_random

logger = logging.getLogger(__name__)

_SESSION_AGE = 30 * 24 * 3600
_SAFE = ("GET", "HEAD")


class Dashboard:
    """Pages on which operators see and repair the runs of a store, as an ASGI app.

    With a mapping of names to stores or runtimes, the name is the first segment of the path. `auth`
    is a hook of `perdure.dashboard`, such as `basic({"ana": hash})`, or your own async function;
    without it, every request is refused. `read_only` limits everyone to viewing. `redact` defines
    what is hidden in values. `environment` is shown on every page ("production"). With
    `live="poll"` pages ask for changes every few seconds, for proxies that buffer streams.
    `show_source` shows the source of a runtime's workflows. With `audit_reveals`, the audit trail
    records who saw hidden values of a run. `url` is the address of a store, as pages show it; a
    runtime knows its own. `hosts` are the only accepted values of the header Host.

        app = Starlette(routes=[Mount("/perdure", Dashboard(runtime, auth=allow_all))])
    """

    def __init__(
        self,
        runtime_or_store: Stores,
        *,
        auth: Auth | None = None,
        read_only: bool = False,
        redact: Redact = DEFAULT_REDACTION,
        environment: str = "",
        live: Literal["sse", "poll"] = "sse",
        show_source: bool = False,
        audit_reveals: bool = False,
        url: str = "",
        hosts: Iterable[str] = (),
        clock: Clock = SystemClock(),
        random: Random | None = None,
    ) -> None:
        if auth is not None and not callable(auth):
            raise errors.InvalidArgument("auth", auth, "an async function that takes the request")
        if live not in ("sse", "poll"):
            raise errors.InvalidArgument("live", live, "'sse' or 'poll'")
        self._auth = auth or refuse_all
        self._hosts = frozenset(each.lower() for each in hosts)
        self._random = SystemRandom() if random is None else check_random(random)
        self._clock = clock
        self._limit = protection.RateLimit(clock)
        flags = {"read_only": read_only, "show_source": show_source, "audit_reveals": audit_reveals}
        options: dict[str, Any] = {name: check_flag(flag, name) for name, flag in flags.items()}
        options |= {"environment": environment, "live": live, "url": url}
        self._boards = new_boards(runtime_or_store, redact, clock, **options)
        self._lives = {name: Live(clock) for name in self._boards}
        self._app = GZipMiddleware(self._respond, minimum_size=1024)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Other kinds of connections are not accepted."""
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            # A server that runs the dashboard on its own expects an answer to each event.
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except HTTPException as refusal:
            text = f"{refusal.detail}\n"
            response = PlainTextResponse(text, refusal.status_code, refusal.headers)
        except Exception as error:  # noqa: BLE001 - the auth hook is the user's code
            # There is no person yet to show a page to.
            response = PlainTextResponse(_log_failure(request, error), 500)
        for name, value in protection.HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        """Authorize a request, or refuse it; public paths need no person."""
        mount, name, path = self._split_name(*split_path(request.scope))
        # A foreign name that points here may be a DNS rebinding attack.
        if self._hosts and request.headers.get("host", "").lower() not in self._hosts:
            raise HTTPException(421, "This host name is not served here.")
        if path == "/healthz":
            return PlainTextResponse("ok\n")
        if path.startswith("/static/"):
            return static_response(path.rpartition("/")[2])
        access = await self._auth(request)
        if isinstance(access, Response):
            return access
        session = protection.session_of(request)
        if not self._limit.allows(session or access.person):
            raise HTTPException(429, "Too many requests: wait a second.")
        if "view" not in access.rights:
            raise HTTPException(403, "You may not see this dashboard.")
        base = base_of(request, mount)
        if name not in self._boards:
            return self._list_stores(base, path)
        visit = self._visit(request, self._boards[name], base, path, access)
        response = await self._page(visit)
        if not session:
            visit.set_cookie(response, protection.SESSION_COOKIE, visit.session, _SESSION_AGE)
        return response

    def _split_name(self, mount: str, path: str) -> tuple[str, str, str]:
        """Move the name of a store from the path to the mount."""
        name, _, rest = path[1:].partition("/")
        if "" in self._boards or name not in self._boards:
            return mount, "", path
        return f"{mount}/{name}", name, f"/{rest}"

    def _list_stores(self, base: str, path: str) -> Response:
        """Show the names of the stores, which the paths of all other pages begin with."""
        if path != "/":
            raise HTTPException(404, "There is no such store.")
        template = environment().get_template("stores.html")
        return HTMLResponse(template.render(base=base, names=self._boards))

    def _visit(self, request: Request, board: Board, base: str, path: str, access: Access) -> Visit:
        if board.read_only:
            access = Access(access.person, frozenset({"view"}))
        session = protection.session_of(request) or self._random.randbytes(32).hex()
        preferences = Preferences.from_cookie(request.cookies.get(PREFERENCES_COOKIE, ""))
        now = self._clock.now()
        return Visit(request, board, base, path, access, session, preferences, now, self._random)

    async def _page(self, visit: Visit) -> Response:
        """Answer an authorized person; whatever fails, they see a page."""
        try:
            return await self._route(visit)
        except HTTPException as problem:
            status, text = problem.status_code, problem.detail
        except errors.StoreError as error:
            is_read = visit.request.method in _SAFE
            status, text = 503, problem_of(error, "read from" if is_read else "write to")
        except errors.PerdureError as error:
            status, text = _STATUSES.get(type(error), 400), str(error)
        except Exception as error:  # noqa: BLE001 - its message may be confidential
            status, text = 500, _log_failure(visit.request, error)
        title = _TITLES.get(status, "Request failed")
        return render(visit, "message.html", {"error": text}, status=status, title=title, text=text)

    async def _route(self, visit: Visit) -> Response:
        """Find the view of a path, and call it if the person may."""
        if visit.path == "/live":
            return await self._lives[visit.board.name].stream(visit)
        for route in ROUTES:
            params = route.match(visit.path)
            if params is not None:
                visit = replace(visit, params=params)
                return await _call(route, await _check(route, visit))
        raise HTTPException(404, "There is no such page.")


async def _check(route: Route, visit: Visit) -> Visit:
    """Check method, right, origin and token, for every view."""
    request, is_post = visit.request, visit.request.method == "POST"
    if (route.post if is_post else route.get if request.method in _SAFE else None) is None:
        raise HTTPException(405, f"This page does not accept {request.method}.")
    if is_post:
        if not protection.is_same_origin(request):
            raise HTTPException(403, "This form was not sent from a page of this host.")
        visit = replace(visit, form=await protection.read_form(request))
    right = route.right_for(visit.params, visit.form)
    if right is None:
        raise HTTPException(404, "There is no such page.")
    if not visit.may(right):
        raise HTTPException(403, f"This requires the right {right!r}.")
    if is_post and not visit.has_token():
        raise HTTPException(403, "This form has expired. Open the page again.")
    return visit


async def _call(route: Route, visit: Visit) -> Response:
    """Call the view. A form that is refused is shown again, with the reason."""
    if visit.request.method not in _SAFE:
        assert route.post is not None, "the method was checked"
        try:
            # A change is never interrupted, because it could be half done.
            return await route.post(visit)
        except errors.PerdureError as error:
            if isinstance(error, errors.StoreError | errors.RunNotFound) or route.get is None:
                raise
            visit = replace(visit, refusal=error)
    assert route.get is not None, "the method was checked"
    async with visit.board.reading(is_long=route.is_long):
        return await route.get(visit)


_STATUSES: Mapping[type[Exception], int] = {errors.RunNotFound: 404, errors.Refused: 409}
_TITLES = {403: "Not allowed", 404: "Not found", 409: "Refused", 503: "Store unavailable"}


def _log_failure(request: Request, error: Exception) -> str:
    """Log an unexpected error, and return a text for the page; its message may be confidential."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return f"This page failed with {type(error).__name__}. The server's log says more."
