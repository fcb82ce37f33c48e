"""Hide secrets in payloads, values and errors from operators.

A redacted value is replaced by `MASK`, so not even its length is visible. Passwords are removed
from URLs wherever they occur.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import msgspec

from perdure.insights.model import Json

MASK = "•••"

DEFAULT_NAMES = (
    "password",
    "passwd",
    "secret",
    "token",
    "api_key",
    "authorization",
    "cookie",
    "private_key",
    "nonce",
    "dsn",
    "card_number",
    "cvv",
    "iban",
    "ssn",
)

Path: TypeAlias = tuple[str, ...]
"""Where a value is: `("payload", "customer", "email")`, `("steps", "charge", "card")`."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")
_NOT_LATIN = "[^a-z]*"
_NOTHING = "(?!)"
# Both begin with literal characters, so that a long string without spaces takes linear time.
_URL_PASSWORD = re.compile(r"(://[^\s/:@]*:)[^\s/]*@")
_CREDENTIALS = re.compile(r"\b(bearer|basic)\s+(?=\S*\d)[\w.~+/=-]{6,}", re.IGNORECASE)


class Redact(msgspec.Struct, frozen=True, dict=True):
    """Rules for what to hide: by name, by path, or by a function.

    A name matches the keys of objects, however they are spelled: "api_key" also matches `apiKey`,
    `API-KEY` and `stripe_api_key`. A path begins with `payload`, `output`, `steps.<name>` or
    `inbox.<event>`, and `*` stands for one part: "payload.*.email". The function is called with the
    path and the value of each key, and returns whether to hide it.
    """

    names: tuple[str, ...] = DEFAULT_NAMES
    paths: tuple[str, ...] = ()
    function: Callable[[Path, Json], bool] | None = None

    @property
    def is_off(self) -> bool:
        """Whether nothing is hidden."""
        return not (self.names or self.paths or self.function)

    def hides(self, path: Path, value: Json = None) -> bool:
        """Return whether the value at a path is hidden."""
        if not path:
            return False
        name = path[-1]
        # Large values have many different keys and positions, of which this excludes almost all.
        if self._candidates.search(name.lower()) and self._hides_name(name, value):
            return True
        if self._patterns and any(_matches(pattern, path) for pattern in self._patterns):
            return True
        return self.function is not None and bool(self.function(path, value))

    def value(self, value: Json, path: Path) -> Json:
        """Return JSON with hidden values replaced."""
        return value if self.is_off else self._redacted(value, path)

    def _redacted(self, value: Json, path: Path) -> Json:
        if self.hides(path, value):
            return MASK
        if isinstance(value, str):
            return self.url(value)
        if isinstance(value, list):
            return [self._redacted(item, (*path, str(n))) for n, item in enumerate(value)]
        if isinstance(value, dict):
            return self._object(value, path)
        return value

    def url(self, text: str) -> str:
        """Return a string without the passwords of URLs in it."""
        # Searching for one character is far faster, and encoded binary data contains no colon.
        if self.is_off or ":" not in text or "://" not in text:
            return text
        return _URL_PASSWORD.sub(rf"\1{MASK}@", text)

    def text(self, text: str) -> str:
        """Return a message written by code without anything that looks like a secret."""
        if self.is_off or not text:
            return text
        text = _CREDENTIALS.sub(rf"\1 {MASK}", self.url(text))
        return text if self._assignment is None else self._assignment.sub(rf"\1{MASK}", text)

    def tags(self, tags: dict[str, str]) -> dict[str, str]:
        """Return the tags of a run with the values of hidden names replaced."""
        return {name: self.value(value, ("tags", name)) for name, value in tags.items()}

    def _object(self, value: dict[str, Any], path: Path) -> Json:
        if len(value) == 1 and isinstance(pairs := value.get("~map"), list):
            # A dict whose keys are not all strings is stored as pairs.
            return {"~map": [self._pair(pair, path) for pair in pairs]}
        return {key: self._redacted(item, (*path, key)) for key, item in value.items()}

    def _pair(self, pair: Json, path: Path) -> Json:
        if not isinstance(pair, list) or len(pair) != 2:
            return self._redacted(pair, path)
        key, item = pair
        return [self._redacted(key, path), self._redacted(item, (*path, str(key)))]

    def _hides_name(self, name: str, value: Json) -> bool:
        return _has_name(self._names, name, isinstance(value, int | float))

    @cached_property
    def _names(self) -> tuple[tuple[str, ...], ...]:
        return tuple(_words(name) for name in self.names)

    @cached_property
    def _candidates(self) -> re.Pattern[str]:
        """Matches every key that `_has_name` matches, and some others."""
        # `_words` drops separators, which may be anywhere in a key.
        names = (_NOT_LATIN.join(map(re.escape, "".join(words))) for words in self._names)
        return re.compile("|".join(names) if self.names else _NOTHING)

    @cached_property
    def _patterns(self) -> tuple[Path, ...]:
        return tuple(tuple(pattern.split(".")) for pattern in self.paths)

    @cached_property
    def _assignment(self) -> re.Pattern[str] | None:
        """Matches `password=x` and `'password': 'x'` in text."""
        if not self.names:
            return None
        names = "|".join("[-_ ]?".join(map(re.escape, words)) for words in self._names)
        quoted = r"'[^']*'|\"[^\"]*\""
        return re.compile(
            rf"((?:{names})(?:['\"]?\s*=\s*|['\"]\s*:\s*|\s*:\s*(?=['\"])))(?:{quoted}|[^\s,;&)}}]+)",
            re.IGNORECASE,
        )


NOTHING_REDACTED = Redact(names=())
"""Shows everything."""

DEFAULT_REDACTION = Redact()


def lookup(value: Json, path: Sequence[str], redact: Redact, root: Path = ("payload",)) -> Json:
    """Return the value at a path, or raise `LookupError` if there is none or it is hidden."""
    for part in path:
        root = (*root, part)
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            raise LookupError(part)
        if redact.hides(root, value):
            raise LookupError(part)
    return redact.value(value, root)


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(name))


# Keys repeat in every step of every run, and splitting one into words takes microseconds.
@lru_cache(maxsize=4096)
def _has_name(names: tuple[tuple[str, ...], ...], key: str, is_number: bool) -> bool:
    words = _words(key)
    spelling = "".join(words)
    # "tokens" may be a list of secrets, but a number is just a count.
    plural = spelling if is_number else spelling.removesuffix("s")
    return any(
        _contains(words, name) or spelling.endswith("".join(name)) or plural.endswith("".join(name))
        for name in names
    )


def _contains(words: tuple[str, ...], name: tuple[str, ...]) -> bool:
    return any(words[n : n + len(name)] == name for n in range(len(words) - len(name) + 1))


def _matches(pattern: Path, path: Path) -> bool:
    return len(pattern) == len(path) and all(
        expected in ("*", part) for expected, part in zip(pattern, path, strict=True)
    )
