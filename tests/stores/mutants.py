"""Memory stores with one bug each, and the check of the kit that must catch it."""

import asyncio
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from itertools import count
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from perdure import codec
from perdure.clock import Clock
from perdure.snapshot import Snapshot
from perdure.store import (
    Capabilities,
    Entry,
    Grant,
    Query,
    Rest,
    RunSummary,
    SupportedVersions,
    Verdict,
)
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult
from perdure.stores.memory import MemoryStore, MemoryTransaction
from perdure.stores.memory.backend import MemoryBackend
from perdure.stores.memory.rows import Run, Runs

Work: TypeAlias = Callable[[MemoryTransaction], Awaitable[Entry]]
Drives: TypeAlias = Sequence[SupportedVersions] | None
Mutant: TypeAlias = type[MemoryBackend] | type[MemoryStore]
M = TypeVar("M", bound=Mutant)

MUTANTS: list[tuple[type[MemoryStore], str]] = []


def store_of(mutant: Mutant) -> type[MemoryStore]:
    """Return the store to check: one on the mutant if the mutant is a backend."""
    if issubclass(mutant, MemoryStore):
        return mutant
    backend: type[MemoryBackend] = mutant

    class Store(MemoryStore):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            sound = self._backend
            self._backend = backend(sound.runs, sound.prefix, sound.clock)

    Store.__name__ = backend.__name__
    return Store


def caught_by(*checks: str) -> Callable[[M], M]:
    """Register a mutant with the checks that must catch it, each of them."""

    def register(mutant: M) -> M:
        store = store_of(mutant)
        MUTANTS.extend((store, check) for check in checks)
        return mutant

    return register


