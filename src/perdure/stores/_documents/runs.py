"""Save, load, append to and delete runs that are stored as documents."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from perdure.errors import StoreCorrupted
from perdure.snapshot import Snapshot
from perdure.store import Entry, Rest, Verdict
from perdure.stores._documents.records import (
    MAX_ATTEMPTS,
    H,
    Head,
    StoredMessage,
    too_busy,
    verdict,
)
from perdure.stores._documents.storage import Storage, StoredRun

T = TypeVar("T")
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

    def public_id(self, stored_id: str) -> str:
        """Return the id of a run without the prefix."""
        return stored_id[len(self.prefix) :]

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest, now: int) -> None:
        """Replace a whole run and remove it from its queue."""
        run = self.run(id)
        async with self.wakes.gate(), run.lock():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if head is None:
                    await run.prepare()
                epoch = await run.next_epoch(head, now)
                new = _saved_head(run.id, workflow, rest, epoch, head, now)
                if new.wake_at is not None:
                    await self.wakes.add([new.wake(new.wake_at)], now)
                if await self._settle(run, head, new, data, (), now):
                    return
        raise too_busy(id)

    async def load(self, id: str) -> Snapshot | None:
        """Read the merged snapshot."""
        run = self.run(id)
        async with run.lock(shared=True):
            return await run.load()

    async def delete(self, id: str, now: int) -> bool:
        """Delete a run; return whether it existed."""
        run = self.run(id)
        async with run.lock():
            try:
                existed = await self._delete(run, lambda head: True)
            except StoreCorrupted:
                existed = False
            return existed or await run.discard(now)

    async def _delete(self, run: StoredRun[H], condition: Callable[[H], bool]) -> bool:
        for _ in range(MAX_ATTEMPTS):
            head = await run.head()
            if head is None or not condition(head):
                return False
            if await run.delete(head):
                return True
        raise too_busy(run.id)

    async def append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        """Write the entries of many runs, several runs at a time."""
        rests = [
            (entry.id, entry.rest)
            for entry in entries
            if entry.rest is not None and entry.rest.wake_at is not None
        ]
        async with self.wakes.gate():
            heads = await self.readable_heads([id for id, _ in rests])
            # The lines are written before the heads: a run without a line would never be found.
            new_heads = [heads[id].at_rest(rest, (0, 0), now) for id, rest in rests if id in heads]
            await self.wakes.add([head.wake(head.wake_at or 0) for head in new_heads], now)
            return await self.by_run(
                lambda group: self._append(group, now), entries, lambda entry: entry.id
            )

    async def _append(self, entries: Sequence[Entry], now: int) -> list[Verdict]:
        run = self.run(entries[0].id)
        verdicts: list[Verdict] = []
        steps: list[Entry] = []
        async with run.lock():
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
        journal_places = (
            await run.journal_places(head) if head is not None and head.released else ()
        )
        return [verdict(head, entry, journal_places) for entry in entries]

    async def _rest(
        self, run: StoredRun[H], steps: Sequence[Entry], last: Entry, rest: Rest, now: int
    ) -> list[Verdict]:
        """Write a rest, whose snapshot includes the steps before it in the batch."""
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
            new = head.at_rest(rest, (last.epoch, last.n), now)
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
        consumed_ids = {*consumes}
        if old is not None and messages:
            consumed_ids |= await run.consumed_ids(old)
        is_due = _awaits(new, messages, consumed_ids)
        if is_due:
            await self.wakes.add([new.wake(now)], now)
        in_inbox = tuple(message.id for message in messages if message.id in consumed_ids)
        head = await run.settle(old, replace(new, consumed=in_inbox), data)
        if head is None:
            return False
        # A sender in another process may have read the head before it was replaced, and its message
        # may have arrived after we read the inbox. In that case neither side has written a wake
        # line.
        if new.awaits and not is_due and _awaits(new, await run.inbox(), consumed_ids):
            await self.wakes.add([new.wake(now)], now)
        await run.sweep(head)
        return True

    async def heads(self, ids: Sequence[str]) -> Sequence[H | StoreCorrupted | None]:
        """Read many heads by ids without the prefix."""
        return await self.storage.heads([self.prefix + id for id in ids])

    async def readable_heads(self, ids: Sequence[str]) -> dict[str, H]:
        """Read the heads that exist and can be read, by id without the prefix."""
        heads = zip(ids, await self.heads(ids), strict=True)
        return {id: head for id, head in heads if isinstance(head, Head)}

    async def by_run(
        self,
        work: Callable[[list[T]], Coroutine[Any, Any, Sequence[R]]],
        items: Sequence[T],
        id_of: Callable[[T], str],
    ) -> list[R]:
        """Process the items of each run in order, several runs at a time."""
        groups: dict[str, list[T]] = {}
        for item in items:
            groups.setdefault(id_of(item), []).append(item)
        if len(groups) == 1:
            return list(await work(list(items)))
        results = await self.storage.gather(work, list(groups.values()))
        answers = {id: iter(result) for id, result in zip(groups, results, strict=True)}
        return [next(answers[id_of(item)]) for item in items]


async def unconsumed_messages(run: StoredRun[H], head: H) -> list[StoredMessage]:
    """Return a run's unconsumed messages, in order."""
    messages = await run.inbox()
    if not messages:
        return []
    consumed_ids = await run.consumed_ids(head)
    return [message for message in messages if message.id not in consumed_ids]


def _saved_head(
    id: str, workflow: str | None, rest: Rest, epoch: int, old: Head | None, now: int
) -> Head:
    """Return the head of a saved run; of the old head it keeps only the time of creation."""
    head = Head(
        id=id,
        workflow=workflow,
        created_at=now if old is None else old.created_at,
        status=rest.status,
        wake_at=None,
        epoch=epoch,
        updated_at=now,
        base=(epoch, 0),
    )
    return head.at_rest(rest, head.base, now)


def _awaits(head: Head, messages: Iterable[StoredMessage], consumed_ids: set[str]) -> bool:
    return any(
        message.name in head.awaits and message.id not in consumed_ids for message in messages
    )
