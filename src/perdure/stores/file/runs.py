"""What the file store does to its runs, as functions that block: writing them and reading them.

A run's shard lock is held while its files are read or changed, and the gate is shared by whatever
writes a wake line and then the run. Locks are taken in one order: gate, shard, epochs.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from perdure.snapshot import Snapshot, is_over
from perdure.store import Entry, Rest, Verdict
from perdure.stores._scan import Line
from perdure.stores._timestamps import to_microseconds
from perdure.stores.file.catalog import Catalog
from perdure.stores.file.disk import Disk, locked
from perdure.stores.file.journal import Journals, JournalWriter
from perdure.stores.file.layout import (
    Header,
    Mail,
    Place,
    RunFiles,
    Standing,
    head_content,
    mail_line,
    read_header,
    read_inbox,
)
from perdure.stores.file.wakes import Wake, Wakes


class OfRun(Protocol):
    """Something that a run is asked for, or told."""

    @property
    def id(self) -> str:
        """The run's id."""
        ...


T = TypeVar("T", bound=OfRun)
R = TypeVar("R")

_GATE = "gate"
_THREADS = 8


class Shelf:
    """The runs of a directory whose ids begin with `prefix`. Times are microseconds since 1970."""

    def __init__(self, root: Path, disk: Disk, prefix: str) -> None:
        self.runs = root / "runs"
        self.disk = disk
        self.prefix = prefix
        self.wakes = Wakes(disk, root / "wakes")
        self._root = root
        self._locks = root / "locks"
        self._epochs = root / "epoch"
        self._journals = Journals()
        self._catalog = Catalog(self.runs)
        self._is_open = False
        self._opening = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="perdure-file-run")

    def open(self) -> None:
        """Make the directories, once; after a failure they are tried again."""
        with self._opening:
            if not self._is_open:
                for directory in (self.runs, self._locks, self._root / "wakes"):
                    self.disk.make_directory(directory)
                self._is_open = True

    def close(self) -> None:
        """End the threads that deal with many runs at once."""
        self._threads.shutdown()

    def by_run(self, deal: Callable[[list[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
        """Deal with each run's items in order, with several runs at once, and answer in order.

        A disk syncs many files in the time that it takes for one.
        """
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(item.id, []).append(item)
        if len(groups) == 1:
            return list(deal(list(items)))
        futures = {id: self._threads.submit(deal, group) for id, group in groups.items()}
        # Also after a failure nothing may go on behind the caller, who holds the gate.
        wait(futures.values())
        answers = {id: iter(future.result()) for id, future in futures.items()}
        return [next(answers[item.id]) for item in items]

    def files(self, id: str) -> RunFiles:
        """Give the files of a run by its id without the prefix."""
        return RunFiles(self.runs, self.prefix + id)

    def guard(self, files: RunFiles, *, shared: bool = False) -> AbstractContextManager[None]:
        """Hold a run against others; shared by those who only read."""
        return locked(self._locks / files.shard, shared=shared)

    def gate(self) -> AbstractContextManager[None]:
        """Hold off those who sweep wake lines, until the run is written that a line tells of."""
        return locked(self.gate_path, shared=True)

    @property
    def gate_path(self) -> Path:
        """The lock that is shared while a run is written."""
        return self._locks / _GATE

    def next_epoch(self, now: int) -> int:
        """Give a number that was never given before in this directory.

        It follows the clock, so that also a loss of power that takes the last ones repeats none.
        """
        with locked(self._epochs):
            try:
                last = int(self._epochs.read_bytes() or b"0")
            except ValueError:
                last = 0
            epoch = max(last + 1, now)
            self.disk.overwrite(self._epochs, b"%d" % epoch)
        return epoch

    def save(self, id: str, data: bytes, workflow: str | None, rest: Rest, now: int) -> None:
        """Replace a whole run."""
        files = self.files(id)
        with self.gate(), JournalWriter(self.disk, self._journals) as journals:
            if rest.wake_at is not None:
                self.wakes.add([Wake(to_microseconds(rest.wake_at), files.id, workflow)])
            with self.guard(files):
                standing = files.standing()
                if standing is None:
                    self.clear(files)
                place = (self.next_epoch(now), 0)
                before = None if standing is None else standing.header
                self._lay(files, journals, before, place, data, rest, (), workflow, now)

    def load(self, id: str) -> Snapshot | None:
        """Read the merged snapshot."""
        files = self.files(id)
        with self.guard(files, shared=True):
            whole = files.whole()
        return None if whole is None else whole[1]

    def delete(self, id: str) -> bool:
        """Remove a run; tell whether there was one."""
        files = self.files(id)
        with self.guard(files):
            return self._delete(files)

    def prune(self, id: str, before: int) -> bool:
        """Remove a run if it is still over and was last written before a time."""
        files = self.files(id)
        with self.guard(files):
            standing = files.standing()
            if standing is None or not is_over(standing.status):
                return False
            return standing.header.updated_at < before and self._delete(files)

    def _delete(self, files: RunFiles) -> bool:
        there = self.disk.remove(files.head)
        if there:
            self.disk.sync_directory(files.head.parent)
        self.clear(files)
        return there

    def lines(self, prefix: str) -> list[Line]:
        """Give all runs whose stored ids begin with `prefix`, in no order."""
        return self._catalog.lines(prefix)

    def clear(self, files: RunFiles) -> None:
        """Remove what belongs to a run that is not there: a crash may have left it behind."""
        self._journals.forget(files.name)
        for path in (files.lease, files.journal, files.inbox):
            self.disk.remove(path)

    def append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        """Write the entries of many runs, each run's journal synced once."""
        with self.gate():
            self.announce(
                (self.files(entry.id), to_microseconds(entry.rest.wake_at))
                for entry in entries
                if entry.rest is not None and entry.rest.wake_at is not None
            )
            return self.by_run(lambda mine: self._append(mine, now), entries)

    def _append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        files = self.files(entries[0].id)
        with JournalWriter(self.disk, self._journals) as journals:
            with self.guard(files):
                verdicts = self._write(files, journals, entries, now)
            # Whoever gets the lock now and reads what is not synced yet, syncs it with their own.
            journals.sync()
        return verdicts

    def _write(
        self, files: RunFiles, journals: JournalWriter, entries: Sequence[Entry], now: int
    ) -> list[Verdict]:
        standing = files.standing()
        known: Collection[Place] = () if standing is None else journals.places(files)
        fresh: dict[Place, Entry] = {}
        verdicts: list[Verdict] = []
        for entry in entries:
            place = (entry.epoch, entry.n)
            verdict = _verdict(standing, place, is_known=place in known or place in fresh)
            if standing is not None and verdict is None:
                fresh[place] = entry
                if entry.rest is not None:
                    consumes = [id for each in fresh.values() for id in each.consumes]
                    header = standing.header
                    standing = self._rest(files, journals, header, entry, entry.rest, consumes, now)
                    known = ()
                    fresh = {}
            verdicts.append(verdict or Verdict.ACCEPTED)
        if fresh:
            journals.add(files, fresh.values())
        return verdicts

    def _rest(
        self,
        files: RunFiles,
        journals: JournalWriter,
        before: Header,
        entry: Entry,
        rest: Rest,
        consumes: Sequence[str],
        now: int,
    ) -> Standing | None:
        """Put a run to rest and return how it stands, or None when it is deleted."""
        if rest.delete:
            # The head first: without its journal it would tell of less than was accepted.
            self._delete(files)
            journals.drop(files)
            return None
        place = (entry.epoch, entry.n)
        header = self._lay(
            files, journals, before, place, entry.data, rest, consumes, before.workflow, now
        )
        return Standing(header, None, ())

    def announce(self, wakes: Iterable[tuple[RunFiles, int]]) -> None:
        """Write the wake lines of runs, under the names of their workflows."""
        headers = ((read_header(files.head), wake_at) for files, wake_at in wakes)
        self.wakes.add(
            Wake(wake_at, header.id, header.workflow)
            for header, wake_at in headers
            if header is not None
        )

    def _lay(
        self,
        files: RunFiles,
        journals: JournalWriter,
        before: Header | None,
        place: Place,
        data: bytes,
        rest: Rest,
        consumes: Sequence[str],
        workflow: str | None,
        now: int,
    ) -> Header:
        """Put a run to rest: replacing the header is the one act that counts."""
        inbox = read_inbox(files.inbox)
        taken = {*consumes}
        if before is not None:
            taken.update(before.taken)
            taken.update(id for entry in files.entries(before) for id in entry.consumes)
        if any(mail.name in rest.awaits and mail.id not in taken for mail in inbox):
            self.wakes.add([Wake(now, files.id, workflow)])
        header = Header(
            id=files.id,
            workflow=workflow,
            status=rest.status,
            wake_at=None if rest.wake_at is None else to_microseconds(rest.wake_at),
            awaits=rest.awaits,
            epoch=place[0],
            n=place[1],
            updated_at=now,
            taken=tuple(mail.id for mail in inbox if mail.id in taken),
        )
        self.disk.replace(files.head, head_content(header, data))
        # What follows is behind the header's place and says nothing any more, swept out or not.
        journals.drop(files)
        self.disk.remove(files.lease)
        if header.taken:
            self._sweep_inbox(files, inbox, taken)
        return header

    def _sweep_inbox(self, files: RunFiles, inbox: Sequence[Mail], taken: set[str]) -> None:
        # Of a message that was taken, only the id that makes a second one a duplicate is kept.
        kept = (
            Mail(mail.id, None, "", 0, mail.dedup_id) if mail.id in taken else mail
            for mail in inbox
            if mail.id not in taken or mail.dedup_id is not None
        )
        self.disk.replace(files.inbox, b"".join(map(mail_line, kept)))


def _verdict(standing: Standing | None, place: Place, *, is_known: bool) -> Verdict | None:
    """Return the verdict on an entry; None when it is accepted and has to be written."""
    if standing is None:
        return Verdict.UNKNOWN
    if place[0] != standing.epoch:
        return Verdict.FENCED
    if is_known or place <= (standing.header.epoch, standing.header.n):
        return Verdict.ACCEPTED
    return None if standing.is_open else Verdict.FENCED
