"""The checks on a log of leases: they must detect a limit that is exceeded."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure import Queue, Runtime, Step, Worker, workflow
from perdure.stores.memory import MemoryStore
from tests.durability.lease_history import most_at_once
from tests.durability.lease_log import (
    Held,
    LeaseLog,
    longest_until_back,
    processes_in_a_call,
    read_leases,
    share_held,
)

START = datetime(2030, 1, 1, tzinfo=UTC)
TTL = timedelta(seconds=1)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def held_lease(permit: str, begin: float, expires: float, *, returned: float | None = None) -> Held:
    given_up = None if returned is None else at(returned)
    return Held(permit, 1, 1, at(begin), at(expires), given_up, returned is not None)


@workflow("logged", queue=Queue("logged", concurrency=2))
async def logged(step: Step, number: int) -> int:
    return await step("work", lambda: number)


async def test_the_log_has_the_leases_of_permits_alone(tmp_path: Path) -> None:
    log = tmp_path / "leases.log"
    runtime = Runtime(LeaseLog(MemoryStore(), str(log)), workflows=[logged])
    await runtime.trigger_many(logged, range(6))
    async with Worker(runtime) as worker:
        await worker.run_until_idle()
    leases = read_leases(log)
    assert {lease.permit for lease in leases} == {f"~permit:queue:logged#1.{n}" for n in range(2)}
    assert most_at_once([lease.span for lease in leases]) == 2
    assert all(lease.is_returned for lease in leases)
    assert processes_in_a_call(log) == set()


def test_a_lease_lasts_until_it_is_given_up_or_expires() -> None:
    assert held_lease("a", 0, 1).end == at(1)
    assert held_lease("a", 0, 1, returned=0.5).end == at(0.5)
    assert held_lease("a", 0, 1, returned=1.5).end == at(1)


def test_a_slot_of_a_dead_worker_is_unavailable_since_its_last_renewal() -> None:
    leases = [held_lease("a", 0, 3), held_lease("a", 3.4, 5, returned=5)]
    assert longest_until_back(leases, TTL, at(5)) == timedelta(seconds=1.4)


def test_a_slot_that_is_never_granted_again_is_unavailable_until_the_end() -> None:
    assert longest_until_back([held_lease("a", 0, 1)], TTL, at(60)) == timedelta(seconds=60)


def test_a_slot_may_have_been_with_a_process_that_died_during_a_call() -> None:
    leases = [held_lease("a", 0, 1), held_lease("a", 3, 5, returned=5)]
    assert longest_until_back(leases, TTL, at(5), [at(1.8)]) == timedelta(seconds=1.2)
    assert longest_until_back(leases, TTL, at(5), [at(4)]) == timedelta(seconds=3)


def test_a_slot_that_was_returned_was_not_unavailable() -> None:
    leases = [held_lease("a", 0, 1, returned=0.5), held_lease("a", 30, 31, returned=30.5)]
    assert longest_until_back(leases, TTL, at(60)) == timedelta(0)


def test_the_share_held_counts_what_is_in_the_window() -> None:
    spans = [(at(-1), at(1)), (at(3), at(9)), (at(20), at(30))]
    assert share_held(spans, 2, (at(0), at(4))) == pytest.approx(2 / 8)
