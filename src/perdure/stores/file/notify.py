"""Notifications between processes that share a directory, through a file that grows.

An operation that makes a run due appends a byte after writing the run. The size of the file is a
reliable signal, unlike its timestamp: two writes within one tick of the file system's clock have
the same time.
"""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from perdure.stores._watching import Look
from perdure.stores.file.disk import open_file

logger = logging.getLogger(__name__)

# The file is then truncated, which is a change of size too.
_MAX_SIZE = 64 * 1024


class NotifyFile:
    """Sends and notices notifications.

    Nothing depends on the file, so it is not synced. If a process dies between writing a run and
    sending the notification, workers find the run when they poll.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self) -> None:
        """Notify all processes that a run became due."""
        try:
            with open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
                if os.fstat(descriptor).st_size >= _MAX_SIZE:
                    os.ftruncate(descriptor, 0)
                os.write(descriptor, b".")
        except OSError as error:
            # The run is written, so the operation has succeeded.
            logger.warning("%s: no notification sent (%s); polling continues", self._path, error)

    @contextmanager
    def watching(self) -> Generator[Look, None, None]:
        """Yield a function that returns whether anything was sent since its previous call."""
        version: tuple[int, int] | None = None

        def look() -> bool:
            nonlocal version
            previous, version = version, self._version()
            return version != previous

        yield look

    def _version(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size
