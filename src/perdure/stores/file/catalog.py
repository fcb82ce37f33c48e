"""Every run of a directory, for lists and counts: the one place where all headers are read."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from perdure.clock import SystemClock
from perdure.stores._scan import Line
from perdure.stores.file.layout import Header, RunFiles, read_header

Headers: TypeAlias = dict[str, tuple[tuple[int, int], Header]]

_TICK = 2.0


class Catalog:
    """Reads the headers of all runs, each again only when its file has changed."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._read: Headers = {}
        self._reading = threading.Lock()

    def lines(self, prefix: str) -> list[Line]:
        """Give the runs whose ids begin with `prefix`, in no order."""
        with self._reading:
            before, self._read = self._read, {}
            found = [line for shard in self._runs.iterdir() for line in self._shard(shard, before)]
        return [line for line in found if line.id.startswith(prefix)]

    def _shard(self, shard: Path, before: Headers) -> Iterator[Line]:
        with os.scandir(shard) as entries:
            names = {entry.name: entry for entry in entries}
        for name, entry in names.items():
            stem, _, kind = name.partition(".")
            if kind != "json" or (header := self._header(entry, before)) is None:
                continue
            status = header.status
            # Only a run that was given to somebody since has one of these.
            if f"{stem}.lease" in names or f"{stem}.journal" in names:
                standing = RunFiles(self._runs, header.id).standing()
                status = status if standing is None else standing.status
            yield Line(header.updated_at, header.id, status, header.workflow)

    def _header(self, entry: "os.DirEntry[str]", before: Headers) -> Header | None:
        try:
            status = entry.stat()
        except FileNotFoundError:
            return None
        version = (status.st_ino, status.st_mtime_ns)
        known = before.get(entry.name)
        if known is not None and known[0] == version:
            self._read[entry.name] = known
            return known[1]
        header = read_header(Path(entry.path))
        # Files written in one tick of the machine's clock can look the same: old ones cannot.
        age = SystemClock().now().timestamp() - status.st_mtime
        if header is not None and age > _TICK:
            self._read[entry.name] = (version, header)
        return header
