"""Runs that cannot be read are named, logged and left out of claims, whatever is wrong."""

from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest

from perdure.errors import StoreUnavailable
from perdure.store import Lease, LeaseRequest, NewRun, Refusal
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


async def store_with(*snapshots: bytes) -> tuple[MemoryStore, TestClock]:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await store.enqueue([NewRun(f"run {n}", "w", data) for n, data in enumerate(snapshots)])
    return store, clock


@pytest.mark.parametrize("data", UNREADABLE)
async def test_an_unreadable_run_is_left_out_of_claims(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once with its id, and the next run is claimed instead."""
    store, _ = await store_with(data, as_json(snapshot()))
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 1)] == ["run 1"]
    assert list(await store.claim("ana", LONG, 1)) == []
    (record,) = caplog.records
    assert "'run 0' cannot be read" in record.message
    (refusal,) = await store.acquire([LeaseRequest("run 0", "ana", LONG)])
    assert isinstance(refusal, Refusal)
    assert "'run 0'" in refusal.error


async def test_a_repaired_run_is_claimed_soon() -> None:
    """It is tried again without an operator: at first after ten seconds."""
    store, clock = await store_with(b"{")
    assert list(await store.claim("ana", LONG, 1)) == []
    run = store._backend.runs.get("run 0")
    assert run is not None
    run.snapshot = as_json(snapshot())
    await clock.advance(timedelta(seconds=9))
    assert list(await store.claim("ana", LONG, 1)) == []
    await clock.advance(timedelta(seconds=1))
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 1)] == ["run 0"]


async def test_an_unreadable_run_is_tried_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The delay doubles up to an hour, and the run is logged once."""
    store, clock = await store_with(b"{")
    delays = []
    for _ in range(12):
        assert list(await store.claim("ana", LONG, 1)) == []
        run = store._backend.runs.get("run 0")
        assert run is not None
        assert run.wake_at is not None
        delays.append((run.wake_at - clock.now()).total_seconds())
        await clock.advance(delays[-1])
    assert delays == [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600, 3600]
    assert len(caplog.records) == 1


async def test_a_failed_release_does_not_lose_other_claimed_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The readable runs of a claim are returned if the unreadable one cannot be released."""

    class Unreleasing(MemoryStore):
        async def release(
            self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None
        ) -> None:
            raise StoreUnavailable("unreachable")

    store = Unreleasing()
    await store.enqueue([NewRun("bad", "w", b"{"), NewRun("good", "w", as_json(snapshot()))])
    assert [grant.lease.id for grant in await store.claim("ana", LONG, 5)] == ["good"]
    assert "stay leased until their leases expire: unreachable" in caplog.text
