"""Entries and rests of `SqlStore`."""

from collections.abc import Collection, Mapping, Sequence

from perdure.store import Entry, Rest, Verdict
from perdure.stores.sql import statements as sql
from perdure.stores.sql.creation import Tags
from perdure.stores.sql.executor import awaits_values, chunks, header_values, micros_or_none


class Journal(Tags):
    """Writes entries: many per statement, but each rest in its own."""

    async def append(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Return a verdict on each entry, in order."""
        verdicts: dict[int, Verdict] = {}
        remaining = list(range(len(entries)))
        while remaining:
            batch, remaining = _split_after_rests(entries, remaining)
            additions = [index for index in batch if entries[index].rest is None]
            for chunk in chunks(additions):
                chunk_verdicts = await self._write([entries[index] for index in chunk])
                verdicts.update(zip(chunk, chunk_verdicts, strict=True))
            for index in batch:
                rest = entries[index].rest
                if rest is not None:
                    verdicts[index] = await self._settle(entries[index], rest)
        return [verdicts[index] for index in range(len(entries))]

    async def _write(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        # The first of two equal entries counts, but a database may insert rows in any order.
        first = {(entry.id, entry.epoch, entry.n): entry for entry in reversed(entries)}
        values: list[object] = []
        # Sorted, so that concurrent statements lock runs in the same order.
        for place in sorted(first):
            entry = first[place]
            values += self._key(entry.id), entry.epoch, entry.n, entry.data.decode()
            values.append(_consumes(entry))
        result = await self._run_many(sql.APPEND, len(first), *values)
        if result.rowcount == len(first):
            verdicts: Sequence[Verdict] = [Verdict.ACCEPTED] * len(entries)
        else:
            verdicts = await self._verdicts(entries)
        for entry, verdict in zip(entries, verdicts, strict=True):
            if entry.consumes and verdict is Verdict.ACCEPTED:
                await self._clean_up(self._key(entry.id))
        return verdicts

    async def _verdicts(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Return the verdicts on entries of which this call wrote none, or only some."""
        keys = sorted({self._key(entry.id) for entry in entries})
        entry_places = {*(await self._run_many(sql.WRITTEN_ENTRIES, len(keys), *keys)).rows}
        fences = await self._run_many(sql.FENCES, len(keys), *keys)
        runs = {key: (epoch, (folded_epoch, n)) for key, epoch, folded_epoch, n in fences.rows}
        return [self._verdict(entry, entry_places, runs) for entry in entries]

    def _verdict(
        self,
        entry: Entry,
        entry_places: Collection[tuple[object, ...]],
        runs: Mapping[str, tuple[int, tuple[int, int]]],
    ) -> Verdict:
        key, place = self._key(entry.id), (entry.epoch, entry.n)
        if key not in runs:
            return Verdict.UNKNOWN
        epoch, fold = runs[key]
        is_written = (key, *place) in entry_places or fold >= place
        return Verdict.ACCEPTED if is_written and epoch == entry.epoch else Verdict.FENCED

    async def _settle(self, entry: Entry, rest: Rest) -> Verdict:
        key = self._key(entry.id)
        if rest.delete:
            return await self._delete_owned(entry)
        # If there are no new tags, the rows of the old ones are ignored until the run is deleted.
        is_tagged = bool(rest.tags) and await self._change_tags(key, rest.tags or ())
        awaits, awaits_names = awaits_values(rest)
        result = await self._run(
            sql.REST,
            *(entry.data.decode(), rest.status, awaits, awaits_names, _consumes(entry)),
            *header_values(rest.version, rest.tags, rest.summary),
            *(int(awaits is not None), micros_or_none(rest.wake_at), entry.n, entry.epoch),
            *(key, entry.epoch),
        )
        if result.rowcount != 1:
            return (await self._verdicts([entry]))[0]
        await self._clean_up(key)
        if awaits is not None:
            await self._schedule_wake(key, rest, entry.n)
        if is_tagged:
            await self._delete_other_tags(key, rest.tags or ())
        return Verdict.ACCEPTED

    async def _delete_owned(self, entry: Entry) -> Verdict:
        key = self._key(entry.id)
        await self._run(sql.RAISE_EPOCH_FLOOR, key)
        result = await self._run(sql.DELETE_OWNED, key, entry.epoch)
        if result.rowcount != 1:
            return (await self._verdicts([entry]))[0]
        await self._delete_orphans([key])
        return Verdict.ACCEPTED


def _consumes(entry: Entry) -> str | None:
    return f",{','.join(entry.consumes)}," if entry.consumes else None


def _split_after_rests(
    entries: Sequence[Entry], indexes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the indexes that can be written now, and those that come after a rest of their run."""
    settled_ids: set[str] = set()
    batch: list[int] = []
    remaining: list[int] = []
    for index in indexes:
        entry = entries[index]
        (remaining if entry.id in settled_ids else batch).append(index)
        if entry.rest is not None:
            settled_ids.add(entry.id)
    return batch, remaining
