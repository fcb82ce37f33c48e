"""Where runs lie: keys by shard, and shards spread evenly over the slots of a cluster."""

from binascii import crc_hqx
from itertools import count
from typing import get_args
from zlib import crc32

from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus
from perdure.validation import check_id

SHARDS = 16
"""How many parts the runs are divided into. Runs that are stored lie by it: it never changes."""

STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)

_SLOTS = 16384


def _tag(shard: int) -> str:
    """Give a hash tag whose slot lies in the shard's share of all slots."""
    tags = (f"{shard:x}-{number}" for number in count())
    return next(tag for tag in tags if slot_of(tag.encode()) * SHARDS // _SLOTS == shard)


def slot_of(key: bytes) -> int:
    """Give the slot of a cluster that a key lies in: that of its first braces, if they hold any."""
    _, _, rest = key.partition(b"{")
    tag, brace, _ = rest.partition(b"}")
    return crc_hqx(tag if tag and brace else key, 0) % _SLOTS


_TAGS = tuple(map(_tag, range(SHARDS)))


def shard_of(id: bytes) -> int:
    """Give the number of the shard that a run of this stored id lies in."""
    return crc32(id) % SHARDS


class Keys:
    """The keys of one namespace.

    A run, what belongs to it and the indexes that find it have one hash tag, so that a script can
    change them all at once, also on a cluster. An id may hold braces: only a key's first count.
    """

    def __init__(self, namespace: str) -> None:
        check_id(namespace, "namespace")
        if "{" in namespace or "}" in namespace:
            raise InvalidArgument("namespace", namespace, "a text without braces")
        self.channel = f"{namespace}:hints".encode()
        self._shards = [f"{namespace}:{{{tag}}}:".encode() for tag in _TAGS]

    def run(self, id: str) -> bytes:
        """Give the key of a run."""
        return self._of(b"run:", id)

    def mail(self, id: str) -> bytes:
        """Give the key of a run's inbox."""
        return self._of(b"mail:", id)

    @property
    def trial(self) -> bytes:
        """Give a key that holds nothing for long."""
        return self._shards[0] + b"trial"

    def lanes(self, shard: int) -> bytes:
        """Give the key of the lanes of a shard's wake times."""
        return self._shards[shard] + b"lanes"

    def list(self, shard: int, status: RunStatus) -> bytes:
        """Give the key of the list of a shard's runs of one status."""
        return self._shards[shard] + b"list:" + status.encode()

    def _of(self, kind: bytes, id: str) -> bytes:
        name = id.encode()
        return self._shards[shard_of(name)] + kind + name
