"""One run as documents: the head, the snapshot it names, the journal, the inbox.

The head is the truth, and changing it is the one act that counts. It names the snapshot, and says
which journal entries count: `sealed` are earlier epochs with how many documents of each are valid;
of the head's own epoch, all that are there. What is not named by the head says nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from perdure import codec
from perdure.errors import StoreCorrupted
from perdure.filenames import safe_name
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Entry, Message
from perdure.stores._reading import merged, reading
from perdure.stores._timestamps import from_microseconds
from perdure.stores.keyvalue.documents import Documents, at_once

_CHUNK = 64


class Litter(msgspec.Struct, frozen=True):
    """Documents that no head names any more."""

    snapshot: str
    epochs: tuple[tuple[int, int], ...] = ()


class Head(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """How a run stands. Times are microseconds since 1970.

    While it has an owner, `wake_at` is the end of the lease. `folded` is the place of the write
    that put it to rest; while that is of the head's own epoch, or that epoch is sealed because the
    lease was released, nothing can be added. `taken` are
    messages that lie in the inbox and were taken. `litter` is what was left to be removed when the
    head was written: a snapshot, and epochs with how many documents each has.
    """

    id: str
    workflow: str | None
    status: RunStatus
    wake_at: int | None
    awaits: tuple[str, ...] = ()
    owner: str | None = None
    epoch: int
    takeovers: int = 0
    updated_at: int
    snapshot: str
    folded: tuple[int, int]
    sealed: tuple[tuple[int, int | None], ...] = ()
    taken: tuple[str, ...] = ()
    litter: "Litter | None" = None

    @property
    def is_closed(self) -> bool:
        """Whether the run was put to rest or released, and not given to anybody since."""
        return self.folded[0] == self.epoch or self.is_released

    @property
    def is_released(self) -> bool:
        """Whether the lease was given up without a rest."""
        return bool(self.sealed) and self.sealed[-1][0] == self.epoch

    def is_held(self, now: int) -> bool:
        """Tell whether somebody's lease is unexpired."""
        return self.owner is not None and self.wake_at is not None and self.wake_at > now

    def holds(self, owner: str, epoch: int) -> bool:
        """Tell whether this is the lease that the run was last given with."""
        return self.owner == owner and self.epoch == epoch and not self.is_closed


class Written(NamedTuple):
    """One journal entry."""

    n: int
    consumes: tuple[str, ...]
    data: str


class Mail(NamedTuple):
    """A message."""

    id: str
    name: str
    payload: str
    sent_at: int


class Inbox(msgspec.Struct):
    """The messages of a run that were not cleared away, and every id that was ever used."""

    count: int = 0
    messages: list[Mail] = []
    known: list[str] = []


_read_head = msgspec.json.Decoder(Head).decode
_read_written = msgspec.json.Decoder(list[Written]).decode
_read_inbox = msgspec.json.Decoder(Inbox).decode


