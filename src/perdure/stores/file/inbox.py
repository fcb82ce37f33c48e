"""Inboxes as append-only files."""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.stores.file.disk import Disk, open_file, split_lines
from perdure.stores.file.layout import (
    InboxLine,
    RunPaths,
    decode_messages,
    encode_message,
    read_inbox,
)

logger = logging.getLogger(__name__)

_MAX_KNOWN = 4096


@dataclass(slots=True)
class InboxContents:
    """The contents of an inbox up to a size: message ids, and every `dedup_id` ever used.

    `last_line` is the last line up to that size. Message ids are never reused, and consumed
    messages are only ever replaced by something shorter. So as long as these bytes are still in the
    same place, nothing before them has changed.
    """

    size: int = 0
    last_line: bytes = b""
    ids: set[str] = field(default_factory=set)
    dedup_ids: set[str] = field(default_factory=set)

    def add(self, lines: bytes) -> None:
        """Add the complete lines that follow."""
        if not lines:
            return
        self.size += len(lines)
        self.last_line = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        for message in decode_messages(line[9:] for line in lines.split(b"\n")[:-1]):
            if message.name is not None:
                self.ids.add(message.id)
            if message.dedup_id is not None:
                self.dedup_ids.add(message.dedup_id)


class KnownInboxes:
    """A cache of inbox contents, so that an inbox is not read in full for each message."""

    def __init__(self) -> None:
        self._inboxes: dict[str, InboxContents] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> InboxContents | None:
        """Return the cached contents of an inbox, which may have changed since."""
        return self._inboxes.get(name)

    def remember(self, name: str, contents: InboxContents) -> None:
        """Cache the contents of an inbox; the least recently used one is evicted."""
        with self._lock:
            self._inboxes.pop(name, None)
            self._inboxes[name] = contents
            if len(self._inboxes) > _MAX_KNOWN:
                del self._inboxes[next(iter(self._inboxes))]

    def forget(self, name: str) -> None:
        """Forget an inbox that was removed."""
        with self._lock:
            self._inboxes.pop(name, None)


class InboxWriter:
    """The inbox of a locked run."""

    def __init__(self, disk: Disk, cache: KnownInboxes, paths: RunPaths) -> None:
        self._disk = disk
        self._cache = cache
        self._paths = paths

    def read(self) -> InboxContents:
        """Return what the inbox contains; a torn last line is cut off."""
        if not self._paths.inbox.exists():
            return InboxContents()
        with open_file(self._paths.inbox, os.O_RDWR) as descriptor:
            contents = self._read(descriptor)
            # A process may have died before it synced a message. Reporting the next one as a
            # duplicate promises that the first one is durable, so sync it now.
            self._disk.sync(descriptor)
        self._cache.remember(self._paths.name, contents)
        return contents

    def add(self, messages: Sequence[InboxLine], contents: InboxContents) -> None:
        """Append messages durably, in one write, to an inbox with these contents."""
        is_new = not self._paths.inbox.exists()
        lines = b"".join(map(encode_message, messages))
        try:
            with open_file(self._paths.inbox, os.O_RDWR | os.O_CREAT | os.O_APPEND) as descriptor:
                self._disk.append(descriptor, lines)
                self._disk.sync(descriptor)
        finally:
            # Even if the disk is full: when the write is repeated, the file is no longer new.
            if is_new:
                self._disk.sync_directory(self._paths.inbox.parent)
        contents.add(lines)
        self._cache.remember(self._paths.name, contents)

    def sweep(self, consumed_ids: set[str]) -> None:
        """Remove messages, but keep their `dedup_id`s to recognize duplicates."""
        lines = (
            InboxLine(line.id, None, "", 0, line.dedup_id) if line.id in consumed_ids else line
            for line in read_inbox(self._paths.inbox)
            if line.id not in consumed_ids or line.dedup_id is not None
        )
        self._cache.forget(self._paths.name)
        self._disk.replace(self._paths.inbox, b"".join(map(encode_message, lines)))

    def remove(self) -> None:
        """Remove the inbox."""
        self._cache.forget(self._paths.name)
        self._disk.remove(self._paths.inbox)

    def _read(self, descriptor: int) -> InboxContents:
        contents = self._cache.get(self._paths.name)
        if contents is None or not _is_unchanged(descriptor, contents):
            contents = InboxContents()
        data = os.pread(descriptor, os.fstat(descriptor).st_size - contents.size, contents.size)
        lines = split_lines(self._paths.inbox, data)
        if lines.is_torn:
            logger.warning("%s ends in a line torn by a crash; it is cut off", self._paths.inbox)
            self._disk.truncate(descriptor, contents.size + lines.size)
        contents.add(data[: lines.size])
        return contents


def _is_unchanged(descriptor: int, contents: InboxContents) -> bool:
    start = contents.size - len(contents.last_line)
    return os.pread(descriptor, len(contents.last_line), start) == contents.last_line
