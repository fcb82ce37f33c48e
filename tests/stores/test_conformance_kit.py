"""The conformance kit can fail: each mutant is caught by the check for its bug."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from traceback import walk_tb

import pytest
from hypothesis import settings

from perdure.errors import StoreError
from perdure.snapshot import Snapshot
from perdure.store import Entry, Store, Verdict
from perdure.stores.memory import MemoryStore, MemoryTransaction
from perdure.stores.memory.backend import MemoryBackend
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.reference import StoreMachine
from perdure.testing.faults import FaultyStore
from tests.stores.mutants import MUTANTS, AppendsAgain, LosesFencing, Mutant, store_of
from tests.stores.mutants_handing_off import HandsOffOwnedRuns, HandsOffWithoutMessages
from tests.stores.mutants_owning import (
    ClaimsAnyWorkflow,
    GrantsWithOldStatus,
    IgnoresTheInboxAtRest,
    RenewsLostLeases,
    StealsLeases,
)
from tests.stores.mutants_searching import (
    ClaimsAnyVersion,
    ClaimsFromAnyQueue,
    CountsBeforeDelivery,
    KeepsTheFirstHeader,
)

settings.register_profile("derandomized", settings.get_profile("perdure"), derandomize=True)

CHECKS = [name for name in dir(StoreConformance) if name.startswith("test_")]
CHECK_MODULES = {getattr(StoreConformance, name).__module__ for name in CHECKS} | {
    StoreMachine.__module__
}
MODEL = "test_the_store_agrees_with_a_simple_model"


class Kit(StoreConformance):
    """The kit on one kind of memory store."""

    __test__ = False

    def __init__(self, kind: type[MemoryStore]) -> None:
        self.kind = kind
        self.clock: TestClock = TestClock()

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        assert isinstance(store, MemoryStore)
        return self.kind(prefix=prefix, clock=self.clock, shares=store)

    async def user_write(self, connection: MemoryTransaction, note: str) -> None:
        connection[note] = True

    async def user_notes(self, store: Store) -> Sequence[str]:
        assert isinstance(store, MemoryStore)
        return list(store.table)

    async def caught(self, check: str) -> bool:
        """Return whether an assertion of the check fails on a new store.

        Any other exception is an error in the mutant and proves nothing about the check.
        """
        run: Callable[[Store], Awaitable[None]] = getattr(self, check)
        try:
            await run(self.kind(clock=self.clock))
        except pytest.skip.Exception as skipped:
            pytest.fail(f"{check} was skipped: {skipped}")
        except (AssertionError, pytest.fail.Exception) as failure:
            if not raised_by_a_check(failure):
                raise
            return True
        return False


def raised_by_a_check(failure: BaseException) -> bool:
    """Return whether a line of a check failed, rather than one of the store or of its set-up."""
    frames = [frame for frame, _ in walk_tb(failure.__traceback__)]
    modules = [frame.f_globals["__name__"] for frame in frames]
    # `pytest.raises` and `pytest.fail` raise in frames of pytest.
    outside_pytest = [module for module in modules if not module.startswith("_pytest.")]
    return outside_pytest[-1] in CHECK_MODULES


@pytest.mark.parametrize(("mutant", "check"), MUTANTS)
async def test_a_check_catches_its_mutant(mutant: type[MemoryStore], check: str) -> None:
    """The bug is caught by the check of the law it breaks, and the reference passes that check."""
    assert check in CHECKS
    assert await Kit(mutant).caught(check)
    assert not await Kit(MemoryStore).caught(check)


@pytest.mark.parametrize("error", [TypeError, AssertionError])
async def test_an_error_in_a_mutant_is_not_a_caught_bug(error: type[Exception]) -> None:
    """Only a failed assertion of a check counts; an error in the store fails the test."""

    class Broken(MemoryStore):
        async def load(self, id: str, /) -> Snapshot | None:
            raise error("an error in the mutant")

    with pytest.raises(error, match="an error in the mutant"):
        await Kit(Broken).caught("test_load_returns_what_was_saved")


@pytest.mark.parametrize(
    "mutant",
    [
        LosesFencing,
        AppendsAgain,
        StealsLeases,
        RenewsLostLeases,
        ClaimsAnyWorkflow,
        GrantsWithOldStatus,
        IgnoresTheInboxAtRest,
        ClaimsAnyVersion,
        ClaimsFromAnyQueue,
        CountsBeforeDelivery,
        KeepsTheFirstHeader,
        HandsOffOwnedRuns,
        HandsOffWithoutMessages,
    ],
)
async def test_the_model_catches_bugs_without_the_other_checks(mutant: Mutant) -> None:
    """Random sequences of all verbs find the bugs that the other checks find."""
    kit = Kit(store_of(mutant))
    # It ends with the first failure. Which examples are drawn also depends on the modules that are
    # loaded: Hypothesis collects constants from them.
    kit.examples = 3000
    settings.load_profile("derandomized")
    try:
        assert await kit.caught(MODEL)
        assert not await Kit(MemoryStore).caught(MODEL)
    finally:
        settings.load_profile("perdure")


class CrashesWhileFolding(MemoryBackend):
    """Deletes the journal before it writes the snapshot, and crashes in between."""

    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None and entry.rest is not None:
            run.journal.clear()
            raise StoreError("crashed")
        return super()._append(entry)


class CrashKit(Kit):
    """The kit on a memory store that crashes before its first write, or in its second."""

    def __init__(self, crashing_kind: type[MemoryStore]) -> None:
        super().__init__(MemoryStore)
        self.crashing_kind = crashing_kind

    async def crashing(self, store: Store, writes: int) -> Store:
        assert isinstance(store, MemoryStore)
        if writes == 0:
            return FaultyStore(store, fail_at=1, verbs={"append"})
        return self.crashing_kind(clock=self.clock, shares=store)


@pytest.mark.parametrize(("kind", "caught"), [(MemoryStore, False), (CrashesWhileFolding, True)])
async def test_a_crash_between_two_writes_is_caught(kind: Mutant, caught: bool) -> None:
    """A store with several writes in one verb is checked with a crash between any two of them."""
    check = "test_a_crash_between_the_writes_of_a_rest_is_harmless"
    assert await CrashKit(store_of(kind)).caught(check) is caught


async def test_a_store_with_only_the_five_methods_passes() -> None:
    """A store that declares nothing passes; checks of abilities it does not have are skipped."""

    class Five:
        def __init__(self, clock: TestClock) -> None:
            inner = MemoryStore(clock=clock)
            self.save, self.load, self.delete = inner.save, inner.load, inner.delete
            self.list, self.close = inner.list, inner.close

    reasons: list[str] = []
    for check in CHECKS:
        kit = StoreConformance()
        kit.clock = TestClock()
        try:
            await getattr(kit, check)(Five(kit.clock))
        except pytest.skip.Exception as skipped:
            reasons.append(str(skipped))
    assert reasons
    assert all("does not declare" in reason or "has no" in reason for reason in reasons)


def test_every_check_quotes_its_law() -> None:
    """Each check is a coroutine function whose docstring is the sentence it checks."""
    for name in CHECKS:
        check = getattr(StoreConformance, name)
        assert inspect.iscoroutinefunction(check)
        assert check.__doc__
        assert check.__doc__.strip().endswith(".")
