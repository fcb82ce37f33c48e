"""A server that hangs keeps its connections open but no longer replies.

The timeouts of asyncpg do not apply to BEGIN, COMMIT, ROLLBACK and UNLISTEN, nor to waiting until a
cancelled statement has ended.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from perdure.errors import StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, Verdict
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.process import Server
from tests.servers.proxy import CHUNK, TcpProxy

LONG = timedelta(minutes=5)
TIMEOUT = 2
"""How long a statement may take, in seconds: enough for a busy machine to reply."""
PATIENCE = 15


class HangingProxy(TcpProxy):
    """A proxy that drops a reply and all later ones, but does not cut the connection."""

    async def _return(self, link: Any, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while reply := await reader.read(CHUNK):
                if link.swallows:
                    self.dropped += 1
                else:
                    link.client.write(reply)
                    await link.client.drain()
        link.close()


@pytest.fixture(scope="session")
def postgres_server(debian_postgres_server: Server) -> Server:
    """One of the two: the driver's timeouts do not depend on the server."""
    return debian_postgres_server


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[HangingProxy]:
    async with postgres(postgres_url) as store:
        await store.load("run")  # creates the tables
    async with HangingProxy.before(postgres_url) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: HangingProxy) -> AsyncIterator[PostgresStore]:
    async with postgres(proxy.url, timeout=TIMEOUT, max_connections=1) as store:
        yield store


async def acquire(store: PostgresStore) -> Grant:
    request = LeaseRequest("run", "ana", LONG, create=as_json(snapshot()), workflow="order")
    (grant,) = await store.acquire([request])
    assert isinstance(grant, Grant)
    return grant


def entry(grant: Grant) -> Entry:
    return Entry("run", grant.lease.epoch, 1, delta("a"), step="a")


async def steps(store: PostgresStore) -> list[str]:
    loaded = await store.load("run")
    assert loaded is not None
    return list(loaded["steps"])


async def listening(store: PostgresStore) -> "asyncio.Task[None]":
    """Return a task that has begun to listen for notifications."""
    heard = asyncio.Event()

    async def listen() -> None:
        async for _ in store.notifications():  # type: ignore[attr-defined]  # declared by `notify`
            heard.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(heard.wait(), PATIENCE)
    return task


async def ended(task: "asyncio.Task[Any]", proxy: TcpProxy) -> None:
    """Wait until the task has ended; if it does not, fail after ending it."""
    await asyncio.wait([task], timeout=PATIENCE)
    has_ended = task.done()
    proxy.cut()
    await asyncio.wait([task], timeout=1)
    task.cancel()
    await asyncio.wait([task])
    assert has_ended, f"the task did not end by itself: {task}"


async def test_a_cancelled_listener_ends_although_the_server_hangs(
    store: PostgresStore, proxy: HangingProxy
) -> None:
    """A worker that drains waits for it."""
    task = await listening(store)
    proxy.drop_next_reply(to=b"UNLISTEN")
    task.cancel()
    await ended(task, proxy)
    assert task.cancelled()


async def test_a_cancelled_listener_does_not_reconnect_if_the_connection_is_lost(
    postgres_url: str,
) -> None:
    """The lost connection does not replace the cancellation."""
    async with TcpProxy.before(postgres_url) as proxy, postgres(proxy.url) as store:
        task = await listening(store)
        proxy.drop_next_reply(to=b"UNLISTEN")
        task.cancel()
        await ended(task, proxy)
        assert task.cancelled()
        assert proxy.dropped == 1


async def test_a_store_can_be_closed_although_the_server_hangs(
    store: PostgresStore, proxy: HangingProxy
) -> None:
    task = await listening(store)
    proxy.drop_next_reply(to=b"UNLISTEN")
    closing = asyncio.create_task(store.close())
    await ended(closing, proxy)
    await asyncio.gather(closing, task)


@pytest.mark.parametrize(
    ("statement", "recorded"), [(b"BEGIN", []), (b"SET LOCAL", []), (b"COMMIT", ["a"])]
)
async def test_a_transaction_without_a_reply_makes_the_store_unavailable(
    store: PostgresStore, proxy: HangingProxy, statement: bytes, recorded: list[str]
) -> None:
    """As after a lost connection, the caller has to find out whether a commit took place."""
    grant = await acquire(store)

    async def work(_: object) -> Entry:
        return entry(grant)

    proxy.drop_next_reply(to=statement)
    task = asyncio.create_task(store.transact("run", grant.lease.epoch, work))
    await ended(task, proxy)
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        await task
    assert await steps(store) == recorded


