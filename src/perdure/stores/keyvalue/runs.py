"""What the key-value store does to its runs: writing them and reading them.

Nothing here is a transaction: the order of the writes does the work. What a head will name is
written before it, what it named before is removed after it, and a run's wake line comes first of
all. A crash between any two leaves the run as before or as after, and at worst some litter.
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar
from zlib import crc32

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreCorrupted, StoreUnavailable
from perdure.snapshot import Snapshot, is_over
from perdure.store import Entry, Rest, Verdict
from perdure.stores._scan import Line
from perdure.stores._timestamps import to_microseconds
from perdure.stores.keyvalue.documents import Documents, at_once
from perdure.stores.keyvalue.layout import (
    Head,
    Inbox,
    Litter,
    RunDocuments,
    entries_text,
    head_of,
    head_text,
    inbox_of,
    inbox_text,
)
from perdure.stores.keyvalue.wakes import Wake, Wakes

_FLOOR = "perdure:epochs"
_CATALOG = "perdure:catalog"
_CATALOG_SHARDS = 64
_REMEMBERED = 4096
MAX_ATTEMPTS = 20

_read_ids = msgspec.json.Decoder(list[str]).decode


@dataclass(slots=True)
class _Tail:
    """What this process knows of the journal that it writes: whose, how long, what it holds."""

    epoch: int
    documents: int
    places: set[int]


class KeyValueShelf:
    """Runs whose ids begin with `prefix`. Times are microseconds since 1970."""

    def __init__(self, documents: Documents, prefix: str) -> None:
        self.prefix = prefix
        self.documents = documents
        self.wakes = Wakes(documents)
        self._tails: dict[str, _Tail] = {}
        self._random = Random()

    @asynccontextmanager
    async def guarded(self, id: str) -> AsyncGenerator[RunDocuments, None]:
        """Give a run, held against the other tasks of this process."""
        run = RunDocuments(self.documents, self.prefix + id)
        async with self.documents.guard(run.head_key):
            yield run

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest, now: int) -> None:
        """Replace a whole run."""
        async with self.guarded(id) as run:
            for _ in range(MAX_ATTEMPTS):
                found = await run.head()
                if found is None:
                    await self.prepare(run)
                if rest.wake_at is not None:
                    await self.wakes.add(
                        [Wake(to_microseconds(rest.wake_at), run.id, workflow, now)]
                    )
                epoch = await self.next_epoch(found and found[1], now)
                entry = Entry(id, epoch, 0, data)
                if await self._lay(run, found, entry, rest, (), workflow, now, self.mark()):
                    return
        raise too_busy(id)

    async def load(self, id: str) -> Snapshot | None:
        """Read the merged snapshot."""
        async with self.guarded(id) as run:
            for _ in range(MAX_ATTEMPTS):
                found = await run.head()
                if found is None:
                    return None
                whole = await run.whole(found[1])
                if whole is not None:
                    return whole
                # The snapshot went because another process put the run to rest; else it is lost.
                if found == await run.head():
                    raise StoreCorrupted(f"the snapshot of run {id!r} is missing in the store")
        raise too_busy(id)

    async def delete(self, id: str) -> bool:
        """Remove a run; tell whether there was one."""
        async with self.guarded(id) as run:
            return await self._delete(run, lambda head: True)

    async def prune(self, id: str, before: int) -> bool:
        """Remove a run if it is still over and was last written before a time."""
        async with self.guarded(id) as run:
            return await self._delete(
                run, lambda head: is_over(head.status) and head.updated_at < before
            )

    async def lines(self, prefix: str) -> list[Line]:
        """Give all runs whose stored ids begin with `prefix`, in no order."""
        shards = [f"{_CATALOG}:{shard}" for shard in range(_CATALOG_SHARDS)]
        texts = await self.documents.read_many(shards)
        ids = [id for text in texts if text is not None for id in _read_ids(text)]
        heads = await self.heads([id for id in ids if id.startswith(prefix)])
        return [
            Line(head.updated_at, head.id, head.status, head.workflow)
            for head in heads
            if head is not None
        ]

    def mark(self) -> str:
        """Give a name for a document that no other writer uses, whoever else wants to write it."""
        # With the process, as a fork draws the same numbers.
        return f"{os.getpid():x}.{self._random.getrandbits(64):016x}"

    async def next_epoch(self, head: Head | None, now: int) -> int:
        """Give an epoch that the run never had, also when it was deleted meanwhile."""
        if head is not None:
            return max(head.epoch + 1, now)
        floor = await self.documents.read(_FLOOR)
        return max(int(floor or 0) + 1, now)

    async def prepare(self, run: RunDocuments) -> None:
        """Make ready for a new run: enter its id, and remove what a crash left of an older one."""
        await self.documents.change(_shard(run.id), _with_id(run.id))
        await self.documents.remove(run.inbox_key)

    async def append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        """Write the entries of many runs."""
        await self.announce(
            [
                (entry.id, to_microseconds(entry.rest.wake_at))
                for entry in entries
                if entry.rest is not None and entry.rest.wake_at is not None
            ],
            now,
        )
        return await by_run(lambda mine: self._append(mine, now), entries)

    async def announce(self, wakes: Sequence[tuple[str, int]], now: int) -> None:
        """Write the wake lines of runs, under the names of their workflows."""
        heads = await self.heads([self.prefix + id for id, _ in wakes])
        await self.wakes.add(
            Wake(wake_at, head.id, head.workflow, now)
            for head, (_, wake_at) in zip(heads, wakes, strict=True)
            if head is not None
        )

    async def heads(self, stored_ids: Sequence[str]) -> list[Head | None]:
        """Read many heads."""
        keys = [RunDocuments(self.documents, id).head_key for id in stored_ids]
        texts = await self.documents.read_many(keys)
        return [
            None if text is None else head_of(id, text)
            for id, text in zip(stored_ids, texts, strict=True)
        ]

    def forget(self, run: RunDocuments) -> None:
        """Forget what is known of a run's journal."""
        self._tails.pop(run.id, None)

    async def _append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        verdicts: list[Verdict] = []
        steps: list[Entry] = []
        async with self.guarded(entries[0].id) as run:
            for entry in entries:
                steps.append(entry)
                if entry.rest is not None:
                    verdicts += await self._rest(run, steps, entry.rest, now)
                    steps = []
            if steps:
                verdicts += await self._add(run, steps)
        return verdicts

    async def _add(self, run: RunDocuments, entries: Sequence[Entry]) -> list[Verdict]:
        """Add to the journal as one document, and then look whether the run is still the owner's.

        A taker writes the head before it reads the journal: when the head is still ours after our
        write, the taker will read what we wrote.
        """
        tail = self._tails.get(run.id)
        if tail is None or any(entry.epoch != tail.epoch for entry in entries):
            before = await run.head()
            tail = None if before is None else await self._tail(run, before[1])
        fresh: dict[int, Entry] = {}
        for entry in entries:
            if tail is not None and entry.epoch == tail.epoch and entry.n not in tail.places:
                fresh.setdefault(entry.n, entry)
        if tail is not None and fresh:
            key = run.entry_key(tail.epoch, tail.documents)
            await self.documents.write(key, entries_text(list(fresh.values())))
            tail.documents += 1
            tail.places.update(fresh)
        after = await run.head()
        if after is None or tail is None or after[1].epoch != tail.epoch or after[1].is_closed:
            self.forget(run)
        return await self._verdicts(run, after and after[1], entries)

    async def _verdicts(
        self, run: RunDocuments, head: Head | None, entries: Sequence[Entry]
    ) -> list[Verdict]:
        written: set[int] = set()
        if head is not None and head.is_released:
            written = {
                each.n for document in await run.journal(*head.sealed[-1]) for each in document
            }
        return [_verdict(head, entry, written) for entry in entries]

    async def _tail(self, run: RunDocuments, head: Head) -> _Tail | None:
        """Give what the journal of the head's own epoch holds; None when nothing can be added."""
        if head.is_closed:
            return None
        tail = self._tails.get(run.id)
        if tail is None or tail.epoch != head.epoch:
            journal = await run.journal(head.epoch, None)
            places = {written.n for document in journal for written in document}
            tail = _Tail(head.epoch, len(journal), places)
            self._tails[run.id] = tail
            if len(self._tails) > _REMEMBERED:
                del self._tails[next(iter(self._tails))]
        return tail

    async def _rest(
        self, run: RunDocuments, entries: Sequence[Entry], rest: Rest, now: int
    ) -> list[Verdict]:
        """Put a run to rest by the last entry; the steps before it are in its snapshot."""
        epoch = entries[-1].epoch
        for _ in range(MAX_ATTEMPTS):
            found = await run.head()
            head = found and found[1]
            verdicts = await self._verdicts(run, head, entries)
            if head is None or head.is_closed or verdicts[-1] is not Verdict.ACCEPTED:
                return verdicts
            if rest.delete:
                if await self._delete(run, lambda head: head.epoch == epoch):
                    return verdicts
                continue
            consumes = [
                id for entry in entries if entry.epoch == head.epoch for id in entry.consumes
            ]
            if await self._lay(run, found, entries[-1], rest, consumes, head.workflow, now):
                return verdicts
        raise too_busy(run.id)

    async def _lay(
        self,
        run: RunDocuments,
        found: tuple[str, Head] | None,
        entry: Entry,
        rest: Rest,
        consumes: Iterable[str],
        workflow: str | None,
        now: int,
        mark: str = "",
    ) -> bool:
        """Put a run to rest; False when another process has changed the head meanwhile.

        An owner's write is the only one of its place, and done again it replaces itself; any other
        has a `mark`.
        """
        old = found and found[1]
        inbox = await run.inbox()
        taken = {*consumes}
        if old is not None and inbox.messages:
            taken |= await run.taken(old)
        due = Wake(now, run.id, workflow, now)
        is_awaited = _awaits_mail(rest, inbox, taken)
        if is_awaited:
            await self.wakes.add([due])
        head = Head(
            id=run.id,
            workflow=workflow,
            status=rest.status,
            wake_at=None if rest.wake_at is None else to_microseconds(rest.wake_at),
            awaits=rest.awaits,
            epoch=entry.epoch,
            updated_at=now,
            snapshot=run.snapshot_key(mark or f"{entry.epoch}.{entry.n}"),
            folded=(entry.epoch, entry.n),
            taken=tuple(mail.id for mail in inbox.messages if mail.id in taken),
            litter=None if old is None else await self._litter(run, old),
        )
        await self.documents.write(head.snapshot, entry.data.decode())
        if not await self.documents.swap(run.head_key, found and found[0], head_text(head)):
            await self.documents.remove(head.snapshot)
            return False
        self.forget(run)
        if rest.awaits and not is_awaited and _awaits_mail(rest, await run.inbox(), taken):
            # It came from another process, which saw the run before it was at rest.
            await self.wakes.add([due])
        if head.litter is not None:
            await run.clear(head.litter)
        if head.taken:
            await self.documents.change(run.inbox_key, _without_mail(taken))
        return True

    async def count_sealed(self, run: RunDocuments, head: Head) -> Head:
        """Return a head that was just written, with the number of documents of each old epoch."""
        sealed = [
            (epoch, len(await run.journal(epoch, None)) if count is None else count)
            for epoch, count in head.sealed
        ]
        return replace(head, sealed=tuple(sealed))

    async def _litter(self, run: RunDocuments, head: Head) -> Litter:
        epochs: list[tuple[int, int]] = []
        for epoch, count in (*head.sealed, *(() if head.is_closed else ((head.epoch, None),))):
            number = len(await run.journal(epoch, None)) if count is None else count
            epochs.append((epoch, number))
        return Litter(head.snapshot, tuple(epochs))

    async def _delete(self, run: RunDocuments, expected: Callable[[Head], bool]) -> bool:
        for _ in range(MAX_ATTEMPTS):
            found = await run.head()
            if found is None or not expected(found[1]):
                return False
            text, head = found
            litter = await self._litter(run, head)
            # Before the head goes, so that an epoch of the deleted run can never come again.
            await self.documents.change(_FLOOR, _at_least(head.epoch))
            if await self.documents.swap(run.head_key, text, None):
                self.forget(run)
                await run.clear(litter)
                await self.documents.remove(run.inbox_key)
                await self.documents.change(_shard(run.id), _without_id(run.id))
                return True
        raise too_busy(run.id)


