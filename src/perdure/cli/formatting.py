"""Make strings safe for a terminal."""

import re

# Control characters, and those that reorder or hide what follows them.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_PASSWORD = re.compile(r"(://[^\s/:@]*:)[^\s/]*(?=@)|([?&](?:password|authToken)=)[^&\s]+")


def printable(text: str) -> str:
    """Return a string as one line in which control characters are visible and passwords are not."""
    return _UNSAFE.sub(_escape, hide_passwords(text))


def hide_passwords(text: str) -> str:
    """Return a string without the passwords of URLs."""
    return _PASSWORD.sub(r"\1\2•••", text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def printable_json(text: str) -> str:
    """Return equivalent JSON that cannot control the terminal."""
    # Outside of strings, JSON has none of these characters but line breaks.
    return "\n".join(
        _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in text.split("\n")
    )


def shorten(text: str, width: int) -> str:
    """Return a string of at most `width` characters."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
