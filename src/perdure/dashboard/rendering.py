"""Templates and static files: turn the results of views into responses."""

import hashlib
import mimetypes
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, get_args
from urllib.parse import urlencode

import jinja2
import msgspec
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.responses import Response

from perdure.dashboard import charts, values
from perdure.dashboard.board import Board
from perdure.dashboard.visit import Visit
from perdure.insights import Frame, Term, to_json, words
from perdure.snapshot import RunStatus
from perdure.urls import encode_id

_FOLDER = Path(__file__).parent
ERROR_WINDOWS = {"1h": "1 h", "24h": "24 h", "7d": "7 days", "30d": "30 days"}
CHART_WINDOWS = {f"{hours}h": f"{hours} h" for hours in (1, 6, 24, 48)}
View: TypeAlias = Callable[[Board, Visit], Awaitable["Content | Response"]]


@dataclass(frozen=True, slots=True)
class Content:
    """A page: its template, the structs it shows, and the template's other context.

    `?format=json` returns `data`, which also decides whether the page has changed. `topics` are the
    topics of which the page wants to be notified.
    """

    template: str
    data: object = None
    context: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    topics: tuple[str, ...] = ()


class Problem(Exception):
    """A request cannot be fulfilled; a page says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@cache
def static_files() -> Mapping[str, bytes]:
    """Return the static files by name."""
    return {path.name: path.read_bytes() for path in sorted((_FOLDER / "static").iterdir())}


@cache
def static_version() -> str:
    """Return a hash of all static files: their URLs change with them."""
    digest = hashlib.sha256()
    for name, content in static_files().items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:12]


def static_response(name: str) -> Response | None:
    """Return a static file, which browsers may keep, or `None`."""
    content = static_files().get(name)
    if content is None:
        return None
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(content, media_type=media_type, headers=headers)


def _finalize(value: object) -> object:
    """Make invisible characters visible in every string that a template prints."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return values.visible(value)
    return value


@jinja2.pass_context
def _age(context: Context, at: Any) -> str:
    return words.age(at, context["visit"].now)


@jinja2.pass_context
def _time(context: Context, at: Any) -> str:
    visit: Visit = context["visit"]
    return words.time_of_day(at, visit.now, visit.preferences.tz)


@jinja2.pass_context
def _full(context: Context, at: Any) -> str:
    return words.date_and_time(at, context["visit"].preferences.tz)


def frame_groups(frames: Sequence[Frame]) -> list[tuple[bool, list[Frame]]]:
    """Group adjacent frames of a traceback that are inside or outside perdure."""
    groups = groupby(frames, key=lambda frame: frame.is_engine)
    return [(is_engine, list(group)) for is_engine, group in groups]


def shell_command(*arguments: str, where: str = "") -> str:
    """Return the command line that is equivalent to a page."""
    return shlex.join(["perdure", *arguments, *(["--where", where] if where else ())])


def quote_term(field: str, value: str) -> str:
    """Return a term of a query for a value that may contain anything, or "" for none."""
    return str(Term(field, (value,))) if value else ""


_FILTERS: Mapping[str, Callable[..., object]] = {
    "age": _age,
    "time": _time,
    "full": _full,
    "duration": words.duration,
    "size": words.size,
    "plural": words.count_words,
    "tally": words.tally_words,
    "number": "{:,}".format,
    "nice_top": charts.nice_top,
    "log_position": charts.log_position,
    "fold": values.fold,
    "is_cut": values.is_cut,
    "frame_groups": frame_groups,
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
    # Jinja's own types know only its built-in filters.
    filters: Any = env.filters
    functions: Any = env.globals
    filters |= _FILTERS
    functions |= {each.__name__: each for each in (encode_id, quote_term, shell_command)}
    functions |= {"static_version": static_version(), "statuses": get_args(RunStatus)}
    functions |= {"chart_windows": CHART_WINDOWS, "error_windows": ERROR_WINDOWS}
    return env


def etag_of(content: Content, visit: Visit) -> str:
    """Return a tag that changes with the content of the page, but not with time."""
    person = (visit.access.person, sorted(visit.access.rights), visit.preferences)
    shown = (visit.path, person, static_version(), content.template, content.data)
    return f'"{hashlib.sha256(msgspec.json.encode(shown)).hexdigest()[:24]}"'


def render(content: Content, visit: Visit, shell: Mapping[str, Any]) -> Response:
    """Return the page, its structs as JSON, or 304 if the browser already has it."""
    if visit.query.get("format") == "json":
        body = msgspec.json.encode(to_json(content.data))
        return Response(body, content.status, media_type="application/json")
    headers = {"Vary": "X-Perdure-Part"}
    # Only the script asks conditionally, and only for parts; hashing a large run takes long.
    if visit.is_part:
        headers["ETag"] = etag_of(content, visit)
        if visit.request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
    topics = urlencode([("topic", each) for each in content.topics])
    template = environment().get_template(content.template)
    html = template.render(visit=visit, topics=topics, **shell)
    # A lone surrogate cannot be encoded; JSON may contain one.
    body = html.encode("utf-8", "replace")
    return Response(body, content.status, headers, "text/html; charset=utf-8")
