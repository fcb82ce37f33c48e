"""The documents of one run: the head, the snapshot that it names, the journal, the inbox.

Replacing the head is the write that counts. The head names the snapshot and determines which
journal entries count: for earlier epochs the number of documents in `sealed`, for its own epoch all
that exist. A document that the head does not refer to is ignored.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from perdure.errors import StoreCorrupted
from perdure.filenames import safe_name
from perdure.store import Entry
from perdure.stores._documents.records import Head, StoredMessage
from perdure.stores.keyvalue.documents import Edit

T = TypeVar("T")


class Garbage(msgspec.Struct, frozen=True):
    """Documents that no head refers to: a snapshot, and epochs with their document counts."""

    snapshot: str
    epochs: tuple[tuple[int, int], ...] = ()


class KeyValueHead(Head, frozen=True, kw_only=True):
    """A head, with the key of its snapshot.

    `sealed` pairs each earlier epoch with the number of its documents that count, or with `None`
    until they have been counted. `garbage` is what was left to remove when the head was written.
    """

    snapshot: str
    sealed: tuple[tuple[int, int | None], ...] = ()
    garbage: Garbage | None = None


class JournalEntry(NamedTuple):
    """One journal entry."""

    n: int
    consumes: tuple[str, ...]
    data: str


class Inbox(msgspec.Struct):
    """The messages of a run, and every `dedup_id` that was ever used."""

    count: int = 0
    messages: list[StoredMessage] = []
    dedup_ids: list[str] = []


_decode_head = msgspec.json.Decoder(KeyValueHead).decode
_decode_inbox = msgspec.json.Decoder(Inbox).decode
decode_entries = msgspec.json.Decoder(list[JournalEntry]).decode


class RunKeys:
    """The keys of one run's documents."""

    __slots__ = ("head", "inbox")

    def __init__(self, id: str) -> None:
        self.head = f"perdure:run:{safe_name(id)}"
        self.inbox = f"{self.head}:inbox"

    def snapshot(self, name: str) -> str:
        """Return the key of the snapshot that the named write stores."""
        return f"{self.head}:{name}:snapshot"

    def journal(self, epoch: int, number: int) -> str:
        """Return the key of a journal document."""
        return f"{self.head}:{epoch}:{number}"


def decode_head(id: str, text: str) -> KeyValueHead:
    """Return the head in a document."""
    try:
        return _decode_head(text)
    except msgspec.MsgspecError as error:
        raise StoreCorrupted(f"the head of run {id!r} cannot be read; delete the run") from error


def encode_entries(entries: Sequence[Entry]) -> str:
    """Encode the journal entries of one call as a document."""
    return encode([JournalEntry(entry.n, entry.consumes, entry.data.decode()) for entry in entries])


def decode_inbox(text: str | None) -> Inbox:
    """Return the inbox in a document."""
    return Inbox() if text is None else _decode_inbox(text)


def without_messages(ids: set[str]) -> Edit:
    """Return the edit that removes messages from an inbox."""

    def edit(text: str | None) -> str | None:
        if text is None:
            return None
        inbox = decode_inbox(text)
        inbox.messages = [message for message in inbox.messages if message.id not in ids]
        return encode(inbox)

    return edit


def encode(value: object) -> str:
    """Encode a value as a document."""
    return msgspec.json.encode(value).decode()


def editing(decode: Callable[[str | None], T], change: Callable[[T], T]) -> Edit:
    """Return an edit that changes a collection in a document, and removes an empty document."""

    def edit(text: str | None) -> str | None:
        collection = change(decode(text))
        return encode(collection) if collection else None

    return edit
