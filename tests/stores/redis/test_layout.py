"""A namespace that an older perdure wrote is upgraded when a store opens it."""

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, ResponseError
from redis.crc import key_slot

from perdure.errors import StoreError
from perdure.store import Delivery, Entry, Query, Rest, Verdict
from perdure.stores.redis import RedisStore, redis, scripts
from perdure.stores.redis.keys import SHARDS, Keys, shard_of
from perdure.testing.conformance.harness import acquire_run, send_one
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.redis import SLOTS, RedisCluster
from tests.stores.redis.kit import HOUR, steps

FIRST_LAYOUT = Path(__file__).parent / "first_layout.json"
IDS = {
    *("owned", "orphaned", "waiting", "suspended", "enqueued", "completed", "tenant:~failed"),
    "{later} \N{GRINNING FACE}/\n",
}
# More runs in each shard than one script moves.
MANY = SHARDS * 150


@pytest.fixture
def admin(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def write(admin: Redis, kind: str, key: str, value: Any) -> None:
    """Write one key."""
    match kind:
        case "hash":
            admin.hset(key, mapping=value)
        case "zset":
            admin.zadd(key, value)
        case "set":
            admin.sadd(key, *value)
        case _:
            admin.set(key, value)


@pytest.fixture
def namespace(admin: Redis, redis_prefix: str) -> str:
    """A namespace with runs of all kinds, in the first layout."""
    for kind, key, value in json.loads(FIRST_LAYOUT.read_text()):
        write(admin, kind, redis_prefix + key, value)
    return redis_prefix


def write_many(admin: Redis, namespace: str) -> None:
    """Add many runs, as the first layout has them."""
    keys = Keys(namespace)
    pipeline = admin.pipeline()
    for number in range(MANY):
        id = f"many {number}"
        shard = keys.marks[shard_of(id.encode())].decode().removesuffix("sequence")
        fields = {"status": "completed", "workflow": "bulk", "updated": f"{number}"}
        content = {"epoch": "1" * 16, "snapshot": as_json(snapshot()).decode()}
        pipeline.hset(f"{shard}run:{id}", mapping=dict[Any, Any](fields | content))
        pipeline.zadd(f"{shard}list:completed", {f"{id}\0bulk": number})
        pipeline.set(f"{shard}sequence", "1" * 16)
    pipeline.execute()


def keys_of_the_first_layout(admin: Redis, namespace: str) -> set[str]:
    """Return the keys that the first layout had, except for the marks."""
    keys = [str(key).removeprefix(namespace) for key in admin.keys(f"{namespace}:*")]
    return {key for key in keys if ":2:" not in key and not key.endswith("}:sequence")}


async def test_every_run_is_there_after_the_upgrade(
    redis_url: str, namespace: str, admin: Redis
) -> None:
    """With its steps, status, workflow and owner; nothing is left of the first layout."""
    async with redis(redis_url, namespace=namespace) as store:
        runs = {run.id: run for run in await store.list()}
        assert set(runs) == IDS
        assert await steps(store, "owned") == ["a", "b"]
        assert await steps(store, "completed") == ["a", "b"]
        assert (runs["owned"].status, runs["owned"].owner) == ("running", "ana")
        assert (runs["waiting"].awaits, runs["waiting"].workflow) == (("paid",), "order")
        assert (runs["suspended"].workflow, runs["suspended"].created_at) == (None, None)
        assert (await store.stats()).by_status["running"] == 4
    assert keys_of_the_first_layout(admin, namespace) == set()


async def test_messages_and_dedup_ids_survive_the_upgrade(redis_url: str, namespace: str) -> None:
    """In their order; one that was sent before is a duplicate."""
    async with redis(redis_url, namespace=namespace) as store:
        messages = await store.inbox("waiting")
        assert [(each.name, each.payload) for each in messages] == [
            ("other \x01 {}", b'"1"'),
            ("other \x01 {}", b'"2"'),
        ]
        assert await send_one(store, "owned", "paid", b"1", dedup_id="x") is Delivery.DUPLICATE
        await send_one(store, "waiting", "paid", b'"3"')
        grant = await acquire_run(store, "waiting")
        assert [each.name for each in grant.inbox] == ["other \x01 {}"] * 2 + ["paid"]


async def test_due_runs_are_claimed_after_the_upgrade(redis_url: str, namespace: str) -> None:
    """An orphaned one and one that was enqueued; a live lease is not taken."""
    async with redis(redis_url, namespace=namespace) as store:
        grants = await store.claim("bob", HOUR, 10)
        assert [grant.lease.id for grant in grants] == ["orphaned", "enqueued"]
        # It wrote an entry, so its owner was not lost without progress.
        assert grants[0].takeovers == 0
        due = await store.due(datetime(2300, 1, 1, tzinfo=UTC), 10)
        assert [run.id for run in due][:2] == ["{later} \N{GRINNING FACE}/\n", "suspended"]


async def test_an_owner_continues_with_its_lease_after_the_upgrade(
    redis_url: str, namespace: str, admin: Redis
) -> None:
    """Its epoch is still the newest; a deleted run's epoch stays stale."""
    epoch = int(str(admin.hget(f"{namespace}:{{d-12}}:run:owned", "epoch")))
    async with redis(redis_url, namespace=namespace) as store:
        (message,) = await store.inbox("owned")
        data = as_json(snapshot("a", "b", "c", status="completed"))
        rest = Rest("completed", tags=("a=1",))
        entry = Entry("owned", epoch, 3, data, consumes=(message.id,), rest=rest)
        assert list(await store.append([entry])) == [Verdict.ACCEPTED]
        assert list(await store.inbox("owned")) == []
        (run,) = (await store.search(Query(tags=("a=1",)), 5)).runs
        assert (run.id, run.created_at) == ("owned", None)
        new = await acquire_run(store, "deleted")
        assert new.lease.epoch > epoch


async def test_an_interrupted_upgrade_is_continued(
    redis_url: str, namespace: str, admin: Redis
) -> None:
    """After any number of scripts, the next process moves what is left."""
    write_many(admin, namespace)
    marks = Keys(namespace).marks
    for mark in marks[::2]:
        admin.eval(scripts.LAYOUT.text, 1, mark)
    for mark in marks[::4]:
        assert admin.eval(scripts.UPGRADE.text, 1, mark) == 1
    async with redis(redis_url, namespace=namespace) as store:
        assert len(await store.list(limit=2 * MANY)) == MANY + len(IDS)
    assert keys_of_the_first_layout(admin, namespace) == set()


async def test_processes_may_upgrade_together(
    redis_url: str, namespace: str, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Each moves some of the runs, and each sees all of them afterwards."""
    write_many(admin, namespace)

    async def count(store: RedisStore) -> int:
        async with store:
            return sum((await store.stats()).by_status.values())

    with caplog.at_level(logging.INFO):
        stores = [redis(redis_url, namespace=namespace) for _ in range(4)]
        assert await asyncio.gather(*map(count, stores)) == [MANY + len(IDS)] * 4
    assert "upgrading the runs at" in caplog.text


@pytest.mark.parametrize("is_new", [True, False])
async def test_an_older_perdure_can_create_no_run(
    redis_url: str, namespace: str, redis_prefix: str, admin: Redis, is_new: bool
) -> None:
    """Its scripts read a string where there is a hash now, before their first write."""
    name = f"{redis_prefix}:new" if is_new else namespace
    async with redis(redis_url, namespace=name) as store:
        await store.load("run")
    for mark in Keys(name).marks:
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            admin.get(mark)


async def test_a_newer_layout_is_refused(redis_url: str, redis_prefix: str, admin: Redis) -> None:
    """The error says what to do, and nothing is written."""
    admin.hset(Keys(redis_prefix).marks[-1], "layout", "3")
    async with redis(redis_url, namespace=redis_prefix) as store:
        with pytest.raises(
            StoreError, match=r"\(layout 3; this version supports layouts up to 2\): upgrade"
        ):
            await store.save("run", snapshot())
    assert not [key for key in admin.keys(f"{redis_prefix}:*") if ":2:" in str(key)]


async def test_a_cluster_is_upgraded(
    redis_cluster: RedisCluster, redis_cluster_prefix: str
) -> None:
    """Shard by shard, on the node that has it."""
    url = redis_cluster.url.replace("redis://", "redis+cluster://")
    nodes = [Redis.from_url(node.url) for node in redis_cluster.nodes]
    for kind, key, value in json.loads(FIRST_LAYOUT.read_text()):
        name = redis_cluster_prefix + key
        write(nodes[key_slot(name.encode()) * len(nodes) // SLOTS], kind, name, value)
    for node in nodes:
        node.close()
    async with redis(url, namespace=redis_cluster_prefix) as store:
        assert {run.id for run in await store.list()} == IDS
        assert len(await store.claim("bob", HOUR, 10)) == 2
