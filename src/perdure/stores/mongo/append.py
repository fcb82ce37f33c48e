"""Fenced writes of many runs at once: entries into the journal, and runs put to rest.

The owner of a lease writes by memory: its entries are one insert, its rests one update, each in one
round trip for the whole batch. What that leaves in doubt (an answer that was lost, a slot that was
taken, a lease that somebody else was given) is settled run by run from what the database holds.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeAlias

from pymongo import DeleteOne, InsertOne, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import BulkWriteError, PyMongoError

from perdure.errors import StoreUnavailable
from perdure.store import Entry, Rest, Verdict
from perdure.stores.mongo.batch import Turn
from perdure.stores.mongo.cleanup import Sweeper
from perdure.stores.mongo.connection import Collection
from perdure.stores.mongo.documents import body_of
from perdure.stores.mongo.errors import DUPLICATE, is_cut
from perdure.stores.mongo.inbox import awaited, mark_taken, message_ids, taken_in, untaken
from perdure.stores.mongo.journal import (
    Log,
    Positions,
    entry_document,
    read_logs,
    seal_logs,
    slot_id,
)
from perdure.stores.mongo.schema import Collections, insert, together
from perdure.stores.mongo.settle import lay_down, remove
from perdure.stores.mongo.updates import HEADER, Document, fenced, life_of, rest_fields, resting

Write: TypeAlias = "UpdateOne | DeleteOne"

_ATTEMPTS = 20
_AT_ONCE = 16


class Appender:
    """Writes entries, each run's by one call at a time, so that its slots stay in order."""

    def __init__(self, prefix: str, positions: Positions, sweeper: Sweeper) -> None:
        self._prefix = prefix
        self._positions = positions
        self._sweeper = sweeper
        self._busy: set[str] = set()
        self._freed = asyncio.Event()

    async def append(self, db: Collections, entries: Sequence[Entry]) -> list[Verdict]:
        """Write the entries and give a verdict for each."""
        turns: dict[str, Turn] = {}
        for place, entry in enumerate(entries):
            key = self._prefix + entry.id
            turn = turns.get(key)
            if turn is None:
                turn = turns[key] = Turn(key)
            turn.entries.append(entry)
            turn.places.append(place)
        verdicts = [Verdict.ACCEPTED] * len(entries)
        async with self.writing(turns.keys()):
            doubtful = await self._write(db, turns.values())
            await self._settle_all(db, doubtful, verdicts)
        return verdicts

    @asynccontextmanager
    async def writing(self, keys: Iterable[str]) -> AsyncGenerator[None]:
        """Keep others in this process from writing these runs."""
        mine = {*keys}
        while not self._busy.isdisjoint(mine):
            self._freed.clear()
            await self._freed.wait()
        self._busy |= mine
        try:
            yield
        finally:
            self._busy -= mine
            self._freed.set()

    async def _write(self, db: Collections, turns: Iterable[Turn]) -> list[Turn]:
        """Write what can be written by memory; give the turns that are in doubt."""
        plain: list[Turn] = []
        rests: list[Turn] = []
        doubtful: list[Turn] = []
        for turn in turns:
            position = self._positions.sure(turn.key, turn.entries[0].epoch)
            if not turn.goes_by(position):
                doubtful.append(turn)
                continue
            turn.position = position
            (plain if turn.last.rest is None else rests).append(turn)
        if plain and rests:
            for left in await together([self._insert(db, plain), self._rest(db, rests)]):
                doubtful += left
        elif plain:
            doubtful += await self._insert(db, plain)
        elif rests:
            doubtful += await self._rest(db, rests)
        return doubtful

    async def _insert(self, db: Collections, turns: list[Turn]) -> list[Turn]:
        documents: list[Document] = []
        owners: list[Turn] = []
        weight = 0
        for turn in turns:
            assert turn.position is not None
            for slot, entry in enumerate(turn.entries, turn.position.slot):
                documents.append(entry_document(turn.key, entry, slot))
                owners.append(turn)
                weight += len(entry.data)
        try:
            with _in_doubt(turns):
                beaten = await insert(db.journal, documents, weight)
                # A seal that lies in the way of one entry makes those after it void.
                doubtful = {owners[place].key for place in beaten}
                written = [turn for turn in turns if turn.key not in doubtful]
                for turn in written:
                    self._wrote(turn)
                await self._take(db, written)
        except PyMongoError as error:
            if not is_cut(error):
                raise
            return turns
        return [turn for turn in turns if turn.key in doubtful]

    def _wrote(self, turn: Turn) -> None:
        position = self._positions.confirm(turn.key, turn.last.epoch)
        if position is not None:
            position.slot += len(turn.entries)
            position.last = turn.last.n

    async def _take(self, db: Collections, turns: Iterable[Turn]) -> None:
        """Mark the messages that entries took."""
        taken: list[str] = []
        for turn in turns:
            if consumes := turn.consumes():
                taken += message_ids(turn.key, consumes)
                self._positions.forget_mail(turn.key, turn.last.epoch, consumes)
        if taken:
            await mark_taken(db, taken)

    async def _rest(self, db: Collections, turns: list[Turn]) -> list[Turn]:
        leaving = {turn.key: turn.last.epoch for turn in turns if turn.leaves()}
        try:
            with _in_doubt(turns):
                done = await lay_down(db, [turn for turn in turns if not turn.leaves()])
                lettered = False
                if leaving:
                    delete, lettered = await remove(db, leaving)
                    done += delete
        except PyMongoError as error:
            if not is_cut(error):
                raise
            return turns
        if done < len(turns):
            return turns
        await self._rested(db, turns, lettered=lettered)
        return []

    async def _rested(
        self, db: Collections, turns: Sequence[Turn], *, lettered: bool = True
    ) -> None:
        """Clear up after rests, and mark what they took; those that left may have had letters."""
        taken: list[str] = []
        for turn in turns:
            epoch = turn.last.epoch
            position = self._positions.get(turn.key, epoch)
            if position is None or position.sealed:
                self._sweeper.logs(turn.key, epoch)
            elif position.slot:
                self._sweeper.slots(slot_id(turn.key, epoch, slot) for slot in range(position.slot))
            self._positions.drop(turn.key, epoch)
            if not turn.leaves():
                taken += message_ids(turn.key, turn.consumes())
            elif lettered:
                self._sweeper.mail(turn.key, turn.life if position is None else position.life)
        if taken:
            await mark_taken(db, taken)

    async def _settle_all(
        self, db: Collections, turns: Sequence[Turn], verdicts: list[Verdict]
    ) -> None:
        for start in range(0, len(turns), _AT_ONCE):
            some = turns[start : start + _AT_ONCE]
            settled = await together([self._settle(db, turn) for turn in some])
            for turn, ruled in zip(some, settled, strict=True):
                for place, verdict in zip(turn.places, ruled, strict=True):
                    verdicts[place] = verdict

    async def _settle(self, db: Collections, turn: Turn) -> list[Verdict]:
        """Write one run's entries one by one, each from what the database holds."""
        singles = [Turn(turn.key, [entry], sent=turn.sent) for entry in turn.entries]
        return [await self._settle_one(db, single) for single in singles]

    async def _settle_one(self, db: Collections, turn: Turn) -> Verdict:
        for _ in range(_ATTEMPTS):
            plan = await self.plan(db, turn)
            if isinstance(plan, Verdict):
                if plan is Verdict.ACCEPTED:
                    await self._conclude(db, turn)
                return plan
            if await plan.execute():
                await self.written(db, turn, plan)
                return Verdict.ACCEPTED
        raise StoreUnavailable(f"run {turn.last.id!r} is written by too many at once; try again")

    def plan_by_memory(self, db: Collections, turn: Turn) -> "Plan | None":
        """Give the write of an entry that is the next one of a lease of this process."""
        position = self._positions.sure(turn.key, turn.last.epoch)
        if position is None or turn.last.rest is not None or not turn.goes_by(position):
            return None
        return Plan(db.journal, InsertOne(entry_document(turn.key, turn.last, position.slot)))

    async def plan(self, db: Collections, turn: Turn) -> "Plan | Verdict":
        """Give the write that one entry needs, or the verdict if it needs none."""
        entry = turn.last
        run: Any = await db.runs.find_one({"_id": turn.key}, HEADER)
        verdict = self._verdict(turn, run)
        if verdict is not None:
            return verdict
        turn.life = life_of(run)
        log = (await read_logs(db, {turn.key: [entry.epoch]}))[turn.key][0]
        was_released = run.get("owner") is None
        position = self._positions.confirm(turn.key, entry.epoch)
        if log.sealed or was_released:
            self._positions.drop(turn.key, entry.epoch)
        elif position is not None:
            position.slot, position.last, position.sure = log.next, log.last, True
        if log.holds(entry.n):
            return Verdict.ACCEPTED
        if entry.rest is not None and not was_released:
            return Plan(db.runs, await self._rest_one(db, turn, entry.rest, run, log))
        if log.sealed or was_released:
            return Verdict.FENCED
        return Plan(db.journal, InsertOne(entry_document(turn.key, entry, log.next)))

    def _verdict(self, turn: Turn, run: Any) -> Verdict | None:
        """Give the verdict that the run's document alone tells."""
        entry = turn.last
        if run is None:
            # A run that its owner wanted gone, and that is gone: the answer to the write was lost.
            sent = turn.sent or entry
            own = self._positions.get(turn.key, entry.epoch) is not None
            expected = own and sent.rest is not None and sent.rest.delete
            return Verdict.ACCEPTED if expected else Verdict.UNKNOWN
        rested = {**run.get("rested", {})}
        if turn.sent is not None and rested == _place(turn.sent):
            return Verdict.ACCEPTED
        if run.get("epoch") != entry.epoch:
            self._positions.drop(turn.key, entry.epoch)
            return Verdict.FENCED
        if rested.get("epoch") != entry.epoch:
            return None
        return Verdict.ACCEPTED if entry.n <= rested["n"] else Verdict.FENCED

    async def _rest_one(self, db: Collections, turn: Turn, rest: Rest, run: Any, log: Log) -> Write:
        entry = turn.last
        if self._positions.get(turn.key, entry.epoch) is None:
            # Another process goes by memory with this epoch, and must not go on after the rest.
            await seal_logs(db, {turn.key: [entry.epoch]})
        turn.sent = entry
        filter = fenced(turn.key, entry)
        if rest.delete:
            return DeleteOne(filter)
        taken = [*taken_in(run) | log.taken(), *turn.consumes()]
        letters = run.get("letters")
        filter["letters"] = letters
        due = bool(letters and rest.awaits) and await _mail_waits(db, turn, rest, taken)
        body = body_of(entry.data, f"the snapshot of run {entry.id!r}")
        fields = rest_fields(entry, rest, body, taken, due=due)
        return UpdateOne(filter, resting({turn.key: fields}))

    async def written(self, db: Collections, turn: Turn, plan: "Plan") -> None:
        """Note that a planned write was made."""
        if isinstance(plan.write, InsertOne):
            self._wrote(turn)
        await self._conclude(db, turn)

    async def _conclude(self, db: Collections, turn: Turn) -> None:
        await (self._take if turn.last.rest is None else self._rested)(db, [turn])


