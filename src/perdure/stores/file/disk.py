"""The file system as the file store needs it: whole writes, checksummed lines, locks.

Each method of `Disk` that changes something is one change that a crash leaves done or not done,
but for `append`, whose last line may be torn and is then known by its checksum.
"""

import fcntl
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from perdure.errors import StoreCorrupted


class Disk:
    """Changes files; with `sync` they outlast a loss of power when they were synced."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync

    def replace(self, path: Path, content: bytes) -> None:
        """Put a whole new file in place of whatever was there."""
        self.make_directory(path.parent)
        temporary = path.with_suffix(".tmp")
        self.write(temporary, content)
        self.rename(temporary, path)
        self.sync_directory(path.parent)

    def write(self, path: Path, content: bytes) -> None:
        """Write a whole file that nobody reads yet."""
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            self.sync(file.fileno())

    def rename(self, path: Path, target: Path) -> None:
        """Put a file in place of another."""
        path.replace(target)

    def overwrite(self, path: Path, content: bytes) -> None:
        """Write a small file in place, at once but not for a loss of power."""
        # One call, so that a process that is killed has written all of it or nothing.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, content)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)

    def append(self, descriptor: int, content: bytes) -> None:
        """Add to the end of a file, all or nothing unless the process dies meanwhile."""
        size = os.fstat(descriptor).st_size
        written = 0
        try:
            while written < len(content):
                written += os.write(descriptor, content[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file after so many bytes."""
        os.ftruncate(descriptor, size)

    def remove(self, path: Path) -> bool:
        """Remove a file; tell whether it was there."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def make_directory(self, directory: Path) -> None:
        """See to it that a directory is there, for good."""
        if directory.is_dir():
            return
        self.make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        self.sync_directory(directory.parent)

    def sync(self, descriptor: int) -> None:
        """Return when what was written to a file outlasts a loss of power."""
        if self._sync:
            os.fsync(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Return when the names in a directory outlast a loss of power."""
        if self._sync:
            with opened(directory, os.O_RDONLY) as descriptor:
                os.fsync(descriptor)


@contextmanager
def opened(path: Path, flags: int) -> Generator[int, None, None]:
    """Open a file for a while."""
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Generator[None, None, None]:
    """Hold the lock of this name against all other processes and threads."""
    with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@contextmanager
def locked_now(path: Path) -> Generator[bool, None, None]:
    """Hold the lock of this name alone, or give False at once when somebody holds it."""
    with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class Lines(NamedTuple):
    """The whole lines of a file and how many bytes they take; what comes after them is torn."""

    whole: list[bytes]
    size: int
    torn: bool


def line_of(content: bytes) -> bytes:
    """Give JSON as a line with its checksum."""
    # A line break can only stand between the tokens of JSON, where a space says the same.
    content = content.replace(b"\n", b" ")
    return b"%08x %b\n" % (crc32(content), content)


def content_of(line: bytes) -> bytes | None:
    """Give what a line holds, or None when the line is torn."""
    if len(line) < 9 or line[8:9] != b" ":
        return None
    content = line[9:]
    with suppress(ValueError):
        if int(line[:8], 16) == crc32(content):
            return content
    return None


def read_lines(path: Path) -> Lines:
    """Read the lines of a file that is appended to; a missing file has none.

    Only the last line can be torn by a crash: a damaged one before others is `StoreCorrupted`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines([], 0, torn=False)
    *lines, rest = data.split(b"\n")
    whole = [content for content in map(content_of, lines) if content is not None]
    if len(whole) == len(lines):
        return Lines(whole, len(data) - len(rest), torn=bool(rest))
    if len(whole) < len(lines) - 1 or content_of(lines[-1]) is not None or rest:
        raise StoreCorrupted(f"{path} is damaged in the middle; restore it, or delete the run")
    return Lines(whole, len(data) - len(lines[-1]) - 1, torn=True)


def loose_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a file whose damaged lines do no harm."""
    data = path.read_bytes() if path.exists() else b""
    return (content for line in data.split(b"\n") if (content := content_of(line)) is not None)


def write_lines(lines: Iterable[bytes]) -> bytes:
    """Give lines for a file in which an earlier writer may have left half a line."""
    return b"".join(b"\n" + line_of(line) for line in lines)
