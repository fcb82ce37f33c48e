"""What is special about PostgreSQL: transactions, notifications, permissions, pools.

What all stores on servers have in common is tested in `tests/stores/test_server_failures.py`.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from perdure.errors import MissingDependency, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.proxy import TcpProxy

LONG = timedelta(minutes=5)


async def acquire(store: PostgresStore, *ids: str) -> list[Grant]:
    requests = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), workflow="order") for id in ids
    ]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


async def steps(store: PostgresStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


class TestLostConnection:
    """The connection is lost between commit and reply."""

    @pytest.fixture
    async def proxy(self, postgres_url: str) -> AsyncIterator[TcpProxy]:
        async with TcpProxy.before(postgres_url) as proxy:
            yield proxy

    @pytest.fixture
    async def store(self, proxy: TcpProxy) -> AsyncIterator[PostgresStore]:
        async with postgres(proxy.url, connect_timeout=1) as store:
            yield store

    async def test_a_transaction_whose_commit_is_lost_is_not_repeated(
        self, store: PostgresStore, proxy: TcpProxy
    ) -> None:
        """The user's writes cannot be repeated: the caller gets an error and can check."""
        (grant,) = await acquire(store, "run")

        async def work(_: object) -> Entry:
            proxy.drop_next_reply(to=b"COMMIT")
            return entry(grant, 1, "a")

        with pytest.raises(StoreUnavailable):
            await store.transact("run", grant.lease.epoch, work)
        assert await steps(store) == ["a"]

    async def test_notifications_that_reconnect_end_when_the_store_closes(
        self, store: PostgresStore, proxy: TcpProxy
    ) -> None:
        """They end like others, without an error."""
        heard = asyncio.Event()

        async def listen() -> None:
            async for _ in store.notifications():  # type: ignore[attr-defined]  # declared by `notify`
                heard.set()

        listening = asyncio.ensure_future(listen())
        await asyncio.wait_for(heard.wait(), 5)
        proxy.refuse()
        await asyncio.sleep(0.2)
        assert not listening.done()
        await store.close()
        await asyncio.wait_for(listening, 5)


async def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains the command that installs it."""
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(MissingDependency, match=r"pip install 'perdure\[postgres\]'"):
        postgres("postgresql://localhost/db")


async def test_missing_permissions_are_reported_with_the_remedy(postgres_url: str) -> None:
    """The error contains the statement for an administrator, which helps when it is run."""
    parts = urlsplit(postgres_url)
    limited = parts._replace(netloc=f"limited@{parts.netloc.rpartition('@')[2]}").geturl()
    with psycopg.connect(postgres_url, autocommit=True) as administrator:
        administrator.execute("CREATE ROLE limited LOGIN")
        try:
            async with postgres(limited) as store:
                with pytest.raises(StoreError, match="As an administrator run: ") as caught:
                    await store.load("run")
                administrator.execute(str(caught.value).partition("run: ")[2].encode())
                assert await store.load("run") is None
        finally:
            administrator.execute("DROP OWNED BY limited")
            administrator.execute("DROP ROLE limited")


async def test_a_pool_that_was_passed_in_stays_open(postgres_url: str) -> None:
    """The store closes only what it opened."""
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2) as pool:
        async with postgres(pool=pool) as store:
            await acquire(store, "run")
        assert await pool.fetchval("SELECT count(*) FROM perdure_runs") == 1
        assert pool.get_size() <= 2


async def test_the_number_of_connections_is_limited(postgres_url: str) -> None:
    """At most `max_connections` are open, however many calls run concurrently."""
    async with postgres(postgres_url, max_connections=3) as store:
        await asyncio.gather(*(store.load(f"run {number}") for number in range(50)))
        with psycopg.connect(postgres_url) as connection:
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure'"
            assert connection.execute(query).fetchone() == (3,)


async def test_notifications_continue_after_a_lost_connection(postgres_url: str) -> None:
    """The listener does not notice that the server closed the connection."""
    async with postgres(postgres_url) as store:
        await store.load("run")
        heard = asyncio.Semaphore(0)

        async def listen() -> None:
            async for _ in store.notifications():  # type: ignore[attr-defined]  # declared by `notify`
                heard.release()

        listening = asyncio.ensure_future(listen())
        await asyncio.wait_for(heard.acquire(), 5)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND query LIKE 'LISTEN%'"
            )
        await asyncio.wait_for(heard.acquire(), 5)
        await store.enqueue([NewRun("run", "order", as_json(snapshot()))])
        await asyncio.wait_for(heard.acquire(), 5)
    await asyncio.wait_for(listening, 5)


async def test_a_run_of_a_step_transaction_is_announced(postgres_url: str) -> None:
    """The connection is the store's own, but the run becomes due only with the commit."""
    async with postgres(postgres_url) as store:
        (grant,) = await acquire(store, "run")
        notifications = store.notifications()  # type: ignore[attr-defined]  # declared by `notify`
        await asyncio.wait_for(anext(notifications), 5)
        notification = asyncio.ensure_future(anext(notifications))

        async def work(connection: object) -> Entry:
            await store.enqueue_in(connection, [NewRun("child", "order", as_json(snapshot()))])
            return entry(grant, 1, "a")

        await store.transact("run", grant.lease.epoch, work)
        await asyncio.wait_for(notification, 5)
        await notifications.aclose()