class Plan(NamedTuple):
    """One write that is still to be made."""

    collection: Collection
    write: "InsertOne[Any] | UpdateOne | DeleteOne"

    async def execute(self, session: AsyncClientSession | None = None) -> bool:
        """Make the write; False when it found its slot taken, or its run changed."""
        try:
            done = await self.collection.bulk_write([self.write], session=session)
        except BulkWriteError as error:
            if error.details["writeErrors"][0]["code"] != DUPLICATE:
                raise
            return False
        return done.inserted_count + done.matched_count + done.deleted_count == 1


@contextmanager
def _in_doubt(turns: Iterable[Turn]) -> Generator[None]:
    """Note that the turns are in doubt, unless the block ends well."""
    for turn in turns:
        turn.sent = turn.last if turn.last.rest is not None else None
        assert turn.position is not None
        turn.position.sure = False
    yield
    for turn in turns:
        assert turn.position is not None
        turn.position.sure = True


def _place(entry: Entry) -> Document:
    return {"epoch": entry.epoch, "n": entry.n}


async def _mail_waits(db: Collections, turn: Turn, rest: Rest, taken: Sequence[str]) -> bool:
    messages = (await untaken(db, {turn.key: turn.life}))[turn.key]
    return awaited({message.id: message.name for message in messages}, taken, rest.awaits)
