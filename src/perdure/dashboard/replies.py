"""Redirects after a change, with a sentence that the next page shows once."""

import base64
import binascii
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.dashboard.visit import Visit

SAID_COOKIE = "perdure_said"
_MAX_SAID = 600


def redirect(url: str, sentence: str, visit: Visit) -> Response:
    """Send the browser to a page, which says what was done."""
    response = RedirectResponse(url, 303)
    said = base64.urlsafe_b64encode(sentence[:_MAX_SAID].encode()).decode()
    set_cookie(response, visit, SAID_COOKIE, said, max_age=30)
    return response


def set_cookie(response: Response, visit: Visit, name: str, value: str, max_age: int) -> None:
    """Set a cookie that scripts and other sites cannot use."""
    options: dict[str, Any] = {"httponly": True, "samesite": "strict", "path": visit.base or "/"}
    is_secure = visit.request.url.scheme == "https"
    response.set_cookie(name, value, max_age, secure=is_secure, **options)


def read_said(request: Request) -> str:
    """Return what the previous page did, or ""."""
    try:
        return base64.urlsafe_b64decode(request.cookies.get(SAID_COOKIE, "")).decode()
    except (binascii.Error, ValueError):
        return ""
