"""Journals as append-only files: which entries they hold, and adding to many with one sync each."""

import logging
import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple, Self

from perdure.store import Entry
from perdure.stores.file.disk import Disk, read_lines
from perdure.stores.file.layout import Place, RunFiles, journal_line, read_journal

logger = logging.getLogger(__name__)

_REMEMBERED = 4096


class _Known(NamedTuple):
    inode: int
    size: int
    places: set[Place]


class Journals:
    """What is known of journals that this process wrote to, so that adding always costs the same.

    It is trusted only while a file has the size and the inode that it had then.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._changing = threading.Lock()

    def recall(self, name: str, status: os.stat_result) -> set[Place] | None:
        """Give the places of a journal's entries if nobody else has written to it."""
        known = self._known.get(name)
        if known is None or (known.inode, known.size) != (status.st_ino, status.st_size):
            return None
        return known.places

    def remember(self, name: str, status: os.stat_result, places: set[Place]) -> None:
        """Keep what a journal holds now; the longest unused is forgotten."""
        with self._changing:
            self._known.pop(name, None)
            self._known[name] = _Known(status.st_ino, status.st_size, places)
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]

    def forget(self, name: str) -> None:
        """Forget a journal that is gone."""
        with self._changing:
            self._known.pop(name, None)


class JournalWriter:
    """Adds entries to journals whose locks are held, and syncs all of them at the end."""

    def __init__(self, disk: Disk, journals: Journals) -> None:
        self._disk = disk
        self._journals = journals
        self._opened: dict[str, int] = {}
        self._created: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)

    def places(self, files: RunFiles) -> Collection[Place]:
        """Give the places of the entries that a journal holds; a torn last line is cut off."""
        try:
            descriptor = self._open(files, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return ()
        return self._places(files, descriptor)

    def add(self, files: RunFiles, entries: Iterable[Entry]) -> None:
        """Add entries that the journal does not hold, as one line."""
        if not files.journal.exists():
            self._created.add(files.journal.parent)
        descriptor = self._open(files, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        places = self._places(files, descriptor)
        entries = list(entries)
        self._disk.append(descriptor, journal_line(entries))
        places.update((entry.epoch, entry.n) for entry in entries)
        self._journals.remember(files.name, os.fstat(descriptor), places)

    def drop(self, files: RunFiles) -> None:
        """Remove a journal whose entries the snapshot holds."""
        descriptor = self._opened.pop(files.name, None)
        if descriptor is not None:
            os.close(descriptor)
        self._journals.forget(files.name)
        self._disk.remove(files.journal)

    def sync(self) -> None:
        """Return when everything that was added is durable."""
        for descriptor in self._opened.values():
            self._disk.sync(descriptor)
        for directory in self._created:
            self._disk.sync_directory(directory)

    def _open(self, files: RunFiles, flags: int) -> int:
        descriptor = self._opened.get(files.name)
        if descriptor is None:
            descriptor = self._opened[files.name] = os.open(files.journal, flags, 0o644)
        return descriptor

    def _places(self, files: RunFiles, descriptor: int) -> set[Place]:
        places = self._journals.recall(files.name, os.fstat(descriptor))
        if places is None:
            lines = read_lines(files.journal)
            if lines.torn:
                logger.warning("%s ends in a line that a crash tore; it is cut off", files.journal)
                self._disk.truncate(descriptor, lines.size)
            places = {(entry.epoch, entry.n) for entry in read_journal(files.journal)}
            self._journals.remember(files.name, os.fstat(descriptor), places)
        return places
