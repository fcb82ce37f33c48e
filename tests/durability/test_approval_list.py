"""The first page of 10,000 open approvals is read from the index, in a few milliseconds."""

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

from perdure import Client, codec
from perdure.snapshot import new_snapshot
from perdure.snapshot.asks import event_of, new_nonce
from perdure.store import NewRun, header_of, require_schedule
from perdure.store.checks import rest_of
from perdure.store.contract import ScheduleStore
from perdure.stores import open_store
from perdure.testing.faults import FaultyStore
from tests.durability.places import Place, place_of

OPEN = 10_000


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[ScheduleStore]:
    opened = require_schedule(open_store(place.url, **place.options), "this test")
    runs = [asking(n) for n in range(OPEN)]
    for first in range(0, OPEN, 500):
        await opened.enqueue(runs[first : first + 500])
    yield opened
    await opened.close()


def asking(n: int) -> NewRun:
    """Return a run that waits for an approval, as it is stored."""
    nonce, now = new_nonce(Random(n)), datetime.now(UTC)
    snapshot = new_snapshot("order", now=now, metadata={"version": 1, "input": "x" * 500})
    snapshot["execution"]["state"] = "waiting"
    snapshot["execution"]["pending"] = [
        {
            "id": "ship",
            "kind": "event",
            "ask": "approval",
            "event": event_of(nonce),
            "nonce": nonce,
            "question": f"Ship order {n} to Oslo, although the customer has not paid the last one?",
            "to": "ops" if n % 2 else "sales",
        }
    ]
    header = header_of(snapshot)
    return NewRun(f"run-{n}", "order", codec.dumps(snapshot), rest=rest_of(snapshot), **header)


@pytest.mark.alone
async def test_the_first_page_is_fast(store: ScheduleStore) -> None:
    counted = FaultyStore(store)
    client, took = Client(counted), list[float]()
    page = await client.approvals(to="ops", limit=50)
    for _ in range(20):
        began = time.perf_counter()
        page = await client.approvals(to="ops", limit=50)
        took.append(time.perf_counter() - began)
    assert len(page.approvals) == 50
    assert {call.verb for call in counted.calls} == {"search"}
    assert sorted(took)[10] <= 0.020
    # Further pages have each of them once.
    listed = [each.run_id for each in page.approvals]
    while page.cursor is not None:
        page = await client.approvals(to="ops", limit=1000, after=page.cursor)
        listed += (each.run_id for each in page.approvals)
    assert len(listed) == len(set(listed)) == OPEN // 2
