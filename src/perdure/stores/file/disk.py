"""The file system as the file store needs it: atomic replacement, checksummed lines, locks.

Each change made by a method of `Disk` is atomic: after a crash it is either done or not done. The
exceptions are `append` and `append_shared`, which may leave a torn line, detected by its checksum.
"""

import errno
import fcntl
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from perdure.errors import StoreCorrupted


class FlushFailed(OSError):
    """A file could not be flushed.

    The kernel reports data that it could not write only once: another flush would succeed without
    it, so the operation must not be repeated as if nothing had been written.
    """


class Disk:
    """Changes files. With `sync`, changes survive a power loss once they are synced."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a file with a new one, durably."""
        self.make_directory(path.parent)
        temporary = path.with_suffix(".tmp")
        try:
            self.write(temporary, content)
            self.rename(temporary, path)
        except OSError:
            # On a full disk, other writes need the space.
            with suppress(OSError):
                temporary.unlink()
            raise
        self.sync_directory(path.parent)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file that no other process can see yet."""
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            self.sync(file.fileno())

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file, replacing the target."""
        path.replace(target)

    def overwrite(self, path: Path, content: bytes) -> None:
        """Write a small file in place, without syncing it."""
        # A single call, so that a killed process has written either all of it or nothing.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)

    def append(self, descriptor: int, content: bytes) -> None:
        """Append to a locked file: all or nothing, unless the process dies in between."""
        size = os.fstat(descriptor).st_size
        position = 0
        try:
            while position < len(content):
                position += os.write(descriptor, content[position:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise

    def append_shared(self, descriptor: int, content: bytes) -> None:
        """Append lines of `separate_lines` to a file that other processes may append to."""
        # After a part was written, neither cut it off nor complete it: another process may have
        # appended something behind it. Readers skip the torn line.
        while os.write(descriptor, content) < len(content):
            pass

    def truncate(self, descriptor: int, size: int) -> None:
        """Truncate a file to `size` bytes."""
        os.ftruncate(descriptor, size)

    def remove(self, path: Path) -> bool:
        """Remove a file; return whether it existed."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def remove_directory(self, directory: Path) -> bool:
        """Remove a directory if it is empty; return whether it was removed."""
        try:
            directory.rmdir()
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents durably, if they do not exist."""
        if directory.is_dir():
            return
        self.make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        self.sync_directory(directory.parent)

    def sync(self, descriptor: int) -> None:
        """Flush a file, so that its contents survive a power loss."""
        if self._sync:
            _flush(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Flush a directory, so that the names in it survive a power loss."""
        if self._sync:
            with open_file(directory, os.O_RDONLY) as descriptor:
                _flush(descriptor)


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise FlushFailed(*error.args) from error


@contextmanager
def open_file(path: Path, flags: int) -> Generator[int, None, None]:
    """Open a file, and close it on exit."""
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def lock_file(path: Path, *, shared: bool = False) -> Generator[None, None, None]:
    """Hold a file's lock against all other processes and threads."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def try_lock_file(path: Path) -> Generator[bool, None, None]:
    """Hold a file's lock exclusively; yield `False` at once if it is already held."""
    with open_file(path, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class Lines(NamedTuple):
    """The complete lines of a file and their size in bytes; anything after them is torn."""

    complete: list[bytes]
    size: int
    is_torn: bool


def checked_line(content: bytes) -> bytes:
    """Return JSON as a line with its checksum."""
    # In JSON, a raw line break can only occur between tokens, where a space is equivalent.
    content = content.replace(b"\n", b" ")
    return b"%08x %b\n" % (crc32(content), content)


def line_content(line: bytes) -> bytes | None:
    """Return the content of a line, or `None` if the line is damaged."""
    if len(line) < 9 or line[8:9] != b" ":
        return None
    content = line[9:]
    with suppress(ValueError):
        if int(line[:8], 16) == crc32(content):
            return content
    return None


def read_lines(path: Path) -> Lines:
    """Read the lines of a file that is appended to; a missing file has none.

    A crash can only tear the last line; any other damaged line raises `StoreCorrupted`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines([], 0, is_torn=False)
    return split_lines(path, data)


def split_lines(path: Path, data: bytes) -> Lines:
    """Split the tail of a file, from the start of a line, as `read_lines` does."""
    *lines, rest = data.split(b"\n")
    complete = [content for content in map(line_content, lines) if content is not None]
    if len(complete) == len(lines):
        return Lines(complete, len(data) - len(rest), is_torn=bool(rest))
    if len(complete) < len(lines) - 1 or line_content(lines[-1]) is not None or rest:
        raise StoreCorrupted(f"{path} is damaged in the middle; restore it, or delete the run")
    return Lines(complete, len(data) - len(lines[-1]) - 1, is_torn=True)


def read_intact_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a file, skipping damaged ones anywhere; a missing file has none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    return (content for line in data.split(b"\n") if (content := line_content(line)) is not None)


def separate_lines(lines: Iterable[bytes]) -> bytes:
    """Return lines for a file that may currently end in a torn line."""
    return b"".join(b"\n" + checked_line(line) for line in lines)
