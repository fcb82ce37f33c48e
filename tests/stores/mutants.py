"""Memory stores with one hole each, and the check of the kit that must find it."""

import asyncio
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from itertools import count
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from perdure.snapshot import Snapshot
from perdure.store import Capabilities, Entry, Grant, Rest, RunSummary, Verdict
from perdure.stores._reading import Granted
from perdure.stores.memory import MemoryStore
from perdure.stores.memory.rows import Run

MUTANTS: list[tuple[type[MemoryStore], str]] = []


def caught_by(*checks: str) -> Any:
    """Say which checks must find the hole, each of them."""

    def note(mutant: type[MemoryStore]) -> type[MemoryStore]:
        MUTANTS.extend((mutant, check) for check in checks)
        return mutant

    return note


@caught_by("test_an_entry_of_an_older_epoch_is_fenced")
class LosesFencing(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        return super()._append(entry if run is None else replace(entry, epoch=run.epoch))


@caught_by("test_a_paused_owner_is_fenced_out")
class FencesOnlyTheReleased(MemoryStore):
    """Does not mind the epoch of an owner whose lease expired."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.expired: set[int] = set()

    def _grant(self, run: Run, owner: str, now: datetime, *rest: Any, **options: Any) -> Granted:
        if run.orphaned(now):
            self.expired.add(run.epoch)
        return super()._grant(run, owner, now, *rest, **options)

    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is not None and entry.epoch in self.expired:
            entry = replace(entry, epoch=run.epoch)
        return super()._append(entry)


@caught_by("test_an_entry_is_fenced_after_save")
class SavesWithoutFencing(MemoryStore):
    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        run = self._runs.get(self._prefix + id)
        before = None if run is None else (run.epoch, run.owner)
        await super().save(id, snapshot)
        if run is not None and before is not None:
            run.epoch, run.owner = before


@caught_by("test_load_gives_steps_in_the_order_they_were_recorded")
class DropsOrder(MemoryStore):
    async def load(self, id: str, /) -> Snapshot | None:
        loaded = await super().load(id)
        if loaded is not None:
            loaded["steps"] = dict(sorted(loaded["steps"].items()))
        return loaded


@caught_by("test_runs_of_another_prefix_are_not_there")
class IgnoresItsPrefix(MemoryStore):
    def __init__(self, *, prefix: str = "", **options: Any) -> None:
        super().__init__(**options)


@caught_by("test_claims_keep_to_the_prefix")
class ClaimsAcrossPrefixes(MemoryStore):
    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        now = self._now()
        runs = self._agenda.due(now, limit, workflows, "")
        return [self._grant(run, owner, now, ttl) for run in runs]


class ListsByPattern(MemoryStore):
    """Filters what is listed by some other rule than the prefix itself."""

    def matches(self, id: str, prefix: str) -> bool:
        raise NotImplementedError

    async def list(
        self, *, prefix: str = "", limit: int = 100, **filters: Any
    ) -> Sequence[RunSummary]:
        lines = await super().list(limit=100_000, **filters)
        return [line for line in lines if self.matches(line.id, prefix)][:limit]


@caught_by("test_prefix_is_exact_and_case_sensitive")
class ListsWithoutCase(ListsByPattern):
    def matches(self, id: str, prefix: str) -> bool:
        return id.lower().startswith(prefix.lower())


@caught_by("test_every_prefix_is_exact")
class ListsWithWildcards(ListsByPattern):
    def matches(self, id: str, prefix: str) -> bool:
        return fnmatchcase(id, prefix + "*")


@caught_by("test_list_takes_the_newest_before_it_cuts")
class CutsBeforeSorting(MemoryStore):
    async def list(self, *, limit: int = 100, **filters: Any) -> Sequence[RunSummary]:
        first = [self._id(run) for run in self._mine()][:limit]
        lines = await super().list(limit=100_000, **filters)
        return [line for line in lines if line.id in first]


@caught_by("test_limit_zero_gives_nothing")
class TakesZeroForAll(MemoryStore):
    async def list(self, *, limit: int = 100, **filters: Any) -> Sequence[RunSummary]:
        return await super().list(limit=limit or 100_000, **filters)


@caught_by("test_paging_skips_nothing_and_shows_nothing_twice")
class PagesByTimeAlone(MemoryStore):
    def _mark(self, cursor: str) -> tuple[datetime, str]:
        time, _ = super()._mark(cursor)
        return time, ""


@caught_by("test_paging_skips_nothing_and_shows_nothing_twice")
class NeverComesToTheLastPage(MemoryStore):
    async def list(self, *, after: str | None = None, **filters: Any) -> Sequence[RunSummary]:
        return await super().list(**filters)


@caught_by("test_load_gives_a_snapshot_of_its_own")
class SharesWhatItHolds(MemoryStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.held: dict[str, Snapshot] = {}

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        await super().save(id, snapshot)
        self.held[id] = snapshot

    async def load(self, id: str, /) -> Snapshot | None:
        return self.held.get(id) or await super().load(id)


@caught_by("test_save_replaces_the_journal")
class SavesBesideTheJournal(MemoryStore):
    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        run = self._runs.get(self._prefix + id)
        journal = {} if run is None else dict(run.journal)
        await super().save(id, snapshot)
        self._runs[self._prefix + id].journal = journal


@caught_by("test_an_epoch_of_the_deleted_run_stays_stale")
class CountsEpochsAnew(MemoryStore):
    async def delete(self, id: str, /) -> bool:
        self._shelf.epochs = count(1)
        return await super().delete(id)


@caught_by("test_an_entry_sent_again_changes_nothing")
class AppendsAgain(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is not None and entry.rest is None:
            entry = replace(entry, n=len(run.journal) + 1)
        return super()._append(entry)


@caught_by("test_a_rest_sent_again_changes_nothing")
class ForgetsWhatItFolded(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        verdict = super()._append(entry)
        run = self._runs.get(self._prefix + entry.id)
        if run is not None:
            run.folded = (0, 0)
        return verdict


class WritesToClosedEpochs(MemoryStore):
    """Takes an entry of the newest epoch although nobody owns the run."""

    def is_closed(self, run: Run) -> bool:
        raise NotImplementedError

    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is None or run.owner is not None or self.is_closed(run):
            return super()._append(entry)
        run.owner = "the last owner"
        try:
            return super()._append(entry)
        finally:
            run.owner = None


@caught_by("test_a_rest_closes_its_epoch")
class WritesAfterARest(WritesToClosedEpochs):
    def is_closed(self, run: Run) -> bool:
        return run.folded[0] != run.epoch


@caught_by("test_release_closes_its_epoch")
class WritesAfterRelease(WritesToClosedEpochs):
    def is_closed(self, run: Run) -> bool:
        return run.folded[0] == run.epoch


@caught_by("test_a_rest_closes_its_epoch_for_the_rest_of_its_call")
class JudgesACallAsItBegins(MemoryStore):
    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        rests = [entry for entry in entries if entry.rest is not None]
        others = [entry for entry in entries if entry.rest is None]
        verdicts = dict(
            zip([*others, *rests], await super().append([*others, *rests]), strict=True)
        )
        return [verdicts[entry] for entry in entries]


@caught_by("test_a_rest_sent_again_changes_nothing")
class FencesWhatItFolded(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is not None and run.folded[0] == run.epoch:
            return Verdict.FENCED
        return super()._append(entry)


@caught_by("test_an_entry_sent_again_after_release_is_accepted")
class FencesWhatWasReleased(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is not None and run.owner is None and run.folded[0] != run.epoch:
            return Verdict.FENCED
        return super()._append(entry)


@caught_by("test_one_refusal_harms_no_other")
class RefusesTheWholeBatch(MemoryStore):
    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        keys = {self._prefix + entry.id for entry in entries}
        if keys - set(self._runs):
            return [Verdict.UNKNOWN] * len(entries)
        return await super().append(entries)


@caught_by("test_rest_is_one_atomic_write")
class FoldsInTwoWrites(MemoryStore):
    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        for entry in entries:
            if entry.rest is not None:
                self._runs[self._prefix + entry.id].journal.clear()
                await asyncio.sleep(0)
        return await super().append(entries)


@caught_by("test_rest_gives_the_lease_up")
class RestsWithItsLease(MemoryStore):
    def _lay(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        owner, wake_at = run.owner, run.wake_at
        super()._lay(run, snapshot, rest)
        if owner is not None:
            run.owner = owner
            self._wake(run, wake_at)


@caught_by("test_a_value_too_large_is_refused_with_the_steps_name")
class TakesAnySize(MemoryStore):
    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        return [self._append(entry) for entry in entries]


class KeysAreNotIds(MemoryStore):
    """Keeps runs under something other than their ids."""

    def bent(self, id: str) -> str:
        raise NotImplementedError

    def _key(self, id: str) -> str:
        return super()._key(id) and self._prefix + self.bent(id)


@caught_by("test_every_id_is_its_own_run")
class FoldsCase(KeysAreNotIds):
    def bent(self, id: str) -> str:
        return id.casefold()


@caught_by("test_every_id_is_its_own_run")
class TrimsIds(KeysAreNotIds):
    def bent(self, id: str) -> str:
        return id.rstrip() or id


@caught_by("test_every_id_is_its_own_run")
class NormalisesIds(KeysAreNotIds):
    def bent(self, id: str) -> str:
        return unicodedata.normalize("NFC", id)


def without_nul(value: Any) -> Any:
    match value:
        case str():
            return value.replace("\0", "")
        case list():
            return [without_nul(item) for item in value]
        case dict():
            return {without_nul(key): without_nul(item) for key, item in value.items()}
        case _:
            return value


@caught_by("test_values_come_back_as_they_were")
class DropsNul(MemoryStore):
    async def load(self, id: str, /) -> Snapshot | None:
        return without_nul(await super().load(id))


class Declaring(MemoryStore):
    """Declares something other than what it is."""

    changes: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        declared: Capabilities = self.capabilities
        self.capabilities = replace(declared, **self.changes)


@caught_by("test_what_is_declared_is_there")
class DeclaresTooMuch(Declaring):
    changes = MappingProxyType({"transaction": True})


@caught_by("test_what_is_there_is_declared")
class DeclaresTooLittle(Declaring):
    changes = MappingProxyType({"maintenance": False})
