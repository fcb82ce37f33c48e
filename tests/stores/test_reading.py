"""Runs that cannot be read are named, logged and left out, whatever is wrong with them."""

from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest

from perdure.errors import StoreCorrupted, StoreUnavailable
from perdure.store import Lease, LeaseRequest, NewRun
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot

LONG = timedelta(hours=2)

UNREADABLE = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"formatVersion": 99, "steps": {}, "execution": {}}',
    b'{"formatVersion": 1, "steps": 7, "execution": {}}',
    b'{"formatVersion": 1, "steps": {}}',
    b'{"formatVersion": 1, "steps": {}, "execution": []}',
)


async def enqueued(*snapshots: bytes) -> tuple[MemoryStore, TestClock]:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await store.enqueue([NewRun(f"run {n}", "w", data) for n, data in enumerate(snapshots)])
    return store, clock


@pytest.mark.parametrize("data", UNREADABLE)
async def test_what_is_not_a_snapshot_is_left_out(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with the run's id, and the runs after it are claimed."""
    store, _ = await enqueued(data, as_json(snapshot()))
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 1)] == ["run 1"]
    assert list(await store.claim("ana", LONG, 1)) == []
    (record,) = caplog.records
    assert "'run 0' cannot be read" in record.message
    with pytest.raises(StoreCorrupted, match="'run 0'"):
        await store.acquire([LeaseRequest("run 0", "ana", LONG)])


async def test_a_run_that_was_repaired_is_claimed_an_hour_later() -> None:
    """It is tried again, so that nobody needs to wake it."""
    store, clock = await enqueued(b"{")
    assert list(await store.claim("ana", LONG, 1)) == []
    run = store._backend.runs.get("run 0")
    assert run is not None
    run.snapshot = as_json(snapshot())
    await clock.advance(timedelta(minutes=59))
    assert list(await store.claim("ana", LONG, 1)) == []
    await clock.advance(timedelta(minutes=1))
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 1)] == ["run 0"]


async def test_a_run_that_cannot_be_put_off_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was claimed beside it is returned, though the store went away."""

    class Unreleasing(MemoryStore):
        async def release(
            self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None
        ) -> None:
            raise StoreUnavailable("gone")

    store = Unreleasing()
    await store.enqueue([NewRun("bad", "w", b"{"), NewRun("good", "w", as_json(snapshot()))])
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 5)] == ["good"]
    assert "stay leased until their leases end: gone" in caplog.text
