"""The Lua scripts, each one atomic act of the server."""

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files

_RUN = ("run",)
_LEASE = ("run", "content", "lease")
_MERGE = ("run", "merge")


@dataclass(frozen=True, slots=True)
class Script:
    """A script by its name, its text, and the hash that the server knows it by."""

    name: str
    text: str
    sha: str


def _script(name: str, before: tuple[str, ...]) -> Script:
    folder = files("perdure.stores.redis") / "lua"
    parts = [(folder / f"{part}.lua").read_text("utf-8") for part in (*before, name)]
    text = "\n".join(parts)
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = _script("acquire", _LEASE)
APPEND = _script("append", ("steps", *_RUN))
CLAIM = _script("claim", (*_LEASE, "merge"))
COUNT = _script("count", ())
DELETE = _script("delete", _RUN)
DUE = _script("due", _MERGE)
ENQUEUE = _script("enqueue", _RUN)
INBOX = _script("inbox", ())
LIST = _script("list", _MERGE)
LOAD = _script("load", ("content",))
PRUNE = _script("prune", _RUN)
RELEASE = _script("release", _RUN)
RENEW = _script("renew", _RUN)
REPLACE = _script("replace", ())
RIGHTS = _script("rights", ())
SAVE = _script("save", _RUN)
SEND = _script("send", _RUN)
