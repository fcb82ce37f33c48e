"""The kit can fail: each mutant is caught by the check that is there for it."""

import inspect
from collections.abc import Awaitable, Callable
from traceback import walk_tb

import pytest
from hypothesis import settings

from perdure.errors import StoreError
from perdure.snapshot import Snapshot
from perdure.store import Entry, Store, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.reference import StoreMachine
from perdure.testing.faults import FaultyStore
from tests.stores.mutants import MUTANTS, AppendsAgain, LosesFencing
from tests.stores.mutants_owning import (
    ClaimsAnyWorkflow,
    GrantsWithOldStatus,
    RenewsTakenLeases,
    RestsOverMail,
    StealsLeases,
)

settings.register_profile("without luck", settings.get_profile("perdure"), derandomize=True)

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

    async def caught(self, check: str) -> bool:
        """Return whether an assertion of a check fails on a fresh store.

        Any other exception is an error of the mutant, and no proof of the check.
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
    """Return whether a line of a check failed, and not one of the store or of its preparation."""
    frames = [frame for frame, _ in walk_tb(failure.__traceback__)]
    modules = [frame.f_globals["__name__"] for frame in frames]
    # `pytest.raises` and `pytest.fail` raise in frames of their own.
    own = [module for module in modules if not module.startswith("_pytest.")]
    return own[-1] in CHECK_MODULES


@pytest.mark.parametrize(("mutant", "check"), MUTANTS)
async def test_a_check_catches_its_mutant(mutant: type[MemoryStore], check: str) -> None:
    """The hole is found by the check whose law it breaks, which the reference passes."""
    assert check in CHECKS
    assert await Kit(mutant).caught(check)
    assert not await Kit(MemoryStore).caught(check)


@pytest.mark.parametrize("error", [TypeError, AssertionError])
async def test_a_mutant_that_breaks_by_itself_proves_nothing(error: type[Exception]) -> None:
    """Only an assertion of a check counts: an error of the store is an error of the test."""

    class Broken(MemoryStore):
        async def load(self, id: str, /) -> Snapshot | None:
            raise error("broken by itself")

    with pytest.raises(error, match="broken by itself"):
        await Kit(Broken).caught("test_load_gives_what_was_saved")


@pytest.mark.parametrize(
    "mutant",
    [
        LosesFencing,
        AppendsAgain,
        StealsLeases,
        RenewsTakenLeases,
        ClaimsAnyWorkflow,
        GrantsWithOldStatus,
        RestsOverMail,
    ],
)
async def test_the_model_finds_holes_by_itself(mutant: type[MemoryStore]) -> None:
    """Random sequences of all verbs find what the written checks find."""
    kit = Kit(mutant)
    kit.examples = 500
    settings.load_profile("without luck")
    try:
        assert await kit.caught(MODEL)
        assert not await Kit(MemoryStore).caught(MODEL)
    finally:
        settings.load_profile("perdure")


class DiesWhileFolding(MemoryStore):
    """Removes the journal before it writes the snapshot, and dies in between."""

    def _append(self, entry: Entry) -> Verdict:
        if entry.rest is not None:
            self._runs[self._prefix + entry.id].journal.clear()
            raise StoreError("died")
        return super()._append(entry)


class CrashKit(Kit):
    """The kit on a memory store that dies before its first write, or in its second."""

    def __init__(self, dying: type[MemoryStore]) -> None:
        super().__init__(MemoryStore)
        self.dying = dying

    async def crashing(self, store: Store, writes: int) -> Store:
        assert isinstance(store, MemoryStore)
        if writes == 0:
            return FaultyStore(store, fail_at=1, verbs={"append"})
        return self.dying(clock=self.clock, shares=store)


@pytest.mark.parametrize(("dying", "caught"), [(MemoryStore, False), (DiesWhileFolding, True)])
async def test_a_crash_between_two_writes_is_caught(dying: type[MemoryStore], caught: bool) -> None:
    """A store that tells where it may die is checked at each of these places."""
    check = "test_a_crash_between_the_writes_of_a_rest_is_harmless"
    assert await CrashKit(dying).caught(check) is caught


async def test_the_five_methods_alone_pass() -> None:
    """A store that declares nothing passes; what it cannot do is skipped, and nothing fails."""

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
    assert all("does not declare" in reason or "gives no" in reason for reason in reasons)


def test_every_check_states_its_law() -> None:
    """Each check is a coroutine function whose docstring is the sentence it checks."""
    for name in CHECKS:
        check = getattr(StoreConformance, name)
        assert inspect.iscoroutinefunction(check)
        assert check.__doc__
        assert check.__doc__.strip().endswith(".")
