"""File names and keys for arbitrary strings."""

import re
from hashlib import blake2b

_READABLE_LENGTH = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def safe_name(text: str) -> str:
    """Return a short, unique ASCII name for `text` that is valid in any file system.

    It starts with the readable part of the string and ends in 32 hexadecimal digits of its hash, so
    that different strings differ even where a file system ignores case.
    """
    readable = _UNSAFE.sub("_", text)[:_READABLE_LENGTH].strip("_-")
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{readable}-{digest}" if readable else digest
