"""One request: who made it, how they want pages to look, and where the dashboard is mounted."""

import hmac
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from random import Random
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, quote, unquote, urlencode
from zoneinfo import ZoneInfo

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.dashboard.access import Access
from perdure.dashboard.board import Board
from perdure.dashboard.protection import form_token
from perdure.errors import InvalidArgument, InvalidPayload, PerdureError
from perdure.operations.verbs import VERBS, Right, Verb
from perdure.urls import encode_id

PREFERENCES_COOKIE = "perdure_preferences"
NOTICE_COOKIE = "perdure_notice"
# Browsers ignore cookies of more than 4 KB.
_MAX_NOTICE = 3500
_PREFIX = re.compile(r"(/[A-Za-z0-9_.~-]+)*")


class Preferences(msgspec.Struct, frozen=True):
    """A person's preferences for pages; kept in a cookie, so that the server can use them."""

    theme: Literal["system", "light", "dark"] = "system"
    zone: str = "UTC"
    density: Literal["normal", "compact"] = "normal"
    keys: Literal["on", "off"] = "on"

    @classmethod
    def from_cookie(cls, cookie: str) -> Self:
        """Return the preferences in a cookie; the defaults if one is invalid."""
        try:
            preferences = msgspec.convert(dict(parse_qsl(cookie)), cls)
            ZoneInfo(preferences.zone)
        except (msgspec.ValidationError, ValueError, OSError, LookupError):
            return cls()
        return preferences

    @property
    def tz(self) -> tzinfo:
        """The time zone in which times are shown."""
        return UTC if self.zone == "UTC" else ZoneInfo(self.zone)


def base_of(request: Request, mount: str) -> str:
    """Return the prefix of all links: that of a proxy, and the mount point."""
    prefix = request.headers.get("x-forwarded-prefix", "").rstrip("/")
    return (prefix if _PREFIX.fullmatch(prefix) else "") + mount


@dataclass(frozen=True, slots=True)
class Visit:
    """An authorized request. `refusal` is why its form is shown again, if it is."""

    request: Request
    board: Board
    base: str
    path: str
    access: Access
    session: str
    preferences: Preferences
    now: datetime
    random: Random
    params: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, list[str]] = field(default_factory=dict)
    refusal: PerdureError | None = None

    @property
    def error(self) -> str:
        """Why the form was refused, or ""."""
        return str(self.refusal or "")

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the payload in the form, each with its path."""
        return self.refusal.errors if isinstance(self.refusal, InvalidPayload) else ()

    @property
    def invalid_field(self) -> str:
        """The field of the form that was refused, or ""."""
        if isinstance(self.refusal, InvalidArgument):
            return self.refusal.parameter
        return "payload" if self.problems else ""

    @property
    def verb(self) -> Verb:
        """The verb that the path names; it exists, since its right was checked."""
        return VERBS[self.params["verb"]]

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the URL."""
        return self.request.query_params

    @property
    def is_part(self) -> bool:
        """Whether the script asks for the content without the frame around it."""
        return self.request.headers.get("x-perdure-part") == "main"

    @property
    def after(self) -> str | None:
        """The cursor of the previous page."""
        return self.query.get("after") or None

    def choice(self, name: str, options: Collection[str], default: str) -> str:
        """Return a parameter of the URL if it is one of the options."""
        value = self.query.get(name, "")
        return value if value in options else default

    def may(self, right: Right) -> bool:
        """Return whether to offer something; the actual request is checked again."""
        return right in self.access.rights

    def url(self, *segments: str, **query: Any) -> str:
        """Return a link inside the dashboard; segments are encoded like ids."""
        return self._link("/" + "/".join(map(encode_id, segments)), query)

    def here(self, **changes: Any) -> str:
        """Return a link to this page with other parameters."""
        return self._link(self.path, {**self.query, "format": None, **changes})

    def _link(self, path: str, query: Mapping[str, Any]) -> str:
        pairs = {key: value for key, value in query.items() if value not in (None, "")}
        return self.base + path + (f"?{urlencode(pairs)}" if pairs else "")

    def token(self, path: str | None = None) -> str:
        """Return the token for a form that posts to `path`."""
        salt = self.random.randbytes(8).hex()
        return form_token(self.session, self.access.person, path or self.path, salt)

    def has_token(self) -> bool:
        """Return whether the posted form has the token of this session, person and path."""
        token = self.value("form_token")
        expected = form_token(self.session, self.access.person, self.path, token[:16])
        return hmac.compare_digest(token.encode(), expected.encode())

    def value(self, name: str, default: str = "") -> str:
        """Return a field of the posted form."""
        return self.form.get(name, [default])[-1]

    def attribution(self, verb: Verb | None = None) -> dict[str, Any]:
        """Return who acts and why, as every verb of `Operations` takes it; some need a reason."""
        why = self.value("why")
        return {"by": self.access.person, "why": verb.check_why(why) if verb else why}

    @property
    def notice(self) -> str:
        """What the previous request did, or ""."""
        return unquote(self.request.cookies.get(NOTICE_COOKIE, ""))

    def redirect(self, notice: str, *segments: str, **query: Any) -> Response:
        """Redirect the browser to a page, which shows once what was done."""
        response = RedirectResponse(self.url(*segments, **query), 303)
        return self.set_cookie(response, NOTICE_COOKIE, quote(notice)[:_MAX_NOTICE], 30)

    def set_cookie(self, response: Response, name: str, value: str, max_age: int) -> Response:
        """Set a cookie that scripts and other sites cannot use."""
        options: dict[str, Any] = {"httponly": True, "samesite": "strict", "path": self.base or "/"}
        is_secure = self.request.url.scheme == "https"
        response.set_cookie(name, value, max_age, secure=is_secure, **options)
        return response
