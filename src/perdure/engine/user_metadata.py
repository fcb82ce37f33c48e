"""The metadata that a user stores with a run: a small JSON object."""

from collections.abc import Mapping
from typing import Any

from perdure import codec
from perdure.errors import CodecError, InvalidArgument
from perdure.validation import check_text

USER = "userMetadata"
"""The name under which the user's metadata is stored, separate from the engine's."""

MAX_METADATA = 8192
"""The maximum size of a run's metadata as JSON, in bytes: every rest writes it."""


def user_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's part of a run's metadata."""
    own = metadata.get(USER)
    return own if type(own) is dict else {}


def check_metadata(value: object) -> dict[str, Any]:
    """Check for a small JSON object; return a copy."""
    expected = f"a JSON object of at most {MAX_METADATA} bytes"
    if not isinstance(value, Mapping):
        raise InvalidArgument("metadata", value, expected)
    for name in value:
        check_text(name, "metadata", "non-empty strings as names")
    try:
        data = codec.dumps(dict(value))
        if codec.encode(dict(value)) != codec.loads(data) or len(data) > MAX_METADATA:
            raise InvalidArgument("metadata", value, expected)
    except CodecError as error:
        raise InvalidArgument("metadata", value, expected, str(error)) from error
    metadata: dict[str, Any] = codec.loads(data)
    return metadata
