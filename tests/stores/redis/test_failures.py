"""The Redis store when the server, the connection, permissions or the driver fail."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from perdure.clock import SystemClock
from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, NewRun, Rest, Verdict
from perdure.stores.redis import RedisStore, redis
from perdure.stores.redis.node import NodeLink
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.servers.proxy import TcpProxy
from tests.stores.redis.kit import HOUR, execute, leased, step, steps

RUNS = 200
LIMITED = "perdure_limited"


@pytest.fixture
async def store(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisStore]:
    async with redis(redis_url, namespace=redis_prefix) as store:
        yield store


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[TcpProxy]:
    async with TcpProxy.before(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def remote(proxy: TcpProxy, redis_prefix: str) -> AsyncIterator[RedisStore]:
    """A store behind the proxy, set up."""
    async with redis(proxy.url, namespace=redis_prefix) as store:
        await store.load("run")
        yield store


@pytest.fixture
def admin(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


async def append_until(store: RedisStore, grant: Grant, done: asyncio.Event) -> int:
    """Append one entry after another, as the committer does; return how many were accepted."""
    n = 0
    while not done.is_set():
        try:
            (verdict,) = await store.append([step(grant, n + 1)])
        except StoreUnavailable:
            await asyncio.sleep(0.05)
            continue
        assert verdict is Verdict.ACCEPTED
        n += 1
    return n


async def test_no_accepted_entry_is_lost_when_the_server_is_killed(
    redis_server: Server, store: RedisStore
) -> None:
    """The store reconnects by itself, and every accepted entry is there."""
    grants = await leased(store, *(f"{n}" for n in range(RUNS)))
    done = asyncio.Event()
    tasks = [asyncio.create_task(append_until(store, grant, done)) for grant in grants]
    await asyncio.sleep(1)
    await asyncio.to_thread(redis_server.kill)
    await asyncio.to_thread(redis_server.ensure)
    await asyncio.sleep(1)
    done.set()
    accepted = await asyncio.gather(*tasks)
    assert sum(accepted) > RUNS
    for grant, count in zip(grants, accepted, strict=True):
        assert await steps(store, grant.lease.id) == [f"{n + 1}" for n in range(count)]


async def test_an_entry_whose_reply_was_lost_is_written_once(
    remote: RedisStore, proxy: TcpProxy, admin: Redis
) -> None:
    """A connection lost between commit and reply neither loses nor duplicates it."""
    (grant,) = await leased(remote)
    for n in range(1, 5):
        proxy.drop_next_reply(to=b"EVALSHA")
        assert await remote.append([step(grant, n)]) == [Verdict.ACCEPTED]
    assert proxy.dropped == 4
    assert await steps(remote) == ["1", "2", "3", "4"]


async def test_a_batch_whose_reply_was_lost_is_written_once(
    remote: RedisStore, proxy: TcpProxy
) -> None:
    """Also one of entries and rests of many runs."""
    grants = await leased(remote, *(f"{n}" for n in range(20)))
    whole = as_json(snapshot("end", status="completed"))
    batch = [
        step(grant, 1)
        if number % 2
        else Entry(grant.lease.id, grant.lease.epoch, 1, whole, rest=Rest("completed"))
        for number, grant in enumerate(grants)
    ]
    proxy.drop_next_reply(to=b"EVALSHA")
    assert set(await remote.append(batch)) == {Verdict.ACCEPTED}
    assert proxy.dropped == 1
    for number, grant in enumerate(grants):
        assert await steps(remote, grant.lease.id) == (["1"] if number % 2 else ["end"])


async def test_commands_that_must_not_be_repeated_are_sent_once(
    remote: RedisStore, proxy: TcpProxy
) -> None:
    """If the reply to a message, a new run or a claim is lost, the caller gets an error; nothing is
    duplicated."""
    await leased(remote)
    # After its first use the server has a script, and is sent only its hash.
    await remote.send("no run", "paid", b"1")
    await remote.enqueue([NewRun("run", "order", as_json(snapshot()))])
    await remote.claim("bob", HOUR, 10)
    proxy.drop_next_reply(to=b"EVALSHA")
    with pytest.raises(StoreUnavailable):
        await remote.send("run", "paid", b"1")
    assert [message.name for message in await remote.inbox("run")] == ["paid"]
    proxy.drop_next_reply(to=b"EVALSHA")
    with pytest.raises(StoreUnavailable):
        await remote.enqueue([NewRun("new", "order", as_json(snapshot()))])
    proxy.drop_next_reply(to=b"EVALSHA")
    with pytest.raises(StoreUnavailable):
        await remote.claim("bob", HOUR, 10)
    assert list(await remote.claim("cem", HOUR, 10)) == []
    assert await remote.load("new") is not None


async def test_a_lease_whose_reply_was_lost_is_requested_again(
    remote: RedisStore, proxy: TcpProxy
) -> None:
    """The owner gets it, and can append."""
    proxy.drop_next_reply(to=b"EVALSHA")
    (grant,) = await leased(remote)
    assert proxy.dropped == 1
    assert await remote.append([step(grant, 1)]) == [Verdict.ACCEPTED]


async def test_an_append_cancelled_while_it_is_sent_is_cancelled(store: RedisStore) -> None:
    """The driver would swallow the cancellation, and the caller would continue."""
    (grant,) = await leased(store)
    work = asyncio.create_task(store.append([step(grant, 1)]))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled()


async def test_a_cancelled_append_disturbs_no_other(store: RedisStore) -> None:
    """A late entry takes its place, and no reply is read as that of another command."""
    (grant,) = await leased(store)
    cancelled = last = 0
    while cancelled < 3:
        last += 1
        work = asyncio.create_task(store.append([step(grant, last)]))
        # After some turns of the event loop the reply may or may not have arrived.
        for _ in range(last % 12):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work])
        cancelled += work.cancelled()
    everything = range(1, last + 1)
    assert await store.append([step(grant, last + 1)]) == [Verdict.ACCEPTED]
    again = await store.append([step(grant, n) for n in everything])
    assert again == [Verdict.ACCEPTED] * last
    assert await steps(store) == [f"{n}" for n in (*everything, last + 1)]


async def test_an_unavailable_server_is_named() -> None:
    """With how long it was tried, and without the password."""
    async with redis("redis://u:secret@127.0.0.1:1/0", connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable) as raised:
            await store.load("run")
    assert "Redis at 127.0.0.1:1/0 is unavailable, tried for 0." in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_failed_set_up_is_tried_again(proxy: TcpProxy, redis_prefix: str) -> None:
    """A store that was used too early works as soon as the server does."""
    proxy.refuse()
    async with redis(proxy.url, namespace=redis_prefix, connect_timeout=0) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.save("run", snapshot("a"))
        proxy.accept()
        await store.save("run", snapshot("a"))
        assert await steps(store) == ["a"]


async def test_a_store_waits_for_a_server_to_come_back(proxy: TcpProxy, redis_prefix: str) -> None:
    """Up to `connect_timeout`."""
    proxy.refuse()
    async with redis(proxy.url, namespace=redis_prefix) as store:
        saving = asyncio.create_task(store.save("run", snapshot("a")))
        await asyncio.sleep(0.3)
        proxy.accept()
        await saving
        assert await steps(store) == ["a"]


async def test_notifications_continue_after_a_lost_connection(
    remote: RedisStore, proxy: TcpProxy
) -> None:
    """A new connection listens, and one is sent for what may have been missed."""
    notifications = remote.notifications()
    await anext(notifications)
    notification = asyncio.ensure_future(anext(notifications))
    await asyncio.sleep(0.05)
    proxy.cut()
    await notification
    notification = asyncio.ensure_future(anext(notifications))
    await remote.enqueue([NewRun("run", "order", as_json(snapshot()))])
    await notification
    await notifications.aclose()  # type: ignore[attr-defined]  # an async generator has it


async def test_notifications_end_when_the_store_is_closed(
    redis_url: str, redis_prefix: str
) -> None:
    """A closed store refuses to listen."""
    store = redis(redis_url, namespace=redis_prefix)
    received = asyncio.ensure_future(_count(store))
    await asyncio.sleep(0.2)
    await store.close()
    assert await received == 1
    with pytest.raises(StoreClosed):
        await anext(store.notifications())


async def _count(store: RedisStore) -> int:
    return len([None async for _ in store.notifications()])


async def test_machines_with_clocks_an_hour_apart_share_leases(
    redis_url: str, redis_prefix: str
) -> None:
    """Only the server's clock counts."""
    now = SystemClock().now()
    early, late = TestClock(now - HOUR), TestClock(now + HOUR)
    async with (
        redis(redis_url, namespace=redis_prefix, clock=early) as one,
        redis(redis_url, namespace=redis_prefix, clock=late) as two,
    ):
        (mine,) = await leased(one, ttl=timedelta(milliseconds=300))
        assert list(await two.claim("bob", HOUR, 10)) == []
        await asyncio.sleep(0.4)
        (theirs,) = await two.claim("bob", HOUR, 10)
        assert theirs.takeovers == 1
        assert theirs.now - mine.now < timedelta(seconds=30)
        assert await one.append([step(mine, 1)]) == [Verdict.FENCED]


