"""How soon a worker finds work, and what it does first."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.durable.session import wake_workers
from perdure.snapshot import Snapshot
from perdure.store import Entry, Grant, NewMessage, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock


@workflow("quick")
async def quick(step: Step) -> str:
    return await step("work", lambda: "done")


@workflow("approval")
async def approval(step: Step) -> Any:
    return await step.wait_for_event("wait", "approved")


class Quiet(MemoryStore):
    """A store without notifications and handoff that counts how often it was asked for work."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__(clock=clock)
        self.capabilities = msgspec.structs.replace(self.capabilities, notify=False, handoff=False)
        self.clock = clock
        self.claims: list[float] = []

    async def claim(self, *arguments: Any, **options: Any) -> Any:
        self.claims.append(self.clock.monotonic())
        return await super().claim(*arguments, **options)


@pytest.fixture
def quiet(clock: TestClock) -> Quiet:
    return Quiet(clock)


@pytest.fixture
def runtime(quiet: Quiet, clock: TestClock) -> Runtime:
    return Runtime(quiet, workflows=[quick, approval], clock=clock)


async def test_a_run_that_this_process_creates_wakes_its_worker(
    runtime: Runtime, clock: TestClock
) -> None:
    """Without waiting for the next poll."""
    async with Worker(runtime, poll="1h"):
        await clock.advance(0)
        run = await runtime.trigger(quick, wait=False)
        await clock.advance(0)
        ended = await runtime.get_run(run.id)
    assert ended is not None
    assert ended.output == "done"


async def test_a_signal_from_this_process_wakes_its_worker(
    runtime: Runtime, clock: TestClock
) -> None:
    """`wait=False` leaves the run to a worker, which continues it at once."""
    run = await runtime.trigger(approval)
    async with Worker(runtime, poll="1h"):
        await clock.advance(0)
        await runtime.signal(run.id, "approved", {"by": "ana"}, wait=False)
        await clock.advance(0)
        ended = await runtime.get_run(run.id)
    assert ended is not None
    assert ended.output == {"by": "ana"}


class Noted(MemoryStore):
    """A store that notes the calls of some verbs, and whose claims are announced once more."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__(clock=clock)
        self.calls: list[str] = []
        self.on_claim: Callable[[], None] = lambda: None

    async def load(self, id: str, /) -> Snapshot | None:
        self.calls.append("load")
        return await super().load(id)

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        self.calls.append("append")
        return await super().append(entries)

    async def claim(self, *arguments: Any, **options: Any) -> Sequence[Grant]:
        self.calls.append("claim")
        grants = await super().claim(*arguments, **options)
        if grants:
            self.on_claim()
        return grants


async def test_a_signal_that_does_not_wait_does_not_load_the_run(
    noted: Noted, clock: TestClock
) -> None:
    runtime = Runtime(noted, workflows=[approval], clock=clock)
    run = await runtime.trigger(approval)
    noted.calls.clear()
    result = await runtime.signal(run.id, "approved", {"by": "ana"}, wait=False)
    assert result
    assert result.run is None
    assert noted.calls == []


@pytest.fixture
def noted(clock: TestClock) -> Noted:
    return Noted(clock)


async def test_a_second_notification_is_handled_after_the_run_has_written(
    noted: Noted, clock: TestClock
) -> None:
    """A run that becomes due is announced by this process and by the store."""
    runtime = Runtime(noted, workflows=[approval], clock=clock)
    run = await runtime.trigger(approval)
    async with Worker(runtime, poll="1h"):
        await clock.advance(0)
        noted.on_claim = lambda: wake_workers(noted)
        noted.calls.clear()
        await noted.send([NewMessage(run.id, "approved", b"null")])
        await clock.advance(0)
        assert noted.calls == ["claim", "append", "append"]
        await clock.advance(0.01)
        assert noted.calls == ["claim", "append", "append", "claim"]
        await clock.advance(60)
        assert len(noted.calls) == 4


async def test_a_notification_after_a_claim_is_handled_at_once(
    noted: Noted, clock: TestClock
) -> None:
    """Even when the worker is about to look again."""
    runtime = Runtime(noted, workflows=[approval], clock=clock)
    run = await runtime.trigger(approval)
    async with Worker(runtime, poll="1h"):
        await clock.advance(0)
        noted.on_claim = lambda: wake_workers(noted)
        await noted.send([NewMessage(run.id, "approved", b"null")])
        await clock.advance(0)
        noted.calls.clear()
        wake_workers(noted)
        await clock.advance(0)
        assert noted.calls == ["claim"]


async def test_a_worker_that_is_drained_during_a_claim_does_not_claim_again(
    noted: Noted, clock: TestClock
) -> None:
    runtime = Runtime(noted, workflows=[quick], clock=clock)
    worker = Worker(runtime, poll="1h")
    noted.on_claim = worker._stop
    async with worker:
        await clock.advance(0)
        await runtime.trigger(quick, run_id="q", wait=False)
        await clock.advance(0)
    assert noted.calls.count("claim") == 2


async def test_a_worker_that_found_work_polls_again_soon(
    runtime: Runtime, quiet: Quiet, clock: TestClock
) -> None:
    """After 20 ms, and later after a tenth of the time since there was work, up to `poll`."""
    other = Runtime(quiet, workflows=[quick], clock=clock)
    await other.trigger(quick, wait=False)
    async with Worker(runtime, poll=0.5):
        await clock.advance(20)
    check_pauses(quiet.claims)


async def test_a_worker_that_was_woken_without_work_polls_again_soon(
    runtime: Runtime, quiet: Quiet, clock: TestClock
) -> None:
    """Another process may have been faster to claim the run, and more may follow."""
    async with Worker(runtime, poll=0.5):
        await clock.advance(10)
        quiet.claims.clear()
        wake_workers(quiet)
        await clock.advance(20)
    check_pauses(quiet.claims)


def check_pauses(claims: list[float]) -> None:
    ages = [claim - claims[0] for claim in claims]
    pauses = [later - earlier for earlier, later in pairwise(ages)]
    assert pauses
    for age, pause in zip(ages, pauses, strict=False):
        assert 0.74 <= pause / min(max(0.02, age / 10), 0.5) <= 1.26
