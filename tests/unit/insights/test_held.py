"""Why a run in a queue is not claimed: one test for each situation."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Limits, Queue, Rate
from perdure.insights import Insights
from perdure.limits import PermitLimit, declared_limits
from perdure.operations import Operations
from perdure.presence import DeclaredLimit
from perdure.store import LeaseRequest, NewRun
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.unit.insights.runs import live_worker
from tests.unit.insights.samples import new_snapshot_json

EMAILS = Queue("emails", concurrency=2, per_key=Limits(concurrency=1, rate=Rate(1, per="1m")))


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


async def enqueue(store: MemoryStore, clock: TestClock, *ids: str, **worker: Any) -> None:
    """Create due runs of one key, and a worker that serves their queue."""
    snapshot = new_snapshot_json("order")
    for run_id in ids:
        await store.enqueue([NewRun(run_id, "order", snapshot, queue="emails/acme", version=1)])
        await clock.advance(1)
    limits = tuple(
        DeclaredLimit(each.name, each.n, None if each.per is None else 60.0)
        for each in declared_limits(EMAILS)
    )
    await live_worker(store, clock.now(), queues=("", "emails"), limits=limits, **worker)


async def take(store: MemoryStore, limit: PermitLimit, units: int) -> None:
    """Lease permits of a limit, as a worker does."""
    snapshot = new_snapshot_json("~permit")
    ids = limit.ids()
    await store.enqueue([NewRun(id, "~permit", snapshot, queue=limit.queue) for id in ids])
    await store.acquire([LeaseRequest(id, "o-1", timedelta(minutes=1)) for id in ids[:units]])


async def ask(store: MemoryStore, clock: TestClock, run_id: str = "a") -> str:
    return (await Insights(store, clock=clock).why(run_id)).sentence


async def test_the_queue_is_paused(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a")
    await Operations(store, clock=clock).pause_queue("emails", by="ana", why="spam")
    sentence = 'Due for 1 s. Queue "emails" is paused, by ana 0 ms ago: "spam".'
    assert await ask(store, clock) == sentence


async def test_no_worker_serves_the_queue(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a")
    await live_worker(store, clock.now())
    assert await ask(store, clock) == 'Due for 1 s. No live worker takes runs from queue "emails".'


async def test_the_queue_is_at_its_limit(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a")
    await take(store, PermitLimit("queue:emails", 2), 2)
    assert await ask(store, clock) == 'Due for 1 s. Queue "emails" is at its limit, 2 of 2.'


async def test_the_key_is_at_its_limit(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a", "b")
    await take(store, PermitLimit("queue:emails/acme", 1), 1)
    assert await ask(store, clock, "b") == (
        'Due for 1 s. Key "acme" of queue "emails" is at its limit, 1 of 1. '
        '1 run of key "acme" starts before it.'
    )


async def test_the_rate_of_the_key_is_used_up(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a")
    await take(store, PermitLimit("rate:emails/acme", 1), 1)
    sentence = 'Due for 1 s. Key "acme" of queue "emails" has started 1 of 1 runs in the last 1 min'
    assert await ask(store, clock) == f"{sentence}."


async def test_other_runs_of_the_key_come_first(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a", "b", "c")
    assert await ask(store, clock, "c") == 'Due for 1 s. 2 runs of key "acme" start before it.'
    assert "The next free slot of w-1 takes it." in await ask(store, clock)


async def test_permits_that_were_never_created_are_not_in_use(
    store: MemoryStore, clock: TestClock
) -> None:
    await enqueue(store, clock, "a")
    used = {limit.of: limit.in_use for limit in await Insights(store, clock=clock).limits()}
    assert used == {"concurrency": 0, "key_concurrency": None, "key_rate": None}


async def test_one_queue_by_name(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, clock, "a", "b")
    row = await Insights(store, clock=clock).queue("emails")
    assert row is not None
    assert (row.due, [key.key for key in row.keys]) == (2, ["acme"])
    assert await Insights(store, clock=clock).queue("nope") is None


async def test_a_run_with_a_priority_is_due_since_it_was_created(
    store: MemoryStore, clock: TestClock
) -> None:
    """Its head start is not time that it has waited."""
    snapshot, days = new_snapshot_json("order"), timedelta(days=9)
    created = clock.now()
    await store.enqueue([NewRun("old", "order", snapshot, queue="emails/acme")])
    await clock.advance("2h")
    urgent = NewRun("urgent", "order", snapshot, queue="emails/acme", head_start=days)
    await store.enqueue([urgent])
    insights = Insights(store, clock=clock)
    row = await insights.queue("emails")
    assert row is not None
    assert (row.oldest_due, row.keys[0].oldest_due) == (created, created)
    assert (await insights.overview()).oldest_due == created
    await store.delete("old")
    assert (await insights.overview()).oldest_due == clock.now()


async def test_the_runs_of_a_queue_are_found_with_any_key(
    store: MemoryStore, clock: TestClock
) -> None:
    snapshot = new_snapshot_json("order")
    names = {"a": "emails", "b": "emails/acme", "c": "emails2", "d": ""}
    await store.enqueue([NewRun(id, "order", snapshot, queue=names[id]) for id in names])

    async def find_ids(query: str) -> list[str]:
        page = await Insights(store, clock=clock).runs(query)
        return sorted(row.id for row in page.runs)

    assert await find_ids("queue:emails") == ["a", "b"]
    assert await find_ids("queue:emails/acme") == ["b"]
    assert await find_ids('queue:""') == ["d"]
