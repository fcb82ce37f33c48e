"""The keys of runs, by shard; the shards are spread evenly over the slots of a cluster."""

from binascii import crc_hqx
from itertools import count
from typing import get_args
from zlib import crc32

from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus
from perdure.validation import check_id

SHARDS = 16
"""How many parts the runs are divided into. Never change it: keys of stored runs depend on it."""

STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)

_SLOTS = 16384


def slot_of(key: bytes) -> int:
    """Return the cluster slot of a key: that of its first braces, unless they are empty."""
    _, _, rest = key.partition(b"{")
    tag, brace, _ = rest.partition(b"}")
    return crc_hqx(tag if tag and brace else key, 0) % _SLOTS


def shard_of(id: bytes) -> int:
    """Return the number of the shard of a run, given its stored id."""
    return crc32(id) % SHARDS


def _tag(shard: int) -> str:
    """Return a hash tag whose slot is in the shard's share of all slots."""
    tags = (f"{shard:x}-{number}" for number in count())
    return next(tag for tag in tags if slot_of(tag.encode()) * SHARDS // _SLOTS == shard)


_TAGS = tuple(map(_tag, range(SHARDS)))


class Keys:
    """The keys of one namespace.

    A run, what belongs to it and the indexes that find it have one hash tag, so that a script can
    change them together, also on a cluster. An id may contain braces: only a key's first count.
    """

    def __init__(self, namespace: str) -> None:
        check_id(namespace, "namespace")
        if "{" in namespace or "}" in namespace:
            raise InvalidArgument("namespace", namespace, "a string without braces")
        self.channel = f"{namespace}:notifications".encode()
        self._shards = [f"{namespace}:{{{tag}}}:".encode() for tag in _TAGS]
        self.probe = self._shards[0] + b"probe"

    def run(self, id: str) -> bytes:
        """Return the key of a run."""
        return self._of(b"run:", id)

    def inbox(self, id: str) -> bytes:
        """Return the key of a run's inbox."""
        return self._of(b"inbox:", id)

    def document(self, name: str) -> bytes:
        """Return the key of a document."""
        return self._of(b"document:", name)

    def documents(self, shard: int) -> bytes:
        """Return the key of the names of a shard's documents."""
        return self._shards[shard] + b"documents"

    def workflows(self, shard: int) -> bytes:
        """Return the key of the workflows that have runs with a wake time in a shard."""
        return self._shards[shard] + b"workflows"

    def list(self, shard: int, status: RunStatus) -> bytes:
        """Return the key of the list of a shard's runs of one status."""
        return self._shards[shard] + b"list:" + status.encode()

    def _of(self, kind: bytes, id: str) -> bytes:
        name = id.encode()
        return self._shards[shard_of(name)] + kind + name
