"""Queues in documents: what a claim reads, and what remains of a queue."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from perdure.errors import StoreError
from perdure.filenames import safe_name
from perdure.keyvalue import MemoryKeyValue
from perdure.store import NewMessage, Rest, SupportedVersions
from perdure.stores.keyvalue import KeyValueRuns, keyvalue
from perdure.stores.keyvalue.documents import Documents
from perdure.stores.keyvalue.queues import QueueNames
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import acquire_run, write_rest
from perdure.testing.conformance.queues import queued
from tests.stores.crashes import HOUR, MOVES, Crash, check_move
from tests.stores.keyvalue.test_conformance import DyingKeyValue, processes

SECOND = timedelta(seconds=1)


class WatchedKeyValue(MemoryKeyValue):
    """Remembers which keys were read."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__(clock=clock)
        self.read: list[str] = []

    async def get(self, key: str, /) -> str | None:
        self.read.append(key)
        return await super().get(key)

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        self.read += keys
        return await super().get_many(keys)

    def read_of(self, what: str) -> list[str]:
        return [key for key in self.read if key.startswith(f"perdure:{what}")]


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def kv(clock: TestClock) -> WatchedKeyValue:
    return WatchedKeyValue(clock)


@pytest.fixture
async def store(kv: WatchedKeyValue, clock: TestClock) -> AsyncIterator[KeyValueRuns]:
    async with keyvalue(kv, clock=clock) as store:
        yield store


async def claimed(store: KeyValueRuns, limit: int = 10, **options: Any) -> list[str]:
    grants = await store.claim("ana", HOUR, limit, **options)
    return [grant.lease.id for grant in grants]


class TestWhatIsRead:
    async def test_a_claim_reads_no_wake_line_of_another_queue(
        self, store: KeyValueRuns, kv: WatchedKeyValue
    ) -> None:
        """Nor does a claim of runs in no queue read those of any queue."""
        await store.enqueue(
            [queued(f"{queue}{n}", queue) for n in range(20) for queue in ("", "a", "a/1", "b")]
        )
        kv.read.clear()
        assert await claimed(store, queues={"a": 10}) == [f"a{n}" for n in range(10)]
        assert kv.read_of("wakes") == []
        own = f"queue:{safe_name('a')}"
        assert kv.read_of("queue:") == kv.read_of(own) != []
        kv.read.clear()
        assert await claimed(store) == [f"{n}" for n in range(10)]
        assert kv.read_of("queue") == []

    async def test_a_claim_reads_no_run_that_it_cannot_drive(
        self, store: KeyValueRuns, kv: WatchedKeyValue
    ) -> None:
        """Their wake lines say of which workflow and version they are."""
        await store.enqueue([queued(f"other{n}", workflow="other") for n in range(50)])
        await store.enqueue([queued(f"new{n}", version=2) for n in range(50)])
        await store.enqueue([queued("old", version=1)])
        kv.read.clear()
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == ["old"]
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == []
        assert kv.read_of("run:") == kv.read_of("run:old")

    async def test_a_line_with_a_previous_version_is_read_once(
        self, store: KeyValueRuns, kv: WatchedKeyValue, clock: TestClock
    ) -> None:
        """A worker that cannot drive a run does not read it at every poll."""
        await store.enqueue([queued("run")])
        await write_rest(store, await acquire_run(store), Rest("suspended", clock.now(), version=2))
        await clock.advance(timedelta(minutes=2))
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == []
        kv.read.clear()
        assert await claimed(store, supports=[SupportedVersions("order", 1, 1)]) == []
        assert kv.read_of("run:") == []
        assert await claimed(store, supports=[SupportedVersions("order", 2, 2)]) == ["run"]

    async def test_a_line_that_is_out_of_date_does_not_change_the_order(
        self, store: KeyValueRuns, clock: TestClock
    ) -> None:
        """A run that was due before, and is due again, takes its turn."""
        await store.enqueue([queued("again")])
        later = clock.now() + 10 * SECOND
        await write_rest(store, await acquire_run(store, "again"), Rest("suspended", later))
        await clock.advance(5 * SECOND)
        await store.enqueue([queued("first")])
        await clock.advance(10 * SECOND)
        assert await claimed(store, 1) == ["first"]
        assert await claimed(store, 1) == ["again"]


