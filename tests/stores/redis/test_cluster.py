"""The Redis store satisfies the contract on a cluster, and what is special about one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

import pytest
from redis import Redis
from redis.asyncio import RedisCluster as AsyncRedisCluster
from redis.crc import key_slot

from perdure.errors import StoreError, StoreUnavailable
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    LeaseRequest,
    NewRun,
    Rest,
    SupportedVersions,
    Verdict,
)
from perdure.stores.redis import RedisStore, redis
from perdure.stores.redis.keys import SHARDS, Keys, shard_of
from perdure.testing.conformance.handoff import ORDERS, hand_off, ids_of, paid, wait_for_paid
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.hostile import NAMES
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.conformance.schedule import claimed_ids
from tests.servers.redis import SLOTS, RedisCluster
from tests.stores.redis.kit import HOUR, RedisConformance, execute, leased, step, steps

MANY = 100


def cluster_url(url: str) -> str:
    return url.replace("redis://", "redis+cluster://")


class TestRedisCluster(RedisConformance):
    """On three primaries."""

    examples = 3

    @pytest.fixture
    async def store(
        self, redis_cluster_url: str, redis_cluster_prefix: str
    ) -> AsyncIterator[RedisStore]:
        async with self.opened(cluster_url(redis_cluster_url), redis_cluster_prefix) as store:
            yield store


@pytest.fixture
async def store(redis_cluster_url: str, redis_cluster_prefix: str) -> AsyncIterator[RedisStore]:
    url = cluster_url(redis_cluster_url)
    async with redis(url, namespace=redis_cluster_prefix) as store:
        yield store


def test_all_keys_of_a_run_are_in_one_slot() -> None:
    """That of its shard's indexes, whatever braces the id contains."""
    keys = Keys("perdure")
    shards = {key_slot(keys.lists(shard)): shard for shard in range(SHARDS)}
    for id in [*NAMES, "{}", "{a}{b}", "}{", "{0-0}"]:
        shard = shards[key_slot(keys.run(id))]
        slots = {key_slot(keys.inbox(id)), key_slot(keys.list(shard, id.encode()))}
        slots |= {key_slot(keys.wake(shard, id.encode())), key_slot(keys.marks[shard])}
        assert slots == {key_slot(keys.ids(shard))}


