"""Render JSON as folding HTML, and make invisible characters visible."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from markupsafe import Markup

from perdure.insights.words import count_words

MAX_SHOWN = 4096
"""How many characters of a value are shown; the rest can be downloaded."""

_INLINE = 72
_MAX_DEPTH = 40
_NOTHING = Markup("")
_KINDS = {str: "string", int: "number", float: "number", bool: "word", type(None): "word"}
# Control characters, and those that change the direction or the look of what follows.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


def visible(text: str) -> str:
    """Return a string whose invisible characters are written as escapes."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def to_text(value: Any) -> str:
    """Return a value as indented JSON: keys keep their order and numbers their digits."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def fold(value: Any) -> Markup:
    """Return a value as nested, folding HTML of at most `MAX_SHOWN` characters of JSON."""
    return Markup('<div class="json">{}</div>').format(_Folder().render(value, 0))


class _Folder:
    """Renders one value, and stops when its budget of characters is spent."""

    def __init__(self) -> None:
        self._left = MAX_SHOWN
        self.is_cut = False

    def render(self, value: Any, depth: int, label: Markup = _NOTHING) -> Markup:
        """Render a value after its label; the label of a container is in the line that folds it."""
        if not isinstance(value, dict | list) or not value:
            return label + self._scalar(value)
        if depth >= _MAX_DEPTH or self._left <= 0:
            return label + self._ellipsis(len(value))
        inline = self._inline(value)
        return self._container(value, depth, label) if inline is None else label + inline

    def _inline(self, value: Any) -> Markup | None:
        """Return a container on one line, if it is small."""
        members = value.values() if isinstance(value, dict) else value
        if len(value) > 8 or any(isinstance(each, dict | list) for each in members):
            return None
        if len(text := _dumps(value)) > _INLINE:
            return None
        self._left -= len(text)
        shown = Markup(", ").join(self._members(value, 0))
        left, right = ("{", "}") if isinstance(value, dict) else ("[", "]")
        return Markup("{}{}{}").format(left, shown, right)

    def _container(self, value: Any, depth: int, label: Markup) -> Markup:
        noun = "key" if isinstance(value, dict) else "item"
        count = count_words(len(value), noun)
        is_open = Markup(" open") if depth < 2 else Markup("")
        members = Markup("").join(
            Markup("<li>{}</li>").format(each) for each in self._members(value, depth + 1)
        )
        return Markup("<details{}><summary>{}{}</summary><ul>{}</ul></details>").format(
            is_open, label, count, members
        )

    def _members(self, value: Any, depth: int) -> Iterator[Markup]:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for index, (key, member) in enumerate(pairs):
            if self._left <= 0:
                yield self._ellipsis(len(value) - index)
                return
            if isinstance(value, dict):
                name = Markup('<span class="json-key">{}</span>: ').format(self._cut(_dumps(key)))
                yield self.render(member, depth, name)
            else:
                yield self.render(member, depth)

    def _scalar(self, value: Any) -> Markup:
        kind = _KINDS.get(type(value), "empty")
        # A string of megabytes is not encoded as a whole.
        is_long = isinstance(value, str) and len(value) > MAX_SHOWN
        text = self._cut(_dumps(value[: MAX_SHOWN + 1] if is_long else value))
        return Markup('<span class="json-{}">{}</span>').format(kind, text)

    def _cut(self, text: str) -> str:
        shown = text[: max(self._left, 16)]
        self._left -= len(shown)
        if len(shown) == len(text):
            return visible(shown)
        self.is_cut = True
        return visible(shown) + "…"

    def _ellipsis(self, count: int) -> Markup:
        self.is_cut = True
        return Markup('<span class="json-cut">… {} more</span>').format(f"{count:,}")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_cut(value: Any) -> bool:
    """Return whether `fold` shows only a part of a value."""
    folder = _Folder()
    folder.render(value, 0)
    return folder.is_cut
