"""One run as files: the snapshot with its header, the journal, the lease, the inbox.

The header file is replaced whole when the run is created, saved or put to rest, and is the truth
about it. Journal entries and leases count only when they are newer than the header's `epoch` and
`n`: what a crash has left behind says nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from perdure import codec
from perdure.errors import StoreCorrupted
from perdure.filenames import safe_name
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Entry, Message
from perdure.stores._reading import merged, reading
from perdure.stores._timestamps import from_microseconds
from perdure.stores.file.disk import content_of, line_of, read_lines

_SNAPSHOT = b',"snapshot":\n'
_END = b"\n}\n"

Place: TypeAlias = tuple[int, int]


class Header(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """How a run lay when it was last written whole. Times are microseconds since 1970.

    `epoch` and `n` are the place of the write itself. `taken` are messages that lie in the inbox
    file and were taken.
    """

    id: str
    workflow: str | None
    status: RunStatus
    wake_at: int | None
    awaits: tuple[str, ...]
    epoch: int
    n: int
    updated_at: int
    taken: tuple[str, ...] = ()
    checksum: int = 0


class Mark(msgspec.Struct, frozen=True):
    """A lease: its owner until a time; without an owner, the run is free from that time on."""

    owner: str | None
    epoch: int
    until: int
    takeovers: int = 0


class Mail(NamedTuple):
    """A line of the inbox; what is left of a message that was swept out has no name."""

    id: str
    name: str | None
    payload: str
    sent_at: int
    dedup_id: str | None


class Written(NamedTuple):
    """One journal entry."""

    epoch: int
    n: int
    consumes: tuple[str, ...]
    data: msgspec.Raw


_read_header = msgspec.json.Decoder(Header).decode
_read_mark = msgspec.json.Decoder(Mark).decode
_read_mail = msgspec.json.Decoder(Mail).decode
_read_written = msgspec.json.Decoder(list[Written]).decode


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands now: its header, and the lease that was given since, if one was."""

    header: Header
    mark: Mark | None
    mail: Sequence[Mail]

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return self.header.epoch if self.mark is None else self.mark.epoch

    @property
    def is_open(self) -> bool:
        """Whether the newest epoch can be written to: a rest and a release close it."""
        return self.mark is not None and self.mark.owner is not None

    @property
    def status(self) -> RunStatus:
        """A run that was given to somebody is running until its next rest."""
        return self.header.status if self.mark is None else "running"

    @property
    def wake_at(self) -> int | None:
        """When the run wants a worker."""
        if self.mark is not None:
            return self.mark.until
        awaited = (mail.sent_at for mail in self.mail if mail.name in self.header.awaits)
        return min(awaited, default=self.header.wake_at)

    def is_held(self, now: int) -> bool:
        """Tell whether somebody's lease is unexpired."""
        return self.mark is not None and self.mark.owner is not None and self.mark.until > now

    def holds(self, owner: str, epoch: int) -> bool:
        """Tell whether this is the lease that the run was last given with."""
        mark = self.mark
        return mark is not None and mark.owner == owner and mark.epoch == epoch


