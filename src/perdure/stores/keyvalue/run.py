"""One run as documents.

Other processes cannot be locked out. So a write of the head compares it with the text that was last
read, and an owner's journal entries count only if the head is unchanged afterwards.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import asdict, replace

from perdure import codec
from perdure.errors import StoreCorrupted
from perdure.snapshot import Snapshot, is_over
from perdure.store import Entry, NewMessage, Receipt
from perdure.stores._documents.records import (
    MAX_ATTEMPTS,
    Head,
    Place,
    StoredMessage,
    too_busy,
)
from perdure.stores._reading import merge_journal, reading
from perdure.stores.keyvalue.delivery import Deliver
from perdure.stores.keyvalue.documents import concurrently
from perdure.stores.keyvalue.keyspace import JournalEnd, Keyspace
from perdure.stores.keyvalue.layout import (
    Garbage,
    JournalEntry,
    KeyValueHead,
    RunKeys,
    decode_entries,
    decode_head,
    decode_inbox,
    encode,
    encode_entries,
    without_messages,
)

_CHUNK = 64


class KeyValueRun:
    """A `StoredRun` in documents."""

    def __init__(self, keyspace: Keyspace, id: str) -> None:
        self.id = id
        self.keys = RunKeys(id)
        self._keyspace = keyspace
        self._documents = keyspace.documents
        self._text: str | None = None

    @asynccontextmanager
    async def lock(self, *, shared: bool = False) -> AsyncGenerator[None, None]:
        """Lock the run against the other tasks of this process."""
        async with self._documents.lock(self.keys.head):
            yield

    async def head(self) -> KeyValueHead | None:
        self._text = await self._documents.read(self.keys.head)
        return None if self._text is None else decode_head(self.id, self._text)

    async def load(self) -> Snapshot | None:
        for _ in range(MAX_ATTEMPTS):
            head = await self.head()
            if head is None:
                return None
            try:
                return await self._snapshot(head)
            except StoreCorrupted:
                # Otherwise another process has settled the run and removed what we were reading.
                if self._text == await self._documents.read(self.keys.head):
                    raise
        raise too_busy(self.id)

    async def inbox(self) -> list[StoredMessage]:
        return decode_inbox(await self._documents.read(self.keys.inbox)).messages

    async def consumed_ids(self, head: KeyValueHead) -> set[str]:
        entries = await self._entries(head)
        return {*head.consumed, *(id for entry in entries for id in entry.consumes)}

    async def journal_places(self, head: KeyValueHead) -> set[Place]:
        count = head.sealed[-1][1] if head.released else None
        documents = await self._journal(head.epoch, count)
        return {(head.epoch, entry.n) for document in documents for entry in document}

    async def next_epoch(self, head: KeyValueHead | None, now: int) -> int:
        if head is not None:
            return max(head.epoch + 1, now)
        return max(await self._keyspace.epoch_floor() + 1, now)

    async def prepare(self) -> None:
        """Add the id to the catalog, and remove an inbox that a crash left behind."""
        await self._keyspace.add_id(self.id)
        await self._documents.remove(self.keys.inbox)

    async def take(self, old: KeyValueHead, new: KeyValueHead) -> KeyValueHead | None:
        """Lease the run to another owner, and seal the epoch of the previous one."""
        if old.garbage is not None:
            await self._collect_again(old.garbage)
        sealed = old.sealed if old.is_closed else (*old.sealed, (old.epoch, None))
        new = replace(new, sealed=sealed, garbage=None)
        if not await self._swap(new):
            return None
        # From now on, entries of the previous owner are refused.
        self._keyspace.forget(self.id)
        return new

    async def read(self, head: KeyValueHead) -> tuple[KeyValueHead, Snapshot] | None:
        """Count and read what previous owners wrote; return `None` if the lease was lost."""
        counted_head = await self._count_sealed(head)
        if counted_head.sealed and counted_head.sealed[-1][1]:
            counted_head = replace(counted_head, takeovers=0)
        if counted_head != head and not await self._swap(counted_head):
            return None
        return counted_head, await self._snapshot(counted_head)

    async def is_held(self, head: KeyValueHead) -> bool:
        last = await self.head()
        return last is not None and (last.owner, last.epoch) == (head.owner, head.epoch)

    async def renew(self, old: KeyValueHead, new: KeyValueHead) -> bool:
        return await self._swap(new)

    async def release(self, old: KeyValueHead, new: KeyValueHead) -> bool:
        """Release the lease, and then count what was written under it."""
        new_head = replace(new, sealed=(*old.sealed, (old.epoch, None)))
        if not await self._swap(new_head):
            return False
        self._keyspace.forget(self.id)
        await self._swap(await self._count_sealed(new_head))
        return True

    async def add(self, entries: Sequence[Entry]) -> KeyValueHead | None:
        """Add to the journal as one document, and then read the head.

        A new owner replaces the head before it counts the journal. So if the head is still ours
        after our write, any later owner will count what we wrote.
        """
        end = self._keyspace.journal_end(self.id)
        if end is None or any(entry.epoch != end.epoch for entry in entries):
            end = await self._find_journal_end(await self.head())
        new: dict[int, Entry] = {}
        for entry in entries:
            if end is not None and entry.epoch == end.epoch and entry.n not in end.numbers:
                new.setdefault(entry.n, entry)
        if end is not None and new:
            key = self.keys.journal(end.epoch, end.documents)
            await self._documents.write(key, encode_entries(list(new.values())))
            end.documents += 1
            end.numbers.update(new)
        head = await self.head()
        if head is None or end is None or head.epoch != end.epoch or head.is_closed:
            self._keyspace.forget(self.id)
        return head

    async def settle(self, old: KeyValueHead | None, new: Head, data: bytes) -> KeyValueHead | None:
        """Write the snapshot, and then the head that names it."""
        # An owner's write is the only one with its place, so repeating it overwrites only itself.
        # Saves compete with each other, and none may overwrite the snapshot of another.
        is_owner = old is not None and old.epoch == new.epoch
        name = f"{new.base[0]}.{new.base[1]}" if is_owner else self._documents.unique_name()
        garbage = None if old is None else await self._garbage(old)
        head = KeyValueHead(**asdict(new), snapshot=self.keys.snapshot(name), garbage=garbage)
        await self._documents.write(head.snapshot, data.decode())
        if not await self._swap(head):
            await self._documents.remove(head.snapshot)
            return None
        self._keyspace.forget(self.id)
        return head

    async def sweep(self, head: KeyValueHead) -> None:
        """Remove the previous snapshot and journal, and consumed messages."""
        if head.garbage is not None:
            await self._collect(head.garbage)
        if head.consumed:
            await self._documents.change(self.keys.inbox, without_messages({*head.consumed}))

    async def deliver(
        self, head: KeyValueHead, messages: Sequence[NewMessage], now: int
    ) -> Sequence[Receipt]:
        deliver = Deliver(messages, now, is_over=is_over(head.status))
        await self._documents.change(self.keys.inbox, deliver)
        # Read only if there were messages already, which is rare: only those can be consumed.
        consumed_ids = await self.consumed_ids(head) if deliver.existing_ids else set()
        return deliver.receipts(consumed_ids)

    async def progress(self, head: KeyValueHead) -> str:
        inbox = decode_inbox(await self._documents.read(self.keys.inbox))
        entries = 0 if head.is_closed else await self._journal_length(head.epoch)
        return f"{entries}.{inbox.count}"

    async def delete(self, head: KeyValueHead) -> bool:
        garbage = await self._garbage(head)
        if not await self._remove_head(head.epoch):
            return False
        await self._collect(garbage)
        await self._remove_rest()
        return True

    async def discard(self, now: int) -> bool:
        """Remove an unreadable head; the keys of its snapshot and journal are unknown."""
        if self._text is None or not await self._remove_head(now):
            return False
        await self._remove_rest()
        return True

    async def _remove_head(self, epoch: int) -> bool:
        # Raise the floor before removing the head, so that no epoch of a deleted run is used again.
        await self._keyspace.raise_epoch_floor(epoch)
        if not await self._documents.swap(self.keys.head, self._text, None):
            return False
        self._keyspace.forget(self.id)
        return True

    async def _remove_rest(self) -> None:
        await self._documents.remove(self.keys.inbox)
        await self._keyspace.remove_id(self.id)

    async def _swap(self, head: KeyValueHead) -> bool:
        """Replace the head that was last read; return whether it was still there."""
        text = encode(head)
        if not await self._documents.swap(self.keys.head, self._text, text):
            return False
        self._text = text
        return True

    async def _snapshot(self, head: KeyValueHead) -> Snapshot:
        # Read the journal first. `_collect` removes the snapshot before the journal, so a snapshot
        # that still exists proves that no entry was removed before we read it.
        entries = await self._entries(head)
        base = await self._documents.read(head.snapshot)
        if base is None:
            raise StoreCorrupted(f"the snapshot of run {self.id!r} is missing in the store")
        with reading(self.id):
            return merge_journal(*map(codec.loads, (base, *(entry.data for entry in entries))))

    async def _entries(self, head: KeyValueHead) -> list[JournalEntry]:
        """Read the journal entries that count, in order."""
        entries: list[JournalEntry] = []
        for epoch, count in _epochs(head):
            documents = await self._journal(epoch, count)
            epoch_entries = (entry for document in documents for entry in document)
            entries += sorted(epoch_entries, key=lambda entry: entry.n)
        return entries

    async def _journal(self, epoch: int, count: int | None) -> list[list[JournalEntry]]:
        """Read `count` documents of an epoch, or all that exist."""
        documents: list[list[JournalEntry]] = []
        while count is None or len(documents) < count:
            size = max(len(documents), _CHUNK)
            if count is not None:
                size = min(size, count - len(documents))
            first = len(documents)
            keys = [self.keys.journal(epoch, number) for number in range(first, first + size)]
            texts = [text for text in await self._documents.read_many(keys) if text is not None]
            documents += map(decode_entries, texts)
            if len(texts) < size:
                break
        if count is not None and len(documents) < count:
            raise StoreCorrupted(f"journal entries of run {self.id!r} are missing in the store")
        return documents

    async def _journal_length(self, epoch: int) -> int:
        """Return how many documents an open epoch has, by reading few of them."""
        low, high = 0, 1
        while await self._documents.read(self.keys.journal(epoch, high - 1)) is not None:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            if await self._documents.read(self.keys.journal(epoch, middle - 1)) is not None:
                low = middle
            else:
                high = middle
        return low

    async def _find_journal_end(self, head: KeyValueHead | None) -> JournalEnd | None:
        """Return where the journal of the head's epoch ends; `None` if that epoch is closed."""
        if head is None or head.is_closed:
            return None
        end = self._keyspace.journal_end(self.id)
        if end is None or end.epoch != head.epoch:
            documents = await self._journal(head.epoch, None)
            numbers = {entry.n for document in documents for entry in document}
            end = JournalEnd(head.epoch, len(documents), numbers)
            self._keyspace.remember(self.id, end)
        return end

    async def _count_sealed(self, head: KeyValueHead) -> KeyValueHead:
        return replace(head, sealed=tuple(await self._counts(head.sealed)))

    async def _garbage(self, head: KeyValueHead) -> Garbage:
        return Garbage(head.snapshot, tuple(await self._counts(_epochs(head))))

    async def _counts(self, epochs: Sequence[tuple[int, int | None]]) -> list[tuple[int, int]]:
        return [
            (epoch, len(await self._journal(epoch, None)) if count is None else count)
            for epoch, count in epochs
        ]

    async def _collect(self, garbage: Garbage) -> None:
        await self._documents.remove(garbage.snapshot)
        # Remove the first document of an epoch last: it shows whether a crash left any behind.
        for epoch, count in garbage.epochs:
            keys = [self.keys.journal(epoch, number) for number in range(count)]
            await concurrently(self._documents.remove, keys[1:])
            await concurrently(self._documents.remove, keys[:1])

    async def _collect_again(self, garbage: Garbage) -> None:
        """Remove what remains of garbage if a crash interrupted its removal."""
        first = [self.keys.journal(epoch, 0) for epoch, _ in garbage.epochs]
        texts = await self._documents.read_many([*first, garbage.snapshot])
        if any(text is not None for text in texts):
            await self._collect(garbage)


def _epochs(head: KeyValueHead) -> tuple[tuple[int, int | None], ...]:
    return head.sealed if head.is_closed else (*head.sealed, (head.epoch, None))
