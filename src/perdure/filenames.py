"""File names, and keys of key-value servers, for strings that contain any characters."""

import re
from hashlib import blake2b

_READABLE_LENGTH = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def safe_name(text: str) -> str:
    """Return a short ASCII name that is unique to `text`.

    It begins with the readable part of the text and ends in 32 hexadecimal digits of its hash, so
    that two names differ even on a file system that ignores case.
    """
    readable = _UNSAFE.sub("_", text)[:_READABLE_LENGTH].strip("_-")
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{readable}-{digest}" if readable else digest
