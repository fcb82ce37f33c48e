"""Names that any file system or key-value server takes, for texts that they would not."""

import re
from hashlib import blake2b

_READABLE_LENGTH = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def safe_name(text: str) -> str:
    """Give a short ASCII name that stands for `text` and for no other.

    It begins with what is readable of the text and ends in 32 hexadecimal digits of its hash, so
    that two texts differ also where a file system ignores case.
    """
    readable = _UNSAFE.sub("_", text)[:_READABLE_LENGTH].strip("_-")
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{readable}-{digest}" if readable else digest
