"""The directory of a file store."""

from pathlib import Path

from perdure.stores.file.disk import Disk, locked
from perdure.stores.file.journal import KnownJournals
from perdure.stores.file.notify import NotifyFile


class Folder:
    """The directory of a store, and what its runs share."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self.runs = root / "runs"
        self.wakes = root / "wakes"
        self.documents = root / "documents"
        self.locks = root / "locks"
        self.gate = self.locks / "gate"
        self.journals = KnownJournals()
        self.notifications = NotifyFile(root / "notifications")
        self._epoch = root / "epoch"

    def create(self) -> None:
        """Create the directories that do not exist."""
        for directory in (self.runs, self.wakes, self.locks):
            self.disk.make_directory(directory)

    def next_epoch(self, now: int) -> int:
        """Return a number that was never returned before in this directory.

        It follows the clock, so none is repeated even if a power loss takes the last ones.
        """
        with locked(self._epoch):
            try:
                last = int(self._epoch.read_bytes() or b"0")
            except ValueError:
                last = 0
            epoch = max(last + 1, now)
            self.disk.overwrite(self._epoch, b"%d" % epoch)
        return epoch