class RunDocuments:
    """The documents of one run, found by its id."""

    __slots__ = ("_documents", "_root", "id")

    def __init__(self, documents: Documents, id: str) -> None:
        self.id = id
        self._documents = documents
        self._root = f"perdure:run:{safe_name(id)}"

    @property
    def head_key(self) -> str:
        """Where the head is."""
        return self._root

    @property
    def inbox_key(self) -> str:
        """Where the messages are."""
        return f"{self._root}:inbox"

    def snapshot_key(self, mark: str) -> str:
        """Where a snapshot is, by the mark of the one write that made it."""
        return f"{self._root}:{mark}:snapshot"

    def entry_key(self, epoch: int, number: int) -> str:
        """Where a document of the journal is."""
        return f"{self._root}:{epoch}:{number}"

    async def head(self) -> tuple[str, Head] | None:
        """Read the head, as it is and what it says."""
        text = await self._documents.read(self.head_key)
        return None if text is None else (text, head_of(self.id, text))

    async def inbox(self) -> Inbox:
        """Read the messages, taken ones too."""
        return inbox_of(await self._documents.read(self.inbox_key))

    async def journal(self, epoch: int, count: int | None) -> list[list[Written]]:
        """Read an epoch's documents: so many, or all that are there."""
        found: list[list[Written]] = []
        while count is None or len(found) < count:
            size = max(len(found), _CHUNK)
            if count is not None:
                size = min(size, count - len(found))
            keys = [self.entry_key(epoch, len(found) + number) for number in range(size)]
            texts = await self._documents.read_many(keys)
            whole = [text for text in texts if text is not None]
            found += map(_read_written, whole)
            if len(whole) < size:
                break
        if count is not None and len(found) < count:
            raise StoreCorrupted(f"journal entries of run {self.id!r} are missing in the store")
        return found

    async def entries(self, head: Head) -> list[tuple[int, Written]]:
        """Read the journal entries that count, each with its epoch, in order."""
        entries: list[tuple[int, Written]] = []
        for epoch, count in (*head.sealed, (head.epoch, 0 if head.is_closed else None)):
            written = [each for document in await self.journal(epoch, count) for each in document]
            entries += ((epoch, each) for each in sorted(written, key=lambda each: each.n))
        return entries

    async def whole(self, head: Head) -> Snapshot | None:
        """Read the merged snapshot; None when it is gone because the head has changed since."""
        entries = await self.entries(head)
        base = await self._documents.read(head.snapshot)
        if base is None:
            return None
        with reading(self.id):
            return merged(*map(codec.loads, (base, *(each.data for _, each in entries))))

    async def mail(self, head: Head) -> list[Mail]:
        """Read the messages that were not taken, in order."""
        messages = (await self.inbox()).messages
        if not messages:
            return []
        taken = await self.taken(head)
        return [mail for mail in messages if mail.id not in taken]

    async def taken(self, head: Head) -> set[str]:
        """Give the ids of messages that were taken and may still lie in the inbox."""
        entries = await self.entries(head)
        return {*head.taken, *(id for _, each in entries for id in each.consumes)}

    async def clear(self, litter: Litter) -> None:
        """Remove documents that no head names any more."""
        # The first of an epoch goes last: it tells whether a crash has left some.
        for epoch, count in litter.epochs:
            keys = [self.entry_key(epoch, number) for number in range(count)]
            await at_once(self._documents.remove, keys[1:])
            await at_once(self._documents.remove, keys[:1])
        await self._documents.remove(litter.snapshot)

    async def clear_again(self, litter: Litter) -> None:
        """Remove what a crash has left of documents that should be gone."""
        firsts = [self.entry_key(epoch, 0) for epoch, _ in litter.epochs]
        left = await self._documents.read_many([*firsts, litter.snapshot])
        if any(text is not None for text in left):
            await self.clear(litter)


def head_of(id: str, text: str) -> Head:
    """Give what a head says."""
    try:
        return _read_head(text)
    except msgspec.MsgspecError as error:
        raise StoreCorrupted(f"the head of run {id!r} cannot be read; delete the run") from error


def head_text(head: Head) -> str:
    """Give a head as its document."""
    return msgspec.json.encode(head).decode()


def entries_text(entries: Sequence[Entry]) -> str:
    """Give what one call adds to a journal as its document."""
    written = [Written(entry.n, entry.consumes, entry.data.decode()) for entry in entries]
    return msgspec.json.encode(written).decode()


def inbox_of(text: str | None) -> Inbox:
    """Give what an inbox holds."""
    return Inbox() if text is None else _read_inbox(text)


def inbox_text(inbox: Inbox) -> str:
    """Give an inbox as its document."""
    return msgspec.json.encode(inbox).decode()


def message_of(mail: Mail) -> Message:
    """Give a message as the contract has it."""
    return Message(mail.id, mail.name, mail.payload.encode(), from_microseconds(mail.sent_at))
