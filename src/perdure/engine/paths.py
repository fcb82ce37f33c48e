"""Paths of branches: `1/2`, or `search/%2`; names and numbers are joined by slashes."""

from collections.abc import Set


def join_path(path: str, name: str) -> str:
    """Return `path` with one more part, in an unambiguous form: without slashes or bare numbers."""
    if "/" in name or "%" in name:
        name = name.replace("%", "%25").replace("/", "%2F")
    part = f"%{name}" if name.isdecimal() else name
    return f"{path}/{part}" if path else part


def split_path(path: str) -> tuple[str, str]:
    """Return the path and name from which `join_path` made `path`."""
    head, _, part = path.rpartition("/")
    name = part[1:] if part[:1] == "%" and part[1:].isdecimal() else part
    return head, name.replace("%2F", "/").replace("%25", "%")


def is_below(path: str, paths: Set[str]) -> bool:
    """Return whether a branch is one of these, or below one of them."""
    parts = path.split("/")
    return any("/".join(parts[:length]) in paths for length in range(1, len(parts) + 1))