async def test_an_epoch_is_never_repeated_when_the_clock_is_set_back(
    store: RedisStore, admin: Redis, redis_prefix: str
) -> None:
    """The server remembers the last number it gave."""
    (before,) = await leased(store)
    (sequence,) = admin.keys(f"{redis_prefix}:*:sequence")
    ahead = int(admin.get(sequence) or 0) + 10**12
    admin.set(sequence, ahead)
    (first,) = await leased(store)
    await store.delete("run")
    (second,) = await leased(store)
    epochs = [grant.lease.epoch for grant in (before, first, second)]
    assert epochs == sorted(set(epochs))
    assert first.lease.epoch > ahead


async def test_scripts_that_the_server_forgot_are_sent_again(
    store: RedisStore, admin: Redis
) -> None:
    """A restart or SCRIPT FLUSH costs one more round trip."""
    (grant,) = await leased(store)
    admin.script_flush()
    assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
    admin.script_flush()
    assert await steps(store) == ["1"]


async def test_ten_stores_can_be_opened_at_once(redis_url: str, redis_prefix: str) -> None:
    """Each by several concurrent first calls."""
    stores = [redis(redis_url, namespace=redis_prefix) for _ in range(10)]
    await asyncio.gather(*(store.save(f"{n}", snapshot()) for n in range(5) for store in stores))
    assert len(await stores[0].list()) == 5
    for store in stores:
        await store.close()


