"""Journal entries and rests of `SqlStore`."""

from collections.abc import Collection, Mapping, Sequence

from perdure.store import Entry, Rest, Verdict
from perdure.stores.sql import statements as sql
from perdure.stores.sql.executor import Desk, chunks, marks, marks_of, moment, rows_of


class Journal:
    """Writes entries: those without a rest a statement at a time, each rest by itself."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def append(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Give a verdict for each entry, in order."""
        verdicts: dict[int, Verdict] = {}
        left = list(range(len(entries)))
        while left:
            turn, left = _one_turn(entries, left)
            plain = [place for place in turn if entries[place].rest is None]
            for chunk in chunks(plain):
                found = await self._write([entries[place] for place in chunk])
                verdicts.update(zip(chunk, found, strict=True))
            for place in turn:
                rest = entries[place].rest
                if rest is not None:
                    verdicts[place] = await self._rest(entries[place], rest)
        return [verdicts[place] for place in range(len(entries))]

    async def _write(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        # Of two that are the same the first counts, and a database may take them in any order.
        first = {(entry.id, entry.epoch, entry.n): entry for entry in reversed(entries)}
        values: list[object] = []
        for place in sorted(first):
            entry = first[place]
            values += self._key(entry), entry.epoch, entry.n, entry.data.decode(), _takes(entry)
        rows = rows_of(sql.ENTRY, len(first))
        answer = await self._desk.ask(sql.APPEND, *values, rows=rows)
        if answer.affected == len(first):
            verdicts: Sequence[Verdict] = [Verdict.ACCEPTED] * len(entries)
        else:
            verdicts = await self._look(entries)
        for entry, verdict in zip(entries, verdicts, strict=True):
            if entry.consumes and verdict is Verdict.ACCEPTED:
                await self._desk.tidy(self._key(entry))
        return verdicts

    async def _look(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Find out what became of entries that were not all written just now."""
        keys = sorted({self._key(entry) for entry in entries})
        found = await self._desk.ask(sql.WRITTEN, *keys, marks=marks(keys))
        written = {tuple(row) for row in found.rows}
        places = await self._desk.ask(sql.PLACES, *keys, marks=marks(keys))
        runs = {key: (epoch, (folded, n)) for key, epoch, folded, n in places.rows}
        return [self._verdict(entry, written, runs) for entry in entries]

    def _verdict(
        self,
        entry: Entry,
        written: Collection[tuple[object, ...]],
        runs: Mapping[str, tuple[int, tuple[int, int]]],
    ) -> Verdict:
        key, place = self._key(entry), (entry.epoch, entry.n)
        if key not in runs:
            return Verdict.UNKNOWN
        epoch, folded = runs[key]
        is_there = (key, *place) in written or folded >= place
        return Verdict.ACCEPTED if is_there and epoch == entry.epoch else Verdict.FENCED

    async def _rest(self, entry: Entry, rest: Rest) -> Verdict:
        key = self._key(entry)
        if rest.delete:
            return await self._forget(entry)
        awaits = marks_of(rest.awaits)
        answer = await self._desk.ask(
            sql.REST,
            *(entry.data.decode(), rest.status, awaits, _takes(entry)),
            *(int(awaits is not None), moment(rest), entry.n, entry.epoch),
            *(key, entry.epoch),
        )
        if answer.affected != 1:
            return (await self._look([entry]))[0]
        await self._desk.tidy(key)
        if awaits is not None:
            await self._desk.lay_to_sleep(key, rest, entry.n)
        return Verdict.ACCEPTED

    async def _forget(self, entry: Entry) -> Verdict:
        key = self._key(entry)
        await self._desk.ask(sql.RAISE_FLOOR, key, marks="?")
        answer = await self._desk.ask(sql.FORGET, key, entry.epoch)
        if answer.affected != 1:
            return (await self._look([entry]))[0]
        await self._desk.remove_leftovers([key])
        return Verdict.ACCEPTED

    def _key(self, entry: Entry) -> str:
        return self._desk.prefix + entry.id


def _takes(entry: Entry) -> str | None:
    return f",{','.join(entry.consumes)}," if entry.consumes else None


def _one_turn(entries: Sequence[Entry], places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Part the places: those that can go at once, and those after a rest of their run."""
    at_rest: set[str] = set()
    turn: list[int] = []
    left: list[int] = []
    for place in places:
        entry = entries[place]
        (left if entry.id in at_rest else turn).append(place)
        if entry.rest is not None:
            at_rest.add(entry.id)
    return turn, left
