"""Sign in to a standalone dashboard with the token that the terminal shows."""

import hmac

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from perdure.dashboard.access import Access
from perdure.dashboard.protection import is_same_origin, read_form
from perdure.dashboard.rendering import environment
from perdure.validation import check_text

LOGIN = "/login"


class OneTimeToken:
    """Lets the person in who has the token, once; a cookie remembers them.

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
        cookie = request.cookies.get(self._cookie, "")
        if hmac.compare_digest(cookie.encode(), self._session.encode()):
            is_arriving = path == LOGIN or "token" in query
            return _to(path) if is_arriving else Access(self._person)
        token = query.get("token", "")
        if path == LOGIN and request.method == "POST" and is_same_origin(request):
            token = ((await read_form(request) or {}).get("token") or [""])[-1].strip()
        if token:
            return self._let_in(path) if self._fits(token) else _refused(path)
        return _form() if path == LOGIN else _ask(request)

    def _fits(self, token: str) -> bool:
        is_right = hmac.compare_digest(token.encode(), self.token.encode())
        return is_right and not self._is_used

    def _let_in(self, path: str) -> Response:
        self._is_used = True
        response = _to(path)
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return response


def _to(path: str) -> Response:
    """Load the page without its query, so that the token leaves the address bar."""
    return Response(status_code=303, headers={"Location": "/" if path == LOGIN else path})


def _ask(request: Request) -> Response:
    """Send a browser to the page that asks for the token; other programs are refused."""
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(LOGIN, 303)
    return PlainTextResponse("Open the address that the terminal shows.\n", 403)


def _form(problem: str = "") -> Response:
    html = environment().get_template("login.html").render(base="", problem=problem)
    return HTMLResponse(html, 403 if problem else 200)


def _refused(path: str) -> Response:
    text = (
        "This token is wrong, or was used. A token lets in one browser; to use another one, "
        "restart the command."
    )
    return _form(text) if path == LOGIN else PlainTextResponse(f"{text}\n", 403)
