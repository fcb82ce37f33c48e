"""Protection against other pages in the operator's browser, and against overload."""

import hmac
import re
from collections.abc import Mapping
from email import message_from_bytes
from hashlib import sha256
from typing import cast
from urllib.parse import parse_qsl, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from perdure.clock import Clock

MAX_BODY = 1_000_000
MAX_FIELDS = 300
SESSION_COOKIE = "perdure_session"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

_SESSION = re.compile(r"[0-9a-f]{64}")
_REQUESTS_PER_SECOND = 20
_BURST = 60
_MAX_SESSIONS = 1000


def session_of(request: Request) -> str:
    """Return the session of the browser, or "" if it has none yet."""
    cookie = request.cookies.get(SESSION_COOKIE, "")
    return cookie if _SESSION.fullmatch(cookie) else ""


def form_token(session: str, person: str, path: str, salt: str) -> str:
    """Return the token that a form of this path must send: the salt and a digest.

    Its key is the session cookie, which no other page can read, so every process can check it. Each
    token has another salt, so that compressed pages reveal nothing about it.
    """
    message = "\n".join((salt, person, path))
    return salt + hmac.new(session.encode(), message.encode(), sha256).hexdigest()


def is_same_origin(request: Request) -> bool:
    """Return whether a page of this host sent the request, according to the browser."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin", "")
    return bool(origin) and urlsplit(origin).netloc == request.headers.get("host", "")


async def read_form(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form, or refuse it if it is too large or not text."""
    body = bytearray()
    content_type = request.headers.get("content-type", "")
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise ValueError("too many bytes")
        if content_type.startswith("multipart/form-data"):
            pairs = _read_parts(content_type, bytes(body))
        else:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise HTTPException(413, "A form may contain at most 1 MB, and only text.") from error
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        # Browsers send line breaks of a text area as CR LF.
        fields.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return fields


def _read_parts(content_type: str, body: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form with files, which are text."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1")
    parts = [part for part in message_from_bytes(head + body).walk() if not part.is_multipart()]
    if len(parts) > MAX_FIELDS:
        raise ValueError("too many fields")
    names = [str(part.get_param("name", "", "content-disposition")) for part in parts]
    texts = [cast(bytes, part.get_payload(decode=True)).decode() for part in parts]
    return list(zip(names, texts, strict=True))


class RateLimit:
    """Allows each session some requests per second, and a short burst."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def allows(self, session: str) -> bool:
        """Count a request; return whether it is within the limit."""
        now = self._clock.monotonic()
        left, since = self._buckets.pop(session, (float(_BURST), now))
        left = min(left + (now - since) * _REQUESTS_PER_SECOND, _BURST)
        if len(self._buckets) >= _MAX_SESSIONS:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[session] = (max(left - 1, 0.0), now)
        return left >= 1
