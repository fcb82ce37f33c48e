"""How the MongoDB store tells the server's time."""

from datetime import datetime, timedelta

import pytest

from perdure.clock import SystemClock
from perdure.store import Entry, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores.mongo import mongo
from perdure.stores.mongo.server_clock import ServerClock
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot

HOUR = timedelta(hours=1)
LATENCY = timedelta(milliseconds=20)


class Machine:
    """A machine an hour behind the server, which takes its time to answer."""

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
def told(machine: Machine) -> ServerClock:
    return ServerClock(machine.ask, machine.clock)


async def test_the_servers_clock_is_never_said_to_be_behind(
    machine: Machine, told: ServerClock
) -> None:
    """What is told is not yet past there, and no further off than the way."""
    for _ in range(5):
        moment = await told.now()
        assert machine.server_time <= moment <= machine.server_time + 2 * LATENCY
        assert machine.server_time - 3 * LATENCY <= await told.past() < machine.server_time
        await machine.clock.advance(timedelta(seconds=1))
    assert machine.asked == 1


async def test_the_time_is_asked_for_again_when_it_may_be_wrong(
    machine: Machine, told: ServerClock
) -> None:
    """After some seconds, and after another server may have come in the place of this one."""
    await told.now()
    await machine.clock.advance(timedelta(seconds=11))
    await told.now()
    assert machine.asked == 2
    told.forget()
    await told.now()
    assert machine.asked == 3


async def test_a_moment_is_waited_for_until_it_is_past(machine: Machine, told: ServerClock) -> None:
    """By asking; and not at all when other things have taken as long."""
    await told.wait_past(await told.now())
    assert machine.asked == 2
    moment = await told.now()
    await machine.clock.advance(2 * LATENCY)
    await told.wait_past(moment)
    assert machine.asked == 2
    assert machine.server_time >= moment


async def test_what_is_enqueued_is_due_at_once(mongo_url: str) -> None:
    """Whoever hears of a new run can claim it, in any process."""
    async with mongo(mongo_url) as one, mongo(mongo_url) as other:
        for n in range(20):
            await one.enqueue([NewRun(f"{n}", "w", as_json(snapshot()))])
            (grant,) = await other.claim("bob", HOUR, 10)
            assert grant.lease.id == f"{n}"


async def test_epochs_grow_from_process_to_process(mongo_url: str) -> None:
    """Runs that come and go under one id, by turns in two processes, never have an epoch twice."""
    epochs: list[int] = []
    async with mongo(mongo_url) as one, mongo(mongo_url) as other:
        for store in (one, other) * 20:
            (grant,) = await store.acquire([LeaseRequest("run", "ana", HOUR, as_json(snapshot()))])
            assert grant is not None
            epochs.append(grant.lease.epoch)
            delete = Entry("run", epochs[-1], 1, b"", rest=Rest("completed", delete=True))
            assert await store.append([delete]) == [Verdict.ACCEPTED]
    assert epochs == sorted({*epochs})
