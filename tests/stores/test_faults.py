"""FaultyStore fails where it is told, and is the store it wraps everywhere else."""

import asyncio
from datetime import timedelta

import pytest

from perdure.errors import StoreError, StoreUnavailable
from perdure.store import Entry, Store, capabilities, require_journal, require_lease
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.harness import granted, need_journal, step
from perdure.testing.conformance.samples import snapshot
from perdure.testing.faults import Call, FaultyStore


class TestFaultyStoreWithoutFault(StoreConformance):
    """Without a fault it keeps the whole contract."""

    @pytest.fixture
    def store(self) -> FaultyStore:
        return FaultyStore(MemoryStore())


async def test_before_fails_without_doing_the_work() -> None:
    """The third call fails, and those around it do not."""
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=3)
    await store.save("a", snapshot())
    await store.save("b", snapshot())
    with pytest.raises(StoreUnavailable):
        await store.save("c", snapshot())
    assert await inner.load("c") is None
    await store.save("c", snapshot())
    assert store.failed


async def test_after_does_the_work_and_fails() -> None:
    """The caller cannot know, and the entry is there."""
    inner = MemoryStore()
    store = need_journal(FaultyStore(inner, fail_at=1, how="after", verbs={"append"}))
    grant = await granted(store)
    entry = step(grant, 1, "a")
    with pytest.raises(StoreUnavailable):
        await store.append([entry])
    loaded = await inner.load("run")
    assert loaded is not None
    assert list(loaded["steps"]) == ["a"]


async def test_hang_never_answers() -> None:
    """The call waits until somebody cancels it."""
    store = FaultyStore(MemoryStore(), fail_at=1, how="hang")
    call = asyncio.ensure_future(store.load("run"))
    await asyncio.wait([call], timeout=0.01)
    assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_stays_down_as_after_a_crash() -> None:
    """Every later call fails too, whatever its verb."""
    store = FaultyStore(MemoryStore(), fail_at=1, verbs={"save"}, stays_down=True)
    await store.load("run")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.save("run", snapshot())
    with pytest.raises(StoreUnavailable):
        await store.load("run")
    await store.close()


async def test_the_error_can_be_chosen() -> None:
    """`error` makes the exception from a text."""
    store = FaultyStore(MemoryStore(), fail_at=1, error=StoreError)
    with pytest.raises(StoreError, match="as it was told"):
        await store.list()


async def test_calls_are_noted_with_their_ids() -> None:
    """`calls` holds verb and ids of every call, failed or not."""
    store = FaultyStore(MemoryStore())
    grant = await granted(require_lease(store))
    await require_journal(store).append([step(grant, 1, "a"), Entry("other", 1, 1, b"{}")])
    await need_claim(store)
    await store.list()
    await store.delete("run")
    assert store.calls == [
        Call("acquire", ("run",)),
        Call("append", ("run", "other")),
        Call("claim", ()),
        Call("list", ()),
        Call("delete", ("run",)),
    ]


async def need_claim(store: FaultyStore) -> None:
    await store.claim("ana", timedelta(seconds=1), 1)


def test_it_declares_what_it_wraps() -> None:
    """The same capabilities, and the same verbs."""
    inner = MemoryStore(max_value_size=7)
    store: Store = FaultyStore(inner)
    assert capabilities(store) == inner.capabilities
    assert not hasattr(store, "transact")
