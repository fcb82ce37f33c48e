"""When runs want a worker: lines in files of one minute each, so that nobody scans the runs.

A line is written before the run it tells of, and says only where to look: a line whose run has
other plans by now is harmless and is swept out. What sweeps must hold the store's gate alone, so
that no run is between its line and its own write.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from perdure.stores.file.disk import Disk, loose_lines, opened, write_lines

_MINUTE = 60_000_000
_PART = 1_000


class Wake(NamedTuple):
    """A run that may want a worker at a time, in microseconds since 1970."""

    at: int
    id: str
    workflow: str | None


_read = msgspec.json.Decoder(Wake).decode


class Wakes:
    """The lines, in a folder of their own."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder

    def add(self, wakes: Iterable[Wake]) -> None:
        """Write lines; they are durable when this returns."""
        created = False
        for minute, group in groupby(sorted(wakes, key=_order), key=_minute):
            path = self._folder / f"{minute:010}"
            created |= not path.exists()
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
                self._disk.append(descriptor, write_lines(map(msgspec.json.encode, group)))
                self._disk.sync(descriptor)
        if created:
            self._disk.sync_directory(self._folder)

    def scan(self, now: int) -> "Scan":
        """Give the lines up to a time, earliest first."""
        return Scan(self._folder, now)

    def deal(self, path: Path) -> None:
        """Split a file of very many lines into parts in order, so that each is read by itself."""
        lines = sorted(set(_lines(path)), key=_order)
        taken = sum(1 for _ in self._folder.glob(f"{path.name}.*"))
        for number, start in enumerate(range(0, len(lines), _PART), start=taken):
            part = path.with_name(f"{path.name}.{number:06}")
            self._write(part, lines[start : start + _PART])
        # A crash before this leaves lines doubled, which is harmless.
        self._disk.remove(path)

    def sweep(self, path: Path, plan: Callable[[Wake], Wake | None]) -> None:
        """Keep the lines that are still true, and file under its new time what has moved."""
        kept: list[Wake] = []
        moved: list[Wake] = []
        for wake in {wake.id: wake for wake in _lines(path)}.values():
            true = plan(wake)
            if true is not None:
                later = _minute(true) > int(path.name[:10])
                (moved if later else kept).append(true)
        # Filed anew before it is taken out here: a crash between leaves it in both places.
        self.add(moved)
        if kept:
            self._write(path, sorted(kept, key=_order))
        else:
            self._disk.remove(path)

    def _write(self, path: Path, wakes: Iterable[Wake]) -> None:
        self._disk.replace(path, write_lines(map(msgspec.json.encode, wakes)))


class Scan:
    """Lines up to a time, earliest first; counts which files hold how many, and how many untrue."""

    def __init__(self, folder: Path, now: int) -> None:
        self._folder = folder
        self._now = now
        self._held: Counter[Path] = Counter()
        self._untrue: Counter[Path] = Counter()
        self._homes: dict[str, set[Path]] = {}

    def __iter__(self) -> Iterator[Wake]:
        names = sorted(path.name for path in self._folder.iterdir() if path.suffix != ".tmp")
        last = f"{self._now // _MINUTE:010}"
        seen: set[tuple[str, str | None]] = set()
        for minute, group in groupby(names, key=lambda name: name[:10]):
            if minute > last:
                return
            for wake in self._minute(list(group)):
                if wake.at <= self._now and wake[1:] not in seen:
                    seen.add(wake[1:])
                    yield wake

    def untrue(self, wake: Wake) -> None:
        """Note that the lines of a run, as far as they were read, are not true any more."""
        self._untrue.update(self._homes[wake.id])

    def to_deal(self) -> list[Path]:
        """Give the files that hold so many lines that they should be split."""
        return [path for path, held in self._held.items() if held > 2 * _PART and not path.suffix]

    def to_sweep(self) -> list[Path]:
        """Give the files of which half or more was found untrue."""
        return [path for path, untrue in self._untrue.items() if untrue * 2 >= self._held[path]]

    def _minute(self, names: list[str]) -> Iterator[Wake]:
        # The parts are in order among themselves; what came after they were dealt is not.
        dealt = [name for name in names if "." in name]
        fresh = [name for name in names if "." not in name]
        parts = (wake for name in dealt for wake in self._file(self._folder / name))
        return merge(*(self._file(self._folder / name) for name in fresh), parts, key=_order)

    def _file(self, path: Path) -> list[Wake]:
        lines = sorted(_lines(path), key=_order)
        self._held[path] = len({wake.id for wake in lines})
        for wake in lines:
            self._homes.setdefault(wake.id, set()).add(path)
        return lines


def _order(wake: Wake) -> tuple[int, str]:
    return wake.at, wake.id


def _minute(wake: Wake) -> int:
    return max(wake.at, 0) // _MINUTE


def _lines(path: Path) -> list[Wake]:
    return [_read(line) for line in loose_lines(path) if line]
