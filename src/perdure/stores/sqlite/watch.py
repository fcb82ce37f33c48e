"""Detect that a SQLite file was deleted or replaced while it was open.

SQLite continues to use the file it opened, even if the path no longer leads to it: all writes are
lost when the process ends. A `stat` takes 2 to 10 microseconds, too much for each commit, so the
file is checked at most once a second: writes within that second are lost, but the next call raises
an error.
"""

from pathlib import Path

from perdure.clock import SystemClock
from perdure.errors import StoreError

_INTERVAL_SECONDS = 1.0


class FileWatch:
    """Remembers which file a path referred to when it was first opened."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._clock = SystemClock()
        self._file: tuple[int, int] | None = None
        self._checked_at = 0.0
        self._is_lost = False

    def begin(self) -> None:
        """Remember the file that the path currently refers to."""
        self._file = self._identity()
        self._checked_at = self._clock.monotonic()

    def check(self) -> None:
        """Raise `StoreError` if the path refers to another file, or to none."""
        now = self._clock.monotonic()
        if self._file is not None and now - self._checked_at >= _INTERVAL_SECONDS:
            self._checked_at = now
            self._is_lost = self._is_lost or self._identity() != self._file
        if self._is_lost:
            raise StoreError(
                f"{self._path}: the database file was deleted or replaced while it was open; "
                "writes since then are lost. Close the store and open it again"
            )

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        return stat.st_dev, stat.st_ino
