"""The beginning of a value as JSON text, without encoding all of it."""

from collections.abc import Iterator

from perdure import codec
from perdure.insights.model import Json
from perdure.insights.redaction import MASK, NOTHING_REDACTED, Path, Redact

SIZE = 80

# Redaction sees far more than is shown: half of a URL would not be recognized as one. No password
# is longer than this, and a value may have megabytes.
_EXAMINED = 16 * 1024


def preview(value: Json, redact: Redact, path: Path) -> str:
    """Return a redacted value as JSON text of at most `SIZE` characters."""
    text = ""
    for piece in _pieces(value, redact, path):
        text += piece
        if len(text) > SIZE:
            return text[: SIZE - 1] + "…"
    return text


def _pieces(value: Json, redact: Redact, path: Path) -> Iterator[str]:
    if not redact.is_off and redact.hides(path, value):
        yield _json(MASK)
    elif isinstance(value, str):
        yield _json(redact.url(value[:_EXAMINED])[: SIZE + 1])
    elif isinstance(value, list):
        yield from _items(value, redact, path)
    elif isinstance(value, dict) and isinstance(value.get("~map"), list):
        yield from _pieces(redact.value(value, path), NOTHING_REDACTED, path)
    elif isinstance(value, dict):
        yield from _fields(value, redact, path)
    else:
        yield _json(value)


def _items(value: list[Json], redact: Redact, path: Path) -> Iterator[str]:
    for n, item in enumerate(value):
        yield ", " if n else "["
        yield from _pieces(item, redact, (*path, str(n)))
    yield "]" if value else "[]"


def _fields(value: dict[str, Json], redact: Redact, path: Path) -> Iterator[str]:
    for n, (key, item) in enumerate(value.items()):
        yield f"{', ' if n else '{'}{_json(key[:SIZE])}: "
        yield from _pieces(item, redact, (*path, key))
    yield "}" if value else "{}"


def _json(value: Json) -> str:
    return codec.dumps(value).decode()