def limited_url(admin: Redis, url: str, *permissions: str) -> str:
    """Return a URL for a user with only these permissions."""
    execute(admin, "ACL", "SETUSER", LIMITED, "reset", "on", ">word", *permissions)
    parts = urlsplit(url)
    return parts._replace(netloc=f"{LIMITED}:word@{parts.netloc}").geturl()


@pytest.fixture
def limited(admin: Redis) -> Iterator[None]:
    yield
    execute(admin, "ACL", "DELUSER", LIMITED)


@pytest.mark.usefixtures("limited")
async def test_missing_permissions_are_named_before_anything_is_written(
    admin: Redis, redis_url: str, redis_prefix: str
) -> None:
    """The error has the command for the administrator."""
    url = limited_url(admin, redis_url, "~*", "&*", "+@all", "-zadd")
    async with redis(url, namespace=redis_prefix) as store:
        with pytest.raises(StoreError, match="ACL SETUSER"):
            await store.save("run", snapshot())
    assert admin.keys(f"{redis_prefix}*") == []


@pytest.mark.usefixtures("limited")
async def test_the_named_permissions_are_sufficient(
    admin: Redis, redis_url: str, redis_prefix: str
) -> None:
    """A user with those of the error can use the store."""
    keys = (f"~{redis_prefix}*", f"&{redis_prefix}*", "+@read", "+@write", "+@scripting")
    commands = ("+@connection", "+@pubsub", "+time", "+info", "+config|get")
    url = limited_url(admin, redis_url, *keys, *commands)
    async with redis(url, namespace=redis_prefix) as store:
        notifications = store.notifications()
        await anext(notifications)
        await store.enqueue([NewRun("run", "order", as_json(snapshot()))])
        await anext(notifications)
        (grant,) = await store.claim("ana", HOUR, 1)
        assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
        await notifications.aclose()  # type: ignore[attr-defined]  # an async generator has it


