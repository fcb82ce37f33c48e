"""How the MongoDB store estimates the server's clock."""

from datetime import datetime, timedelta

import pytest

from perdure.clock import SystemClock
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores.mongo import mongo
from perdure.stores.mongo.server_clock import ServerClock
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot

HOUR = timedelta(hours=1)
LATENCY = timedelta(milliseconds=20)


class Machine:
    """A machine an hour behind the server, whose replies take a while."""

    def __init__(self) -> None:
        self.clock = TestClock(SystemClock().now())
        self.asked = 0

    @property
    def server_time(self) -> datetime:
        return self.clock.now() + HOUR

    async def ask(self) -> datetime:
        self.asked += 1
        await self.clock.advance(LATENCY)
        time = self.server_time
        await self.clock.advance(LATENCY)
        return time


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def server_clock(machine: Machine) -> ServerClock:
    return ServerClock(machine.ask, machine.clock)


async def test_the_estimate_is_never_behind_the_server(
    machine: Machine, server_clock: ServerClock
) -> None:
    """It is ahead by no more than the round trip of the question."""
    for _ in range(5):
        time = await server_clock.now()
        assert machine.server_time <= time <= machine.server_time + 2 * LATENCY
        assert machine.server_time - 3 * LATENCY <= await server_clock.past() < machine.server_time
        await machine.clock.advance(timedelta(seconds=1))
    assert machine.asked == 1


async def test_the_server_is_asked_again_when_the_estimate_is_old(
    machine: Machine, server_clock: ServerClock
) -> None:
    """After some seconds, and when another server may have taken over."""
    await server_clock.now()
    await machine.clock.advance(timedelta(seconds=11))
    await server_clock.now()
    assert machine.asked == 2
    server_clock.forget()
    await server_clock.now()
    assert machine.asked == 3


async def test_waiting_ends_when_the_server_has_passed_the_time(
    machine: Machine, server_clock: ServerClock
) -> None:
    """It asks the server, unless enough time has passed in between."""
    await server_clock.wait_past(await server_clock.now())
    assert machine.asked == 2
    time = await server_clock.now()
    await machine.clock.advance(2 * LATENCY)
    await server_clock.wait_past(time)
    assert machine.asked == 2
    assert machine.server_time >= time


async def test_an_enqueued_run_is_due_at_once(mongo_url: str) -> None:
    """Another process that learns of a new run can claim it."""
    async with mongo(mongo_url) as one, mongo(mongo_url) as other:
        for n in range(20):
            await one.enqueue([NewRun(f"{n}", "w", as_json(snapshot()))])
            (grant,) = await other.claim("bob", HOUR, 10)
            assert grant.lease.id == f"{n}"


async def test_epochs_grow_across_processes(mongo_url: str) -> None:
    """A run that two processes create and delete in turn never gets the same epoch twice."""
    epochs: list[int] = []
    async with mongo(mongo_url) as one, mongo(mongo_url) as other:
        for store in (one, other) * 20:
            (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, as_json(snapshot()))])
            assert isinstance(grant, Grant)
            epochs.append(grant.lease.epoch)
            delete = Entry("run", epochs[-1], 1, b"", rest=Rest("completed", delete=True))
            assert await store.append([delete]) == [Verdict.ACCEPTED]
    assert epochs == sorted({*epochs})
