"""The PostgreSQL store with crashed servers, lost connections and missing permissions."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from perdure.errors import MissingDependency, StoreClosed, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import postgres
from perdure.stores.postgres import PostgresStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.process import Server, free_port
from tests.servers.proxy import TcpProxy

LONG = timedelta(minutes=5)


async def acquire(store: PostgresStore, *ids: str) -> list[Grant]:
    requests = [
        LeaseRequest(id, "ana", LONG, create=as_json(snapshot()), workflow="order") for id in ids
    ]
    return [grant for grant in await store.acquire(requests) if grant is not None]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


async def steps(store: PostgresStore, id: str = "run") -> list[str]:
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


async def test_acknowledged_entries_survive_kill_9(
    postgres_server: Server, postgres_url: str
) -> None:
    """The server is killed during 200 concurrent appends.

    Every acknowledged entry exists, the store reconnects by itself, and callers get success or a
    clear error.
    """
    async with postgres(postgres_url, connect_timeout=30) as store:
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
        await asyncio.to_thread(postgres_server.kill)
        await asyncio.to_thread(postgres_server.restart)
        await working
        for id, keys in acknowledged.items():
            assert set(keys) <= set(await steps(store, id))
        assert sum(map(len, acknowledged.values())) > 2_000


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

    async def test_an_entry_is_neither_duplicated_nor_lost(
        self, store: PostgresStore, proxy: TcpProxy
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
            # Prepared first, so that the dropped reply is to the values and not to the statement.
            await store.append([Entry("missing", 1, 1, b"{}")])
            proxy.drop_next_reply(to=batch[-1].data)
            assert set(await store.append(batch)) == {Verdict.ACCEPTED}
            assert proxy.dropped == number
        assert await steps(store) == ["c"]

    async def test_an_event_is_not_sent_twice(self, store: PostgresStore, proxy: TcpProxy) -> None:
        """Without a dedup id the store raises, because it cannot know; with one it sends again."""
        await acquire(store, "run")
        await store.send("run", "warm", b"1")
        proxy.drop_next_reply(to=b"payload 1")
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            await store.send("run", "paid", b"payload 1")
        proxy.drop_next_reply(to=b"payload 2")
        await store.send("run", "paid", b"payload 2", dedup_id="x")
        names = [message.payload for message in await store.inbox("run")]
        assert names == [b"1", b"payload 1", b"payload 2"]

    async def test_a_lost_grant_is_requested_again(
        self, store: PostgresStore, proxy: TcpProxy
    ) -> None:
        """A lease that the same owner holds is granted again."""
        await acquire(store, "other")
        proxy.drop_next_reply(to=b"run")
        (grant,) = await acquire(store, "run")
        assert await store.append([entry(grant, 1, "a")]) == [Verdict.ACCEPTED]

    async def test_the_store_works_again_once_the_server_is_reachable(
        self, store: PostgresStore, proxy: TcpProxy
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


async def test_a_cancelled_call_does_not_affect_others(postgres_url: str) -> None:
    """A connection whose statement was cancelled is not used again, and not leaked."""
    async with postgres(postgres_url, max_connections=1) as store:
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
    async with postgres(
        f"postgresql://ana:secret@127.0.0.1:{port}/db", connect_timeout=0.2
    ) as store:
        with pytest.raises(StoreUnavailable) as caught:
            await store.load("run")
    text = str(caught.value)
    assert f"PostgreSQL at 127.0.0.1:{port}/db is unavailable: " in text
    assert "(tried for 0." in text
    assert "secret" not in text
    assert caught.value.__cause__ is not None


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


async def test_a_closed_store_raises(postgres_url: str) -> None:
    """Its connections are closed, which the fixture checks."""
    store = postgres(postgres_url)
    await store.load("run")
    await store.close()
    with pytest.raises(StoreClosed):
        await store.append([])
    await store.close()


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


async def test_local_clocks_do_not_matter(postgres_url: str) -> None:
    """Two processes whose clocks are an hour apart share leases correctly."""
    early, late = TestClock(), TestClock()
    await late.advance(timedelta(hours=1))
    async with (
        postgres(postgres_url, clock=early) as one,
        postgres(postgres_url, clock=late) as two,
    ):
        (grant,) = await acquire(one, "run")
        assert list(await two.acquire([LeaseRequest("run", "bob", LONG)])) == [None]
        assert await two.claim("bob", LONG, 10) == []
        await one.renew([grant.lease], timedelta(milliseconds=50))
        await asyncio.sleep(0.1)
        (claimed,) = await two.claim("bob", LONG, 10)
        assert claimed.lease.epoch > grant.lease.epoch
        assert abs(claimed.now - grant.now) < timedelta(minutes=1)


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


# Connections of a loop that has ended are left to the garbage collector, which emits a warning.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_store_moves_to_the_next_event_loop(postgres_url: str) -> None:
    """After its loop has ended, as with one `asyncio.run` after another."""
    store = postgres(postgres_url)

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
def test_a_store_can_be_closed_after_its_event_loop(postgres_url: str) -> None:
    """Its connections ended with the loop, and cannot be closed."""
    store = postgres(postgres_url)
    asyncio.run(store.save("run", snapshot("a")))
    asyncio.run(store.close())
    with pytest.raises(StoreClosed):
        asyncio.run(store.load("run"))
    gc.collect()


async def test_a_store_in_use_by_another_loop_is_refused(postgres_url: str) -> None:
    """Its connections cannot be awaited in this one."""
    async with postgres(postgres_url) as store:
        await store.load("run")
        with pytest.raises(StoreError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(store.load("run")))
