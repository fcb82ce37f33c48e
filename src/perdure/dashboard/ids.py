"""Run ids, workflow and worker names as one segment of a URL's path.

A name of harmless characters appears as it is; any other becomes `~` and base64url, so that a
slash, a percent sign or two dots in it cannot change the path.
"""

import base64
import binascii
import re

_PLAIN = re.compile(r"[A-Za-z0-9_.:@-][A-Za-z0-9_.:@~-]*")


def encode_id(id: str) -> str:
    """Return the path segment of an id."""
    if _PLAIN.fullmatch(id) and id.strip("."):
        return id
    return "~" + base64.urlsafe_b64encode(id.encode()).decode().rstrip("=")


def decode_id(segment: str) -> str | None:
    """Return the id of a path segment, or `None` if `encode_id` returns it for no id."""
    id = _decode(segment[1:]) if segment.startswith("~") else segment
    return id if id and encode_id(id) == segment else None


def _decode(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
