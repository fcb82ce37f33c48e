"""The directory of a file store."""

from pathlib import Path

from perdure.errors import StoreCorrupted
from perdure.stores._layout import check_layout
from perdure.stores.file.disk import Disk, lock_file
from perdure.stores.file.inbox import KnownInboxes
from perdure.stores.file.journal import KnownJournals
from perdure.stores.file.notify import NotifyFile

# Layout 1 had no number: its heads have no queue, version, tags or summary, and there is no
# `queues` directory. It is read as it is, with default values.
_LAYOUT = 2


class Folder:
    """The directory of a store, with the parts that its runs share."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self.runs = root / "runs"
        self.wakes = root / "wakes"
        self.queues = root / "queues"
        self.documents = root / "documents"
        self.locks = root / "locks"
        self.gate = self.locks / "gate"
        self.journals = KnownJournals()
        self.inboxes = KnownInboxes()
        self._layout = root / "layout"
        self.notifications = NotifyFile(root / "notifications")
        self._epoch = root / "epoch"

    def create(self) -> None:
        """Create the directory if necessary; raise if a newer perdure has written to it."""
        self.disk.make_directory(self.locks)
        with lock_file(self.locks / "layout"):
            number = self._layout_number()
            check_layout(f"{self.root}", number, _LAYOUT, alternative="directory")
            if number < _LAYOUT:
                self.disk.replace(self._layout, b"%d" % _LAYOUT)
        for directory in (self.runs, self.wakes, self.queues):
            self.disk.make_directory(directory)

    def _layout_number(self) -> int:
        if not self._layout.exists():
            return 1
        try:
            return int(self._layout.read_bytes())
        except ValueError as error:
            raise StoreCorrupted(
                f"{self._layout} is damaged: it should contain a number"
            ) from error

    def next_epoch(self, now: int) -> int:
        """Return a number that was never used before in this directory.

        The numbers follow the clock, so none is repeated even if a power loss erases the last ones.
        """
        with lock_file(self._epoch):
            try:
                last = int(self._epoch.read_bytes() or b"0")
            except ValueError:
                last = 0
            epoch = max(last + 1, now)
            self.disk.overwrite(self._epoch, b"%d" % epoch)
        return epoch
