"""The error of a step or a run, with its traceback and its causes, read from the record."""

import re
from collections.abc import Mapping
from typing import Any

from perdure.insights.model import ErrorFacts, Frame, Json
from perdure.insights.preview import preview
from perdure.insights.redaction import Path, Redact

_FRAME = re.compile(
    r'^[ |]*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)'
    r"(?:\n(?![ |]*File )(?P<code>[ |]*\S.*))?",
    re.MULTILINE,
)
_TRACEBACK = "Traceback (most recent call last):"
_CONTEXT = "During handling of the above exception, another exception occurred:"
# Matches a file of perdure, wherever it was installed.
_SHOWN_PARTS = 3
_ENGINE = re.compile(
    r"[/\\]perdure[/\\](?:engine|durable|runtime|codec|snapshot|store|stores|sync|testing"
    r"|worker\.py|workflow\.py)\b"
)
_DEEPEST = 20


def error_of(record: Any, redact: Redact, path: Path) -> ErrorFacts | None:
    """Return the error of a record, or `None` if there is none; `path` is the path of its value."""
    if not isinstance(record, Mapping) or record.get("ok") is not False:
        return None
    cause, meta = record.get("cause"), record.get("meta") or {}
    if meta.get("origin") != "result":
        facts = cause_facts(cause, redact, path)
        return facts or ErrorFacts("Error", redact.text(_text(record.get("error"))))
    value = redact.value(record.get("error"), path)
    message = preview(record.get("error"), redact, path)
    if isinstance(value, str):
        message = redact.text(value)
    deeper = None if meta.get("causeless") else cause_facts(cause, redact, path)
    return ErrorFacts("Err", message, value=value, cause=deeper)


def cause_facts(cause: Any, redact: Redact, path: Path, depth: int = 0) -> ErrorFacts | None:
    """Return the facts about a serialized cause and its own causes."""
    if not isinstance(cause, Mapping) or depth > _DEEPEST:
        return None
    if cause.get("type") != "error":
        message = redact.text(_text(cause.get("stringRepresentation")))
        value = redact.value(cause.get("value"), path)
        return ErrorFacts(_text(cause.get("originalType")) or "value", message, value=value)
    members, stack = cause.get("members"), _text(cause.get("stack"))
    facts = (cause_facts(each, redact, path, depth + 1) for each in members or ())
    deeper = cause_facts(cause.get("cause"), redact, path, depth + 1)
    return ErrorFacts(
        type=_text(cause.get("name")),
        message=redact.text(_text(cause.get("message"))),
        frames=frames_of(stack, redact),
        notes=tuple(redact.text(_text(note)) for note in cause.get("notes") or ()),
        cause=deeper or _context_of(stack, redact),
        members=tuple(each for each in facts if each is not None),
    )


def _context_of(stack: str, redact: Redact) -> ErrorFacts | None:
    """Return the exception that was being handled when another was raised.

    Only the text of the traceback shows it; the stored `cause` was raised with `from`.
    """
    context, separator, _ = stack.rpartition(_CONTEXT)
    if not separator:
        return None
    lines = context.rpartition(_TRACEBACK)[2].splitlines()
    last = next((line for line in lines if line[:1].strip()), "")
    name, _, message = last.partition(": ")
    frames = frames_of(context, redact)
    deeper = _context_of(context, redact)
    return ErrorFacts(name.rpartition(".")[2], redact.text(message), frames, cause=deeper)


def frames_of(stack: str, redact: Redact) -> tuple[Frame, ...]:
    """Return the frames of the last traceback in a string, innermost call last."""
    latest = stack.rpartition(_TRACEBACK)[2]
    return tuple(
        Frame(
            file=short_path(match["file"]),
            line=int(match["line"]),
            function=match["function"],
            code=redact.text((match["code"] or "").strip(" |")),
            is_engine=_ENGINE.search(match["file"]) is not None,
        )
        for match in _FRAME.finditer(latest)
    )


def short_path(file: str) -> str:
    """Return the end of a path, which identifies the module on any machine."""
    parts = re.split(r"[/\\]", file)
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    return "/".join(parts[-_SHOWN_PARTS:])


def first_line(facts: ErrorFacts | None) -> str:
    """Return an error as one line: its type and the first line of its message."""
    if facts is None:
        return ""
    message = facts.message.partition("\n")[0]
    return ": ".join(filter(None, (facts.type, message)))


def _text(value: Json) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
