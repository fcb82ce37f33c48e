"""The kit can fail: each mutant is caught by the check that is there for it."""

import inspect
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import settings

from perdure.errors import StoreError
from perdure.store import Entry, Store, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from perdure.testing.faults import FaultyStore
from tests.stores.mutants import MUTANTS, AppendsAgain, LosesFencing
from tests.stores.mutants_owning import (
    ClaimsAnyWorkflow,
    GrantsWithOldStatus,
    RenewsTakenLeases,
    RestsOverMail,
    StealsLeases,
)

settings.register_profile("without luck", derandomize=True)

CHECKS = [name for name in dir(StoreConformance) if name.startswith("test_")]
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
        """Tell whether the check fails on a fresh store."""
        run: Callable[[Store], Awaitable[None]] = getattr(self, check)
        try:
            await run(self.kind(clock=self.clock))
        except pytest.skip.Exception:
            return False
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a mutant may break anyhow
            return True
        return False


@pytest.mark.parametrize(("mutant", "check"), MUTANTS.items())
async def test_a_check_catches_its_mutant(mutant: type[MemoryStore], check: str) -> None:
    """The hole is found by the check whose law it breaks, which the reference passes."""
    assert await Kit(mutant).caught(check)
    assert not await Kit(MemoryStore).caught(check)


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_the_kit_catches_every_mutant(mutant: type[MemoryStore]) -> None:
    """Whoever runs the whole kit learns of the hole, without the random checks' luck."""
    for check in CHECKS:
        if check != MODEL and await Kit(mutant).caught(check):
            return
    pytest.fail("the kit found nothing")


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
        settings.load_profile("default")


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
    assert all("does not declare" in reason or "gives no" in reason for reason in reasons)


def test_every_check_states_its_law() -> None:
    """Each check is a coroutine function whose docstring is the sentence it checks."""
    for name in CHECKS:
        check = getattr(StoreConformance, name)
        assert inspect.iscoroutinefunction(check)
        assert check.__doc__
        assert check.__doc__.strip().endswith(".")