class OfRun(Protocol):
    """Something that a run is asked for, or told."""

    @property
    def id(self) -> str:
        """The run's id."""
        ...


T = TypeVar("T", bound=OfRun)
R = TypeVar("R")


async def by_run(deal: Callable[[list[T]], Awaitable[Sequence[R]]], items: Sequence[T]) -> list[R]:
    """Deal with each run's items in order, with several runs at once, and answer in order."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(item.id, []).append(item)
    dealt = await at_once(lambda id: deal(groups[id]), list(groups))
    answers = {id: iter(answer) for id, answer in zip(groups, dealt, strict=True)}
    return [next(answers[item.id]) for item in items]


def too_busy(id: str) -> StoreUnavailable:
    """Give the error of a run that other processes change all the time."""
    return StoreUnavailable(f"run {id!r} was changed by others {MAX_ATTEMPTS} times; try again")


def _verdict(head: Head | None, entry: Entry, written: Collection[int]) -> Verdict:
    if head is None:
        return Verdict.UNKNOWN
    if entry.epoch != head.epoch:
        return Verdict.FENCED
    is_there = (entry.epoch, entry.n) <= head.folded or entry.n in written
    return Verdict.ACCEPTED if is_there or not head.is_closed else Verdict.FENCED


def _awaits_mail(rest: Rest, inbox: Inbox, taken: set[str]) -> bool:
    return any(mail.name in rest.awaits and mail.id not in taken for mail in inbox.messages)


def _without_mail(taken: set[str]) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        if text is None:
            return None
        inbox = inbox_of(text)
        inbox.messages = [mail for mail in inbox.messages if mail.id not in taken]
        return inbox_text(inbox)

    return edit


def _at_least(epoch: int) -> Callable[[str | None], str | None]:
    return lambda floor: str(max(int(floor or 0), epoch))


def _shard(id: str) -> str:
    return f"{_CATALOG}:{crc32(id.encode()) % _CATALOG_SHARDS}"


def _with_id(id: str) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        ids = [] if text is None else _read_ids(text)
        return text if id in ids else msgspec.json.encode([*ids, id]).decode()

    return edit


def _without_id(id: str) -> Callable[[str | None], str | None]:
    def edit(text: str | None) -> str | None:
        ids = [each for each in ([] if text is None else _read_ids(text)) if each != id]
        return msgspec.json.encode(ids).decode() if ids else None

    return edit
