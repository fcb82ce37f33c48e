"""The answers of `step.patched`, which are part of a run's metadata.

Each answer is stored under its own name, so that a write contains only new ones. It includes the
key of the last record at that time: everything that depends on the answer was recorded later.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from perdure.snapshot.format import Metadata

_PREFIX = "~patch:"


class Answer(NamedTuple):
    """What `step.patched` returned, and the last record at that time."""

    patched: bool
    after: str = ""


def patch_name(place: str) -> str:
    """Return the metadata name of the answer given at a place."""
    return _PREFIX + place


def is_patch(name: str) -> bool:
    """Return whether this metadata name belongs to a patch."""
    return name.startswith(_PREFIX)


def answer_of(data: object) -> Answer | None:
    """Return an answer from the run's metadata, or `None` if there is none."""
    if not isinstance(data, dict) or type(data.get("patched")) is not bool:
        return None
    return Answer(data["patched"], str(data.get("after", "")))


def encode_answer(answer: Answer) -> dict[str, Any]:
    """Encode an answer for the metadata."""
    return answer._asdict() if answer.after else {"patched": answer.patched}


def without_patches(metadata: Metadata) -> Metadata:
    """Return the metadata of a run without the answers of its patches."""
    return {name: value for name, value in metadata.items() if not is_patch(name)}


def forget_patches(metadata: Metadata, keys: Sequence[str], kept_count: int) -> None:
    """Remove the answers that nothing depends on if only the first `kept_count` records remain.

    `keys` are the keys of all records, in order.
    """
    places = {key: place for place, key in enumerate(keys, start=1)}
    for name, answer in _answers(metadata):
        if places.get(answer.after, 0) >= kept_count:
            del metadata[name]


def moved_patches(metadata: Metadata, keys: Iterable[str], dropped_keys: set[str]) -> Metadata:
    """Return the answers that name a dropped record, changed to name the record before it."""
    answers = [each for each in _answers(metadata) if each[1].after in dropped_keys]
    if not answers:
        return {}
    previous_keys, last = dict[str, str](), ""
    for key in keys:
        previous_keys[key] = last
        last = last if key in dropped_keys else key
    return {
        name: encode_answer(answer._replace(after=previous_keys.get(answer.after, "")))
        for name, answer in answers
    }


def _answers(metadata: Metadata) -> list[tuple[str, Answer]]:
    pairs = ((name, answer_of(metadata[name])) for name in metadata if is_patch(name))
    return [(name, answer) for name, answer in pairs if answer is not None]