class RunFiles:
    """The files of one run, found by its id."""

    __slots__ = ("head", "id", "inbox", "journal", "lease", "name")

    def __init__(self, folder: Path, id: str) -> None:
        self.id = id
        self.name = safe_name(id)
        stem = folder / self.name[-2:] / self.name
        self.head = stem.with_suffix(".json")
        self.journal = stem.with_suffix(".journal")
        self.lease = stem.with_suffix(".lease")
        self.inbox = stem.with_suffix(".inbox")

    @property
    def shard(self) -> str:
        """Which of the 256 locks guards the run."""
        return self.name[-2:]

    def standing(self) -> Standing | None:
        """Read how the run stands, without its snapshot; None when there is no run."""
        header = read_header(self.head)
        if header is None:
            return None
        mark = self._mark(header)
        # Mail wakes only a run that nobody has; an owner's every write would else read all of it.
        return Standing(header, mark, self.mail(header) if mark is None else ())

    def whole(self) -> tuple[Header, Snapshot] | None:
        """Read the header and the merged snapshot; None when there is no run."""
        try:
            first, _, rest = self.head.read_bytes().partition(_SNAPSHOT)
        except FileNotFoundError:
            return None
        header = _parse_header(self.head, first)
        data = rest.removesuffix(_END)
        if crc32(data) != header.checksum:
            raise StoreCorrupted(f"{self.head} is damaged; restore it, or delete the run")
        entries = sorted(self.entries(header), key=lambda written: (written.epoch, written.n))
        with reading(self.id):
            parts = (codec.loads(bytes(each)) for each in (data, *(e.data for e in entries)))
            return header, merged(*parts)

    def entries(self, header: Header) -> list[Written]:
        """Read the journal entries that the header's snapshot does not hold."""
        folded = (header.epoch, header.n)
        return [entry for entry in read_journal(self.journal) if entry[:2] > folded]

    def mail(self, header: Header) -> list[Mail]:
        """Read the messages that were not taken, in order."""
        if not self.inbox.exists():
            return []
        taken = {*header.taken, *(id for entry in self.entries(header) for id in entry.consumes)}
        return [
            mail
            for mail in read_inbox(self.inbox)
            if mail.name is not None and mail.id not in taken
        ]

    def _mark(self, header: Header) -> Mark | None:
        mark = read_mark(self.lease)
        if mark is not None:
            return mark if mark.epoch > header.epoch else None
        # A loss of power may take a lease, which is not synced, but not what was written under it.
        newest = max((entry.epoch for entry in self.entries(header)), default=0)
        if newest > header.epoch:
            return Mark(None, newest, header.updated_at)
        return None


def head_content(header: Header, snapshot: bytes) -> bytes:
    """Give the file of a header and its snapshot: one JSON object, the header on the first line."""
    snapshot = snapshot.replace(b"\n", b" ")
    checked = msgspec.structs.replace(header, checksum=crc32(snapshot))
    return msgspec.json.encode(checked)[:-1] + _SNAPSHOT + snapshot + _END


def read_header(path: Path) -> Header | None:
    """Read the header alone."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    return _parse_header(path, line.removesuffix(_SNAPSHOT))


def _parse_header(path: Path, line: bytes) -> Header:
    try:
        return _read_header(line + b"}")
    except msgspec.MsgspecError as error:
        raise StoreCorrupted(f"{path} is damaged; restore it, or delete the run") from error


def mark_content(mark: Mark) -> bytes:
    """Give the file of a lease."""
    return line_of(msgspec.json.encode(mark))


def read_mark(path: Path) -> Mark | None:
    """Read a lease; one that cannot be read says nothing."""
    try:
        content = content_of(path.read_bytes().partition(b"\n")[0])
    except FileNotFoundError:
        return None
    return None if content is None else _read_mark(content)


def journal_line(entries: Iterable[Entry]) -> bytes:
    """Give what one call adds to a journal: one line, so that it is there whole or not at all."""
    parts = (
        b"[%d,%d,%b,%b]" % (entry.epoch, entry.n, msgspec.json.encode(entry.consumes), entry.data)
        for entry in entries
    )
    return line_of(b"[" + b",".join(parts) + b"]")


def read_journal(path: Path) -> list[Written]:
    """Read all entries of a journal, as they were written."""
    return [entry for line in read_lines(path).whole for entry in _read_written(line)]


def mail_line(mail: Mail) -> bytes:
    """Give a message as a line of the inbox."""
    return line_of(msgspec.json.encode(mail))


def read_inbox(path: Path) -> list[Mail]:
    """Read all lines of an inbox."""
    return [_read_mail(line) for line in read_lines(path).whole]


def message_of(mail: Mail) -> Message:
    """Give a message as the contract has it."""
    return Message(mail.id, mail.name or "", mail.payload.encode(), from_microseconds(mail.sent_at))
