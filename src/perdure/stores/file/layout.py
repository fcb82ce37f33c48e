"""The formats of a run's files: head with snapshot, lease, journal, inbox.

The head file is replaced whole when the run is created, saved or settled. A lease or a journal
entry counts only if its place is above the head's, so older ones that a crash left behind are
ignored.
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from perdure.errors import StoreCorrupted
from perdure.filenames import safe_name
from perdure.store import Entry
from perdure.stores._documents.records import Head
from perdure.stores.file.disk import checked_line, line_content, read_lines

_SNAPSHOT = b',"snapshot":\n'
_END = b"\n}\n"


class FileHead(Head, frozen=True, kw_only=True):
    """A head, with the checksum of the snapshot behind it."""

    checksum: int = 0


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease: its owner and expiry. Without an owner, the run is available from that time on."""

    owner: str | None
    epoch: int
    until: int
    takeovers: int = 0


class JournalEntry(NamedTuple):
    """One journal entry."""

    epoch: int
    n: int
    consumes: tuple[str, ...]
    data: msgspec.Raw


class InboxLine(NamedTuple):
    """A message; a consumed message that is kept for its `dedup_id` has no name."""

    id: str
    name: str | None
    payload: str
    sent_at: int
    dedup_id: str | None


_decode_head = msgspec.json.Decoder(FileHead).decode
_decode_lease = msgspec.json.Decoder(LeaseRecord).decode
_decode_entries = msgspec.json.Decoder(list[JournalEntry]).decode
_decode_message = msgspec.json.Decoder(InboxLine).decode


class RunPaths:
    """The paths of one run's files, computed on first use."""

    def __init__(self, directory: Path, id: str) -> None:
        self.name = safe_name(id)
        self._directory = directory

    @cached_property
    def head(self) -> Path:
        return self._path("json")

    @cached_property
    def journal(self) -> Path:
        return self._path("journal")

    @cached_property
    def lease(self) -> Path:
        return self._path("lease")

    @cached_property
    def inbox(self) -> Path:
        return self._path("inbox")

    def _path(self, kind: str) -> Path:
        return self._directory / self.shard / f"{self.name}.{kind}"

    @property
    def shard(self) -> str:
        """Which of 256 directories the run is in, and which of 256 locks guards it."""
        return self.name[-2:]


def encode_head(head: FileHead, snapshot: bytes) -> bytes:
    """Encode a head and its snapshot as a file: one JSON object, the head on the first line."""
    snapshot = snapshot.replace(b"\n", b" ")
    head_with_checksum = msgspec.structs.replace(head, checksum=crc32(snapshot))
    return msgspec.json.encode(head_with_checksum)[:-1] + _SNAPSHOT + snapshot + _END


def read_head(path: Path) -> FileHead | None:
    """Read the head alone."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    return _parse_head(path, line.removesuffix(_SNAPSHOT))


def read_snapshot(path: Path) -> tuple[FileHead, bytes] | None:
    """Read the head and its snapshot."""
    try:
        first, _, rest = path.read_bytes().partition(_SNAPSHOT)
    except FileNotFoundError:
        return None
    head = _parse_head(path, first)
    data = rest.removesuffix(_END)
    if crc32(data) != head.checksum:
        raise StoreCorrupted(f"{path} is damaged; restore it, or delete the run")
    return head, data


def _parse_head(path: Path, line: bytes) -> FileHead:
    try:
        return _decode_head(line + b"}")
    except msgspec.MsgspecError as error:
        raise StoreCorrupted(f"{path} is damaged; restore it, or delete the run") from error


def encode_lease(lease: LeaseRecord) -> bytes:
    """Encode a lease as a file."""
    return checked_line(msgspec.json.encode(lease))


def read_lease(path: Path) -> LeaseRecord | None:
    """Read a lease; return `None` if it is missing or damaged."""
    try:
        content = line_content(path.read_bytes().partition(b"\n")[0])
    except FileNotFoundError:
        return None
    return None if content is None else _decode_lease(content)


def encode_entries(entries: Iterable[Entry]) -> bytes:
    """Encode the journal entries of one call as one line, which a crash leaves whole or torn."""
    parts = (
        b"[%d,%d,%b,%b]" % (entry.epoch, entry.n, msgspec.json.encode(entry.consumes), entry.data)
        for entry in entries
    )
    return checked_line(b"[" + b",".join(parts) + b"]")


def read_journal(path: Path) -> list[JournalEntry]:
    """Read all entries of a journal, in the order they were written."""
    return [entry for line in read_lines(path).complete for entry in _decode_entries(line)]


def encode_message(message: InboxLine) -> bytes:
    """Encode a message as a line of the inbox."""
    return checked_line(msgspec.json.encode(message))


def read_inbox(path: Path) -> list[InboxLine]:
    """Read all lines of an inbox."""
    return decode_messages(read_lines(path).complete)


def decode_messages(lines: Iterable[bytes]) -> list[InboxLine]:
    """Return the messages in lines of an inbox."""
    return [_decode_message(line) for line in lines]
