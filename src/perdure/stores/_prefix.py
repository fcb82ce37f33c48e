"""Ranges of strings that begin with a prefix, for indexes that order strings by code point."""

_LAST = chr(0x10FFFF)
_FIRST_SURROGATE, _AFTER_SURROGATES = 0xD800, 0xE000


def end_of_prefix(prefix: str) -> str | None:
    """Return the smallest string above all that begin with `prefix`; `None` if there is none."""
    shorter = prefix.rstrip(_LAST)
    if not shorter:
        return None
    last = ord(shorter[-1]) + 1
    # Surrogates are not characters, and cannot be encoded.
    return shorter[:-1] + chr(_AFTER_SURROGATES if last == _FIRST_SURROGATE else last)
