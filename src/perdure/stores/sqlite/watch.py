"""Notices that a SQLite file was deleted or replaced while it was open.

SQLite continues with the file it opened, which nobody else can find any more: what is written there
is lost when the process ends. Asking the file system takes 2 to 10 microseconds, too much for each
commit, so it is asked once a second at most: what was written within that second is lost, but the
next call says so.
"""

from pathlib import Path

from perdure.clock import SystemClock
from perdure.errors import StoreError

_SECONDS = 1.0


class FileWatch:
    """Knows which file a path led to when it was first opened."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._clock = SystemClock()
        self._file: tuple[int, int] | None = None
        self._looked_at = 0.0
        self._is_lost = False

    def begin(self) -> None:
        """Take the file that the path leads to now as the right one."""
        self._file = self._found()
        self._looked_at = self._clock.monotonic()

    def check(self) -> None:
        """Raise `StoreError` if the path leads elsewhere, or nowhere."""
        now = self._clock.monotonic()
        if self._file is not None and now - self._looked_at >= _SECONDS:
            self._looked_at = now
            self._is_lost = self._is_lost or self._found() != self._file
        if self._is_lost:
            raise StoreError(
                f"{self._path}: the database file was deleted or replaced while it was open; what "
                "was written since is lost. Close the store and open it again"
            )

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino
