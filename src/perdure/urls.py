"""URL paths: ids and names as single segments, and the mount point of an app.

A name of harmless characters appears as it is; any other becomes `~` and base64url, so that a
slash, a percent sign or two dots cannot change the path.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

_PLAIN = re.compile(r"[A-Za-z0-9_.:@-][A-Za-z0-9_.:@~-]*")


def encode_id(id: str) -> str:
    """Return the path segment of an id."""
    if _PLAIN.fullmatch(id) and id.strip("."):
        return id
    return "~" + base64.urlsafe_b64encode(id.encode()).decode().rstrip("=")


def decode_id(segment: str) -> str | None:
    """Return the id of a path segment, or `None` if `encode_id` cannot have produced it."""
    id = _decode(segment[1:]) if segment.startswith("~") else segment
    return id if id and encode_id(id) == segment else None


def _decode(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError):
        return None


def quote_path(path: str) -> str:
    """Quote a path for a URL."""
    return quote(path, safe="/:@~!$&'()*+,;=-._")


def split_path(scope: Mapping[str, Any]) -> tuple[str, str]:
    """Return the path at which the app is mounted, and the path inside it, both decoded.

    Frameworks differ: with Starlette `path` contains `root_path`; Litestar removes the prefix from
    `path`, and only `raw_path` still has it.
    """
    path, root = "/" + scope["path"].strip("/"), scope.get("root_path", "").rstrip("/")
    if root:
        return root, (path[len(root) :] if (path + "/").startswith(root + "/") else path) or "/"
    raw = unquote(scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1"))
    prefix = "/" + raw.strip("/")
    suffix = path.rstrip("/")
    return prefix.removesuffix(suffix).rstrip("/") if prefix.endswith(suffix) else "", path
