"""The Lua scripts; the server executes each atomically."""

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

_RUN = ("run",)
_LEASE = ("run", "content", "lease")
_MESSAGES = ("run", "messages")
_WAKES = ("run", "supports", "merge", "wakes")
_DESCRIBE = ("run", "describe")


@dataclass(frozen=True, slots=True)
class Script:
    """A script: its name, its text, and the hash by which the server knows it."""

    name: str
    text: str
    sha: str


@cache
def for_cluster(script: Script) -> Script:
    """Return a script that first makes sure that the node has all keys it will use."""
    text = script.text.replace("local in_cluster = false", "local in_cluster = true")
    return _with_hash(script.name, text)


def _with_hash(name: str, text: str) -> Script:
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _script(name: str, parts: tuple[str, ...]) -> Script:
    """Return a script with the shared parts before it, which Redis cannot import."""
    folder = files("perdure.stores.redis") / "lua"
    texts = [(folder / f"{part}.lua").read_text("utf-8") for part in (*parts, name)]
    return _with_hash(name, "\n".join(texts))


ACQUIRE = _script("acquire", _LEASE)
APPEND = _script("append", ("steps", *_RUN))
BACKLOG = _script("backlog", _RUN)
CLAIM = _script("claim", (*_LEASE, "supports", "merge", "wakes"))
COUNTS = _script("counts", ())
DELETE = _script("delete", _RUN)
DOCUMENT = _script("document", ())
DOCUMENTS = _script("documents", ())
DUE = _script("due", _WAKES)
ENQUEUE = _script("enqueue", _RUN)
IDS = _script("ids", _DESCRIBE)
INBOX = _script("inbox", ())
LAYOUT = _script("layout", ())
LOAD = _script("load", ("content",))
OWNERS = _script("owners", ())
PERMISSIONS = _script("permissions", ())
PRUNE = _script("prune", _RUN)
QUEUES = _script("queues", _WAKES)
RELEASE = _script("release", _RUN)
RENEW = _script("renew", _RUN)
REPLACE = _script("replace", ())
SAVE = _script("save", _RUN)
SEARCH = _script("search", (*_DESCRIBE, "merge"))
SEND = _script("send", _MESSAGES)
SEND_AND_CLAIM = _script("send_and_claim", (*_LEASE, "messages", "supports"))
SUMMARIES = _script("summaries", _DESCRIBE)
TALLY = _script("tally", _RUN)
UPGRADE = _script("upgrade", _RUN)