def test_shards_are_spread_evenly_over_the_slots() -> None:
    """So that each node of a cluster has its share."""
    keys = Keys("perdure")
    slots = sorted(key_slot(keys.wakes(shard)) for shard in range(SHARDS))
    assert [slot * SHARDS // SLOTS for slot in slots] == list(range(SHARDS))


async def test_runs_are_spread_over_all_nodes(
    store: RedisStore, redis_cluster: RedisCluster, redis_cluster_prefix: str
) -> None:
    """They are listed, claimed and settled as if they were on one."""
    runs = [NewRun(f"{n}", "order", as_json(snapshot())) for n in range(MANY)]
    assert all(await store.enqueue(runs))
    for node in redis_cluster.nodes:
        with Redis.from_url(node.url) as client:
            assert len(client.keys(f"{redis_cluster_prefix}:*:run:*")) > MANY / 6
    grants = await store.claim("ana", HOUR, 2 * MANY)
    rest = Rest("completed")
    ends = [Entry(g.lease.id, g.lease.epoch, 1, as_json(snapshot("a")), rest=rest) for g in grants]
    assert Counter(await store.append(ends)) == {Verdict.ACCEPTED: MANY}
    assert (await store.stats()).by_status["completed"] == MANY
    assert len(await store.list(status="completed", limit=MANY)) == MANY


async def test_a_client_that_was_passed_in_stays_open(
    redis_cluster_url: str, redis_cluster_prefix: str
) -> None:
    """Its settings are used for new connections."""
    async with AsyncRedisCluster.from_url(redis_cluster_url, decode_responses=True) as client:
        async with redis(client=client, namespace=redis_cluster_prefix) as store:
            grants = await leased(store, "a", "b", "c")
            entries = [step(grant, 1) for grant in grants]
            assert list(await store.append(entries)) == [Verdict.ACCEPTED] * 3
            assert await steps(store, "b") == ["1"]
            assert (await store.durability_report()).primaries == 3
        assert await client.ping()


async def test_a_cluster_opened_as_one_server_is_recognized(
    redis_cluster_url: str, redis_cluster_prefix: str
) -> None:
    """The error says how to open it."""
    async with redis(redis_cluster_url, namespace=redis_cluster_prefix) as store:
        saves = [store.save(f"{n}", snapshot()) for n in range(10)]
        with pytest.raises(StoreError, match=r"redis\+cluster://"):
            await asyncio.gather(*saves)


@contextmanager
def moving(cluster: RedisCluster, slot: int) -> Generator[None]:
    """Let a slot move from one node to another."""
    clients = [Redis.from_url(node.url) for node in cluster.nodes]
    names = [execute(client, "CLUSTER MYID") for client in clients]
    source = slot * len(clients) // SLOTS
    target = (source + 1) % len(clients)
    execute(clients[target], "CLUSTER SETSLOT", slot, "IMPORTING", names[source])
    execute(clients[source], "CLUSTER SETSLOT", slot, "MIGRATING", names[target])
    try:
        yield
    finally:
        for client in clients:
            execute(client, "CLUSTER SETSLOT", slot, "STABLE")
            client.close()


async def test_nothing_is_half_done_while_a_slot_moves(
    store: RedisStore, redis_cluster: RedisCluster, redis_cluster_prefix: str
) -> None:
    """Steps are recorded; what needs keys of both nodes is refused as a whole until the end."""
    (grant,) = await leased(store)
    await send_one(store, "run", "paid", b"1")
    (message,) = await store.inbox("run")
    rest = Entry(
        *("run", grant.lease.epoch, 2, as_json(snapshot("1", "2", status="completed"))),
        consumes=(message.id,),
        rest=Rest("completed"),
    )
    slot = key_slot(Keys(redis_cluster_prefix).run("run"))
    with moving(redis_cluster, slot):
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
        with pytest.raises(StoreUnavailable):
            await store.append([rest])
        assert await steps(store) == ["1"]
        assert list(await store.inbox("run")) == [message]
    assert await store.append([rest]) == [Verdict.ACCEPTED]
    assert await steps(store) == ["1", "2"]
    assert list(await store.inbox("run")) == []


async def write_rest_with_tags(store: RedisStore, grant: Grant) -> object:
    data = as_json(snapshot(status="suspended"))
    rest = Rest("suspended", grant.now + HOUR, version=2, tags=("new=1",))
    return await store.append([Entry("run", grant.lease.epoch, 9, data, rest=rest)])


WRITES: dict[str, Callable[[RedisStore, Grant], Awaitable[object]]] = {
    "append": lambda store, grant: store.append([step(grant, 9)]),
    "rest": write_rest_with_tags,
    "acquire": lambda store, grant: store.acquire([LeaseRequest("run", "ana", HOUR)]),
    "send": lambda store, _: send_one(store, "run", "paid", b"1", dedup_id="x"),
    "renew": lambda store, grant: store.renew([grant.lease], HOUR),
    "release": lambda store, grant: store.release([grant.lease]),
    "save": lambda store, _: store.save("run", snapshot(status="completed")),
    "delete": lambda store, _: store.delete("run"),
}


@pytest.mark.parametrize("verb", WRITES)
async def test_a_write_is_whole_or_absent_while_a_slot_moves(
    store: RedisStore, redis_cluster: RedisCluster, redis_cluster_prefix: str, verb: str
) -> None:
    """If it is refused, nothing of it was written, and it succeeds afterwards."""
    run = NewRun("run", "order", as_json(snapshot()), queue="x", version=1, tags=("old=1",))
    await store.enqueue([run])
    (grant,) = await store.claim("ana", HOUR, 1, queues={"x": 1})
    await send_one(store, "run", "other", b"1")
    before = await contents(redis_cluster, redis_cluster_prefix)
    with moving(redis_cluster, key_slot(Keys(redis_cluster_prefix).run("run"))):
        try:
            await WRITES[verb](store, grant)
        except StoreUnavailable:
            assert await contents(redis_cluster, redis_cluster_prefix) == before
    await WRITES[verb](store, grant)


async def contents(cluster: RedisCluster, namespace: str) -> dict[str, bytes]:
    """Return everything that is stored, by node and key."""
    found: dict[str, bytes] = {}
    for node in cluster.nodes:
        with Redis.from_url(node.url) as client:
            for key in client.keys(f"{namespace}*"):
                found[f"{node.url} {key!r}"] = client.dump(key) or b""
    return found


@pytest.mark.parametrize(
    ("missing", "supported"), [("list of running runs", ORDERS), ("inbox", ORDERS), ("inbox", ())]
)
async def test_no_message_is_sent_without_its_run_while_a_slot_moves(
    store: RedisStore,
    redis_cluster: RedisCluster,
    redis_cluster_prefix: str,
    missing: str,
    supported: Sequence[SupportedVersions],
) -> None:
    """A run that awaits a message of a refused call was neither sent it nor leased."""
    first, second, due = ids_of_one_shard(3)
    await store.enqueue([NewRun(due, "order", as_json(snapshot()), version=1)])
    await wait_for_paid(store, first, second)
    for id in (first, second)[: 1 if missing == "inbox" else 2]:
        await hand_off(store, paid(id, "old", name="other name"))
    before = await contents(redis_cluster, redis_cluster_prefix)
    messages = (paid(first), paid(second))
    with moving(redis_cluster, key_slot(Keys(redis_cluster_prefix).run(first))):
        with pytest.raises(StoreUnavailable):
            await hand_off(store, *messages, supported=supported)
        assert await contents(redis_cluster, redis_cluster_prefix) == before
    handoff = await hand_off(store, *messages, supported=supported)
    assert ids_of(handoff.grants) == (sorted([first, second]) if supported else [])


def ids_of_one_shard(count: int) -> list[str]:
    """Return ids of runs that are in one shard."""
    ids = (f"{number}" for number in range(1_000))
    return [id for id in ids if shard_of(id.encode()) == 0][:count]


async def test_the_limit_of_a_handoff_holds_for_all_shards(store: RedisStore) -> None:
    """Messages for several shards are only sent; those for one are granted up to the limit."""
    many, some = [f"run {n}" for n in range(MANY)], ids_of_one_shard(5)
    await wait_for_paid(store, *many, *some)
    spread = await hand_off(store, *map(paid, many), limit=3)
    assert Counter(receipt.delivery for receipt in spread.receipts) == {Delivery.DELIVERED: MANY}
    assert not spread.grants
    together = await hand_off(store, *map(paid, some), limit=3)
    assert ids_of(together.grants) == sorted(some[:3])
    assert set(await claimed_ids(store, limit=2 * MANY)) == {*many, *some[3:]}


async def test_other_runs_are_claimed_while_a_slot_moves(
    store: RedisStore, redis_cluster: RedisCluster, redis_cluster_prefix: str
) -> None:
    """The runs of the slot are claimed afterwards."""
    runs = [NewRun(f"{n}", "order", as_json(snapshot())) for n in range(MANY)]
    await store.enqueue(runs)
    with moving(redis_cluster, key_slot(Keys(redis_cluster_prefix).run("0"))):
        some = await store.claim("ana", HOUR, MANY)
        assert MANY / 2 < len(some) < MANY
    others = await store.claim("ana", HOUR, MANY)
    assert len(some) + len(others) == MANY


async def test_no_accepted_entry_is_lost_when_a_node_is_killed(
    store: RedisStore, redis_cluster: RedisCluster
) -> None:
    """The store reconnects by itself, and every accepted entry is there."""
    grants = await leased(store, *(f"{n}" for n in range(30)))
    done = asyncio.Event()

    async def append_until_done(n: int) -> int:
        count = 0
        while not done.is_set():
            try:
                await store.append([step(grants[n], count + 1)])
            except StoreUnavailable:
                await asyncio.sleep(0.05)
                continue
            count += 1
        return count

    tasks = [asyncio.create_task(append_until_done(n)) for n in range(len(grants))]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(redis_cluster.nodes[1].kill)
    await asyncio.to_thread(redis_cluster.ensure)
    await asyncio.sleep(0.5)
    done.set()
    accepted = await asyncio.gather(*tasks)
    assert sum(accepted) > len(grants)
    for grant, count in zip(grants, accepted, strict=True):
        assert await steps(store, grant.lease.id) == [f"{n + 1}" for n in range(count)]
