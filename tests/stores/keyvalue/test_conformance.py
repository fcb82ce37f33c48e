"""Any key-value store keeps the whole contract."""

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
from perdure.testing.conformance.harness import asked, rested
from perdure.testing.conformance.samples import as_json, snapshot
from tests.stores.append_speed import cost_of_length
from tests.stores.crashes import (
    HOUR,
    VERBS,
    Crash,
    deletes_whole,
    finishes,
    goes_whole,
    step,
    survives_crash,
)


class PlainKeyValue:
    """The five methods over a shared dict, each of which takes its time."""

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
    """The same with compare-and-set; a second one on the dict is as good as another process."""

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        await self._pause()
        return await self.kv.replace(key, old, new)


class DyingKeyValue(MemoryKeyValue):
    """Lets so many writes through; every later one dies before it is made."""

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
    """On a store that compares and sets."""

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
    """On a store of five methods, slow enough for tasks to come between its calls."""

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
    """On a driver of `py-key-value-aio` that talks to a server."""

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
    """Give stores that share nothing but the keys."""
    return [keyvalue(SwappingKeyValue(kv, seed * 10 + n), clock=clock) for n in range(4)]


async def granted(store: KeyValueRuns, id: str = "run", owner: str = "ana") -> Grant:
    (grant,) = await store.acquire([LeaseRequest(id, owner, HOUR, create=as_json(snapshot()))])
    assert grant is not None
    return grant


