"""The keys of runs, by shard; the shards are spread evenly over the slots of a cluster."""

from binascii import crc_hqx
from collections.abc import Sequence
from itertools import count
from zlib import crc32

from perdure.errors import InvalidArgument
from perdure.validation import check_id

SHARDS = 16
"""How many parts the runs are divided into. Never change it: keys of stored runs depend on it."""

LAYOUT = 2
"""The number of the layout of keys, which is a part of every key since the second."""

_SLOTS = 16384


def slot_of(key: bytes) -> int:
    """Return the cluster slot of a key, determined by its first braces unless they are empty."""
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

    A run, everything that belongs to it, and the indexes that find it have the same hash tag, so
    that a script can change them together, even on a cluster. An id may contain braces, because
    only the first ones in a key count.
    """

    def __init__(self, namespace: str) -> None:
        check_id(namespace, "namespace")
        if "{" in namespace or "}" in namespace:
            raise InvalidArgument("namespace", namespace, "a string without braces")
        self.channel = f"{namespace}:notifications".encode()
        first_layout = [f"{namespace}:{{{tag}}}:".encode() for tag in _TAGS]
        self._shards = [shard + b"%d:" % LAYOUT for shard in first_layout]
        self.marks: Sequence[bytes] = [shard + b"sequence" for shard in first_layout]
        """The key of each shard that has the number of its layout."""
        self.probes = [self._shards[0] + b"probe:1", self._shards[0] + b"probe:2"]

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

    def ids(self, shard: int) -> bytes:
        """Return the key of a shard's ids."""
        return self._shards[shard] + b"ids"

    def lists(self, shard: int) -> bytes:
        """Return the key of the names of a shard's lists."""
        return self._shards[shard] + b"lists"

    def list(self, shard: int, name: bytes) -> bytes:
        """Return the key of a list of a shard."""
        return self._shards[shard] + b"list:" + name

    def wakes(self, shard: int) -> bytes:
        """Return the key of the names of a shard's wake sets."""
        return self._shards[shard] + b"wakes"

    def wake(self, shard: int, name: bytes) -> bytes:
        """Return the key of a wake set of a shard."""
        return self._shards[shard] + b"wake:" + name

    def _of(self, kind: bytes, id: str) -> bytes:
        name = id.encode()
        return self._shards[shard_of(name)] + kind + name
