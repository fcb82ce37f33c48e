"""Runs that are leased with their message on Redis: notifications, limits, lost replies."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis

from perdure.errors import StoreUnavailable
from perdure.store import Delivery, Handoff, NewMessage, Verdict
from perdure.stores.redis import RedisStore, redis
from perdure.stores.redis.keys import Keys
from perdure.testing.conformance.handoff import ORDERS, hand_off, ids_of, paid, wait_for_paid
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.schedule import claimed_ids
from tests.servers.proxy import TcpProxy
from tests.stores.redis.kit import HOUR, step

OTHERS = supports("other")
SHORT = timedelta(milliseconds=100)


@pytest.fixture
async def store(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisStore]:
    async with redis(redis_url, namespace=redis_prefix) as store:
        yield store


@pytest.fixture
def admin(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def published(admin: Redis, redis_prefix: str) -> Iterator[Any]:
    """A subscriber to the notifications of all stores in the namespace."""
    client: Any = admin
    with client.pubsub(ignore_subscribe_messages=True) as subscriber:
        subscriber.subscribe(Keys(redis_prefix).channel)
        assert subscriber.get_message(timeout=5) is None
        yield subscriber


def count_published(admin: Redis, subscriber: Any, namespace: str) -> int:
    """Return how many notifications were published since the last call."""
    # What is published before this arrives before it.
    admin.publish(Keys(namespace).channel, "end")
    count = 0
    while True:
        message = subscriber.get_message(timeout=5)
        if message is not None and message["data"] == b"end":
            return count
        count += message is not None


@asynccontextmanager
async def notified(store: RedisStore) -> AsyncIterator[asyncio.Event]:
    """Provide an event that is set by notifications of the store."""
    event = asyncio.Event()

    async def listen() -> None:
        notifications: Any = store.notifications()
        async with aclosing(notifications):
            async for _ in notifications:
                event.set()

    task = asyncio.create_task(listen())
    await event.wait()
    event.clear()
    yield event
    task.cancel()
    await asyncio.wait([task])


async def test_a_granted_run_is_not_announced(
    store: RedisStore, admin: Redis, redis_prefix: str, published: Any
) -> None:
    """No worker would find it by a claim; one that only became due is announced once."""
    await wait_for_paid(store, "granted", "due")
    assert len((await hand_off(store, paid("granted"))).grants) == 1
    assert count_published(admin, published, redis_prefix) == 0
    assert not (await hand_off(store, paid("due"), supported=OTHERS)).grants
    assert count_published(admin, published, redis_prefix) == 1


async def test_a_message_that_makes_nothing_due_is_not_announced(
    store: RedisStore, admin: Redis, redis_prefix: str, published: Any
) -> None:
    """Neither one for a run with an owner nor one that no run awaits."""
    await wait_for_paid(store, "run")
    await hand_off(store, paid(name="other name"))
    await hand_off(store, paid())
    await hand_off(store, paid())
    assert count_published(admin, published, redis_prefix) == 0


async def test_listeners_of_the_sender_wake_only_for_due_runs(store: RedisStore) -> None:
    """A granted run needs no claim of the sender's own workers."""
    await wait_for_paid(store, "granted", "due", "limited")
    async with notified(store) as event:
        assert len((await hand_off(store, paid("granted"))).grants) == 1
        await asyncio.sleep(0.1)
        assert not event.is_set()
        assert not (await hand_off(store, paid("due"), supported=OTHERS)).grants
        await asyncio.wait_for(event.wait(), 5)


async def test_another_store_is_notified_of_a_due_run(
    store: RedisStore, redis_url: str, redis_prefix: str
) -> None:
    """But not of a granted one."""
    await wait_for_paid(store, "granted", "due")
    async with redis(redis_url, namespace=redis_prefix) as other, notified(other) as event:
        await hand_off(store, paid("granted"))
        await asyncio.sleep(0.1)
        assert not event.is_set()
        await hand_off(store, paid("due"), supported=OTHERS)
        await asyncio.wait_for(event.wait(), 5)


async def test_a_granted_run_is_not_due(store: RedisStore, admin: Redis, redis_prefix: str) -> None:
    """Its place in the wake set is the end of its lease."""
    await wait_for_paid(store, "run")
    (grant,) = (await hand_off(store, paid())).grants
    keys: Any = admin.keys(f"{redis_prefix}:*:wake:*")
    places = [place for key in keys for place in admin.zrange(key, 0, -1, withscores=True)]
    microseconds = grant.lease.expires_at.timestamp() * 1e6
    assert places == [(b"run", pytest.approx(microseconds, abs=1))]


async def test_the_limit_holds_in_one_script(
    store: RedisStore, admin: Redis, redis_prefix: str, published: Any
) -> None:
    """The runs of the first messages are granted, and the others are announced together."""
    ids = [f"run {number:03}" for number in range(100)]
    await wait_for_paid(store, *ids)
    handoff = await hand_off(store, *map(paid, ids), limit=3)
    assert ids_of(handoff.grants) == ids[:3]
    assert count_published(admin, published, redis_prefix) == 1
    assert sorted(await claimed_ids(store, limit=200)) == ids[3:]


