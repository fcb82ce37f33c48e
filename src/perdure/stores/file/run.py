"""One run as files. A run's lock is held while its files are changed."""

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import asdict, replace

from perdure import codec
from perdure.snapshot import Snapshot, is_over
from perdure.store import Delivery, Entry, NewMessage, Receipt
from perdure.stores._documents.records import Head, Place, StoredMessage
from perdure.stores._reading import merge_journal, reading
from perdure.stores.file.disk import lock_file
from perdure.stores.file.folder import Folder
from perdure.stores.file.inbox import InboxWriter
from perdure.stores.file.journal import JournalWriter
from perdure.stores.file.layout import (
    FileHead,
    InboxLine,
    JournalEntry,
    LeaseRecord,
    RunPaths,
    encode_head,
    encode_lease,
    read_head,
    read_inbox,
    read_journal,
    read_lease,
    read_snapshot,
)


class FileRun:
    """A `StoredRun` in files.

    While the run is locked, no other process can change the head, so no write fails for that
    reason. No method ever suspends; `FileStorage.execute` runs them in a thread.
    """

    def __init__(self, folder: Folder, id: str) -> None:
        self.id = id
        self._folder = folder
        self._disk = folder.disk
        self._paths = RunPaths(folder.runs, id)
        self._journal = JournalWriter(folder.disk, folder.journals, self._paths)
        self._inbox = InboxWriter(folder.disk, folder.inboxes, self._paths)

    @asynccontextmanager
    async def lock(self, *, shared: bool = False) -> AsyncGenerator[None, None]:
        """Lock the run against all processes and threads."""
        with self._journal:
            with lock_file(self._folder.locks / self._paths.shard, shared=shared):
                yield
            # After the lock is released: a process that reads entries that are not synced yet syncs
            # them itself.
            self._journal.sync()

    async def head(self) -> FileHead | None:
        return self.read_head()

    def read_head(self) -> FileHead | None:
        """Read the head, and the lease that was granted since it was written."""
        head = read_head(self._paths.head)
        if head is None:
            return None
        lease = read_lease(self._paths.lease)
        if lease is None:
            # A power loss may erase a lease, which is not synced, but not what was written under
            # it.
            epoch = max((entry.epoch for entry in self._entries(head)), default=0)
            lease = LeaseRecord(None, epoch, head.updated_at)
        return head if lease.epoch <= head.epoch else _with_lease(head, lease)

    async def load(self) -> Snapshot | None:
        contents = read_snapshot(self._paths.head)
        return None if contents is None else self._merge(*contents)

    async def inbox(self) -> list[StoredMessage]:
        if not self._paths.inbox.exists():
            return []
        return [
            StoredMessage(line.id, line.name, line.payload, line.sent_at)
            for line in read_inbox(self._paths.inbox)
            if line.name is not None
        ]

    async def consumed_ids(self, head: FileHead) -> set[str]:
        return {*head.consumed, *(id for entry in self._entries(head) for id in entry.consumes)}

    async def journal_places(self, head: FileHead) -> Collection[Place]:
        return self._journal.places()

    async def next_epoch(self, head: FileHead | None, now: int) -> int:
        """Return an epoch that no run of this directory has ever had."""
        return self._folder.next_epoch(now)

    async def prepare(self) -> None:
        self._clear()

    async def take(self, old: FileHead, new: FileHead) -> FileHead:
        if any(entry.epoch == old.epoch for entry in self._entries(old)):
            new = replace(new, takeovers=0)
        return self._write_lease(new)

    async def read(self, head: FileHead) -> tuple[FileHead, Snapshot] | None:
        snapshot = await self.load()
        return None if snapshot is None else (head, snapshot)

    async def is_held(self, head: FileHead) -> bool:
        return True

    async def renew(self, old: FileHead, new: FileHead) -> bool:
        self._write_lease(new)
        return True

    async def release(self, old: FileHead, new: FileHead) -> bool:
        """Release the lease; a lease without an owner closes its epoch."""
        self._write_lease(new)
        return True

    async def add(self, entries: Sequence[Entry]) -> FileHead | None:
        """Append the entries that count to the journal, as one line."""
        head = self.read_head()
        if head is None or head.is_closed:
            return head
        places = self._journal.places()
        new: dict[Place, Entry] = {}
        for entry in entries:
            place = (entry.epoch, entry.n)
            if entry.epoch == head.epoch and place not in places:
                new.setdefault(place, entry)
        if new:
            self._journal.add(new.values())
        return head

    async def settle(self, old: FileHead | None, new: Head, data: bytes) -> FileHead:
        """Replace the head and the snapshot atomically: they are one file."""
        head = FileHead(**asdict(new))
        if head.owner is None:
            self._disk.replace(self._paths.head, encode_head(head, data))
            return head
        # A lease counts only if its epoch is above the head's. If we crash before we write the
        # lease, the run exists without an owner and is found by its wake line.
        first = replace(head, owner=None, base=(head.epoch, 0))
        self._disk.replace(self._paths.head, encode_head(first, data))
        epoch = self._folder.next_epoch(head.updated_at)
        return self._write_lease(replace(first, owner=head.owner, epoch=epoch))

    async def sweep(self, head: FileHead) -> None:
        """Remove the journal, the lease and consumed messages."""
        self._journal.remove()
        self._disk.remove(self._paths.lease)
        if head.consumed:
            self._inbox.sweep({*head.consumed})

    async def deliver(
        self, head: FileHead, messages: Sequence[NewMessage], now: int
    ) -> list[Receipt]:
        """Append messages to the inbox, as one write."""
        contents = self._inbox.read()
        consumed_ids = contents.ids & await self.consumed_ids(head) if contents.ids else ()
        unconsumed_count = len(contents.ids) - len(consumed_ids)
        new: list[InboxLine] = []
        dedup_ids: set[str | None] = set()
        receipts: list[Receipt] = []
        for each in messages:
            if each.dedup_id in contents.dedup_ids or each.dedup_id in dedup_ids:
                receipts.append(Receipt(Delivery.DUPLICATE, unconsumed_count + len(new)))
            elif is_over(head.status):
                receipts.append(Receipt(Delivery.OVER))
            else:
                new.append(self._new_message(each, now))
                dedup_ids |= {each.dedup_id} - {None}
                receipts.append(Receipt(Delivery.DELIVERED, unconsumed_count + len(new)))
        if new:
            self._inbox.add(new, contents)
        return receipts

    def _new_message(self, message: NewMessage, now: int) -> InboxLine:
        # The id comes from the epoch counter, so it is above that of every earlier message.
        id = str(self._folder.next_epoch(now))
        return InboxLine(id, message.name, message.payload.decode(), now, message.dedup_id)

    async def progress(self, head: FileHead) -> str:
        """Return the sizes of the journal and the inbox, to which lines are only appended."""
        return f"{_size(self._paths.journal)}.{_size(self._paths.inbox)}"

    async def delete(self, head: FileHead) -> bool:
        return self._remove()

    async def discard(self, now: int) -> bool:
        return self._remove()

    def _remove(self) -> bool:
        # The head first: a head without its journal would lose accepted entries.
        existed = self._disk.remove(self._paths.head)
        if existed:
            self._disk.sync_directory(self._paths.head.parent)
        self._clear()
        return existed

    def _clear(self) -> None:
        self._disk.remove(self._paths.lease)
        self._journal.remove()
        self._inbox.remove()

    def _merge(self, head: FileHead, data: bytes) -> Snapshot:
        entries = sorted(self._entries(head), key=lambda entry: (entry.epoch, entry.n))
        with reading(self.id):
            return merge_journal(
                *map(codec.loads, (data, *(bytes(entry.data) for entry in entries)))
            )

    def _entries(self, head: FileHead) -> list[JournalEntry]:
        """Read the journal entries that the snapshot does not include."""
        return [entry for entry in read_journal(self._paths.journal) if entry[:2] > head.base]

    def _write_lease(self, head: FileHead) -> FileHead:
        # Neither in the head nor synced: a power loss may erase a lease, but not a head. In the
        # head, every claim and renewal would cost an atomic replacement with its syncs.
        lease = LeaseRecord(head.owner, head.epoch, head.wake_at or 0, head.takeovers)
        self._disk.overwrite(self._paths.lease, encode_lease(lease))
        return head


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _with_lease(head: FileHead, lease: LeaseRecord) -> FileHead:
    return replace(
        head,
        owner=lease.owner,
        epoch=lease.epoch,
        status="running",
        awaits=(),
        wake_at=lease.until,
        takeovers=lease.takeovers,
        released=lease.owner is None,
    )
