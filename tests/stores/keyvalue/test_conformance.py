"""A store on any key-value store implements the whole contract."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from itertools import count
from random import Random
from typing import Any

import pytest

from perdure.clock import Duration, SystemClock
from perdure.errors import (
    InvalidArgument,
    StoreClosed,
    StoreCorrupted,
    StoreError,
    StoreUnavailable,
)
from perdure.keyvalue import CompareAndSet, DriverKeyValue, KeyValueStore, MemoryKeyValue
from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewRun, Rest, Store, Verdict
from perdure.stores._documents.records import Wake
from perdure.stores.keyvalue import KeyValueRuns, keyvalue
from perdure.stores.keyvalue.documents import Documents
from perdure.stores.keyvalue.wakes import KeyValueWakes
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance, harness
from perdure.testing.conformance.harness import request_run, send_one, supports, write_rest
from perdure.testing.conformance.samples import as_json, snapshot
from tests.stores.append_speed import cost_of_length
from tests.stores.crashes import (
    HOUR,
    VERBS,
    Crash,
    check_delete,
    check_rest_with_delete,
    finishes,
    step,
    survives_crash,
)


class PlainKeyValue:
    """The five methods on a shared dict, with pauses."""

    def __init__(self, kv: MemoryKeyValue, seed: int = 0) -> None:
        self.kv = kv
        self.random = Random(seed)

    async def _pause(self) -> None:
        for _ in range(self.random.randrange(3)):
            await SystemClock().sleep(0)

    async def get(self, key: str, /) -> str | None:
        await self._pause()
        return await self.kv.get(key)

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        await self._pause()
        await self.kv.set(key, value, ttl=ttl)

    async def delete(self, key: str, /) -> bool:
        await self._pause()
        return await self.kv.delete(key)

    async def exists(self, key: str, /) -> bool:
        return await self.kv.exists(key)

    async def keys(self, pattern: str = "*", /) -> list[str]:
        return await self.kv.keys(pattern)


class SwappingKeyValue(PlainKeyValue):
    """The same with compare-and-set; a second one on the dict acts like another process."""

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        await self._pause()
        return await self.kv.replace(key, old, new)


class DyingKeyValue(MemoryKeyValue):
    """Makes a number of writes; every later one crashes before it is made."""

    def __init__(self, kv: MemoryKeyValue, writes: int) -> None:
        super().__init__(clock=kv._clock)
        self._entries = kv._entries
        self.left = writes

    def _count(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        self._count()
        await super().set(key, value, ttl=ttl)

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        self._count()
        return await super().replace(key, old, new)

    async def delete(self, key: str, /) -> bool:
        self._count()
        return await super().delete(key)


class TestMemoryKeyValue(StoreConformance):
    """On a key-value store with compare-and-set."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[KeyValueRuns]:
        self.clock = TestClock()
        self.kv = MemoryKeyValue(clock=self.clock)
        async with keyvalue(self.kv, clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> KeyValueRuns:
        assert self.clock is not None
        return keyvalue(self.kv, prefix=prefix, clock=self.clock)

    async def crashing(self, store: Store, writes: int) -> KeyValueRuns:
        assert self.clock is not None
        return keyvalue(DyingKeyValue(self.kv, writes), clock=self.clock)


class TestPlainKeyValue(StoreConformance):
    """On a key-value store without, slow enough for tasks to interleave."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[KeyValueRuns]:
        self.clock = TestClock()
        self.kv = PlainKeyValue(MemoryKeyValue(clock=self.clock))
        async with keyvalue(self.kv, clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> KeyValueRuns:
        assert self.clock is not None
        return keyvalue(self.kv, prefix=prefix, clock=self.clock)


@pytest.mark.filterwarnings("ignore:A configured store is unstable")
class TestDriver(StoreConformance):
    """On a driver of `py-key-value-aio`, in real time."""

    examples = 10

    @pytest.fixture
    async def store(self) -> AsyncIterator[KeyValueRuns]:
        from key_value.aio.stores.simple import SimpleStore

        self.driver = SimpleStore()
        async with keyvalue(self.driver) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> KeyValueRuns:
        return keyvalue(self.driver, prefix=prefix)


class TestRedisDriver(StoreConformance):
    """On a driver of `py-key-value-aio` with a server."""

    examples = 5

    @pytest.fixture
    async def store(self, redis_url: str, redis_prefix: str) -> AsyncIterator[KeyValueRuns]:
        from key_value.aio.stores.redis import RedisStore

        async with RedisStore(url=redis_url) as driver:
            self.kv = DriverKeyValue(driver, collection=redis_prefix)
            async with keyvalue(self.kv) as store:
                yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> KeyValueRuns:
        return keyvalue(self.kv, prefix=prefix)


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def kv(clock: TestClock) -> MemoryKeyValue:
    return MemoryKeyValue(clock=clock)


@pytest.fixture
async def store(kv: MemoryKeyValue, clock: TestClock) -> AsyncIterator[KeyValueRuns]:
    async with keyvalue(kv, clock=clock) as store:
        yield store


def processes(kv: MemoryKeyValue, clock: TestClock, seed: int) -> list[KeyValueRuns]:
    """Return stores that share nothing but the key-value store, as processes do."""
    return [keyvalue(SwappingKeyValue(kv, seed * 10 + n), clock=clock) for n in range(4)]


async def granted(store: KeyValueRuns, id: str = "run", owner: str = "ana") -> Grant:
    (grant,) = await store.acquire([LeaseRequest(id, owner, HOUR, create=as_json(snapshot()))])
    assert isinstance(grant, Grant)
    return grant


class TestCrashes:
    @pytest.mark.parametrize("verb", list(VERBS))
    async def test_a_crash_between_any_two_writes_loses_no_run(self, verb: str) -> None:
        """Acknowledged writes are stored, and every run that is not over is found again."""
        for writes in range(100):
            clock = TestClock()
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await survives_crash(keyvalue(kv, clock=clock), dying, clock, VERBS[verb]):
                return
        pytest.fail("this verb makes more than 100 writes")

    async def test_a_run_deleted_by_its_rest_is_deleted_whole(self, clock: TestClock) -> None:
        """After a crash it exists with all its steps, or not at all."""
        for writes in range(20):
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await check_rest_with_delete(keyvalue(kv, clock=clock), dying):
                return
        pytest.fail("this rest makes more than 20 writes")

    async def test_a_deleted_run_stays_deleted(self, clock: TestClock) -> None:
        """After a crash it exists whole or not at all: nothing of it reappears."""
        for writes in range(20):
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await check_delete(keyvalue(kv, clock=clock), dying):
                return
        pytest.fail("deleting makes more than 20 writes")

    async def test_garbage_left_by_a_crash_is_removed_later(self, clock: TestClock) -> None:
        """What a rest could not remove is removed when the run is leased again."""
        sizes = set()
        for writes in range(12):
            kv = MemoryKeyValue(clock=clock)
            store = keyvalue(kv, clock=clock)
            grant = await granted(store)
            for n in range(3):
                await store.append([step(grant, n, f"{n}")])
            data = as_json(snapshot("x", status="suspended"))
            rest = Entry("run", grant.lease.epoch, 9, data, rest=Rest("suspended"))
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            await finishes(dying.append([rest]))
            await store.append([rest])
            await granted(store)
            sizes.add(len([key for key in await kv.keys() if key.startswith("perdure:run:")]))
        assert sizes == {2}


class TestBetweenProcesses:
    """With compare-and-set the guarantees hold between processes too."""

    @pytest.mark.parametrize("seed", range(10))
    async def test_only_one_owner_gets_the_lease(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """Of twenty that request it at the same time."""
        stores = processes(kv, clock, seed)
        create = as_json(snapshot())
        requests = [LeaseRequest("run", f"owner {n}", HOUR, create=create) for n in range(20)]
        calls = (stores[n % 4].acquire([request]) for n, request in enumerate(requests))
        answers = [grant for (grant,) in await asyncio.gather(*calls)]
        assert len([grant for grant in answers if isinstance(grant, Grant)]) == 1

    @pytest.mark.parametrize("seed", range(10))
    async def test_each_run_goes_to_one_claimant(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """All due runs are claimed, each of them once."""
        stores = processes(kv, clock, seed)
        runs = [NewRun(f"{n}", "w", as_json(snapshot())) for n in range(40)]
        enqueued = (stores[n % 4].enqueue([run]) for n, run in enumerate(runs))
        assert [created for (created,) in await asyncio.gather(*enqueued)] == [True] * len(runs)
        claimed: Counter[str] = Counter()
        while sum(claimed.values()) < len(runs):
            claims = (store.claim("owner", HOUR, 3) for store in stores)
            for grants in await asyncio.gather(*claims):
                claimed.update(grant.lease.id for grant in grants)
        assert set(claimed.values()) == {1}

    @pytest.mark.parametrize("seed", range(10))
    async def test_a_new_owner_sees_every_accepted_entry(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """And an entry that was refused never appears later."""
        first, second, *_ = processes(kv, clock, seed)
        grant = await granted(first)
        accepted: list[str] = []

        async def append_until_fenced() -> None:
            for n in count():
                (verdict,) = await first.append([step(grant, n, f"{n}")])
                if verdict is not Verdict.ACCEPTED:
                    return
                accepted.append(f"{n}")

        appending = asyncio.ensure_future(append_until_fenced())
        while len(accepted) < 3:
            await SystemClock().sleep(0)
        await clock.advance(HOUR)
        (new,) = await second.acquire([LeaseRequest("run", "bob", HOUR)])
        assert isinstance(new, Grant)
        steps = list(new.snapshot["steps"])
        await appending
        assert steps[: len(accepted)] == accepted
        loaded = await second.load("run")
        assert loaded is not None
        assert list(loaded["steps"]) == steps

    @pytest.mark.parametrize("taken_over", [False, True])
    @pytest.mark.parametrize("seed", range(20))
    async def test_a_run_that_is_settled_while_it_is_loaded_is_loaded_whole(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int, taken_over: bool
    ) -> None:
        """Never without a part of its journal, which the rest removes."""
        first, *others = processes(kv, clock, seed)
        grant = await granted(first)
        for n in range(3):
            await first.append([step(grant, n, f"{n}")])
        if taken_over:
            await clock.advance(HOUR)
            grant = await granted(first, owner="bob")
        data = as_json(snapshot("0", "1", "2", status="suspended"))
        rest = Entry("run", grant.lease.epoch, 9, data, rest=Rest("suspended"))
        settling = asyncio.ensure_future(first.append([rest]))
        while not settling.done():
            for loaded in await asyncio.gather(*(store.load("run") for store in others)):
                assert loaded is not None
                assert list(loaded["steps"]) == ["0", "1", "2"]
        assert await settling == [Verdict.ACCEPTED]

    @pytest.mark.parametrize("seed", range(20))
    async def test_a_message_sent_during_a_rest_wakes_the_run(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """When another process sends it."""
        first, second, third, _ = processes(kv, clock, seed)
        grant = await granted(first)
        data = as_json(snapshot(status="waiting"))
        entry = Entry("run", grant.lease.epoch, 9, data, rest=Rest("waiting", None, ("paid",)))
        (verdict,), sent = await asyncio.gather(
            first.append([entry]), send_one(second, "run", "paid", b"1")
        )
        assert (verdict, sent) == (Verdict.ACCEPTED, Delivery.DELIVERED)
        assert [grant.lease.id for grant in await third.claim("bob", HOUR, 10)] == ["run"]

    @pytest.mark.parametrize("seed", range(10))
    async def test_a_message_is_delivered_once(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """Of several with one `dedup_id` from several processes; others are not lost."""
        stores = processes(kv, clock, seed)
        await granted(stores[0])
        same = (send_one(store, "run", "paid", b"1", dedup_id="x") for store in stores)
        others = (send_one(store, "run", "paid", b"2") for store in stores)
        answers = Counter(await asyncio.gather(*same, *others))
        assert answers == {Delivery.DELIVERED: 5, Delivery.DUPLICATE: 3}
        assert len(await stores[0].inbox("run")) == 5


class TestCost:
    @pytest.mark.alone
    async def test_an_entry_costs_the_same_in_a_long_run(self, store: KeyValueRuns) -> None:
        """The cost of an append does not grow with the journal."""
        assert await cost_of_length(store) < 1.3

    async def test_due_reads_only_runs_that_may_be_due(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock
    ) -> None:
        """Sleeping runs are not read, however many there are."""
        later = clock.now() + HOUR
        await store.enqueue([NewRun(f"{n}", "w", as_json(snapshot()), later) for n in range(999)])
        await store.enqueue([NewRun("due", "w", as_json(snapshot()))])
        reading = CountingKeyValue(kv)
        assert [due.id for due in await keyvalue(reading).due(clock.now(), 10)] == ["due"]
        assert reading.reads < 10


class CountingKeyValue(MemoryKeyValue):
    """Counts the keys that are read."""

    def __init__(self, kv: MemoryKeyValue) -> None:
        super().__init__(clock=kv._clock)
        self._entries = kv._entries
        self.reads = 0

    async def get(self, key: str, /) -> str | None:
        self.reads += 1
        return await super().get(key)

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        self.reads += len(keys)
        return await super().get_many(keys)


class PausedKeyValue(MemoryKeyValue):
    """Calls a function before the n-th read."""

    def __init__(self, kv: MemoryKeyValue, n: int, action: Callable[[], Awaitable[None]]) -> None:
        super().__init__(clock=kv._clock)
        self._entries = kv._entries
        self.left = n
        self.action = action

    async def get(self, key: str, /) -> str | None:
        await self._pause()
        return await super().get(key)

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        await self._pause()
        return await super().get_many(keys)

    async def _pause(self) -> None:
        self.left -= 1
        if not self.left:
            await self.action()


class TestAppend:
    async def test_a_stale_rest_does_not_lose_the_steps_before_it(
        self, store: KeyValueRuns, clock: TestClock
    ) -> None:
        """An accepted step is stored, whatever the verdict on a rest in the same batch is."""
        old = await granted(store)
        await clock.advance(HOUR)
        new = await granted(store, owner="bob")
        rest = Entry("run", old.lease.epoch, 9, as_json(snapshot()), rest=Rest("suspended"))
        verdicts = await store.append([step(new, 1, "a"), rest])
        assert list(verdicts) == [Verdict.ACCEPTED, Verdict.FENCED]
        loaded = await store.load("run")
        assert loaded is not None
        assert list(loaded["steps"]) == ["a"]


class TestTakeOver:
    @pytest.mark.parametrize("n", range(1, 12))
    async def test_a_lease_lost_while_the_run_is_read_is_acquired_again(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock, n: int
    ) -> None:
        """An owner that is paused at any read gets neither an error nor a snapshot without its
        journal, which another owner has removed in the meantime."""
        at = timedelta(0)
        old = await harness.acquire_run(store, "run", "ana", at)
        await store.append([step(old, 1, "a")])

        async def take_over() -> None:
            new = await harness.acquire_run(store, "run", "cem")
            assert await write_rest(store, new, Rest("suspended"), "a", "b") is Verdict.ACCEPTED

        paused = keyvalue(PausedKeyValue(kv, n, take_over), clock=clock)
        grant = await request_run(paused, "run", "bob", at)
        assert grant is not None
        assert list(grant.snapshot["steps"]) in (["a"], ["a", "b"])


class TestWakes:
    @pytest.fixture
    def wakes(self, kv: MemoryKeyValue) -> KeyValueWakes:
        return KeyValueWakes(Documents(kv))

    async def test_lines_are_read_in_order(self, wakes: KeyValueWakes) -> None:
        """However many are written at once."""
        lines = [Wake(60_000_000 * (n % 5), f"{n:04}", None) for n in range(2_000)]
        await wakes.add(lines, 0)
        until = 60_000_000 * 5
        scan = wakes.scan("", until, until, lambda wake: True)
        assert await scan.next(2_001) == sorted(lines)

    async def test_removed_lines_leave_no_documents(
        self, wakes: KeyValueWakes, kv: MemoryKeyValue
    ) -> None:
        """Neither those of the lines nor those that list them."""
        await wakes.add([Wake(n * 10_000_000, f"{n}", None) for n in range(100)], 0)
        later = 10**15
        await wakes.remove("", await wakes.lines("").read(later, later), later)
        assert await kv.keys() == []

    async def test_minutes_without_lines_are_not_listed_forever(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock
    ) -> None:
        """A line that is written and removed within a minute leaves nothing after a day."""
        for _ in range(5):
            await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
            await store.claim("ana", timedelta(0), 10)
            await store.delete("run")
            await clock.advance(HOUR)
        await clock.advance(24 * HOUR)
        assert list(await store.claim("ana", HOUR, 10)) == []
        assert list(await kv.keys("perdure:wakes*")) == []

    async def test_a_run_that_became_due_in_a_later_minute_is_found(
        self, store: KeyValueRuns, clock: TestClock
    ) -> None:
        """`due` of a past time finds every run whose wake time is not after it."""
        now = clock.now()
        await clock.advance(timedelta(minutes=2))
        await store.enqueue([NewRun("run", "w", as_json(snapshot()), now)])
        assert [due.id for due in await store.due(now, 10)] == ["run"]

    async def test_lines_do_not_accumulate(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock
    ) -> None:
        """A run that is claimed and renewed for days leaves few lines."""
        await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
        for _ in range(50):
            (grant,) = await store.claim("ana", HOUR, 10)
            await store.renew([grant.lease], 2 * HOUR)
            await clock.advance(HOUR)
            assert list(await store.claim("bob", HOUR, 10)) == []
            await clock.advance(HOUR)
        assert len(await kv.keys("perdure:wakes*")) < 8


class FailingKeyValue(MemoryKeyValue):
    """Raises an error on every read."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def get(self, key: str, /) -> str | None:
        raise self.error


class TestUse:
    async def test_a_line_with_a_previous_workflow_claims_nothing(
        self, store: KeyValueRuns, clock: TestClock
    ) -> None:
        """A run that was saved with another workflow belongs to that one."""
        await store.enqueue([NewRun("run", "old", as_json(snapshot()))])
        whole = snapshot(status="suspended", wake_at=clock.now(), workflow="new")
        await store.save("run", whole)
        assert list(await store.due(clock.now(), 10, supports=supports("old"))) == []
        assert list(await store.claim("ana", HOUR, 10, supports=supports("old"))) == []
        assert len(await store.claim("ana", HOUR, 10, supports=supports("new"))) == 1

    def test_guarantees_are_declared(self) -> None:
        """Leases are atomic only if the key-value store has compare-and-set."""
        memory = keyvalue(MemoryKeyValue()).capabilities
        assert (memory.lease, memory.shared, memory.survives) == ("atomic", "process", "nothing")
        swapping = keyvalue(SwappingKeyValue(MemoryKeyValue()), survives="power_loss").capabilities
        assert (swapping.lease, swapping.shared) == ("atomic", "network")
        assert swapping.survives == "power_loss"
        plain = keyvalue(PlainKeyValue(MemoryKeyValue())).capabilities
        assert (plain.lease, plain.shared) == ("best_effort", "process")
        assert plain.survives == "process_crash"

    def test_compare_and_set_is_detected(self) -> None:
        """By its method."""
        assert isinstance(PlainKeyValue(MemoryKeyValue()), KeyValueStore)
        assert not isinstance(PlainKeyValue(MemoryKeyValue()), CompareAndSet)

    @pytest.mark.parametrize("store", [5, {}, object()])
    def test_anything_else_is_refused(self, store: Any) -> None:
        """The error names the parameter and what can be used."""
        with pytest.raises(InvalidArgument, match=r"^store: expected"):
            keyvalue(store)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (ConnectionResetError("gone"), StoreUnavailable),
            (TimeoutError(), StoreUnavailable),
            (ValueError("what?"), StoreError),
        ],
    )
    async def test_errors_of_the_key_value_store_are_translated(
        self, error: Exception, expected: type[StoreError]
    ) -> None:
        """With the original as the cause."""
        with pytest.raises(expected) as caught:
            await keyvalue(FailingKeyValue(error)).load("run")
        assert caught.value.__cause__ is error

    async def test_a_head_that_cannot_be_read_is_corruption(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """It is not treated as missing."""
        await store.save("run", snapshot())
        (head, _) = sorted(key for key in await kv.keys() if ":run:" in key)
        await kv.set(head, "{")
        with pytest.raises(StoreCorrupted, match="'run'"):
            await store.load("run")

    async def test_a_run_with_an_unreadable_head_can_be_deleted(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """It does not keep others from being listed, and its id can be used again."""
        old = await granted(store, "bad")
        await store.save("good", snapshot())
        (head,) = (key for key in await kv.keys("perdure:run:bad*") if key.count(":") == 2)
        await kv.set(head, "{")
        assert [line.id for line in await store.list()] == ["good"]
        assert await store.delete("bad")
        new = await granted(store, "bad")
        assert new.created
        assert new.lease.epoch > old.lease.epoch

    async def test_a_missing_snapshot_is_corruption(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """The run is not treated as empty."""
        await store.save("run", snapshot())
        (snapshot_key,) = await kv.keys("*:snapshot")
        await kv.delete(snapshot_key)
        with pytest.raises(StoreCorrupted, match="'run'"):
            await store.load("run")

    async def test_a_closed_store_leaves_the_key_value_store_open(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """The caller closes it."""
        await store.close()
        with pytest.raises(StoreClosed):
            await store.load("run")
        assert await kv.get("x") is None

    async def test_the_ttl_of_a_lease_may_be_zero(self, store: KeyValueRuns) -> None:
        """Such a lease expires at once."""
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", timedelta(0), create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        assert [g.lease.owner for g in await store.claim("bob", HOUR, 1)] == ["bob"]