async def test_a_cancelled_transaction_ends_although_the_server_hangs(
    store: PostgresStore, proxy: HangingProxy
) -> None:
    """The transaction is rolled back by the end of its connection."""
    grant = await acquire(store)
    has_begun = asyncio.Event()

    async def work(connection: Any) -> Entry:
        proxy.drop_next_reply(to=b"SELECT 42")
        has_begun.set()
        await connection.execute("SELECT 42")
        return entry(grant)

    task = asyncio.create_task(store.transact("run", grant.lease.epoch, work))
    await asyncio.wait_for(has_begun.wait(), PATIENCE)
    task.cancel()
    await ended(task, proxy)
    assert task.cancelled()
    assert await steps(store) == []


async def test_a_rollback_without_a_reply_makes_the_store_unavailable(
    store: PostgresStore, proxy: HangingProxy
) -> None:
    """What `work` raised is the cause."""
    grant = await acquire(store)

    async def work(_: object) -> Entry:
        proxy.drop_next_reply(to=b"ROLLBACK")
        raise RuntimeError("no money today")

    task = asyncio.create_task(store.transact("run", grant.lease.epoch, work))
    await ended(task, proxy)
    with pytest.raises(StoreUnavailable, match="no money today"):
        await task
    assert await steps(store) == []


class TestBehindAPooler:
    """Each statement of the store is sent in a transaction."""

    @pytest.fixture
    async def store(self, proxy: HangingProxy) -> AsyncIterator[PostgresStore]:
        async with postgres(
            proxy.url, timeout=TIMEOUT, prepared_statements=False, max_connections=1
        ) as store:
            yield store

    @pytest.mark.parametrize("statement", [b"BEGIN", b"COMMIT"])
    async def test_a_statement_without_a_reply_is_repeated(
        self, store: PostgresStore, proxy: HangingProxy, statement: bytes
    ) -> None:
        """On another connection, as after a lost one."""
        await acquire(store)
        proxy.drop_next_reply(to=statement)
        task = asyncio.create_task(store.load("run"))
        await ended(task, proxy)
        assert await task is not None

    async def test_a_connection_whose_rollback_has_no_reply_is_not_used_again(
        self, store: PostgresStore, proxy: HangingProxy
    ) -> None:
        await acquire(store)
        proxy.drop_next_reply(to=b"ROLLBACK")
        task = asyncio.create_task(store._backend._database.fetch("SELECT 1 / 0"))
        await ended(task, proxy)
        with pytest.raises(StoreError, match="division by zero"):
            await task
        assert await steps(store) == []


class TestLentConnection:
    """The user's pool or engine replaces a connection that hangs."""

    @pytest.fixture(params=["pool", "engine"])
    async def store(
        self, proxy: HangingProxy, request: pytest.FixtureRequest
    ) -> AsyncIterator[PostgresStore]:
        async with AsyncExitStack() as stack:
            lender: Any
            if request.param == "pool":
                lender = asyncpg.create_pool(proxy.url, min_size=1, max_size=1)
                await stack.enter_async_context(lender)
            else:
                url = proxy.url.replace("postgresql://", "postgresql+asyncpg://")
                lender = create_async_engine(url, pool_size=1, max_overflow=0)
                stack.push_async_callback(lender.dispose)
            lent: dict[str, Any] = {request.param: lender}
            yield await stack.enter_async_context(postgres(timeout=TIMEOUT, **lent))

    async def test_a_statement_without_a_reply_is_repeated(
        self, store: PostgresStore, proxy: HangingProxy
    ) -> None:
        grant = await acquire(store)
        proxy.drop_next_reply()
        task = asyncio.create_task(store.append([entry(grant)]))
        await ended(task, proxy)
        assert await task == [Verdict.ACCEPTED]
        assert await steps(store) == ["a"]

    async def test_a_rollback_without_a_reply_makes_the_store_unavailable(
        self, store: PostgresStore, proxy: HangingProxy
    ) -> None:
        grant = await acquire(store)

        async def work(_: object) -> Entry:
            proxy.drop_next_reply(to=b"ROLLBACK")
            raise RuntimeError("no money today")

        task = asyncio.create_task(store.transact("run", grant.lease.epoch, work))
        await ended(task, proxy)
        with pytest.raises(StoreUnavailable, match="no money today"):
            await task
        assert await steps(store) == []

    async def test_a_cancelled_listener_ends(
        self, store: PostgresStore, proxy: HangingProxy
    ) -> None:
        await acquire(store)
        task = await listening(store)
        proxy.drop_next_reply(to=b"UNLISTEN")
        task.cancel()
        await ended(task, proxy)
        assert task.cancelled()
        assert await steps(store) == []
