"""Templates and static files: what a view returns becomes a response."""

import hashlib
import mimetypes
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

from perdure.dashboard import charts, formatting, values
from perdure.dashboard.board import Board
from perdure.dashboard.verbs import quote_term, shell_command
from perdure.dashboard.visit import Visit
from perdure.insights import Frame, to_json
from perdure.insights.words import count_words, tally_words
from perdure.snapshot import RunStatus
from perdure.urls import encode_id

_FOLDER = Path(__file__).parent
View: TypeAlias = Callable[[Board, Visit], Awaitable["Content | Response"]]


@dataclass(frozen=True, slots=True)
class Content:
    """A page: its template, the structs it shows, and what else the template needs.

    `data` is what `?format=json` returns, and what decides whether the page has changed. `topics`
    are what the page wants to be notified of.
    """

    template: str
    data: object = None
    context: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    topics: tuple[str, ...] = ()


def page(
    template: str, data: object, status: int = 200, topics: tuple[str, ...] = (), **context: Any
) -> Content:
    """Return a page; `context` is what its template needs."""
    return Content(template, data, context, status, topics)


def missing(text: str) -> Content:
    """Return a page that says what does not exist."""
    return page("message.html", {"error": text}, 404, title="Not found", text=text)


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
    """Show what is invisible in every string that a template prints."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return values.visible(value)
    return value


@jinja2.pass_context
def _age(context: Context, at: Any) -> str:
    return formatting.age(at, context["visit"].now)


@jinja2.pass_context
def _time(context: Context, at: Any) -> str:
    visit: Visit = context["visit"]
    return formatting.time_of_day(at, visit.now, visit.preferences.tz)


@jinja2.pass_context
def _full(context: Context, at: Any) -> str:
    return formatting.date_and_time(at, context["visit"].preferences.tz)


def frame_groups(frames: Sequence[Frame]) -> list[tuple[bool, list[Frame]]]:
    """Group the frames of a traceback that are next to each other inside perdure, or outside."""
    groups = groupby(frames, key=lambda frame: frame.is_engine)
    return [(is_engine, list(group)) for is_engine, group in groups]


_FILTERS: tuple[Callable[..., object], ...] = (
    *(formatting.duration, formatting.number, formatting.size),
    *(charts.nice_top, charts.log_position),
    *(values.fold, values.is_cut, frame_groups),
)


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
    filters |= {each.__name__: each for each in _FILTERS}
    filters |= {
        "age": _age,
        "time": _time,
        "full": _full,
        "plural": count_words,
        "tally": tally_words,
    }
    functions |= {each.__name__: each for each in (encode_id, quote_term, shell_command)}
    functions |= {"static_version": static_version(), "statuses": get_args(RunStatus)}
    return env


def etag_of(content: Content, visit: Visit) -> str:
    """Return a tag that changes with what the page shows, but not with the passing of time."""
    person = (visit.access.person, sorted(visit.access.rights), visit.preferences)
    shown = (visit.path, person, static_version(), content.template, content.data)
    return f'"{hashlib.sha256(msgspec.json.encode(shown)).hexdigest()[:24]}"'


def render(content: Content, visit: Visit, shell: Mapping[str, Any]) -> Response:
    """Return the page, its structs as JSON, or 304 if the browser has it already."""
    if visit.query.get("format") == "json":
        body = msgspec.json.encode(to_json(content.data))
        return Response(body, content.status, media_type="application/json")
    etag = etag_of(content, visit)
    headers = {"ETag": etag, "Vary": "X-Perdure-Part"}
    if visit.is_part and visit.request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    topics = urlencode([("topic", each) for each in content.topics])
    template = environment().get_template(content.template)
    html = template.render(visit=visit, topics=topics, **shell)
    # A lone surrogate cannot be encoded; JSON may contain one.
    body = html.encode("utf-8", "replace")
    return Response(body, content.status, headers, "text/html; charset=utf-8")
