"""FaultyStore fails where it should, and otherwise does what the wrapped store does."""

import asyncio
from datetime import timedelta

import pytest

from perdure.errors import StoreError, StoreUnavailable
from perdure.store import Entry, Store, capabilities, require_journal, require_lease
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.harness import acquire_run, need_journal, step
from perdure.testing.conformance.samples import snapshot
from perdure.testing.faults import Call, FaultyStore


class TestFaultyStoreWithoutFault(StoreConformance):
    """Without a fault it passes the whole kit."""

    @pytest.fixture
    def store(self) -> FaultyStore:
        return FaultyStore(MemoryStore())


async def test_before_fails_without_calling_the_store() -> None:
    """The third call fails, and no other."""
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=3)
    await store.save("a", snapshot())
    await store.save("b", snapshot())
    with pytest.raises(StoreUnavailable):
        await store.save("c", snapshot())
    assert await inner.load("c") is None
    await store.save("c", snapshot())
    assert store.failed


async def test_after_calls_the_store_and_fails() -> None:
    """The entry is written, although the caller gets an error."""
    inner = MemoryStore()
    store = need_journal(FaultyStore(inner, fail_at=1, how="after", verbs={"append"}))
    grant = await acquire_run(store)
    entry = step(grant, 1, "a")
    with pytest.raises(StoreUnavailable):
        await store.append([entry])
    loaded = await inner.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["a"]


async def test_hang_never_returns() -> None:
    """The call waits until it is cancelled."""
    store = FaultyStore(MemoryStore(), fail_at=1, how="hang")
    call = asyncio.ensure_future(store.load("run"))
    await asyncio.wait([call], timeout=0.01)
    assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_stays_down_fails_every_later_call() -> None:
    """Whatever its verb, as after a crash."""
    store = FaultyStore(MemoryStore(), fail_at=1, verbs={"save"}, stays_down=True)
    await store.load("run")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.save("run", snapshot())
    with pytest.raises(StoreUnavailable):
        await store.load("run")
    await store.close()


async def test_the_error_can_be_chosen() -> None:
    """`error` is called with the message."""
    store = FaultyStore(MemoryStore(), fail_at=1, error=StoreError)
    with pytest.raises(StoreError, match="planned failure before list"):
        await store.list()


async def test_calls_are_recorded_with_their_ids() -> None:
    """`calls` contains the verb and the ids of every call, failed or not."""
    store = FaultyStore(MemoryStore())
    grant = await acquire_run(require_lease(store))
    await require_journal(store).append([step(grant, 1, "a"), Entry("other", 1, 1, b"{}")])
    await store.claim("ana", timedelta(seconds=1), 1)
    await store.list()
    await store.delete("run")
    assert store.calls == [
        Call("acquire", ("run",)),
        Call("append", ("run", "other")),
        Call("claim", ()),
        Call("list", ()),
        Call("delete", ("run",)),
    ]


def test_it_declares_the_capabilities_of_the_wrapped_store() -> None:
    """The same capabilities, and the same verbs."""
    inner = SnapshotOnlyStore(MemoryStore(max_value_size=7))
    store: Store = FaultyStore(inner)
    assert capabilities(store) == capabilities(inner)
    assert not hasattr(store, "transact")
