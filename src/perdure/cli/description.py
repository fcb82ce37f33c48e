"""Print one object in full, as indented lines, as in `perdure workflows show`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from perdure.cli.formatting import printable
from perdure.cli.output import Output
from perdure.insights.model import Percentiles, Tally
from perdure.insights.words import duration, tally_words

_FOR_CHARTS = ("durations_by_hour",)
"""Fields with a struct for each hour, which are too long to read."""


def describe(output: Output, value: Any, indent: str = "") -> Iterator[str]:
    """Yield the non-empty fields of a struct or a mapping, with their contents indented."""
    fields = value if isinstance(value, Mapping) else msgspec.structs.asdict(value)
    visible_fields = {
        str(name): each
        for name, each in fields.items()
        if name not in _FOR_CHARTS and not _is_empty(each)
    }
    width = max(map(len, visible_fields), default=0) + 2
    for name, each in visible_fields.items():
        title = indent + printable(name.replace("_", " "))
        text = in_line(output, each)
        if text is not None:
            yield f"{title:<{width + len(indent)}}{printable(text)}"
            continue
        for item in each if isinstance(each, Sequence) else [each]:
            yield title
            yield from describe(output, item, indent + "  ")


def in_line(output: Output, value: Any) -> str | None:
    """Return a value for the same line as its name, or `None` if it needs separate lines."""
    match value:
        case bool():
            return "yes" if value else "no"
        case Tally():
            return tally_words(value)
        case Percentiles():
            parts = (("p50", value.p50), ("p95", value.p95), ("p99", value.p99))
            words = [f"{name} {duration(part)}" for name, part in parts if part is not None]
            return "  ".join([*words, f"of {value.count:,}"])
        case datetime():
            return output.time(value)
        case timedelta():
            return duration(value)
        case str() | int() | float():
            return str(value)
        case msgspec.Struct():
            return None
        case Mapping():
            is_json = any(isinstance(each, Mapping | list) for each in value.values())
            return json.dumps(value, ensure_ascii=False) if is_json else None
        case _:
            texts = [in_line(output, each) for each in value]
            known_texts = [text for text in texts if text is not None]
            return ", ".join(known_texts) if len(known_texts) == len(texts) else None


def _is_empty(value: object) -> bool:
    return value in (None, "", False, (), [], {})