async def test_a_run_that_awaits_several_messages_is_granted_once(store: RedisStore) -> None:
    """A second lease would fence the first; the run counts once for the limit."""
    await wait_for_paid(store, "one", "two")
    messages = (paid("one"), paid("one", name="other"), paid("two"), paid("one"))
    handoff = await hand_off(store, *messages, limit=2)
    assert ids_of(handoff.grants) == ["one", "two"]
    assert {grant.lease.id: len(grant.inbox) for grant in handoff.grants} == {"one": 3, "two": 1}


async def test_several_scripts_only_send(store: RedisStore) -> None:
    """More messages than one script takes have receipts in order, and their runs are due."""
    ids = [f"run {number}" for number in range(1_200)]
    await wait_for_paid(store, *ids)
    handoff = await hand_off(store, *map(paid, ids), paid("missing"), limit=3)
    deliveries = [receipt.delivery for receipt in handoff.receipts]
    assert deliveries == [Delivery.DELIVERED] * len(ids) + [Delivery.UNKNOWN]
    assert not handoff.grants
    assert set(await claimed_ids(store, limit=2_000)) == set(ids)


async def test_runs_of_a_prefix_are_granted_by_their_own_ids(
    store: RedisStore, redis_url: str, redis_prefix: str
) -> None:
    """A run of the same id without the prefix is another run."""
    async with redis(redis_url, namespace=redis_prefix, prefix="shop:") as shop:
        await wait_for_paid(store, "run")
        await wait_for_paid(shop, "run")
        (grant,) = (await hand_off(shop, paid())).grants
        assert grant.lease.id == "run"
        assert await shop.append([step(grant, 1)]) == [Verdict.ACCEPTED]
        assert list(await store.inbox("run")) == []
        assert await claimed_ids(store) == []
        assert [message.name for message in await shop.inbox("run")] == ["paid"]


async def test_an_unreadable_run_is_not_granted(
    store: RedisStore, admin: Redis, redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is skipped and logged; its message is sent, and other runs are granted."""
    await wait_for_paid(store, "good", "bad")
    admin.hset(Keys(redis_prefix).run("bad"), "snapshot", "{")
    handoff = await hand_off(store, paid("bad"), paid("good"))
    assert [receipt.delivery for receipt in handoff.receipts] == [Delivery.DELIVERED] * 2
    assert ids_of(handoff.grants) == ["good"]
    assert "'bad' cannot be read" in caplog.text
    assert len(await store.inbox("bad")) == 1


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[TcpProxy]:
    async with TcpProxy.before(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def remote(proxy: TcpProxy, redis_prefix: str) -> AsyncIterator[RedisStore]:
    """A store behind the proxy, set up."""
    async with redis(proxy.url, namespace=redis_prefix, connect_timeout=2) as store:
        await wait_for_paid(store, "run")
        await hand_off(store, paid("missing"))
        yield store


async def hand_off_lost(
    proxy: TcpProxy, store: RedisStore, messages: Sequence[NewMessage], ttl: timedelta
) -> Handoff:
    """Hand off with a reply that is dropped."""
    proxy.drop_next_reply(to=b"lost owner")
    return await store.send_and_claim(messages, "lost owner", ttl, 9, supports=ORDERS)


async def test_a_handoff_whose_reply_was_lost_is_not_repeated(
    remote: RedisStore, proxy: TcpProxy
) -> None:
    """The message is in the inbox once, and the run stays leased until the lease expires."""
    with pytest.raises(StoreUnavailable):
        await hand_off_lost(proxy, remote, [paid()], HOUR)
    assert proxy.dropped == 1
    assert [message.name for message in await remote.inbox("run")] == ["paid"]
    assert await claimed_ids(remote) == []
    (run,) = await remote.list()
    assert run.owner == "lost owner"


async def test_a_lease_whose_reply_was_lost_expires(remote: RedisStore, proxy: TcpProxy) -> None:
    """Another owner claims the run, with its message; the message with the id is not repeated."""
    with pytest.raises(StoreUnavailable):
        await hand_off_lost(proxy, remote, [paid(dedup_id="x")], SHORT)
    assert (await hand_off(remote, paid(dedup_id="x"))).receipts[0].delivery is Delivery.DUPLICATE
    await asyncio.sleep(2 * SHORT.total_seconds())
    (grant,) = await remote.claim("bob", HOUR, 1)
    assert [message.name for message in grant.inbox] == ["paid"]
    assert grant.takeovers == 1


async def test_listeners_wake_after_a_lost_reply(remote: RedisStore, proxy: TcpProxy) -> None:
    """Runs may have become due that the sender knows nothing about."""
    async with notified(remote) as event:
        with pytest.raises(StoreUnavailable):
            await hand_off_lost(proxy, remote, [paid()], HOUR)
        await asyncio.wait_for(event.wait(), 5)
