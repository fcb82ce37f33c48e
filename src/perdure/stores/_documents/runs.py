"""Saving, loading, appending to and deleting runs that are documents."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec.structs import replace

from perdure.errors import StoreCorrupted
from perdure.snapshot import Snapshot, is_over
from perdure.store import Entry, Rest, Verdict
from perdure.stores._documents.records import (
    MAX_ATTEMPTS,
    H,
    Head,
    Place,
    StoredMessage,
    Wake,
    too_busy,
    verdict,
)
from perdure.stores._documents.storage import Storage, StoredRun
from perdure.stores._timestamps import to_microseconds


class HasId(Protocol):
    """Something that concerns one run."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)
R = TypeVar("R")


class DocumentRuns(Generic[H]):
    """The runs of a storage whose ids start with `prefix`. Times are microseconds since 1970."""

    def __init__(self, storage: Storage[H], prefix: str) -> None:
        self.storage = storage
        self.prefix = prefix
        self.wakes = storage.wakes

    def run(self, id: str) -> StoredRun[H]:
        """Return a run by its id without the prefix."""
        return self.storage.run(self.prefix + id)

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest, now: int) -> None:
        """Replace a whole run."""
        run = self.run(id)
        async with self.wakes.gate(), run.locked():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if head is None:
                    await run.prepare()
                if rest.wake_at is not None:
                    wake = Wake(to_microseconds(rest.wake_at), run.id, workflow)
                    await self.wakes.add([wake], now)
                place = (await run.next_epoch(head, now), 0)
                new = _settled(run.id, workflow, rest, place, now)
                if await self._settle(run, head, new, data, (), now):
                    return
        raise too_busy(id)

    async def load(self, id: str) -> Snapshot | None:
        """Read the merged snapshot."""
        run = self.run(id)
        async with run.locked(shared=True):
            return await run.load()

    async def delete(self, id: str, now: int) -> bool:
        """Delete a run; return whether it existed."""
        run = self.run(id)
        async with run.locked():
            try:
                existed = await self._delete(run, lambda head: True)
            except StoreCorrupted:
                existed = False
            return existed or await run.discard(now)

    async def prune(self, id: str, before: int) -> bool:
        """Delete a run if it is still over and was last written before a time."""
        run = self.run(id)
        async with run.locked():
            return await self._delete(
                run, lambda head: is_over(head.status) and head.updated_at < before
            )

    async def _delete(self, run: StoredRun[H], expected: Callable[[H], bool]) -> bool:
        for _ in range(MAX_ATTEMPTS):
            head = await run.head()
            if head is None or not expected(head):
                return False
            if await run.delete(head):
                return True
        raise too_busy(run.id)

    async def append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        """Write the entries of many runs, several runs at a time."""
        async with self.wakes.gate():
            await self.announce(
                [
                    (entry.id, to_microseconds(entry.rest.wake_at))
                    for entry in entries
                    if entry.rest is not None and entry.rest.wake_at is not None
                ],
                now,
            )
            return await self.by_run(lambda group: self._append(group, now), entries)

    async def _append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        run = self.run(entries[0].id)
        verdicts: list[Verdict] = []
        steps: list[Entry] = []
        async with run.locked():
            for entry in entries:
                if entry.rest is None:
                    steps.append(entry)
                else:
                    verdicts += await self._rest(run, steps, entry, entry.rest, now)
                    steps = []
            return verdicts + await self._add(run, steps)

    async def _add(self, run: StoredRun[H], entries: Sequence[Entry]) -> list[Verdict]:
        if not entries:
            return []
        return await self._verdicts(run, await run.add(entries), entries)

    async def _verdicts(
        self, run: StoredRun[H], head: H | None, entries: Sequence[Entry]
    ) -> list[Verdict]:
        written = await run.written(head) if head is not None and head.released else ()
        return [verdict(head, entry, written) for entry in entries]

    async def _rest(
        self, run: StoredRun[H], steps: Sequence[Entry], last: Entry, rest: Rest, now: int
    ) -> list[Verdict]:
        """Write a rest; the steps before it in the batch are part of its snapshot."""
        entries = [*steps, last]
        for _ in range(MAX_ATTEMPTS):
            head = await run.head()
            verdicts = await self._verdicts(run, head, entries)
            if head is None or head.is_closed or verdicts[-1] is not Verdict.ACCEPTED:
                return [*await self._add(run, steps), verdicts[-1]]
            if rest.delete:
                if await run.delete(head):
                    return verdicts
                continue
            consumes = [
                id for entry in entries if entry.epoch == head.epoch for id in entry.consumes
            ]
            new = _settled(run.id, head.workflow, rest, (last.epoch, last.n), now)
            if await self._settle(run, head, new, last.data, consumes, now):
                return verdicts
        raise too_busy(run.id)

    async def _settle(
        self,
        run: StoredRun[H],
        old: H | None,
        new: Head,
        data: bytes,
        consumes: Iterable[str],
        now: int,
    ) -> bool:
        """Replace the head; return `False` if another process has changed it in the meantime."""
        messages = await run.inbox()
        consumed = {*consumes}
        if old is not None and messages:
            consumed |= await run.consumed(old)
        is_due = _awaits(new, messages, consumed)
        if is_due:
            await self.wakes.add([Wake(now, run.id, new.workflow)], now)
        in_inbox = tuple(message.id for message in messages if message.id in consumed)
        head = await run.settle(old, replace(new, consumed=in_inbox), data)
        if head is None:
            return False
        # A sender in another process may have read the head before it was replaced, and its message
        # may have arrived after we read the inbox: neither side has written a line for it.
        if new.awaits and not is_due and _awaits(new, await run.inbox(), consumed):
            await self.wakes.add([Wake(now, run.id, new.workflow)], now)
        await run.sweep(head)
        return True

    async def announce(self, times: Sequence[tuple[str, int]], now: int) -> None:
        """Write the wake lines of runs, under the names of their workflows."""
        heads = await self.heads([id for id, _ in times])
        await self.wakes.add(
            [
                Wake(wake_at, head.id, head.workflow)
                for head, (_, wake_at) in zip(heads, times, strict=True)
                if head is not None
            ],
            now,
        )

    async def heads(self, ids: Sequence[str]) -> list[H | None]:
        """Read many heads by ids without the prefix; raise if one cannot be read."""
        heads: list[H | None] = []
        for head in await self.storage.heads([self.prefix + id for id in ids]):
            if isinstance(head, StoreCorrupted):
                raise head
            heads.append(head)
        return heads

    async def by_run(
        self, work: Callable[[list[T]], Coroutine[Any, Any, Sequence[R]]], items: Sequence[T]
    ) -> list[R]:
        """Do the work for each run's items, in order; several runs at a time."""
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(item.id, []).append(item)
        if len(groups) == 1:
            return list(await work(list(items)))
        results = await self.storage.gather(work, list(groups.values()))
        answers = {id: iter(result) for id, result in zip(groups, results, strict=True)}
        return [next(answers[item.id]) for item in items]


async def unconsumed(run: StoredRun[H], head: H) -> list[StoredMessage]:
    """Return a run's messages that were not consumed, in order."""
    messages = await run.inbox()
    if not messages:
        return []
    consumed = await run.consumed(head)
    return [message for message in messages if message.id not in consumed]


def _settled(id: str, workflow: str | None, rest: Rest, place: Place, now: int) -> Head:
    return Head(
        id=id,
        workflow=workflow,
        status=rest.status,
        wake_at=None if rest.wake_at is None else to_microseconds(rest.wake_at),
        awaits=rest.awaits,
        epoch=place[0],
        updated_at=now,
        base=place,
    )


def _awaits(head: Head, messages: Iterable[StoredMessage], consumed: set[str]) -> bool:
    return any(message.name in head.awaits and message.id not in consumed for message in messages)
