"""The heads of all runs, for `list`, `prune` and `stats`."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from perdure.clock import SystemClock
from perdure.errors import StoreCorrupted
from perdure.stores.file.folder import Folder
from perdure.stores.file.layout import FileHead, read_head
from perdure.stores.file.run import FileRun

logger = logging.getLogger(__name__)

Version: TypeAlias = tuple[int, int]

# Two versions of a file that were written within one tick of the file system's clock can have the
# same time, so a head is cached only if its file is older than this many seconds.
_TICK = 2.0


class Catalog:
    """Reads the heads of all runs, and caches them until their files change."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._cache: dict[str, tuple[Version, FileHead]] = {}
        self._lock = threading.Lock()

    def heads(self) -> list[FileHead]:
        """Return the heads of all runs that can be read, in no order."""
        with self._lock:
            previous, self._cache = self._cache, {}
            return [
                head
                for shard in self._folder.runs.iterdir()
                for head in self._shard(shard, previous)
            ]

    def _shard(
        self, shard: Path, previous: dict[str, tuple[Version, FileHead]]
    ) -> Iterator[FileHead]:
        with os.scandir(shard) as entries:
            names = {entry.name: entry for entry in entries}
        for name, entry in names.items():
            stem, _, kind = name.partition(".")
            if kind != "json":
                continue
            try:
                head = self._head(entry, previous.get(name))
                # Only a run that was leased since its head was written has one of these files.
                if head and (f"{stem}.lease" in names or f"{stem}.journal" in names):
                    head = FileRun(self._folder, head.id).read_head()
            except StoreCorrupted:
                logger.exception("the run in %s is not listed", entry.path)
            else:
                if head is not None:
                    yield head

    def _head(
        self, entry: "os.DirEntry[str]", cache_entry: tuple[Version, FileHead] | None
    ) -> FileHead | None:
        try:
            status = entry.stat()
        except FileNotFoundError:
            return None
        version = (status.st_ino, status.st_mtime_ns)
        if cache_entry is not None and cache_entry[0] == version:
            self._cache[entry.name] = cache_entry
            return cache_entry[1]
        head = read_head(Path(entry.path))
        age = SystemClock().now().timestamp() - status.st_mtime
        if head is not None and age > _TICK:
            self._cache[entry.name] = (version, head)
        return head
