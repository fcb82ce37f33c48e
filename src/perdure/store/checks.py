"""Argument checks for stores, and `AsyncCloseable`, the base class of all stores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, TypedDict, cast

from perdure.clock import as_utc
from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.snapshot import (
    Snapshot,
    awaits_of,
    open_waits,
    rest_status,
    tags_of,
    version_of,
    wake_at_of,
)
from perdure.snapshot.asks import ask_tags
from perdure.snapshot.summary import summarize
from perdure.snapshot.tags import MAX_TAG_LENGTH, MAX_TAGS, is_tag
from perdure.store.contract import Store
from perdure.store.records import MAX_SUMMARY_SIZE, Entry, Rest
from perdure.validation import RESERVED, check_int


class Header(TypedDict):
    """The fields that a store keeps for a run beside its snapshot."""

    version: int
    tags: tuple[str, ...]
    summary: bytes


def header_of(snapshot: Snapshot, size: int = 0) -> Header:
    """Return the header of a run whose snapshot is `snapshot`, encoded in `size` bytes."""
    metadata, waits = snapshot.get("metadata"), open_waits(snapshot)
    return {
        "version": version_of(metadata),
        "tags": tags_of(metadata, ask_tags(waits) if waits else ()),
        "summary": summarize(snapshot, size, waits),
    }


def rest_of(snapshot: Snapshot, size: int = 0) -> Rest:
    """Return the state of an unowned run whose snapshot is `snapshot`, encoded in `size` bytes."""
    awaits = awaits_of(snapshot)
    header = header_of(snapshot, size)
    return Rest(rest_status(snapshot), wake_at_of(snapshot), awaits, **header)


_METHODS = ("save", "load", "delete", "list", "close")
_store_classes: set[type] = set()


def check_store(store: object, parameter: str = "store") -> Store:
    """Return the store, or raise `InvalidArgument` if it lacks one of the five methods."""
    # Once per class, because this is called for every run.
    if type(store) in _store_classes:
        return cast(Store, store)
    methods = (getattr(store, name, None) for name in _METHODS)
    if isinstance(store, type) or not all(map(callable, methods)):
        expected = "a store: an object with save, load, delete, list and close"
        hint = "perdure.stores.open_store(url) opens one" if isinstance(store, str) else ""
        raise InvalidArgument(parameter, store, expected, hint)
    if all(hasattr(type(store), name) for name in _METHODS):
        _store_classes.add(type(store))
    return cast(Store, store)


def check_entries(entries: Sequence[Entry], limit: int) -> None:
    """Raise `ValueTooLarge`, naming the step, if an entry has more than `limit` bytes.

    A rest that cannot be stored raises `InvalidArgument`.
    """
    for entry in entries:
        if entry.rest is not None:
            check_rest(entry.rest)
        if len(entry.data) > limit:
            what = f"the record of step {entry.step!r}" if entry.step else "the snapshot"
            raise ValueTooLarge(f"{what} of run {entry.id!r}", len(entry.data), limit)


def check_rest(rest: Rest) -> None:
    """Raise `InvalidArgument` if the rest cannot be stored."""
    if rest.wake_at is not None:
        as_utc(rest.wake_at, "wake_at")
    check_header(rest.version or 0, rest.tags, rest.summary or b"")


def check_header(version: int, tags: Sequence[str] | None, summary: bytes) -> None:
    """Raise `InvalidArgument` if the version, the tags or the summary cannot be stored."""
    if type(version) is not int or version < 0:
        check_int(version, "version", minimum=0)
    if tags:
        check_tags(tags)
    if len(summary) > MAX_SUMMARY_SIZE:
        raise InvalidArgument("summary", summary, f"at most {MAX_SUMMARY_SIZE} bytes")


def check_tags(tags: Sequence[str]) -> None:
    """Raise `InvalidArgument` unless the tags are sorted, distinct strings `name=value`."""
    expected = f"at most {MAX_TAGS} distinct strings name=value, sorted"
    # The engine's own tags do not count towards the limit.
    count = sum(not str(tag).startswith(RESERVED) for tag in tags)
    if count > MAX_TAGS or list(tags) != sorted(set(tags)):
        raise InvalidArgument("tags", tags, expected)
    for tag in tags:
        if not isinstance(tag, str) or not is_tag(tag):
            each = f"strings name=value of at most {MAX_TAG_LENGTH} characters without NUL"
            raise InvalidArgument("tags", tag, each)


class AsyncCloseable(ABC):
    """Makes a store usable with `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close everything that the store opened itself."""
