"""Owner ids: which process owns a run, and whether that process still exists.

An owner id is `host/boot/namespace/pid/start/random`. The boot id and the inode of the pid
namespace determine where the pid can be looked up; the start time distinguishes a process from a
later one with the same pid. So a killed process on the same machine is recognized at once, and its
runs need not wait for their leases to expire.

If anything is uncertain, the owner counts as alive, and the lease decides: an owner on another
machine or in another container, a platform without these facts, a process that is only stopped.
"""

import os
import socket
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

_PROC = Path("/proc")
_DEAD_STATES = ("Z", "X")
_numbers = count(1)


class Process(NamedTuple):
    """The identity of a process. `start` is in clock ticks since boot."""

    host: str
    boot: str
    namespace: str
    pid: str
    start: str


def new_owner(random: Random) -> str:
    """Return a unique owner id."""
    # The number distinguishes owners of one process, even if two generators have the same seed.
    unique = f"{random.getrandbits(64):016x}-{next(_numbers)}"
    # The pid is read each time, because a forked process has a different one.
    return f"{_prefix(os.getpid())}{unique}"


def is_gone(owner: str) -> bool:
    """Return whether the process that has this owner id certainly no longer exists."""
    process, this_process = process_of(owner), _this_process(os.getpid())
    if process is None or not all(process) or process[:3] != this_process[:3]:
        return False
    if not process.pid.isdecimal():
        return False
    try:
        # Not through /proc, which may be hidden from other users. Signal 0 only checks for
        # existence.
        os.kill(int(process.pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    stat = _stat(process.pid)
    # A zombie keeps its pid until its parent has waited for it.
    return stat is not None and (stat[0] in _DEAD_STATES or stat[1] != process.start)


def process_of(owner: str) -> Process | None:
    """Return the process in an owner id, or `None` if the id is not from `new_owner`.

    Fields that the platform does not provide are empty.
    """
    parts = owner.split("/")
    return Process(*parts[:5]) if len(parts) == 6 and parts[5] else None


def describe_owner(owner: str) -> str:
    """Describe an owner in messages: its process and host, if the id has them."""
    process = process_of(owner)
    return f"owner {owner!r}" if process is None else f"process {process.pid} on {process.host}"


@cache
def _prefix(pid: int) -> str:
    return "/".join((*_this_process(pid), ""))


@cache
def _this_process(pid: int) -> Process:
    stat = _stat(str(pid))
    host = socket.gethostname().replace("/", "-")
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        namespace = str((_PROC / "self" / "ns" / "pid").stat().st_ino)
    except OSError:
        boot = namespace = ""
    return Process(host, boot, namespace, str(pid), "" if stat is None else stat[1])


def _stat(pid: str) -> tuple[str, str] | None:
    """Return the state and the start time of a process, or `None` if they cannot be read."""
    try:
        text = (_PROC / pid / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The process name, in parentheses, may contain anything; the fields after it are separated by
    # spaces.
    fields = text.rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None
