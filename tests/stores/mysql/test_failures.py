"""What the MySQL store does when the server dies, the line is cut, or rights are missing."""

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


async def granted(store: MysqlStore, *ids: str) -> list[Grant]:
    wants = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), workflow="order") for id in ids
    ]
    return [grant for grant in await store.acquire(wants) if grant is not None]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


async def steps(store: MysqlStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


async def test_what_was_acknowledged_survives_kill_9(mysql_server: Server, mysql_url: str) -> None:
    """The server is killed among 200 running appends: every acknowledged entry is there, the store
    reconnects by itself, and callers get success or a clear error."""
    async with mysql(mysql_url, connect_timeout=30) as store:
        grants = await granted(store, *(f"run {number}" for number in range(200)))
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


class TestACutLine:
    """Between commit and answer."""

    @pytest.fixture
    async def proxy(self, mysql_url: str) -> AsyncIterator[TcpProxy]:
        async with TcpProxy.before(mysql_url) as proxy:
            yield proxy

    @pytest.fixture
    async def store(self, proxy: TcpProxy) -> AsyncIterator[MysqlStore]:
        async with mysql(proxy.url, connect_timeout=1) as store:
            yield store

    async def test_an_entry_is_neither_doubled_nor_lost(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """An entry, a batch, a rest: sent again by the store, and accepted."""
        one, two = await granted(store, "run", "two")
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

    async def test_an_end_whose_answer_is_lost_is_an_end(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Sent again it finds no run, which says that it is gone."""
        (grant,) = await granted(store, "run")
        delete = Entry("run", grant.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
        proxy.drop_next_reply(to=b"DELETE")
        assert await store.append([delete]) == [Verdict.UNKNOWN]
        assert await store.load("run") is None

    async def test_an_event_is_not_sent_twice(self, store: MysqlStore, proxy: TcpProxy) -> None:
        """Without a dedup_id the store cannot know, and says so; with one it sends it again."""
        await granted(store, "run")
        proxy.drop_next_reply(to=b"payload 1")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.send("run", "paid", b"payload 1")
        proxy.drop_next_reply(to=b"payload 2")
        await store.send("run", "paid", b"payload 2", dedup_id="x")
        payloads = [message.payload for message in await store.inbox("run")]
        assert payloads == [b"payload 1", b"payload 2"]

    async def test_a_question_before_the_commit_is_asked_again(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """What cannot have been committed is done again, whatever it is."""
        await granted(store, "run")
        proxy.drop_next_reply(to=b"FOR UPDATE")
        await store.send("run", "paid", b"1")
        assert proxy.dropped == 1
        assert len(await store.inbox("run")) == 1

    async def test_a_grant_that_was_lost_is_asked_for_again(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """A lease that the same owner holds already is given again."""
        await granted(store, "other")
        proxy.drop_next_reply(to=b"'run'")
        (grant,) = await granted(store, "run")
        assert await store.append([entry(grant, 1, "a")]) == [Verdict.ACCEPTED]

    async def test_what_must_be_new_is_not_asked_for_twice(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Asked again it would not be new: the caller is told that nobody knows."""
        await granted(store, "other")
        want = LeaseRequest("run", "ana", LONG, create=as_json(snapshot()), existing=False)
        proxy.drop_next_reply(to=b"'run'")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.acquire([want])
        proxy.drop_next_reply(to=b"'queued'")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.enqueue([NewRun("queued", "order", as_json(snapshot()))])
        assert len(await store.list()) == 3

    async def test_a_connection_that_was_closed_meanwhile_is_replaced(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Also for what cannot be done twice: nothing was sent yet."""
        await granted(store, "run")
        proxy.cut()
        await asyncio.sleep(0.05)
        await store.send("run", "paid", b"1")
        assert len(await store.inbox("run")) == 1

    async def test_a_line_that_comes_back_is_used_again(
        self, store: MysqlStore, proxy: TcpProxy
    ) -> None:
        """Nothing needs to be restarted."""
        await granted(store, "run")
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
        """The user's writes cannot be done twice: the caller is told, and can look."""
        (grant,) = await granted(store, "run")

        async def work(_: object) -> Entry:
            proxy.drop_next_reply(to=b"COMMIT")
            return entry(grant, 1, "a")

        with pytest.raises(StoreUnavailable):
            await store.transact("run", grant.lease.epoch, work)
        assert await steps(store) == ["a"]


async def test_an_idle_connection_is_asked_whether_it_lives(mysql_url: str) -> None:
    """One that something on the way has cut without a word does not cost a call."""
    clock = TestClock()
    async with mysql(mysql_url, clock=clock) as store:
        await granted(store, "run")
        query(mysql_url, f"KILL {perdures(mysql_url)[0][0]}")
        await clock.advance(timedelta(minutes=5))
        await store.send("run", "paid", b"1")
        assert len(perdures(mysql_url)) == 1


def perdures(url: str) -> Any:
    return query(
        url,
        "SELECT id FROM information_schema.processlist "
        "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
    )


async def test_a_silent_server_is_not_waited_for_for_ever(mysql_url: str) -> None:
    """An answer may take as long as `timeout` says."""
    async with mysql(mysql_url, timeout=0.3) as store:
        (grant,) = await granted(store, "run")

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


async def test_a_cancelled_call_harms_no_other(mysql_url: str) -> None:
    """A connection whose statement was cancelled is not used again, and not leaked."""
    async with mysql(mysql_url, max_connections=1) as store:
        (grant,) = await granted(store, "run")
        cancelled = 0
        for n in range(20):
            task = asyncio.ensure_future(store.append([entry(grant, n, f"{n}")]))
            await asyncio.sleep(0.0001 * n)
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
        assert cancelled
        assert await store.append([entry(grant, 20, "last")]) == [Verdict.ACCEPTED]


async def test_a_server_that_is_away_is_named() -> None:
    """What, where, and how long it was tried; no password."""
    port = free_port()
    async with mysql(f"mysql://ana:secret@127.0.0.1:{port}/db", connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable) as caught:
            await store.load("run")
    text = str(caught.value)
    assert f"MySQL at 127.0.0.1:{port}/db is unavailable: " in text
    assert "(tried for 0." in text
    assert "secret" not in text
    assert caught.value.__cause__ is not None


async def test_a_server_that_says_nothing_is_away() -> None:
    """It takes the connection and stays silent."""

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, mysql(f"mysql://ana@127.0.0.1:{port}/db", connect_timeout=0.2) as store:
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.load("run")


async def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message holds the command that installs it."""
    monkeypatch.setitem(sys.modules, "asyncmy", None)
    with pytest.raises(MissingDependency, match=r"pip install 'perdure\[mysql\]'"):
        mysql("mysql://localhost/db")


async def test_missing_rights_say_what_to_run(mysql_url: str) -> None:
    """Which statement an administrator should run."""
    database = urlsplit(mysql_url).path[1:]
    query(mysql_url, "DROP USER IF EXISTS stranger")
    query(mysql_url, "CREATE USER stranger")
    query(mysql_url, f"GRANT SELECT ON {database}.* TO stranger")
    try:
        async with mysql(as_user(mysql_url, "stranger")) as store:
            with pytest.raises(StoreError, match=r"administrator .* GRANT SELECT, INSERT, UPDATE"):
                await store.load("run")
        async with mysql(mysql_url) as store:
            await store.save("run", snapshot("a"))
        # With the tables there, the rights to read and write are enough.
        query(mysql_url, f"GRANT INSERT, UPDATE, DELETE ON {database}.* TO stranger")
        async with mysql(as_user(mysql_url, "stranger")) as store:
            (grant,) = await granted(store, "run")
            assert await store.append([entry(grant, 1, "b")]) == [Verdict.ACCEPTED]
    finally:
        query(mysql_url, "DROP USER stranger")


async def test_a_stranger_and_a_missing_database_are_named(mysql_url: str) -> None:
    """What to look at, and what to run."""
    async with mysql(as_user(mysql_url, "nobody:x")) as store:
        with pytest.raises(StoreError, match="user and password in the URL"):
            await store.load("run")
    async with mysql(urlsplit(mysql_url)._replace(path="/nowhere").geturl()) as store:
        with pytest.raises(StoreError, match="CREATE DATABASE"):
            await store.load("run")


async def test_a_closed_store_says_so(mysql_url: str) -> None:
    """And its connections are closed, which the fixture checks."""
    store = mysql(mysql_url)
    await store.load("run")
    await store.close()
    with pytest.raises(StoreClosed):
        await store.append([])
    await store.close()


async def test_a_pool_that_was_passed_in_stays_open(mysql_url: str) -> None:
    """Whoever opens, closes."""
    pool = await asyncmy.create_pool(minsize=1, maxsize=2, **connect_arguments(mysql_url))
    async with pool:
        async with mysql(pool=pool) as store:
            await asyncio.gather(*(granted(store, f"run {number}") for number in range(10)))
        async with pool.acquire() as connection:
            await connection.ping(reconnect=False)
        assert pool.size <= 2


async def test_connections_keep_to_their_limit(mysql_url: str) -> None:
    """At most `max_connections`, however many calls are under way."""
    async with mysql(mysql_url, max_connections=3) as store:
        await asyncio.gather(*(store.load(f"run {number}") for number in range(50)))
        assert len(perdures(mysql_url)) == 3


async def test_local_clocks_do_not_matter(mysql_url: str) -> None:
    """Two processes whose clocks are an hour apart share leases correctly."""
    early, late = TestClock(), TestClock()
    await late.advance(timedelta(hours=1))
    async with mysql(mysql_url, clock=early) as one, mysql(mysql_url, clock=late) as two:
        (grant,) = await granted(one, "run")
        assert list(await two.acquire([LeaseRequest("run", "bob", LONG)])) == [None]
        assert await two.claim("bob", LONG, 10) == []
        await one.renew([grant.lease], timedelta(milliseconds=50))
        await asyncio.sleep(0.1)
        (taken,) = await two.claim("bob", LONG, 10)
        assert taken.lease.epoch > grant.lease.epoch
        assert abs(taken.now - grant.now) < timedelta(minutes=1)


class TestLargeValues:
    """max_allowed_packet is what a server takes at once."""

    async def test_a_value_that_the_server_does_not_take_is_refused(self, mysql_url: str) -> None:
        """With the step's name, before anything is sent."""
        async with mysql(mysql_url, max_value_size=64 * MEBIBYTE) as store:
            (grant,) = await granted(store, "run")
            big = Entry("run", grant.lease.epoch, 1, delta(big="x" * 17 * MEBIBYTE), step="big")
            with pytest.raises(ValueTooLarge, match="'big'"):
                await store.append([big])
            with pytest.raises(ValueTooLarge):
                await store.save("run", snapshot(big="x" * 17 * MEBIBYTE))
            # Under the limit as it is, over it once its quotes are escaped.
            with pytest.raises(ValueTooLarge, match="max_allowed_packet"):
                await store.save("run", snapshot(big="'" * 9 * MEBIBYTE))
            assert await steps(store) == []

    async def test_a_batch_that_the_server_does_not_take_at_once_is_one_transaction(
        self, mysql_url: str
    ) -> None:
        """It goes in several packets."""
        async with mysql(mysql_url) as store:
            grants = await granted(store, "a", "b", "c")
            part = "x" * 7 * MEBIBYTE
            batch = [
                Entry(grant.lease.id, grant.lease.epoch, 1, delta(big=part)) for grant in grants
            ]
            assert await store.append(batch) == [Verdict.ACCEPTED] * 3
            assert await steps(store, "c") == ["big"]
            runs = [NewRun(f"new {n}", "order", as_json(snapshot(big=part))) for n in range(3)]
            assert await store.enqueue(runs) == [True] * 3
            wants = [LeaseRequest(f"w {n}", "ana", LONG, create=runs[0].snapshot) for n in range(3)]
            assert all(await store.acquire(wants))

    async def test_a_limit_that_was_lowered_meanwhile_is_named(self, mysql_url: str) -> None:
        """The server then hangs up; the next call has another connection."""
        [(before,)] = query(mysql_url, "SELECT @@global.max_allowed_packet")
        try:
            async with mysql(mysql_url) as store, mysql(mysql_url) as other:
                await granted(store, "run")
                query(mysql_url, f"SET GLOBAL max_allowed_packet = {MEBIBYTE}")
                await other.load("run")
                other._backend._database.max_packet_size = before
                with pytest.raises((ValueTooLarge, StoreUnavailable)):
                    await other.save("run", snapshot(big="x" * 2 * MEBIBYTE))
                assert await steps(other) == []
        finally:
            query(mysql_url, f"SET GLOBAL max_allowed_packet = {before}")


async def test_a_run_that_cannot_be_read_harms_itself_alone(
    mysql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A claim leaves it out and says so; whoever asks for it by name is told."""
    async with mysql(mysql_url) as store:
        await store.enqueue([NewRun(id, "order", as_json(snapshot("a"))) for id in ("bad", "good")])
        query(mysql_url, "UPDATE perdure_runs SET snapshot = '{' WHERE id = 'bad'")
        with pytest.raises(StoreCorrupted, match="'bad'"):
            await store.load("bad")
        grants = await store.claim("ana", LONG, 10)
        assert [grant.lease.id for grant in grants] == ["good"]
        assert "cannot be read" in caplog.text


async def test_a_server_that_does_not_flush_is_warned_of(
    mysql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer is then not as durable as the store declares."""
    query(mysql_url, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        with caplog.at_level(logging.WARNING):
            async with mysql(mysql_url) as store:
                await store.load("run")
        assert "innodb_flush_log_at_trx_commit=2" in caplog.text
    finally:
        query(mysql_url, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")


# The connections of a loop that has ended can only be left to the collector, which complains.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_store_moves_to_the_next_event_loop(mysql_url: str) -> None:
    """After its loop has ended, as with one `asyncio.run` after another."""
    store = mysql(mysql_url)

    async def use(id: str) -> None:
        await store.save(id, snapshot("a"))

    async def last() -> list[str]:
        found = await steps(store, "1")
        await store.close()
        return found

    asyncio.run(use("1"))
    asyncio.run(use("2"))
    assert asyncio.run(last()) == ["a"]
    gc.collect()


async def test_a_store_of_another_living_loop_is_refused(mysql_url: str) -> None:
    """Its connections cannot be waited for here."""
    async with mysql(mysql_url) as store:
        await store.load("run")
        with pytest.raises(StoreError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(store.load("run")))
