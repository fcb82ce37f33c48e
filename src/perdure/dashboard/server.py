"""A standalone server for the commands `dashboard`, `dev` and `demo`, with its own sign-in."""

import asyncio
import errno
import hmac
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from random import Random, SystemRandom
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from perdure.clock import Clock, SystemClock
from perdure.dashboard.access import Access, Auth
from perdure.dashboard.app import Dashboard
from perdure.dashboard.board import Stores
from perdure.dashboard.protection import is_same_origin, read_form
from perdure.dashboard.rendering import environment
from perdure.errors import InvalidArgument, MissingDependency
from perdure.validation import check_text

_LOGIN = "/login"
_POLL = 0.01
_WRONG = (
    "This token is wrong or has been used. A token works in one browser; to use another one, "
    "restart the command."
)


@asynccontextmanager
async def serve(
    runtime_or_store: Stores,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    auth: Auth | None = None,
    person: str = "local",
    token: str | None = None,
    random: Random | None = None,
    clock: Clock = SystemClock(),
    **options: Any,
) -> AsyncGenerator[str, None]:
    """Serve a dashboard while the block runs, and yield the URL to open.

    Without `auth` the URL contains a token that lets one browser in, as `person`, and `host` must
    be this machine. A process that restarts passes the same `token`, so that its browser stays
    signed in. With port 0, any free port is used. `options` are passed to `Dashboard`.
    """
    if auth is None and not _is_local(host):
        hint = "Pass auth= to serve other machines"
        raise InvalidArgument("host", host, "an address of this machine", hint)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    token = token or (random or SystemRandom()).randbytes(16).hex()
    hosts = () if auth else [f"{name}:{port}" for name in (host, "localhost", "127.0.0.1", "[::1]")]
    hook = auth or OneTimeToken(token, person=person, port=port)
    app = Dashboard(runtime_or_store, auth=hook, hosts=hosts, clock=clock, random=random, **options)
    address = f"[{host}]" if ":" in host else host
    async with _serving(app, listener, clock):
        yield f"http://{address}:{port}/" + ("" if auth else f"?token={token}")


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        # For this error, asyncio's text differs from the system's.
        is_in_use = error.errno == errno.EADDRINUSE
        reason = "Another process uses it" if is_in_use else error.strerror
        hint = f"{reason}. Choose another port, or 0 for any free one"
        raise InvalidArgument("port", port, "a free port", hint) from error


@asynccontextmanager
async def _serving(
    app: Dashboard, listener: socket.socket, clock: Clock
) -> AsyncGenerator[None, None]:
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependency("uvicorn", "dashboard") from error

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            # The command handles signals itself: beside this server it runs a worker.
            yield

    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_level="warning", server_header=False
    )
    # Streams that browsers keep open must not delay the end.
    config.timeout_graceful_shutdown = 1
    server = Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started and not task.done():
            await clock.sleep(_POLL)
        yield
    finally:
        server.should_exit = True
        await task


class OneTimeToken:
    """A hook that lets in one browser, which has the token; a cookie remembers it.

    The token is part of the URL that the terminal shows, or is entered on the page `/login`. The
    cookie is derived from it: a server that restarts with the same token still knows its browser.
    Each port has its own cookie, since browsers ignore ports.
    """

    def __init__(self, token: str, *, person: str, port: int) -> None:
        self.token = check_text(token, "token", "a non-empty string")
        self._person = person
        self._cookie = f"perdure_{port}"
        self._session = hmac.digest(token.encode(), b"session", "sha256").hex()
        self._is_used = False

    async def __call__(self, request: Request) -> Access | Response:
        """Return the person's access, or a response that lets them in, asks or refuses."""
        path, query = request.url.path, request.query_params
        # The page without its query: the token leaves the address bar.
        response = RedirectResponse("/" if path == _LOGIN else path, 303)
        cookie = request.cookies.get(self._cookie, "")
        if hmac.compare_digest(cookie.encode(), self._session.encode()):
            return response if path == _LOGIN or "token" in query else Access(self._person)
        token = query.get("token", "")
        if path == _LOGIN and request.method == "POST" and is_same_origin(request):
            token = (await read_form(request)).get("token", [""])[-1].strip()
        if self._is_used or not hmac.compare_digest(token.encode(), self.token.encode()):
            return _refuse(request, _WRONG if token else "")
        self._is_used = True
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return response


def _refuse(request: Request, problem: str) -> Response:
    """Ask for the token on its page, where browsers are sent to; other programs are refused."""
    if request.url.path == _LOGIN:
        html = environment().get_template("login.html").render(base="", problem=problem)
        return HTMLResponse(html, 403 if problem else 200)
    is_browser = "text/html" in request.headers.get("accept", "") and request.method == "GET"
    if is_browser and not problem:
        return RedirectResponse(_LOGIN, 303)
    return PlainTextResponse(f"{problem or 'Open the address that the terminal shows.'}\n", 403)
