"""What is special about MySQL: transactions, idle connections, permissions, packet sizes.

What all stores on servers have in common is tested in `tests/stores/test_server_failures.py`.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import pytest

from perdure.errors import (
    MissingDependency,
    StoreCorrupted,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    Handoff,
    LeaseRequest,
    NewMessage,
    NewRun,
    Receipt,
    Rest,
    Verdict,
)
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import connect_arguments, query
from tests.servers.proxy import TcpProxy

LONG = timedelta(minutes=5)
MEBIBYTE = 1024 * 1024


async def acquire(store: MysqlStore, *ids: str) -> list[Grant]:
    requests = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), workflow="order") for id in ids
    ]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


async def steps(store: MysqlStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


class TestLostConnection:
    """The connection is lost between commit and reply."""

    @pytest.fixture
    async def proxy(self, mysql_url: str) -> AsyncIterator[TcpProxy]:
        async with TcpProxy.before(mysql_url) as proxy:
            yield proxy

    @pytest.fixture
    async def store(self, proxy: TcpProxy) -> AsyncIterator[MysqlStore]:
        async with mysql(proxy.url, connect_timeout=1) as store:
            yield store

    async def test_a_request_before_the_commit_is_sent_again(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """A transaction that cannot have been committed is always run again."""
        await acquire(store, "run")
        proxy.drop_next_reply(to=b"FOR UPDATE")
        await send_one(store, "run", "paid", b"1")
        assert proxy.dropped == 1
        assert len(await store.inbox("run")) == 1

    async def test_a_connection_closed_while_idle_is_replaced(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Even for a request that is not repeatable, because nothing was sent yet."""
        await acquire(store, "run")
        proxy.cut()
        await asyncio.sleep(0.05)
        await send_one(store, "run", "paid", b"1")
        assert len(await store.inbox("run")) == 1

    async def test_a_transaction_whose_commit_is_lost_is_not_repeated(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """The user's writes cannot be repeated: the caller gets an error and can check."""
        (grant,) = await acquire(store, "run")

        async def work(_: object) -> Entry:
            proxy.drop_next_reply(to=b"COMMIT")
            return entry(grant, 1, "a")

        with pytest.raises(StoreUnavailable):
            await store.transact("run", grant.lease.epoch, work)
        assert await steps(store) == ["a"]

    async def test_a_handoff_whose_commit_is_lost_is_not_repeated(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """The message would be sent twice. With a dedup id it is found, and nothing is granted."""
        for id, dedup_id in (("a", None), ("b", "x")):
            rest = Rest("waiting", None, ("paid",))
            await store.enqueue([NewRun(id, "order", as_json(snapshot()), rest=rest)])
            proxy.drop_next_reply(to=b"COMMIT")
            message = NewMessage(id, "paid", b"1", dedup_id)
            handoff = store.send_and_claim([message], "ana", LONG, 1, supports=supports("order"))
            if dedup_id is None:
                with pytest.raises(StoreUnavailable):
                    await handoff
            else:
                assert await handoff == Handoff((Receipt(Delivery.DUPLICATE, 1),))
            assert len(await store.inbox(id)) == 1
            assert await store.claim("bob", LONG, 1) == []


async def test_a_long_idle_connection_is_pinged(mysql_url: str) -> None:
    """A connection that was silently dropped does not make a call fail."""
    clock = TestClock()
    async with mysql(mysql_url, clock=clock) as store:
        await acquire(store, "run")
        query(mysql_url, f"KILL {store_connections(mysql_url)[0][0]}")
        await clock.advance(timedelta(minutes=5))
        await send_one(store, "run", "paid", b"1")
        assert len(store_connections(mysql_url)) == 1


def store_connections(url: str) -> Any:
    return query(
        url,
        "SELECT id FROM information_schema.processlist "
        "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
    )


async def test_a_server_that_does_not_reply_times_out(mysql_url: str) -> None:
    """A reply may take as long as `timeout`."""
    async with mysql(mysql_url, timeout=0.3) as store:
        (grant,) = await acquire(store, "run")

        async def work(_: object) -> Entry:
            connection = await asyncmy.connect(**connect_arguments(mysql_url))
            async with connection, connection.cursor() as cursor:
                await cursor.execute("SELECT * FROM perdure_runs FOR UPDATE")
                with pytest.raises(StoreUnavailable, match="is unavailable"):
                    await store.append([entry(grant, 1, "a")])
                await connection.rollback()
            return entry(grant, 2, "b")

        await store.transact("run", grant.lease.epoch, work)
        assert "b" in await steps(store)


async def test_a_server_that_sends_no_greeting_is_unavailable() -> None:
    """It accepts the connection and sends nothing."""

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, mysql(f"mysql://ana@127.0.0.1:{port}/db", connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.load("run")


async def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains the command that installs it."""
    monkeypatch.setitem(sys.modules, "asyncmy", None)
    with pytest.raises(MissingDependency, match=r"pip install 'perdure\[mysql\]'"):
        mysql("mysql://localhost/db")


async def test_missing_permissions_are_reported_with_the_remedy(mysql_url: str) -> None:
    """The error contains the statement for an administrator."""
    database = urlsplit(mysql_url).path[1:]
    query(mysql_url, "DROP USER IF EXISTS limited")
    query(mysql_url, "CREATE USER limited")
    query(mysql_url, f"GRANT SELECT ON {database}.* TO limited")
    try:
        async with mysql(as_user(mysql_url, "limited")) as store:
            with pytest.raises(StoreError, match=r"administrator .* GRANT SELECT, INSERT, UPDATE"):
                await store.load("run")
        async with mysql(mysql_url) as store:
            await store.save("run", snapshot("a"))
        # Once the tables exist, the permissions to read and write are enough.
        query(mysql_url, f"GRANT INSERT, UPDATE, DELETE ON {database}.* TO limited")
        async with mysql(as_user(mysql_url, "limited")) as store:
            (grant,) = await acquire(store, "run")
            assert await store.append([entry(grant, 1, "b")]) == [Verdict.ACCEPTED]
    finally:
        query(mysql_url, "DROP USER limited")


async def test_a_refused_login_and_a_missing_database_are_reported(mysql_url: str) -> None:
    """The errors say what to check, and what to run."""
    async with mysql(as_user(mysql_url, "nobody:x")) as store:
        with pytest.raises(StoreError, match="user and password in the URL"):
            await store.load("run")
    async with mysql(urlsplit(mysql_url)._replace(path="/nowhere").geturl()) as store:
        with pytest.raises(StoreError, match="CREATE DATABASE"):
            await store.load("run")


async def test_a_pool_that_was_passed_in_stays_open(mysql_url: str) -> None:
    """The store closes only what it opened."""
    pool = await asyncmy.create_pool(minsize=1, maxsize=2, **connect_arguments(mysql_url))
    async with pool:
        async with mysql(pool=pool) as store:
            await asyncio.gather(*(acquire(store, f"run {number}") for number in range(10)))
        async with pool.acquire() as connection:
            await connection.ping(reconnect=False)
        assert pool.size <= 2


async def test_the_number_of_connections_is_limited(mysql_url: str) -> None:
    """At most `max_connections` are open, however many calls run concurrently."""
    async with mysql(mysql_url, max_connections=3) as store:
        await asyncio.gather(*(store.load(f"run {number}") for number in range(50)))
        assert len(store_connections(mysql_url)) == 3


class TestLargeValues:
    """`max_allowed_packet` limits what the server accepts at once."""

    async def test_a_value_too_large_for_the_server_is_refused(self, mysql_url: str) -> None:
        """The error names the step, and nothing is sent."""
        async with mysql(mysql_url, max_value_size=64 * MEBIBYTE) as store:
            (grant,) = await acquire(store, "run")
            big = Entry("run", grant.lease.epoch, 1, delta(big="x" * 17 * MEBIBYTE), step="big")
            with pytest.raises(ValueTooLarge, match="'big'"):
                await store.append([big])
            with pytest.raises(ValueTooLarge):
                await store.save("run", snapshot(big="x" * 17 * MEBIBYTE))
            # Below the limit, but above it once its quotes are escaped.
            with pytest.raises(ValueTooLarge, match="max_allowed_packet"):
                await store.save("run", snapshot(big="'" * 9 * MEBIBYTE))
            assert await steps(store) == []

    async def test_a_batch_larger_than_a_packet_is_one_transaction(self, mysql_url: str) -> None:
        """It is sent in several packets."""
        async with mysql(mysql_url) as store:
            grants = await acquire(store, "a", "b", "c")
            part = "x" * 7 * MEBIBYTE
            batch = [
                Entry(grant.lease.id, grant.lease.epoch, 1, delta(big=part)) for grant in grants
            ]
            assert await store.append(batch) == [Verdict.ACCEPTED] * 3
            assert await steps(store, "c") == ["big"]
            runs = [NewRun(f"new {n}", "order", as_json(snapshot(big=part))) for n in range(3)]
            assert await store.enqueue(runs) == [True] * 3
            requests = [
                LeaseRequest(f"w {n}", "ana", LONG, create=runs[0].snapshot) for n in range(3)
            ]
            assert all(await store.acquire(requests))

    async def test_a_limit_lowered_after_set_up_is_reported(self, mysql_url: str) -> None:
        """The server then closes the connection; the next call uses another one."""
        [(before,)] = query(mysql_url, "SELECT @@global.max_allowed_packet")
        try:
            async with mysql(mysql_url) as store, mysql(mysql_url) as other:
                await acquire(store, "run")
                query(mysql_url, f"SET GLOBAL max_allowed_packet = {MEBIBYTE}")
                await other.load("run")
                other._backend._database.max_packet_size = before
                with pytest.raises((ValueTooLarge, StoreUnavailable)):
                    await other.save("run", snapshot(big="x" * 2 * MEBIBYTE))
                assert await steps(other) == []
        finally:
            query(mysql_url, f"SET GLOBAL max_allowed_packet = {before}")


async def test_an_unreadable_run_does_not_affect_others(
    mysql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A claim skips and logs it; loading it raises."""
    async with mysql(mysql_url) as store:
        await store.enqueue([NewRun(id, "order", as_json(snapshot("a"))) for id in ("bad", "good")])
        query(mysql_url, "UPDATE perdure_runs SET snapshot = '{' WHERE id = 'bad'")
        with pytest.raises(StoreCorrupted, match="'bad'"):
            await store.load("bad")
        grants = await store.claim("ana", LONG, 10)
        assert [grant.lease.id for grant in grants] == ["good"]
        assert "cannot be read" in caplog.text


async def test_a_server_that_does_not_flush_causes_a_warning(
    mysql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its commits are not as durable as the store declares."""
    query(mysql_url, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        with caplog.at_level(logging.WARNING):
            async with mysql(mysql_url) as store:
                await store.load("run")
        assert "innodb_flush_log_at_trx_commit=2" in caplog.text
    finally:
        query(mysql_url, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")