@caught_by("test_an_entry_of_an_older_epoch_is_fenced")
class LosesFencing(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        return super()._append(entry if run is None else replace(entry, epoch=run.epoch))


@caught_by("test_a_paused_owner_is_fenced_out")
class FencesOnlyTheReleased(MemoryBackend):
    """Ignores the epoch of an owner whose lease expired."""

    def __init__(self, runs: Runs, prefix: str, clock: Clock) -> None:
        super().__init__(runs, prefix, clock)
        self.expired: set[int] = set()

    def _grant(self, run: Run, owner: str, now: datetime, *rest: Any, **options: Any) -> Granted:
        if run.is_orphaned(now):
            self.expired.add(run.epoch)
        return super()._grant(run, owner, now, *rest, **options)

    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None and entry.epoch in self.expired:
            entry = replace(entry, epoch=run.epoch)
        return super()._append(entry)


@caught_by("test_an_entry_is_fenced_after_save")
class SavesWithoutFencing(MemoryBackend):
    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        run = self._find(id)
        lease = None if run is None else (run.epoch, run.owner)
        await super().save(id, data, workflow, rest)
        if run is not None and lease is not None:
            run.epoch, run.owner = lease


@caught_by("test_load_returns_steps_in_the_order_they_were_recorded")
class DropsOrder(MemoryBackend):
    async def load(self, id: str) -> Snapshot | None:
        loaded = await super().load(id)
        if loaded is not None:
            loaded["steps"] = dict(sorted(loaded["steps"].items()))
        return loaded


class ChangesTheOutbox(MemoryBackend):
    """Stores another outbox than that of the entry."""

    def changed(self, outbox: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _append(self, entry: Entry) -> Verdict:
        part, run = codec.loads(entry.data), self._find(entry.id)
        if run is not None and "outbox" in part:
            before = run.merged_snapshot().get("outbox") or {}
            part["outbox"] = self.changed(part["outbox"], before)
        return super()._append(replace(entry, data=codec.dumps(part)))


@caught_by("test_outbox_items_are_merged_by_name_and_removed_by_null")
class DropsNullsOfTheOutbox(ChangesTheOutbox):
    def changed(self, outbox: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        return {name: item for name, item in outbox.items() if item is not None}


@caught_by("test_outbox_items_are_merged_by_name_and_removed_by_null")
class ReplacesTheOutbox(ChangesTheOutbox):
    def changed(self, outbox: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        return {**dict.fromkeys(before), **outbox}


@caught_by("test_outbox_items_are_merged_by_name_and_removed_by_null")
class GrantsWithoutTheOutbox(MemoryBackend):
    def _grant(self, run: Run, *arguments: Any, **options: Any) -> Granted:
        granted = super()._grant(run, *arguments, **options)
        if isinstance(granted, Grant):
            granted.snapshot.pop("outbox", None)
        return granted


@caught_by("test_runs_of_another_prefix_are_invisible")
class IgnoresItsPrefix(MemoryBackend):
    def __init__(self, runs: Runs, prefix: str, clock: Clock) -> None:
        super().__init__(runs, "", clock)


@caught_by("test_claims_are_restricted_to_the_prefix")
class ClaimsAcrossPrefixes(MemoryBackend):
    async def claim(
        self, owner: str, ttl: timedelta, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Granted]:
        now = self.clock.now()
        runs = self.runs.index.due(now, limit, supports, queues, "")
        return [self._grant(run, owner, now, ttl) for run in runs]


class ListsByPattern(MemoryBackend):
    """Filters the list by another rule than the prefix itself."""

    def matches(self, id: str, prefix: str) -> bool:
        raise NotImplementedError

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        page = await super().search(replace(query, prefix=""), 100_000, after)
        return SearchResult(
            [run for run in page.runs if self.matches(run.id, query.prefix)][:limit]
        )


@caught_by("test_prefix_is_exact_and_case_sensitive")
class ListsWithoutCase(ListsByPattern):
    def matches(self, id: str, prefix: str) -> bool:
        return id.lower().startswith(prefix.lower())


@caught_by("test_every_prefix_is_exact")
class ListsWithWildcards(ListsByPattern):
    def matches(self, id: str, prefix: str) -> bool:
        return fnmatchcase(id, prefix + "*")


@caught_by("test_list_sorts_before_it_applies_the_limit")
class LimitsBeforeSorting(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        first = [self._id(run) for run in self._mine()][:limit]
        page = await super().search(query, 100_000, after)
        return SearchResult([run for run in page.runs if run.id in first])


@caught_by("test_a_limit_of_zero_returns_nothing")
class TreatsZeroAsUnlimited(MemoryStore):
    async def list(self, *, limit: int = 100, **filters: Any) -> Sequence[RunSummary]:
        return await super().list(limit=limit or 100_000, **filters)


@caught_by("test_paging_skips_and_repeats_nothing")
class PagesByTimeAlone(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await super().search(query, limit, after and Position(after.time, ""))


@caught_by("test_paging_skips_and_repeats_nothing")
class HasNoLastPage(MemoryBackend):
    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await super().search(query, limit, None)


@caught_by("test_load_returns_an_independent_copy")
class SharesItsSnapshots(MemoryStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.saved: dict[str, Snapshot] = {}

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        await super().save(id, snapshot)
        self.saved[id] = snapshot

    async def load(self, id: str, /) -> Snapshot | None:
        return self.saved.get(id) or await super().load(id)


@caught_by("test_save_replaces_the_journal")
class KeepsTheJournalOnSave(MemoryBackend):
    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        run = self._find(id)
        journal = {} if run is None else dict(run.journal)
        await super().save(id, data, workflow, rest)
        if run is not None:
            run.journal = journal


@caught_by("test_an_epoch_of_a_deleted_run_stays_stale")
class RestartsEpochs(MemoryBackend):
    async def delete(self, id: str) -> bool:
        self.runs.epochs = count(1)
        return await super().delete(id)


@caught_by("test_an_entry_sent_again_changes_nothing")
class AppendsAgain(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None and entry.rest is None:
            entry = replace(entry, n=len(run.journal) + 1)
        return super()._append(entry)


@caught_by("test_a_rest_sent_again_changes_nothing")
class ForgetsWhatItFolded(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        verdict = super()._append(entry)
        run = self._find(entry.id)
        if run is not None:
            run.folded = (0, 0)
        return verdict


class WritesToClosedEpochs(MemoryBackend):
    """Accepts an entry of the newest epoch although the run is unowned."""

    def is_closed(self, run: Run) -> bool:
        raise NotImplementedError

    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
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


@caught_by("test_a_release_closes_its_epoch")
class WritesAfterRelease(WritesToClosedEpochs):
    def is_closed(self, run: Run) -> bool:
        return run.folded[0] == run.epoch


@caught_by("test_a_rest_closes_its_epoch_for_later_entries_of_its_call")
class WritesRestsLast(MemoryBackend):
    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        rests = [entry for entry in entries if entry.rest is not None]
        others = [entry for entry in entries if entry.rest is None]
        verdicts = dict(
            zip([*others, *rests], await super().append([*others, *rests]), strict=True)
        )
        return [verdicts[entry] for entry in entries]


@caught_by("test_a_rest_sent_again_changes_nothing")
class FencesWhatItFolded(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None and run.folded[0] == run.epoch:
            return Verdict.FENCED
        return super()._append(entry)


@caught_by("test_an_entry_sent_again_after_release_is_accepted")
class FencesWhatWasReleased(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None and run.owner is None and run.folded[0] != run.epoch:
            return Verdict.FENCED
        return super()._append(entry)


@caught_by("test_a_refused_entry_does_not_affect_the_others")
class RefusesTheWholeBatch(MemoryBackend):
    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        if any(self._find(entry.id) is None for entry in entries):
            return [Verdict.UNKNOWN] * len(entries)
        return await super().append(entries)


@caught_by("test_a_rest_is_one_atomic_write")
class FoldsInTwoWrites(MemoryBackend):
    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        for entry in entries:
            run = self._find(entry.id)
            if run is not None and entry.rest is not None:
                run.journal.clear()
                await asyncio.sleep(0)
        return await super().append(entries)


@caught_by("test_a_rest_releases_the_lease")
class KeepsTheLeaseAtRest(MemoryBackend):
    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        owner, wake_at = run.owner, run.wake_at
        super()._rest(run, snapshot, rest)
        if owner is not None:
            run.owner = owner
            self._wake(run, wake_at)


@caught_by("test_an_entry_that_is_too_large_is_refused_with_the_name_of_its_step")
class AcceptsAnySize(MemoryStore):
    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        return await self._backend.append(entries)


class ChangesIds(MemoryBackend):
    """Stores runs under something other than their ids."""

    def changed(self, id: str) -> str:
        raise NotImplementedError

    def _find(self, id: str) -> Run | None:
        return super()._find(self.changed(id))

    def _create(self, id: str, *arguments: Any) -> Run:
        return super()._create(self.changed(id), *arguments)


@caught_by("test_every_id_is_a_separate_run")
class FoldsCase(ChangesIds):
    def changed(self, id: str) -> str:
        return id.casefold()


@caught_by("test_every_id_is_a_separate_run")
class TrimsIds(ChangesIds):
    def changed(self, id: str) -> str:
        return id.rstrip() or id


@caught_by("test_every_id_is_a_separate_run")
class NormalizesIds(ChangesIds):
    def changed(self, id: str) -> str:
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


@caught_by("test_values_are_loaded_unchanged")
class DropsNul(MemoryBackend):
    async def load(self, id: str) -> Snapshot | None:
        loaded: Snapshot | None = without_nul(await super().load(id))
        return loaded


class Misdeclares(MemoryStore):
    """Declares something other than what it can do."""

    changes: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        declared: Capabilities = self.capabilities
        self.capabilities = replace(declared, **self.changes)


@caught_by("test_a_declared_ability_has_its_methods")
class DeclaresTooMuch(MemoryStore):
    stats: Any = None


@caught_by("test_a_stale_transaction_is_fenced", "test_a_transaction_of_a_closed_epoch_is_fenced")
class TransactsUnfenced(MemoryBackend):
    async def transact(self, id: str, epoch: int, work: Work) -> Verdict:
        async with self.runs.table.begin() as transaction:
            entry = await work(transaction)
            run = self._find(id)
            assert run is not None
            run.journal[entry.epoch, entry.n] = entry.data
            return Verdict.ACCEPTED


@caught_by("test_user_writes_roll_back_with_an_exception")
class NeverRollsBack(MemoryBackend):
    async def transact(self, id: str, epoch: int, work: Work) -> Verdict:
        async def committed(transaction: MemoryTransaction) -> Entry:
            try:
                return await work(transaction)
            finally:
                transaction.commit()

        return await super().transact(id, epoch, committed)


@caught_by("test_an_undeclared_ability_has_no_methods")
class DeclaresTooLittle(Misdeclares):
    changes = MappingProxyType({"maintenance": False})
