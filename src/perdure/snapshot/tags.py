"""The tags of a run: a mapping in its metadata, and strings `name=value` in its header."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from perdure.errors import InvalidArgument
from perdure.snapshot.format import Metadata
from perdure.validation import RESERVED, is_encodable

MAX_TAGS: Final = 16
MAX_TAG_LENGTH: Final = 256
PARENT: Final = "~parent"
"""The name of the tag by which the children of a run are found."""


def tags_of(metadata: Metadata | None, other_tags: Iterable[str] = ()) -> tuple[str, ...]:
    """Return a run's tags as sorted strings `name=value`, leaving out invalid ones.

    `other_tags` are tags of the engine that are not in the metadata.
    """
    tags = metadata.get("tags") if metadata else None
    if type(tags) is not dict:
        return tuple(other_tags)
    pairs = {f"{name}={value}" for name, value in tags.items() if name and isinstance(value, str)}
    pairs.update(other_tags)
    # The engine's own tags do not count towards the limit: in this order they come last.
    valid_tags = sorted(filter(is_tag, pairs))
    own = [tag for tag in valid_tags if tag.startswith(RESERVED)]
    return (*valid_tags[: min(MAX_TAGS, len(valid_tags) - len(own))], *own)


def system_tag(name: str, value: str) -> str:
    """Return the value of a tag of the engine; a value that is too long is replaced by its hash."""
    if is_tag(f"{name}={value}"):
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"


def parent_tag(run_id: str) -> str:
    """Return the tag of the children of a run."""
    return f"{PARENT}={system_tag(PARENT, run_id)}"


def visible_tags(tags: object) -> dict[str, str]:
    """Return the tags that the user set."""
    if not isinstance(tags, dict):
        return {}
    return {name: value for name, value in tags.items() if not name.startswith(RESERVED)}


def is_tag(text: str) -> bool:
    """Return whether a string is a valid tag: `name=value`, of bounded length, without NUL."""
    is_short = len(text) <= MAX_TAG_LENGTH
    return text.find("=") > 0 and is_short and "\0" not in text and is_encodable(text)


def check_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the user's tags for a run, or raise `InvalidArgument` for the first invalid one."""
    expected = f"a mapping of at most {MAX_TAGS} names to strings"
    if not isinstance(tags, Mapping) or len(tags) > MAX_TAGS:
        raise InvalidArgument("tags", tags, expected)
    return {_check_name(name): _check_value(name, value) for name, value in tags.items()}


def changed_tags(metadata: Metadata | None, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return a run's tags with changes applied; `None` removes a tag."""
    check_tags({name: "" if value is None else value for name, value in changes.items()})
    stored_tags = metadata.get("tags") if metadata else None
    # Tags that another writer stored are kept, even if `tags_of` leaves them out.
    tags = {**(stored_tags if type(stored_tags) is dict else {}), **changes}
    remaining = {name: value for name, value in tags.items() if value is not None}
    if len(visible_tags(remaining)) > MAX_TAGS:
        expected = f"at most {MAX_TAGS} tags of a run"
        raise InvalidArgument(
            "tags", remaining, expected, "Remove one with None: step.tag(old=None)"
        )
    return remaining


def _check_name(name: object) -> str:
    expected = f"a tag's name: a non-empty string without '=' that does not begin with {RESERVED!r}"
    if not isinstance(name, str) or not name or "=" in name or name.startswith(RESERVED):
        raise InvalidArgument("tags", name, expected)
    return str.__str__(name)


def _check_value(name: str, value: object) -> str:
    parameter = f"tags[{name!r}]"
    if not isinstance(value, str):
        raise InvalidArgument(parameter, value, "a string", "Write str(value)")
    if not is_tag(f"{name}={value}"):
        expected = f"a string that, with the tag's name, has fewer than {MAX_TAG_LENGTH} characters"
        raise InvalidArgument(parameter, value, f"{expected}, without NUL")
    return str.__str__(value)
