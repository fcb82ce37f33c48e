"""JSON as it is shown: as nodes, cut after some characters."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from perdure.insights.beginning import total_of

MAX_SHOWN = 4096
"""How many characters of a value are shown; the rest can be downloaded."""

_MAX_LINE = 72
_MAX_DEPTH = 40
_KINDS: dict[type, str] = {str: "string", int: "number", float: "number", bool: "word"}


class Node(NamedTuple):
    """A scalar, a container, or what is left out. A container that `is_short` fits on a line."""

    kind: str
    key: str
    text: str = ""
    members: Sequence["Node"] = ()
    size: int = 0
    is_short: bool = False


class Outline:
    """The beginning of a value as nodes that a template can draw; `is_cut` if that is not all."""

    def __init__(self, value: Any) -> None:
        self._left = MAX_SHOWN
        self.is_cut = False
        self.root = self._node(value)

    def _node(self, value: Any, key: str = "", depth: int = 0) -> Node:
        if not isinstance(value, dict | list) or not total_of(value):
            # A string of megabytes is not encoded as a whole.
            part = value[: MAX_SHOWN + 1] if isinstance(value, str) else value
            kind = "word" if value is None else _KINDS.get(type(value), "empty")
            return Node(kind, key, self._cut(part))
        if depth >= _MAX_DEPTH or self._left <= 0:
            return self._ellipsis(total_of(value), key)
        kind, left = "object" if isinstance(value, dict) else "list", self._left
        members = tuple(self._members(value, depth + 1))
        is_flat = not any(each.members or each.kind == "cut" for each in members)
        is_short = is_flat and left - self._left <= _MAX_LINE
        return Node(kind, key, "", members, total_of(value), is_short)

    def _members(self, value: Any, depth: int) -> Iterator[Node]:
        pairs = value.items() if isinstance(value, dict) else ((None, each) for each in value)
        left_out = total_of(value)
        for key, member in pairs:
            if self._left <= 0:
                break
            left_out -= 1
            yield self._node(member, "" if key is None else self._cut(key), depth)
        if left_out:
            yield self._ellipsis(left_out)

    def _cut(self, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        length = max(self._left, 16)
        self._left -= min(length, len(text))
        if len(text) <= length:
            return text
        self.is_cut = True
        return text[:length] + "…"

    def _ellipsis(self, count: int, key: str = "") -> Node:
        self.is_cut = True
        return Node("cut", key, f"… {count:,} more")
