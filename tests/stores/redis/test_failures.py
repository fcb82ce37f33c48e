"""What is special about Redis: scripts, notifications, permissions, clients, its clock.

What all stores on servers have in common is tested in `tests/stores/test_server_failures.py`.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.store import NewRun, Verdict
from perdure.stores.redis import RedisStore, redis
from perdure.testing.conformance.handoff import hand_off, paid, wait_for_paid
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import free_port
from tests.servers.proxy import TcpProxy
from tests.stores.redis.kit import HOUR, execute, leased, step, steps

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


async def test_a_server_that_does_not_reply_is_unavailable(
    redis_url: str, redis_prefix: str, admin: Redis
) -> None:
    """After `timeout`, which also limits what is sent to open a connection."""
    options: Any = {"namespace": redis_prefix, "timeout": 0.2, "connect_timeout": 0}
    async with redis(redis_url, **options) as store, redis(redis_url, **options) as other:
        await store.load("run")
        admin.client_pause(3_000)
        try:
            with pytest.raises(StoreUnavailable, match=r"no reply within 0\.2s"):
                await store.load("run")
            with pytest.raises(StoreUnavailable, match=r"no reply within 0\.2s"):
                await other.load("run")
        finally:
            admin.client_unpause()
        assert await store.load("run") is None


async def test_an_outage_is_logged_once_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    """If the URL is wrong, callers would otherwise wait in silence."""
    async with redis(f"redis://127.0.0.1:{free_port()}", connect_timeout=0.2) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="tried for"):
                await store.load("run")
    assert [text.endswith("retrying for up to 0.2s") for text in caplog.messages] == [True]


async def test_an_append_cancelled_while_it_is_sent_is_cancelled(store: RedisStore) -> None:
    """The driver would swallow the cancellation, and the caller would continue."""
    (grant,) = await leased(store)
    work = asyncio.create_task(store.append([step(grant, 1)]))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled()


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


async def test_an_epoch_is_never_repeated_when_the_clock_is_set_back(
    store: RedisStore, admin: Redis, redis_prefix: str
) -> None:
    """The server remembers the last number it gave."""
    (before,) = await leased(store)
    (sequence,) = admin.keys(f"{redis_prefix}:*:2:sequence")
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
        await wait_for_paid(store, "waiting")
        assert len((await hand_off(store, paid("waiting"))).grants) == 1
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
            await send_one(store, "run", "paid", b"1")
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


async def test_an_idle_connection_that_was_closed_is_replaced(
    redis_url: str, redis_prefix: str, admin: Redis
) -> None:
    """Before a command is sent: one that must not be executed twice could not be repeated."""
    url = f"{redis_url}?client_name={redis_prefix}"
    async with redis(url, namespace=redis_prefix, connect_timeout=0) as store:
        await store.load("run")
        (own,) = [each for each in admin.client_list() if each["name"] == redis_prefix]
        admin.client_kill_filter(_id=own["id"])
        await asyncio.sleep(0.1)
        assert await store.enqueue([NewRun("run", "order", as_json(snapshot()))]) == [True]


@pytest.mark.parametrize("parameter", ["protocol=3", "max_connections=2"])
async def test_parameters_of_the_url_are_respected(
    redis_url: str, redis_prefix: str, parameter: str
) -> None:
    """The store does not keep connections itself then, but works as with others."""
    async with redis(f"{redis_url}?{parameter}", namespace=redis_prefix) as store:
        await asyncio.gather(*(store.load(f"{n}") for n in range(5)))
        notifications = store.notifications()
        await anext(notifications)
        await store.enqueue([NewRun("run", "order", as_json(snapshot()))])
        await anext(notifications)
        await notifications.aclose()  # type: ignore[attr-defined]  # an async generator has it


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
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "redis is not installed; run: pip install 'perdure[redis]'" in process.stderr
