"""Wake lines in files of one minute each.

Lines are only ever appended. What removes lines holds the gate exclusively, so that no run is
between the writing of its line and its own write.
"""

import os
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from heapq import merge
from itertools import groupby, islice
from pathlib import Path

import msgspec

from perdure.stores._documents.records import Wake
from perdure.stores._documents.storage import Plan
from perdure.stores.file.disk import (
    locked,
    opened,
    read_intact_lines,
    separate_lines,
    try_locked,
)
from perdure.stores.file.folder import Folder

_MINUTE = 60_000_000
_PART = 1_000

_decode = msgspec.json.Decoder(Wake).decode


class FileWakes:
    """`Wakes` in a directory."""

    def __init__(self, folder: Folder) -> None:
        self.directory = folder.wakes
        self._folder = folder
        self._due_lines = 0
        self._counting = threading.Lock()

    @asynccontextmanager
    async def gate(self) -> AsyncGenerator[None, None]:
        before = self._due_lines
        try:
            with locked(self._folder.gate, shared=True):
                yield
        finally:
            # Not when a line is written, but when the run is, too: a worker would not find it yet.
            # The lines may be another verb's; its runs are announced again when it ends.
            if self._due_lines != before:
                self._folder.notifications.send()

    async def add(self, wakes: Iterable[Wake], now: int) -> None:
        wakes = list(wakes)
        self._add(wakes)
        if any(wake.at <= now for wake in wakes):
            with self._counting:
                self._due_lines += 1

    def _add(self, wakes: Iterable[Wake]) -> None:
        is_new = False
        for minute, group in groupby(sorted(wakes, key=_order), key=_minute):
            path = self.directory / f"{minute:010}"
            is_new |= not path.exists()
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
                self._folder.disk.append(
                    descriptor, separate_lines(map(msgspec.json.encode, group))
                )
                self._folder.disk.sync(descriptor)
        if is_new:
            self._folder.disk.sync_directory(self.directory)

    def scan(self, until: int, now: int) -> "FileScan":
        return FileScan(self, until)

    async def tidy(self, to_sweep: Iterable[Path], to_split: Iterable[Path], plan: Plan) -> None:
        """Sweep and split files, unless a run is being written."""
        with try_locked(self._folder.gate) as is_alone:
            if is_alone:
                for path in to_sweep:
                    await self.sweep(path, plan)
                for path in to_split:
                    if path.exists():
                        self.split(path)

    def split(self, path: Path) -> None:
        """Split a file of many lines into parts in order, so that each is read by itself."""
        lines = sorted(set(_lines(path)), key=_order)
        first = sum(1 for _ in self.directory.glob(f"{path.name}.*"))
        for number, start in enumerate(range(0, len(lines), _PART), start=first):
            part = path.with_name(f"{path.name}.{number:06}")
            self._write(part, lines[start : start + _PART])
        # A crash before this leaves lines twice, which is harmless.
        self._folder.disk.remove(path)

    async def sweep(self, path: Path, plan: Plan) -> None:
        """Keep the lines that are still true, and move those whose time has changed."""
        current: list[Wake] = []
        moved: list[Wake] = []
        for line in {line.id: line for line in _lines(path)}.values():
            wake = await plan(line)
            if wake is not None:
                is_later = _minute(wake) > int(path.name[:10])
                (moved if is_later else current).append(wake)
        # Added before they are removed here: a crash in between leaves them in both places.
        self._add(moved)
        if current:
            self._write(path, sorted(current, key=_order))
        else:
            self._folder.disk.remove(path)

    def _write(self, path: Path, wakes: Iterable[Wake]) -> None:
        self._folder.disk.replace(path, separate_lines(map(msgspec.json.encode, wakes)))


class FileScan:
    """A `Scan` that counts how many lines of each file are out of date."""

    def __init__(self, wakes: FileWakes, until: int) -> None:
        self._wakes = wakes
        self._until = until
        self._sizes: Counter[Path] = Counter()
        self._outdated: Counter[Path] = Counter()
        self._files: dict[str, set[Path]] = {}
        self._lines = self._read()

    async def next(self, count: int) -> list[Wake]:
        return list(islice(self._lines, count))

    def claimed(self, id: str) -> None:
        self._outdated.update(self._files[id])

    def postponed(self, id: str, wake: Wake | None) -> None:
        self._outdated.update(self._files[id])

    async def tidy(self, plan: Plan, now: int) -> None:
        """Sweep files whose lines are mostly out of date, and split those with very many."""
        to_sweep = [path for path, n in self._outdated.items() if 2 * n >= self._sizes[path]]
        to_split = self.large_files()
        if to_sweep or to_split:
            await self._wakes.tidy(to_sweep, to_split, plan)

    def large_files(self) -> list[Path]:
        """Return the files that hold so many lines that they should be split."""
        return [path for path, n in self._sizes.items() if n > 2 * _PART and not path.suffix]

    def _read(self) -> Iterator[Wake]:
        directory = self._wakes.directory
        names = sorted(path.name for path in directory.iterdir() if path.suffix != ".tmp")
        last = f"{self._until // _MINUTE:010}"
        read: set[tuple[str, str | None]] = set()
        for minute, group in groupby(names, key=lambda name: name[:10]):
            if minute > last:
                return
            for wake in self._minute(list(group)):
                if wake.at <= self._until and wake[1:] not in read:
                    read.add(wake[1:])
                    yield wake

    def _minute(self, names: list[str]) -> Iterator[Wake]:
        # The parts are in order among themselves; lines that were added later are not.
        directory = self._wakes.directory
        parts = [directory / name for name in names if "." in name]
        others = [directory / name for name in names if "." not in name]
        lines = (wake for path in parts for wake in self._file(path))
        return merge(*map(self._file, others), lines, key=_order)

    def _file(self, path: Path) -> list[Wake]:
        lines = sorted(_lines(path), key=_order)
        self._sizes[path] = len({wake.id for wake in lines})
        for wake in lines:
            self._files.setdefault(wake.id, set()).add(path)
        return lines


def _order(wake: Wake) -> tuple[int, str]:
    return wake.at, wake.id


def _minute(wake: Wake) -> int:
    return max(wake.at, 0) // _MINUTE


def _lines(path: Path) -> list[Wake]:
    return [_decode(line) for line in read_intact_lines(path) if line]