class TestCrashes:
    @pytest.mark.parametrize("verb", list(VERBS))
    async def test_a_crash_between_any_two_writes_loses_no_run(self, verb: str) -> None:
        """Whatever was acknowledged is there, and every run that is not over is found again."""
        for writes in range(100):
            clock = TestClock()
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await survives_crash(keyvalue(kv, clock=clock), dying, clock, VERBS[verb]):
                return
        pytest.fail("this verb makes more than 100 writes")

    async def test_a_run_that_goes_at_its_rest_goes_whole(self, clock: TestClock) -> None:
        """A crash leaves it with all its steps, or not at all."""
        for writes in range(20):
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await goes_whole(keyvalue(kv, clock=clock), dying):
                return
        pytest.fail("this rest makes more than 20 writes")

    async def test_a_deleted_run_stays_deleted(self, clock: TestClock) -> None:
        """A crash while deleting leaves it there whole, or gone: nothing of it comes back."""
        for writes in range(20):
            kv = MemoryKeyValue(clock=clock)
            dying = keyvalue(DyingKeyValue(kv, writes), clock=clock)
            if await deletes_whole(keyvalue(kv, clock=clock), dying):
                return
        pytest.fail("deleting makes more than 20 writes")

    async def test_litter_of_a_crash_is_removed_later(self, clock: TestClock) -> None:
        """What a rest could not remove any more is removed when the run goes on."""
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
    """With compare-and-set, what holds in one process holds between many."""

    @pytest.mark.parametrize("seed", range(10))
    async def test_one_of_many_gets_the_lease(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """Each epoch is given once, and one owner has the run."""
        stores = processes(kv, clock, seed)
        create = as_json(snapshot())
        wants = [LeaseRequest("run", f"owner {n}", HOUR, create=create) for n in range(20)]
        asked = (stores[n % 4].acquire([want]) for n, want in enumerate(wants))
        answers = [grant for (grant,) in await asyncio.gather(*asked)]
        assert len([grant for grant in answers if grant is not None]) == 1

    @pytest.mark.parametrize("seed", range(10))
    async def test_each_run_goes_to_one_claimant(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """All that is due is claimed, each once, and lines that say so do not pile up."""
        stores = processes(kv, clock, seed)
        runs = [NewRun(f"{n}", "w", as_json(snapshot())) for n in range(40)]
        enqueued = (stores[n % 4].enqueue([run]) for n, run in enumerate(runs))
        assert [made for (made,) in await asyncio.gather(*enqueued)] == [True] * len(runs)
        claimed: Counter[str] = Counter()
        while sum(claimed.values()) < len(runs):
            claims = (store.claim("owner", HOUR, 3) for store in stores)
            for grants in await asyncio.gather(*claims):
                claimed.update(grant.lease.id for grant in grants)
        assert set(claimed.values()) == {1}

    @pytest.mark.parametrize("seed", range(10))
    async def test_no_accepted_entry_is_lost_to_a_taker(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """What was accepted is in what the taker reads; what came too late never shows up."""
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
        (taken,) = await second.acquire([LeaseRequest("run", "bob", HOUR)])
        assert taken is not None
        seen = list(taken.snapshot["steps"])
        await appending
        assert seen[: len(accepted)] == accepted
        loaded = await second.load("run")
        assert loaded is not None
        assert list(loaded["steps"]) == seen

    @pytest.mark.parametrize("seed", range(20))
    async def test_mail_that_meets_a_rest_wakes_the_run(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """An event is neither lost nor late when another process sends it."""
        first, second, third, _ = processes(kv, clock, seed)
        grant = await granted(first)
        data = as_json(snapshot(status="waiting"))
        entry = Entry("run", grant.lease.epoch, 9, data, rest=Rest("waiting", None, ("paid",)))
        (verdict,), sent = await asyncio.gather(
            first.append([entry]), second.send("run", "paid", b"1")
        )
        assert (verdict, sent) == (Verdict.ACCEPTED, Delivery.DELIVERED)
        assert [grant.lease.id for grant in await third.claim("bob", HOUR, 10)] == ["run"]

    @pytest.mark.parametrize("seed", range(10))
    async def test_an_event_is_delivered_once(
        self, kv: MemoryKeyValue, clock: TestClock, seed: int
    ) -> None:
        """A `dedup_id` counts once, whoever sends it; other events are not lost."""
        stores = processes(kv, clock, seed)
        await granted(stores[0])
        same = (store.send("run", "paid", b"1", dedup_id="x") for store in stores)
        others = (store.send("run", "paid", b"2") for store in stores)
        answers = Counter(await asyncio.gather(*same, *others))
        assert answers == {Delivery.DELIVERED: 5, Delivery.DUPLICATE: 3}
        assert len(await stores[0].inbox("run")) == 5


class TestCost:
    @pytest.mark.alone
    async def test_an_entry_costs_the_same_in_a_long_run(self, store: KeyValueRuns) -> None:
        """Nothing that is done for an entry grows with the journal."""
        assert await cost_of_length(store) < 1.3

    async def test_due_reads_only_what_may_be_due(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock
    ) -> None:
        """Sleepers are not read, however many there are."""
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
    """Lets something happen before the n-th read."""

    def __init__(self, kv: MemoryKeyValue, n: int, happens: Callable[[], Awaitable[None]]) -> None:
        super().__init__(clock=kv._clock)
        self._entries = kv._entries
        self.left = n
        self.happens = happens

    async def get(self, key: str, /) -> str | None:
        await self._pause()
        return await super().get(key)

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        await self._pause()
        return await super().get_many(keys)

    async def _pause(self) -> None:
        self.left -= 1
        if not self.left:
            await self.happens()


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
    async def test_a_run_that_is_lost_while_it_is_read_is_read_again(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock, n: int
    ) -> None:
        """Whatever read an owner is paused at, it gets neither an error nor a snapshot without its
        journal, which another owner may have removed in the meantime."""
        at = timedelta(0)
        old = await harness.granted(store, "run", "ana", at)
        await store.append([step(old, 1, "a")])

        async def take_over() -> None:
            taken = await harness.granted(store, "run", "cem")
            assert await rested(store, taken, Rest("suspended"), "a", "b") is Verdict.ACCEPTED

        paused = keyvalue(PausedKeyValue(kv, n, take_over), clock=clock)
        grant = await asked(paused, "run", "bob", at)
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
        assert await wakes.scan(until, until).next(2_001) == sorted(lines)

    async def test_removed_lines_leave_no_documents(
        self, wakes: KeyValueWakes, kv: MemoryKeyValue
    ) -> None:
        """Neither those of the lines nor those that list them."""
        await wakes.add([Wake(n * 10_000_000, f"{n}", None) for n in range(100)], 0)
        later = 10**15
        await wakes.remove(await wakes.lines(later, later), later)
        assert await kv.keys() == []

    async def test_a_run_that_became_due_in_a_later_minute_is_found(
        self, store: KeyValueRuns, clock: TestClock
    ) -> None:
        """`due` of a past time finds every run whose wake time is not after it."""
        now = clock.now()
        await clock.advance(timedelta(minutes=2))
        await store.enqueue([NewRun("run", "w", as_json(snapshot()), now)])
        assert [due.id for due in await store.due(now, 10)] == ["run"]

    async def test_lines_do_not_pile_up(
        self, store: KeyValueRuns, kv: MemoryKeyValue, clock: TestClock
    ) -> None:
        """A run that is claimed and renewed for days leaves no trail."""
        await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
        for _ in range(50):
            (grant,) = await store.claim("ana", HOUR, 10)
            await store.renew([grant.lease], 2 * HOUR)
            await clock.advance(HOUR)
            assert list(await store.claim("bob", HOUR, 10)) == []
            await clock.advance(HOUR)
        assert len(await kv.keys("perdure:wakes*")) < 8


class FailingKeyValue(MemoryKeyValue):
    """Raises what it is told to."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def get(self, key: str, /) -> str | None:
        raise self.error


class TestUse:
    async def test_a_line_of_an_older_workflow_claims_nothing(
        self, store: KeyValueRuns, clock: TestClock
    ) -> None:
        """A run that was saved under another name is of that name, whatever was written down."""
        await store.enqueue([NewRun("run", "old", as_json(snapshot()))])
        whole = snapshot(status="suspended", wake_at=clock.now(), workflow="new")
        await store.save("run", whole)
        assert list(await store.due(clock.now(), 10, workflows=["old"])) == []
        assert list(await store.claim("ana", HOUR, 10, workflows=["old"])) == []
        assert len(await store.claim("ana", HOUR, 10, workflows=["new"])) == 1

    def test_what_holds_is_declared(self) -> None:
        """Atomic only where the key-value store compares and sets."""
        memory = keyvalue(MemoryKeyValue()).capabilities
        assert (memory.lease, memory.shared, memory.survives) == ("atomic", "process", "nothing")
        swapping = keyvalue(SwappingKeyValue(MemoryKeyValue()), survives="power_loss").capabilities
        assert (swapping.lease, swapping.shared) == ("atomic", "network")
        assert swapping.survives == "power_loss"
        plain = keyvalue(PlainKeyValue(MemoryKeyValue())).capabilities
        assert (plain.lease, plain.shared) == ("best_effort", "process")
        assert plain.survives == "process_crash"

    def test_the_contracts_are_told_apart(self) -> None:
        """By their methods."""
        assert isinstance(PlainKeyValue(MemoryKeyValue()), KeyValueStore)
        assert not isinstance(PlainKeyValue(MemoryKeyValue()), CompareAndSet)

    @pytest.mark.parametrize("store", [5, {}, object()])
    def test_anything_else_is_refused(self, store: Any) -> None:
        """The error names the parameter and what serves."""
        with pytest.raises(InvalidArgument, match=r"^store: expected"):
            keyvalue(store)

    @pytest.mark.parametrize(
        ("error", "wanted"),
        [
            (ConnectionResetError("gone"), StoreUnavailable),
            (TimeoutError(), StoreUnavailable),
            (ValueError("what?"), StoreError),
        ],
    )
    async def test_errors_of_the_key_value_store_are_translated(
        self, error: Exception, wanted: type[StoreError]
    ) -> None:
        """With the original as the cause."""
        with pytest.raises(wanted) as caught:
            await keyvalue(FailingKeyValue(error)).load("run")
        assert caught.value.__cause__ is error

    async def test_a_head_that_cannot_be_read_is_corruption(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """And not a run that is not there."""
        await store.save("run", snapshot())
        (head, _) = sorted(key for key in await kv.keys() if ":run:" in key)
        await kv.set(head, "{")
        with pytest.raises(StoreCorrupted, match="'run'"):
            await store.load("run")

    async def test_a_missing_snapshot_is_corruption(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """And not an empty run."""
        await store.save("run", snapshot())
        (lost,) = await kv.keys("*:snapshot")
        await kv.delete(lost)
        with pytest.raises(StoreCorrupted, match="'run'"):
            await store.load("run")

    async def test_a_closed_store_refuses_and_leaves_the_rest_open(
        self, store: KeyValueRuns, kv: MemoryKeyValue
    ) -> None:
        """The key-value store is its owner's to close."""
        await store.close()
        with pytest.raises(StoreClosed):
            await store.load("run")
        assert await kv.get("x") is None

    async def test_ttl_of_a_lease_may_be_any_time(self, store: KeyValueRuns) -> None:
        """A lease of no time is over at once."""
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", timedelta(0), create=as_json(snapshot()))]
        )
        assert grant is not None
        assert [g.lease.owner for g in await store.claim("bob", HOUR, 1)] == ["bob"]
