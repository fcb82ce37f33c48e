"""Convert results to JSON, in the same form for the CLI and for pages."""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from perdure.clock import isoformat
from perdure.insights.model import Json


def to_json(value: object) -> Json:
    """Return a struct of `perdure.insights` as plain JSON values.

    Names are as they are in Python, times are ISO 8601 in UTC with `Z`, durations are seconds.
    """
    if isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
        return {name: to_json(getattr(value, name)) for name in fields}
    if isinstance(value, datetime):
        return isoformat(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    return value
