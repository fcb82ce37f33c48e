"""Journals as append-only files."""

import logging
import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple, Self

from perdure.store import Entry
from perdure.stores._documents.records import Place
from perdure.stores.file.disk import Disk, read_lines
from perdure.stores.file.layout import RunPaths, encode_entries, read_journal

logger = logging.getLogger(__name__)

_MAX_KNOWN = 4096


class _Journal(NamedTuple):
    inode: int
    size: int
    places: set[Place]


class KnownJournals:
    """A cache of the journals that this process wrote, so that they are not read every time.

    A cached journal is valid only while its file has the same inode and size.
    """

    def __init__(self) -> None:
        self._journals: dict[str, _Journal] = {}
        self._lock = threading.Lock()

    def places(self, name: str, status: os.stat_result) -> set[Place] | None:
        """Return the places of a journal's entries, or `None` if another process wrote to it."""
        journal = self._journals.get(name)
        if journal is None or (journal.inode, journal.size) != (status.st_ino, status.st_size):
            return None
        return journal.places

    def remember(self, name: str, status: os.stat_result, places: set[Place]) -> None:
        """Cache the places of a journal; the least recently written one is evicted."""
        with self._lock:
            self._journals.pop(name, None)
            self._journals[name] = _Journal(status.st_ino, status.st_size, places)
            if len(self._journals) > _MAX_KNOWN:
                del self._journals[next(iter(self._journals))]

    def forget(self, name: str) -> None:
        """Forget a journal that was removed."""
        with self._lock:
            self._journals.pop(name, None)


class JournalWriter:
    """The journal of a locked run, opened on first use."""

    def __init__(self, disk: Disk, cache: KnownJournals, paths: RunPaths) -> None:
        self._disk = disk
        self._cache = cache
        self._paths = paths
        self._descriptor: int | None = None
        self._new_in: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def places(self) -> Collection[Place]:
        """Return the places of the journal's entries; a torn last line is cut off."""
        try:
            return self._read_places(self._open(os.O_RDWR | os.O_APPEND))
        except FileNotFoundError:
            return ()

    def add(self, entries: Iterable[Entry]) -> None:
        """Append entries that the journal does not have, as one line."""
        descriptor = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT)
        places = self._read_places(descriptor)
        if not places:
            # The name of a new file survives a power loss only once its directory is synced. An
            # earlier write may have created the file and failed.
            self._new_in = self._paths.journal.parent
        entries = list(entries)
        self._disk.append(descriptor, encode_entries(entries))
        places.update((entry.epoch, entry.n) for entry in entries)
        self._cache.remember(self._paths.name, os.fstat(descriptor), places)

    def remove(self) -> None:
        """Remove the journal."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._cache.forget(self._paths.name)
        self._disk.remove(self._paths.journal)

    def sync(self) -> None:
        """Flush the journal to disk, if it was used.

        This includes entries that were only read: the process that wrote them may not have synced
        them yet, or may have died before it could.
        """
        if self._descriptor is not None:
            self._disk.sync(self._descriptor)
        if self._new_in is not None:
            self._disk.sync_directory(self._new_in)

    def _open(self, flags: int) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._paths.journal, flags, 0o644)
        return self._descriptor

    def _read_places(self, descriptor: int) -> set[Place]:
        name, path = self._paths.name, self._paths.journal
        places = self._cache.places(name, os.fstat(descriptor))
        if places is None:
            lines = read_lines(path)
            if lines.is_torn:
                logger.warning("%s ends in a line torn by a crash; it is cut off", path)
                self._disk.truncate(descriptor, lines.size)
            places = {(entry.epoch, entry.n) for entry in read_journal(path)}
            self._cache.remember(name, os.fstat(descriptor), places)
        return places
