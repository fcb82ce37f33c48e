"""Templates and static files: turn the results of views into responses."""

import hashlib
import math
import shlex
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, get_args
from urllib.parse import urlencode

import jinja2
import msgspec
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.responses import Response

from perdure.dashboard.visit import NOTICE_COOKIE, Visit
from perdure.insights import Frame, Term, charts, to_json, words
from perdure.insights.outline import Outline
from perdure.snapshot import RunStatus
from perdure.snapshot.labels import label_of
from perdure.urls import encode_id

ERROR_WINDOWS = {"1h": "1 h", "24h": "24 h", "7d": "7 days", "30d": "30 days"}
CHART_WINDOWS = {f"{hours}h": f"{hours} h" for hours in (1, 6, 24, 48)}
View: TypeAlias = Callable[[Visit], Awaitable[Response]]

_FOLDER = Path(__file__).parent
_STATIC = {path.name: path.read_bytes() for path in sorted((_FOLDER / "static").iterdir())}
_STATIC_VERSION = hashlib.sha256(repr(_STATIC).encode()).hexdigest()[:12]
_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript"}


def static_response(name: str) -> Response:
    """Return a static file, which browsers may keep: its URL changes with it."""
    if name not in _STATIC:
        raise HTTPException(404, "There is no such file.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(_STATIC[name], 200, headers, _MEDIA_TYPES[name.rpartition(".")[2]])


def _finalize(value: object) -> object:
    """Make invisible characters visible in every string that a template prints."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return words.visible(value)
    return value


def _for_visit(format: Callable[[Any, Visit], str]) -> Callable[..., str]:
    """Return a filter that formats a time for the person who looks at the page."""

    @jinja2.pass_context
    def apply(context: Context, at: Any) -> str:
        return format(at, context["visit"])

    return apply


def frame_groups(frames: Sequence[Frame]) -> list[tuple[bool, list[Frame]]]:
    """Group adjacent frames of a traceback that are inside or outside perdure."""
    groups = groupby(frames, key=lambda frame: frame.is_engine)
    return [(is_engine, list(group)) for is_engine, group in groups]


def quote_term(field: str, value: str) -> str:
    """Return a term of a query for a value that may contain anything, or "" for none."""
    return str(Term(field, (value,))) if value else ""


_FILTERS: dict[str, Any] = {
    "age": _for_visit(lambda at, visit: words.age(at, visit.now)),
    "time": _for_visit(lambda at, visit: words.time_of_day(at, visit.now, visit.preferences.tz)),
    "full": _for_visit(lambda at, visit: words.date_and_time(at, visit.preferences.tz)),
    "duration": words.duration,
    "size": words.size,
    "plural": words.count_words,
    "tally": words.tally_words,
    "number": "{:,}".format,
    "log": math.log,
    "shell": shlex.join,
    "outline": Outline,
    "frame_groups": frame_groups,
    "label": label_of,
}
_GLOBALS: dict[str, Any] = {
    "static_version": _STATIC_VERSION,
    "statuses": get_args(RunStatus),
    "chart_windows": CHART_WINDOWS,
    "error_windows": ERROR_WINDOWS,
    "charts": charts,
    "encode_id": encode_id,
    "quote_term": quote_term,
}


@cache
def environment() -> jinja2.Environment:
    """Return the templates: autoescaped, and strict about names."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    env.filters.update(_FILTERS)
    env.globals.update(_GLOBALS)
    return env


def render(
    visit: Visit,
    template: str,
    data: object = None,
    *,
    status: int = 200,
    topics: Iterable[str] = (),
    **context: Any,
) -> Response:
    """Return a page, the structs that it shows as JSON, or 304 if the browser already has it.

    `?format=json` returns `data`, which also decides whether the page has changed. `topics` are the
    topics of which the page wants to be notified.
    """
    status = 422 if visit.error else status
    if visit.query.get("format") == "json":
        return Response(msgspec.json.encode(to_json(data)), status, media_type="application/json")
    headers = {"Vary": "X-Perdure-Part"}
    # Only the script asks conditionally, and only for parts; hashing a large run takes long.
    if visit.is_part:
        headers["ETag"] = _etag(visit, template, data)
        if visit.request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
    context |= {"visit": visit, "topics": urlencode([("topic", each) for each in topics])}
    html = environment().get_template(template).render(context)
    # A lone surrogate cannot be encoded; JSON may contain one.
    body = html.encode("utf-8", "replace")
    response = Response(body, status, headers, "text/html; charset=utf-8")
    if visit.notice and not visit.is_part:
        response.delete_cookie(NOTICE_COOKIE, path=visit.base or "/")
    return response


def _etag(visit: Visit, template: str, data: object) -> str:
    """Return a tag that changes with the content of the page, but not with time."""
    person = (visit.access.person, sorted(visit.access.rights), visit.preferences)
    page = (visit.path, person, _STATIC_VERSION, template, data)
    return f'"{hashlib.sha256(msgspec.json.encode(page)).hexdigest()[:24]}"'