async def test_a_wrong_password_is_not_unavailability(redis_url: str) -> None:
    """It is reported at once."""
    parts = urlsplit(redis_url)
    url = parts._replace(netloc=f"nobody:wrong@{parts.netloc}").geturl()
    async with redis(url) as store:
        with pytest.raises(StoreError, match="does not accept this user") as raised:
            await store.load("run")
    assert not isinstance(raised.value, StoreUnavailable)


@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}])
async def test_a_client_that_was_passed_in_stays_open(
    redis_url: str, redis_prefix: str, options: dict[str, Any]
) -> None:
    """However it is configured to read replies."""
    async with redis_client(redis_url, **options) as client:
        async with redis(client=client, namespace=redis_prefix) as store:
            (grant,) = await leased(store)
            assert await store.append([step(grant, 1)]) == [Verdict.ACCEPTED]
            notifications = store.notifications()
            await anext(notifications)
            await store.send("run", "paid", b"1")
            assert await steps(store) == ["1"]
            assert (await store.durability_report()).settings["appendfsync"] == "always"
        assert await client.ping()


def redis_client(url: str, **options: Any) -> AsyncRedis:
    return AsyncRedis.from_url(url, **options)


@pytest.mark.parametrize("own", [True, False])
async def test_no_more_connections_are_opened_than_allowed(
    redis_url: str, redis_prefix: str, admin: Redis, own: bool
) -> None:
    """Calls wait for a free one; also with a pool that was passed in."""
    client = None if own else redis_client(redis_url, max_connections=3)
    url = redis_url if own else None
    async with redis(url, client=client, namespace=redis_prefix, max_connections=2) as store:
        await asyncio.gather(*(store.save(f"{n}", snapshot()) for n in range(50)))
        assert len(admin.client_list()) - 1 <= 2
    if client is not None:
        await client.aclose()


async def test_a_closed_store_raises_store_closed(redis_url: str) -> None:
    store = redis(redis_url)
    await store.close()
    await store.close()
    with pytest.raises(StoreClosed):
        await store.load("run")


async def test_calls_that_wait_when_the_store_is_closed_end(
    redis_url: str, redis_prefix: str
) -> None:
    """Each succeeds or raises that the store was closed."""
    store = redis(redis_url, namespace=redis_prefix)
    await store.load("run")
    saves = [asyncio.create_task(store.save(f"{n}", snapshot())) for n in range(50)]
    # Now all of them have started, and none can have finished.
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.gather(*saves, return_exceptions=True)
    assert any(isinstance(result, StoreClosed | StoreUnavailable) for result in results)
    for result in results:
        assert result is None or isinstance(result, StoreClosed | StoreUnavailable)


@pytest.mark.parametrize(
    "options",
    [
        {"url": None},
        {"url": "localhost"},
        {"namespace": "a{b}"},
        {"namespace": ""},
        {"durability": "some"},
        {"max_connections": 0},
        {"client": object()},
        {"prefix": "\0"},
    ],
)
def test_an_invalid_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        redis(**{"url": "redis://localhost", **options})  # type: ignore[arg-type]  # wrong on purpose


def test_a_missing_driver_is_named() -> None:
    """The error has the command that installs it."""
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from perdure.stores import redis\n"
        "redis('redis://localhost')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "redis is not installed; run: pip install 'perdure[redis]'" in done.stderr


def test_a_store_can_be_used_in_successive_loops(redis_url: str, redis_prefix: str) -> None:
    """As by `asyncio.run` in a script; also to close it after its last loop has ended."""
    store = redis(redis_url, namespace=redis_prefix)

    async def use(n: int) -> None:
        await store.save(f"{n}", snapshot("a"))
        assert len(await store.list()) == n + 1
        link = store._backend.server.link
        assert isinstance(link, NodeLink)
        # Otherwise their sockets are left to the garbage collector, which warns.
        await link._pool.aclose()

    for n in range(2):
        asyncio.run(use(n))
    asyncio.run(store.close())
