"""The MySQL store with crashed servers, lost connections and missing permissions."""

import asyncio
import gc
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
    StoreClosed,
    StoreCorrupted,
    StoreError,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import connect_arguments
from tests.servers.process import Server, free_port
from tests.servers.proxy import TcpProxy
from tests.stores.mysql.kit import query

LONG = timedelta(minutes=5)
MEBIBYTE = 1024 * 1024


async def acquire(store: MysqlStore, *ids: str) -> list[Grant]:
    requests = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), workflow="order") for id in ids
    ]
    return [grant for grant in await store.acquire(requests) if grant is not None]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


async def steps(store: MysqlStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


async def test_acknowledged_entries_survive_kill_9(mysql_server: Server, mysql_url: str) -> None:
    """The server is killed during 200 concurrent appends.

    Every acknowledged entry exists, the store reconnects by itself, and callers get success or a
    clear error.
    """
    async with mysql(mysql_url, connect_timeout=30) as store:
        grants = await acquire(store, *(f"run {number}" for number in range(200)))
        acknowledged: dict[str, list[str]] = {grant.lease.id: [] for grant in grants}

        async def work(grant: Grant) -> None:
            for n in range(12):
                try:
                    [verdict] = await store.append([entry(grant, n, f"{n}")])
                except StoreUnavailable:
                    continue
                assert verdict is Verdict.ACCEPTED
                acknowledged[grant.lease.id].append(f"{n}")

        working = asyncio.gather(*(work(grant) for grant in grants))
        while sum(map(len, acknowledged.values())) < 400:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(mysql_server.kill)
        await asyncio.to_thread(mysql_server.restart)
        await working
        for id, keys in acknowledged.items():
            assert set(keys) <= set(await steps(store, id))
        assert sum(map(len, acknowledged.values())) > 2_000


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

    async def test_an_entry_is_neither_duplicated_nor_lost(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """An entry, a batch and a rest are sent again by the store, and accepted."""
        one, two = await acquire(store, "run", "two")
        batches = [
            [entry(one, 1, "a")],
            [entry(one, 2, "b"), entry(two, 1, "a")],
            [Entry("run", one.lease.epoch, 3, as_json(snapshot("c")), rest=Rest("suspended"))],
            [entry(two, 2, "b"), Entry("two", two.lease.epoch, 3, b"{}", rest=Rest("failed"))],
        ]
        for number, batch in enumerate(batches, 1):
            proxy.drop_next_reply(to=batch[-1].data)
            assert set(await store.append(batch)) == {Verdict.ACCEPTED}
            assert proxy.dropped == number
        assert await steps(store) == ["c"]

    async def test_a_deletion_whose_reply_is_lost_is_done(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Sent again, it finds no run: the verdict is UNKNOWN."""
        (grant,) = await acquire(store, "run")
        delete = Entry("run", grant.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
        proxy.drop_next_reply(to=b"DELETE")
        assert await store.append([delete]) == [Verdict.UNKNOWN]
        assert await store.load("run") is None

    async def test_an_event_is_not_sent_twice(self, store: MysqlStore, proxy: TcpProxy) -> None:
        """Without a dedup id the store raises, because it cannot know; with one it sends again."""
        await acquire(store, "run")
        proxy.drop_next_reply(to=b"payload 1")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.send("run", "paid", b"payload 1")
        proxy.drop_next_reply(to=b"payload 2")
        await store.send("run", "paid", b"payload 2", dedup_id="x")
        payloads = [message.payload for message in await store.inbox("run")]
        assert payloads == [b"payload 1", b"payload 2"]

    async def test_a_request_before_the_commit_is_sent_again(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """A transaction that cannot have been committed is always run again."""
        await acquire(store, "run")
        proxy.drop_next_reply(to=b"FOR UPDATE")
        await store.send("run", "paid", b"1")
        assert proxy.dropped == 1
        assert len(await store.inbox("run")) == 1

    async def test_a_lost_grant_is_requested_again(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """A lease that the same owner holds is granted again."""
        await acquire(store, "other")
        proxy.drop_next_reply(to=b"'run'")
        (grant,) = await acquire(store, "run")
        assert await store.append([entry(grant, 1, "a")]) == [Verdict.ACCEPTED]

    async def test_a_request_for_a_new_run_is_not_repeated(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Sent again, it would find the run that it created itself: the caller gets an error."""
        await acquire(store, "other")
        request = LeaseRequest("run", "ana", LONG, create=as_json(snapshot()), existing=False)
        proxy.drop_next_reply(to=b"'run'")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.acquire([request])
        proxy.drop_next_reply(to=b"'queued'")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.enqueue([NewRun("queued", "order", as_json(snapshot()))])
        assert len(await store.list()) == 3

    async def test_a_connection_closed_while_idle_is_replaced(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Even for a request that is not repeatable, because nothing was sent yet."""
        await acquire(store, "run")
        proxy.cut()
        await asyncio.sleep(0.05)
        await store.send("run", "paid", b"1")
        assert len(await store.inbox("run")) == 1

    async def test_the_store_works_again_once_the_server_is_reachable(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """No restart is needed."""
        await acquire(store, "run")
        proxy.refuse()
        with pytest.raises(
            StoreUnavailable, match=r"127\.0\.0\.1:\d+/\w+ is unavailable: .* \(tried for"
        ):
            await store.load("run")
        proxy.accept()
        assert await steps(store) == []

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


async def test_a_long_idle_connection_is_pinged(mysql_url: str) -> None:
    """A connection that was silently dropped does not make a call fail."""
    clock = TestClock()
    async with mysql(mysql_url, clock=clock) as store:
        await acquire(store, "run")
        query(mysql_url, f"KILL {store_connections(mysql_url)[0][0]}")
        await clock.advance(timedelta(minutes=5))
        await store.send("run", "paid", b"1")
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


async def test_a_cancelled_call_does_not_affect_others(mysql_url: str) -> None:
    """A connection whose statement was cancelled is not used again, and not leaked."""
    async with mysql(mysql_url, max_connections=1) as store:
        (grant,) = await acquire(store, "run")
        cancelled = 0
        for n in range(20):
            task = asyncio.ensure_future(store.append([entry(grant, n, f"{n}")]))
            await asyncio.sleep(0.0001 * n)
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
        assert cancelled
        assert await store.append([entry(grant, 20, "last")]) == [Verdict.ACCEPTED]


async def test_an_unavailable_server_is_named() -> None:
    """The error says what, where, and how long it was tried, without the password."""
    port = free_port()
    async with mysql(f"mysql://ana:secret@127.0.0.1:{port}/db", connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable) as caught:
            await store.load("run")
    text = str(caught.value)
    assert f"MySQL at 127.0.0.1:{port}/db is unavailable: " in text
    assert "(tried for 0." in text
    assert "secret" not in text
    assert caught.value.__cause__ is not None


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


async def test_a_closed_store_raises(mysql_url: str) -> None:
    """Its connections are closed, which the fixture checks."""
    store = mysql(mysql_url)
    await store.load("run")
    await store.close()
    with pytest.raises(StoreClosed):
        await store.append([])
    await store.close()


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


async def test_local_clocks_do_not_matter(mysql_url: str) -> None:
    """Two processes whose clocks are an hour apart share leases correctly."""
    early, late = TestClock(), TestClock()
    await late.advance(timedelta(hours=1))
    async with mysql(mysql_url, clock=early) as one, mysql(mysql_url, clock=late) as two:
        (grant,) = await acquire(one, "run")
        assert list(await two.acquire([LeaseRequest("run", "bob", LONG)])) == [None]
        assert await two.claim("bob", LONG, 10) == []
        await one.renew([grant.lease], timedelta(milliseconds=50))
        await asyncio.sleep(0.1)
        (claimed,) = await two.claim("bob", LONG, 10)
        assert claimed.lease.epoch > grant.lease.epoch
        assert abs(claimed.now - grant.now) < timedelta(minutes=1)


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


# Connections of a loop that has ended are left to the garbage collector, which emits a warning.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_store_moves_to_the_next_event_loop(mysql_url: str) -> None:
    """After its loop has ended, as with one `asyncio.run` after another."""
    store = mysql(mysql_url)

    async def use(id: str) -> None:
        await store.save(id, snapshot("a"))

    async def last() -> list[str]:
        keys = await steps(store, "1")
        await store.close()
        return keys

    asyncio.run(use("1"))
    asyncio.run(use("2"))
    assert asyncio.run(last()) == ["a"]
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_store_can_be_closed_after_its_event_loop(mysql_url: str) -> None:
    """Its connections ended with the loop, and cannot be closed."""
    store = mysql(mysql_url)
    asyncio.run(store.save("run", snapshot("a")))
    asyncio.run(store.close())
    with pytest.raises(StoreClosed):
        asyncio.run(store.load("run"))
    gc.collect()


async def test_a_store_in_use_by_another_loop_is_refused(mysql_url: str) -> None:
    """Its connections cannot be awaited in this one."""
    async with mysql(mysql_url) as store:
        await store.load("run")
        with pytest.raises(StoreError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(store.load("run")))
