"""A log of the leases on permits that several processes write, and what it shows about a limit."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from perdure.clock import SystemClock
from perdure.store import Grant, Lease, Store, capabilities, require_queues

_PERMIT = "~permit:"

What = Literal["calling", "granted", "renewed", "called", "returning", "returned"]


class Line(msgspec.Struct):
    """What happened to a lease, at which time of the store.

    `release` returns no time: its lines have this machine's time before and after the call.
    """

    what: What
    id: str
    epoch: int
    pid: int
    at: datetime
    expires: datetime


class LeaseLog:
    """A store that logs the leases of permits, a line each.

    The lines of a call are one atomic append, so processes can share the file. A process that is
    killed during a call may have a lease that is not in the log; its last line is "calling".
    """

    def __init__(self, store: Store, path: str) -> None:
        self.capabilities = capabilities(store)
        self._store = require_queues(store)
        self._clock = SystemClock()
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, *arguments: Any, **options: Any) -> Sequence[Grant]:
        self._write([self._mark("calling")])
        grants = await self._store.claim(*arguments, **options)
        lines = [_line("granted", grant.lease, grant.now) for grant in grants]
        self._write([*lines, self._mark("called")])
        return grants

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        self._write([self._mark("calling")])
        renewed = await self._store.renew(leases, ttl)
        lines = [_line("renewed", each, each.expires_at - ttl) for each in renewed if each]
        self._write([*lines, self._mark("called")])
        return renewed

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        # Before the call: another process may be granted the permit before this one has the answer.
        self._write(_line("returning", lease, self._clock.now()) for lease in leases)
        await self._store.release(leases, wake_at=wake_at)
        self._write(_line("returned", lease, self._clock.now()) for lease in leases)

    def _mark(self, what: What) -> Line:
        now = self._clock.now()
        return Line(what, _PERMIT, 0, os.getpid(), now, now)

    def _write(self, lines: Iterable[Line]) -> None:
        permit_lines = [line for line in lines if line.id.startswith(_PERMIT)]
        if permit_lines:
            os.write(
                self._log, b"".join(msgspec.json.encode(line) + b"\n" for line in permit_lines)
            )


def _line(what: What, lease: Lease, at: datetime) -> Line:
    # MongoDB's driver returns integers of a class of its own.
    return Line(what, lease.id, int(lease.epoch), os.getpid(), at, lease.expires_at)


class Held(msgspec.Struct):
    """A lease on a permit: from its grant until it was given up or expired."""

    permit: str
    epoch: int
    pid: int
    begin: datetime
    expires: datetime
    given_up: datetime | None = None
    is_returned: bool = False

    @property
    def end(self) -> datetime:
        return self.expires if self.given_up is None else min(self.expires, self.given_up)

    @property
    def span(self) -> tuple[datetime, datetime]:
        return self.begin, self.end


def read_leases(log: Path) -> list[Held]:
    """Return the leases of a log, in the order of their grants."""
    leases: dict[tuple[str, int], Held] = {}
    for line in _lines(log):
        key = line.id, line.epoch
        if line.what == "granted":
            leases[key] = Held(line.id, line.epoch, line.pid, line.at, line.expires)
        elif key in leases:
            _continue(leases[key], line)
    return sorted(leases.values(), key=lambda lease: lease.begin)


def processes_in_a_call(log: Path) -> set[int]:
    """Return the ids of the processes whose last call has not returned."""
    calls: Counter[int] = Counter()
    for line in _lines(log):
        calls[line.pid] += {"calling": 1, "called": -1}.get(line.what, 0)
    return {pid for pid, open_calls in calls.items() if open_calls}


def _lines(log: Path) -> list[Line]:
    return [msgspec.json.decode(text, type=Line) for text in log.read_bytes().splitlines()]


def _continue(lease: Held, line: Line) -> None:
    match line.what:
        case "renewed":
            lease.expires = max(lease.expires, line.expires)
        case "returning":
            lease.given_up = line.at
        case "returned":
            lease.is_returned = True


def longest_until_back(
    leases: Sequence[Held], ttl: timedelta, until: datetime, unseen: Sequence[datetime] = ()
) -> timedelta:
    """Return for how long at most a permit was gone after its holder last renewed it, of those that
    the holder did not return. One that was not granted again was gone until `until`.

    At the times `unseen` processes died during a call, which may have granted or renewed it.
    """
    by_permit: defaultdict[str, list[Held]] = defaultdict(list)
    for lease in leases:
        if lease.begin < until:
            by_permit[lease.permit].append(lease)
    durations = [timedelta(0)]
    for permits in by_permit.values():
        begins = [*(lease.begin for lease in permits[1:]), until]
        for each, back in zip(permits, begins, strict=True):
            if not each.is_returned:
                deaths = (death for death in unseen if each.begin < death < back)
                durations.append(back - max([each.expires - ttl, *deaths]))
    return max(durations)


def share_held(
    spans: Iterable[tuple[datetime, datetime]], n: int, window: tuple[datetime, datetime]
) -> float:
    """Return the share of `n` slots that was held, on average over the window."""
    first, last = window
    times = (min(end, last) - max(begin, first) for begin, end in spans)
    total = sum((time for time in times if time > timedelta(0)), timedelta(0))
    return total / (n * (last - first))
