"""Wake lines in files of one minute each, in a directory for each queue.

Lines are only ever appended. Lines are removed while the gate is held exclusively, so that no other
process is between writing a line and writing its run.
"""

import os
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from heapq import merge
from itertools import groupby, islice
from pathlib import Path

import msgspec

from perdure.filenames import safe_name
from perdure.stores._documents.records import Wake
from perdure.stores._documents.storage import Accepts, Plan
from perdure.stores.file.disk import (
    lock_file,
    open_file,
    read_intact_lines,
    separate_lines,
    try_lock_file,
)
from perdure.stores.file.folder import Folder

_MINUTE = 60_000_000
_PART = 1_000

_decode = msgspec.json.Decoder(Wake).decode


class FileWakes:
    """`Wakes` in directories: one for runs in no queue, and one for each queue."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}
        self._due_lines = 0
        self._counting = threading.Lock()

    @asynccontextmanager
    async def gate(self) -> AsyncGenerator[None, None]:
        count_before = self._due_lines
        try:
            with lock_file(self._folder.gate, shared=True):
                yield
        finally:
            # Notify only once the run is written, not when its line is: a worker would not find the
            # run yet. The lines may belong to another operation, which sends its own notification
            # when it ends.
            if self._due_lines != count_before:
                self._folder.notifications.send()

    async def add(self, wakes: Iterable[Wake], now: int) -> None:
        wakes = list(wakes)
        self._add(wakes)
        if any(wake.at <= now for wake in wakes):
            with self._counting:
                self._due_lines += 1

    def _add(self, wakes: Iterable[Wake]) -> None:
        new_directories: set[Path] = set()
        try:
            for (queue, minute), group in groupby(sorted(wakes, key=_place), key=_file_of):
                path = self.directory(queue) / f"{minute:010}"
                if not path.exists():
                    self._folder.disk.make_directory(path.parent)
                    new_directories.add(path.parent)
                self._append(path, group)
        finally:
            # Even if the disk is full: when the write is repeated, the files are no longer new.
            for directory in new_directories:
                self._folder.disk.sync_directory(directory)

    def _append(self, path: Path, wakes: Iterable[Wake]) -> None:
        with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
            lines = separate_lines(map(msgspec.json.encode, wakes))
            self._folder.disk.append_shared(descriptor, lines)
            self._folder.disk.sync(descriptor)

    def scan(self, queue: str, until: int, now: int, accepts: Accepts) -> "FileScan":
        return FileScan(self, self.directory(queue), until, accepts)

    async def queues(self) -> Collection[str]:
        """Return the queues that have directories; their names are read from the lines."""
        names: dict[str, str] = {}
        for directory in self._folder.queues.iterdir():
            name = self._names.get(directory.name) or _queue_of(directory)
            if name is not None:
                names[directory.name] = name
        self._names = names
        return names.values()

    async def tidy(self, to_sweep: Iterable[Path], to_split: Iterable[Path], plan: Plan) -> None:
        """Sweep and split files, unless a run is being written."""
        with try_lock_file(self._folder.gate) as is_alone:
            if is_alone:
                for path in to_sweep:
                    await self.sweep(path, plan)
                for path in to_split:
                    if path.exists():
                        self.split(path)

    def split(self, path: Path) -> None:
        """Split a file of many lines into ordered parts that can be read one at a time."""
        lines = sorted(set(_lines(path)), key=_order)
        first = sum(1 for _ in path.parent.glob(f"{path.name}.*"))
        for number, start in enumerate(range(0, len(lines), _PART), start=first):
            part = path.with_name(f"{path.name}.{number:06}")
            self._write(part, lines[start : start + _PART])
        # A crash before this leaves duplicate lines, which are harmless.
        self._folder.disk.remove(path)

    async def sweep(self, path: Path, plan: Plan) -> None:
        """Keep the lines that are still true, and move those whose time has changed."""
        current: list[Wake] = []
        moved_wakes: list[Wake] = []
        minute = int(path.name[:10])
        for line in {line.id: line for line in _lines(path)}.values():
            wake = await plan(line)
            if wake is not None:
                is_here = _minute(wake) == minute and self.directory(wake.queue) == path.parent
                (current if is_here else moved_wakes).append(wake)
        # Added before they are removed here: after a crash in between, they are in both places.
        self._add(moved_wakes)
        if current:
            self._write(path, sorted(current, key=_order))
        else:
            self._folder.disk.remove(path)
            if path.parent.parent == self._folder.queues:
                self._folder.disk.remove_directory(path.parent)

    def directory(self, queue: str) -> Path:
        """Return where the lines of a queue are."""
        return self._folder.queues / safe_name(queue) if queue else self._folder.wakes

    def _write(self, path: Path, wakes: Iterable[Wake]) -> None:
        self._folder.disk.replace(path, separate_lines(map(msgspec.json.encode, wakes)))


class FileScan:
    """A `Scan` that counts how many lines of each file are out of date."""

    def __init__(self, wakes: FileWakes, directory: Path, until: int, accepts: Accepts) -> None:
        self._wakes = wakes
        self._directory = directory
        self._until = until
        self._sizes: Counter[Path] = Counter()
        self._outdated_ids: set[str] = set()
        self._files: dict[str, set[Path]] = {}
        self._lines = filter(accepts, self._read())

    async def next(self, count: int) -> list[Wake]:
        return list(islice(self._lines, count))

    def mark_claimed(self, id: str) -> None:
        self._outdated_ids.add(id)

    def mark_outdated(self, id: str, wake: Wake | None) -> None:
        self._outdated_ids.add(id)

    async def tidy(self, plan: Plan, now: int) -> None:
        """Sweep files whose lines are mostly out of date, and split those with very many."""
        outdated_counts = Counter(path for id in self._outdated_ids for path in self._files[id])
        to_sweep = [path for path, n in outdated_counts.items() if 2 * n >= self._sizes[path]]
        to_split = self.large_files()
        if to_sweep or to_split:
            await self._wakes.tidy(to_sweep, to_split, plan)

    def large_files(self) -> list[Path]:
        """Return the files that have enough lines to be split."""
        return [path for path, n in self._sizes.items() if n > 2 * _PART and not path.suffix]

    def _read(self) -> Iterator[Wake]:
        names = sorted(path.name for path in _files(self._directory))
        last = f"{self._until // _MINUTE:010}"
        yielded_lines: set[tuple[str, str | None, str, int]] = set()
        for minute, group in groupby(names, key=lambda name: name[:10]):
            if minute > last:
                return
            for wake in self._minute(list(group)):
                if wake.at <= self._until and wake[1:] not in yielded_lines:
                    yielded_lines.add(wake[1:])
                    yield wake

    def _minute(self, names: list[str]) -> Iterator[Wake]:
        # The parts are in order among themselves; lines that were added later are not.
        parts = [self._directory / name for name in names if "." in name]
        others = [self._directory / name for name in names if "." not in name]
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


def _place(wake: Wake) -> tuple[str, int, str]:
    return wake.queue, wake.at, wake.id


def _minute(wake: Wake) -> int:
    return max(wake.at, 0) // _MINUTE


def _file_of(wake: Wake) -> tuple[str, int]:
    return wake.queue, _minute(wake)


def _lines(path: Path) -> list[Wake]:
    return [_decode(line) for line in read_intact_lines(path) if line]


def _files(directory: Path) -> list[Path]:
    """Return the files of a directory, which may have been removed because it was empty."""
    try:
        return [path for path in directory.iterdir() if path.suffix != ".tmp"]
    except FileNotFoundError:
        return []


def _queue_of(directory: Path) -> str | None:
    """Return the queue whose lines are in a directory; `None` if there is no line."""
    lines = (line for path in _files(directory) for line in read_intact_lines(path) if line)
    return next((_decode(line).queue for line in lines), None)