class TestWhatRemains:
    async def test_a_queue_without_runs_leaves_no_document(
        self, store: KeyValueRuns, kv: WatchedKeyValue, clock: TestClock
    ) -> None:
        """Although no worker claims from a queue that is not listed."""
        await store.enqueue([queued("run", "emails/42")])
        (grant,) = await store.claim("ana", HOUR, 1, queues={"emails/42": 1})
        await write_rest(store, grant, Rest("completed"))
        await clock.advance(48 * HOUR)
        assert list(await store.queues(clock.now(), 10)) == []
        assert list(await kv.keys("perdure:queue*")) == []
        await store.enqueue([queued("new", "emails/42")])
        assert list(await store.queues(clock.now(), 10)) == ["emails/42"]


class TestNames:
    """Of a queue that is removed while another process writes a line to it."""

    @pytest.fixture
    def names(self, kv: WatchedKeyValue) -> QueueNames:
        return QueueNames(Documents(kv))

    async def test_a_name_without_lines_is_removed(
        self, names: QueueNames, kv: WatchedKeyValue
    ) -> None:
        """And its document, too."""
        await names.add("a")

        async def has_lines() -> bool:
            return False

        await names.remove("a", has_lines)
        assert await names.all() == []
        assert await kv.keys() == []

    async def test_a_name_that_is_added_in_the_meantime_stays(self, names: QueueNames) -> None:
        """The line was written after it was looked for, and the name was listed after that."""
        await names.add("a")

        async def has_lines() -> bool:
            await names.add("a")
            return False

        await names.remove("a", has_lines)
        assert await names.all() == ["a"]

    async def test_a_name_that_another_process_removes_at_the_same_time_stays(
        self, names: QueueNames
    ) -> None:
        """If a line is written between the two: the first one finds a mark that is not its own."""
        await names.add("a")

        async def has_new_lines() -> bool:
            return True

        async def has_lines() -> bool:
            await names.add("a")
            await names.remove("a", has_new_lines)
            return False

        await names.remove("a", has_lines)
        assert await names.all() == ["a"]

    @pytest.mark.parametrize("writes", range(2))
    async def test_a_removal_that_crashes_leaves_the_name(
        self, names: QueueNames, kv: WatchedKeyValue, writes: int
    ) -> None:
        """A name too many is harmless."""
        await names.add("a")

        async def has_lines() -> bool:
            return False

        with pytest.raises(StoreError) as crash:
            await QueueNames(Documents(DyingKeyValue(kv, writes))).remove("a", has_lines)
        assert isinstance(crash.value.__cause__, Crash)
        assert await names.all() == ["a"]


class TestCrashes:
    @pytest.mark.parametrize("verb", list(MOVES))
    async def test_a_run_is_found_in_the_queue_and_version_that_it_has(self, verb: str) -> None:
        """After a crash between any two writes."""
        for writes in range(100):
            clock = TestClock()
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await check_move(keyvalue(kv, clock=clock), dying, clock, MOVES[verb]):
                return
        pytest.fail("this verb makes more than 100 writes")


@pytest.mark.parametrize("seed", range(10))
async def test_receipts_count_the_messages_of_several_processes(
    clock: TestClock, seed: int
) -> None:
    """When n messages are in an inbox, a `send` of one of them has answered n or more."""
    stores = processes(MemoryKeyValue(clock=clock), clock, seed)
    await acquire_run(stores[0])
    batches = [[NewMessage("run", "paid", b"1", f"{n} {m}") for m in range(3)] for n in range(8)]
    sends = (stores[n % 4].send(batch) for n, batch in enumerate(batches))
    counted = [receipt.unconsumed for batch in await asyncio.gather(*sends) for receipt in batch]
    assert max(counted) == len(await stores[0].inbox("run")) == 24


async def test_a_newer_layout_is_refused(kv: WatchedKeyValue, store: KeyValueRuns) -> None:
    """The error says what to do; without a number, the layout is an earlier one."""
    await kv.set("perdure:layout", "3")
    with pytest.raises(
        StoreError, match=r"newer .* \(layout 3; this version supports layouts up to 2\): upgrade"
    ):
        await store.load("run")
    await kv.delete("perdure:layout")
    assert await store.load("run") is None
    assert await kv.get("perdure:layout") == "2"
