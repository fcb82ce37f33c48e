"""Finding runs that want a worker, through their wake lines."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Generic

import msgspec

from perdure.errors import StoreCorrupted
from perdure.stores._documents.records import H, Wake
from perdure.stores._documents.runs import unconsumed
from perdure.stores._documents.storage import Storage, StoredRun
from perdure.stores._reading import SETBACK, reading

logger = logging.getLogger(__name__)

_SETBACK = SETBACK // timedelta(microseconds=1)


class DueSearch(Generic[H]):
    """The runs that want a worker at a time, in the order of their wake lines.

    A line only says where to look: the run's head tells when it wants a worker, and of which
    workflow it is.
    """

    def __init__(
        self,
        storage: Storage[H],
        prefix: str,
        workflows: Sequence[str] | None,
        at: int,
        now: int,
    ) -> None:
        self.scan = storage.wakes.scan(at, now)
        self._storage = storage
        self._prefix = prefix
        self._workflows = None if workflows is None else {*workflows}
        self._at = at
        self._latest = max(at, now)
        self._read: set[str] = set()
        self._found: list[Wake] = []

    async def next(self, count: int) -> list[Wake]:
        """Return up to `count` further runs with their wake times; none at the end."""
        while (missing := count - len(self._found)) > 0:
            lines = await self.scan.next(max(missing, self._storage.read_ahead))
            if not lines:
                break
            self._found += await self._due(lines)
        found, self._found = self._found[:count], self._found[count:]
        return found

    async def _due(self, lines: Sequence[Wake]) -> list[Wake]:
        due: list[Wake] = []
        unread = {line.id: line for line in lines if self._is_wanted(line)}
        self._read.update(unread)
        heads = await self._storage.heads(list(unread))
        for line, head in zip(unread.values(), heads, strict=True):
            wake = await _plan(self._storage, line, head, self._latest)
            if wake is None or wake.at > self._at:
                self.scan.postponed(line.id, wake)
            elif self._workflows is None or wake.workflow in self._workflows:
                due.append(wake)
        return due

    def _is_wanted(self, line: Wake) -> bool:
        is_chosen = self._workflows is None or line.workflow in self._workflows
        return is_chosen and line.id not in self._read and line.id.startswith(self._prefix)


async def plan_of(storage: Storage[H], line: Wake, now: int) -> Wake | None:
    """Return when the run of a line currently wants a worker, and its workflow."""
    (head,) = await storage.heads([line.id])
    return await _plan(storage, line, head, now)


async def _plan(
    storage: Storage[H], line: Wake, head: H | StoreCorrupted | None, now: int
) -> Wake | None:
    if head is None:
        return None
    try:
        if isinstance(head, StoreCorrupted):
            raise head
        wake_at = head.wake_at
        if head.awaits:
            with reading(line.id, msgspec.MsgspecError):
                wake_at = await wake_time(storage.run(line.id), head)
    except StoreCorrupted:
        logger.exception("run %r cannot be read; it is not claimed for an hour", line.id)
        return line._replace(at=now + _SETBACK)
    return None if wake_at is None else Wake(wake_at, line.id, head.workflow)


async def wake_time(run: StoredRun[H], head: H) -> int | None:
    """Return when a run wants a worker: a message that it awaits wakes it sooner."""
    if not head.awaits:
        return head.wake_at
    messages = await unconsumed(run, head)
    times = (message.sent_at for message in messages if message.name in head.awaits)
    return min(times, default=head.wake_at)
