"""What every store on a server does when the server dies, the connection is cut or calls are
cancelled.

What only one database can do wrong is tested in its own folder.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from perdure.errors import StoreClosed, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import libsql, mongo, mysql, postgres, redis
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.process import Server, free_port
from tests.servers.proxy import TcpProxy

HOUR = timedelta(hours=1)
RUNS = 200

# A client of PyMongo that is closed while its monitor connects leaves that socket to the garbage
# collector, and so does a store whose event loop has ended.
pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@dataclass(frozen=True)
class Backend:
    """How a store is opened, and how the requests of its writes are recognized on the wire.

    `append` occurs in the request that writes entries, but in no earlier one of the same call.
    """

    server: str
    url: str
    open: Callable[..., Any]
    scheme: str
    append: bytes
    query: str = ""
    fail_fast: dict[str, Any] = field(default_factory=lambda: {"connect_timeout": 0.2})


MONGO_FAILS_FAST = {"client_options": {"serverSelectionTimeoutMS": 50}}
# The driver must not repeat writes itself, nor bypass the proxy.
MONGO_QUERY = "directConnection=true&retryWrites=false"

BACKENDS = {
    "postgres": Backend("postgres_server", "postgres_url", postgres, "postgresql", b"lost"),
    "pgbouncer": Backend("postgres_server", "pgbouncer_url", postgres, "postgresql", b"lost"),
    "mysql": Backend("mysql_server", "mysql_url", mysql, "mysql", b"lost"),
    "redis": Backend("redis_server", "redis_url", redis, "redis", b"EVALSHA"),
    "libsql": Backend("sqld_server", "sqld_url", libsql, "http", b"_journal"),
    "mongo": Backend(
        "mongo_server",
        "mongo_url",
        mongo,
        "mongodb",
        b"\x02insert\x00",
        MONGO_QUERY,
        MONGO_FAILS_FAST,
    ),
    "mongo_standalone": Backend(
        "mongo_standalone",
        "mongo_standalone_url",
        mongo,
        "mongodb",
        b"\x02insert\x00",
        MONGO_QUERY,
        MONGO_FAILS_FAST,
    ),
}


class Place:
    """An empty database of one backend, and a proxy in front of it."""

    def __init__(self, backend: Backend, url: str, options: dict[str, Any]) -> None:
        self.backend = backend
        self.url = url
        self.options = options
        self.proxy = TcpProxy.before(url)

    def open(self, **options: Any) -> Any:
        return self.backend.open(self.url, **self._options(options))

    def open_through_proxy(self, **options: Any) -> Any:
        url = self.proxy.url
        if self.backend.query:
            url = urlsplit(url)._replace(query=self.backend.query).geturl()
        return self.backend.open(url, **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        if self.backend is BACKENDS["pgbouncer"]:
            options |= {"prepared_statements": False}
        return {**self.options, **options}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture
def server(backend: Backend, request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(backend.server)
    return server


@pytest.fixture
def place(backend: Backend, request: pytest.FixtureRequest) -> Place:
    options = {}
    if backend.open is redis:
        options["namespace"] = request.getfixturevalue("redis_prefix")
    return Place(backend, request.getfixturevalue(backend.url), options)


@pytest.fixture
async def proxy(place: Place) -> AsyncIterator[TcpProxy]:
    async with place.proxy as proxy:
        yield proxy


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Any]:
    async with place.open() as store:
        yield store


@pytest.fixture
async def proxied(place: Place, proxy: TcpProxy) -> AsyncIterator[Any]:
    """Return a store behind the proxy that has been set up."""
    async with place.open_through_proxy() as store:
        await store.load("run")
        yield store


async def acquire(store: Any, *ids: str) -> list[Grant]:
    requests = [
        LeaseRequest(id, "ana", HOUR, create=as_json(snapshot()), workflow="order") for id in ids
    ]
    return [grant for grant in await store.acquire(requests) if grant is not None]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


async def steps(store: Any, id: str = "run") -> list[str]:
    snapshot = await store.load(id)
    assert snapshot is not None
    return list(snapshot["steps"])


async def test_acknowledged_entries_survive_kill_9_of_the_server(
    server: Server, store: Any
) -> None:
    """The server is killed while 200 runs append. Callers get success or `StoreUnavailable`, and
    the store reconnects by itself.
    """
    grants = await acquire(store, *(f"run {n}" for n in range(RUNS)))
    done = asyncio.Event()
    working = [asyncio.create_task(append_until(done, store, grant)) for grant in grants]
    await asyncio.sleep(1)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.ensure)
    await asyncio.sleep(1)
    done.set()
    counts = await asyncio.gather(*working)
    assert sum(counts) > RUNS
    for grant, count in zip(grants, counts, strict=True):
        assert await steps(store, grant.lease.id) == [f"{n}" for n in range(count)]


async def append_until(done: asyncio.Event, store: Any, grant: Grant) -> int:
    """Append one entry after another, as the committer does; return how many were accepted."""
    n, in_doubt = 0, False
    # An entry whose reply was lost is sent again, or it could be stored without being counted.
    while in_doubt or not done.is_set():
        try:
            verdicts = await store.append([entry(grant, n + 1, f"{n}")])
        except StoreUnavailable:
            in_doubt = True
            await asyncio.sleep(0.05)
            continue
        assert verdicts == [Verdict.ACCEPTED]
        n, in_doubt = n + 1, False
    return n


async def test_an_entry_whose_reply_was_lost_is_stored_once(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """The connection is cut after the commit: the store sends the entry again."""
    (grant,) = await acquire(proxied, "run")
    # Statements are prepared and scripts loaded before the reply is dropped.
    await proxied.append([entry(grant, 1, "first")])
    for n in range(2, 6):
        proxy.drop_next_reply(to=place.backend.append)
        assert await proxied.append([entry(grant, n, f"lost {n}")]) == [Verdict.ACCEPTED]
    assert proxy.dropped == 4
    assert await steps(proxied) == ["first", "lost 2", "lost 3", "lost 4", "lost 5"]


async def test_a_batch_whose_reply_was_lost_is_stored_once(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """This holds for a batch of entries and rests of several runs."""
    grants = await acquire(proxied, *(f"{n}" for n in range(10)))
    await proxied.append([entry(grant, 1, "first") for grant in grants])
    whole = as_json(snapshot("end", status="completed"))
    rests = [Entry(g.lease.id, g.lease.epoch, 2, whole, rest=Rest("completed")) for g in grants[:5]]
    entries = [entry(grant, 2, "lost") for grant in grants[5:]]
    proxy.drop_next_reply(to=place.backend.append)
    assert await proxied.append([*rests, *entries]) == [Verdict.ACCEPTED] * 10
    assert proxy.dropped == 1
    assert await steps(proxied, "0") == ["end"]
    assert await steps(proxied, "9") == ["first", "lost"]


async def test_a_lease_whose_reply_was_lost_can_be_requested_again(
    proxied: Any, proxy: TcpProxy
) -> None:
    """The same owner gets it, in the same call or in the next one, and can write."""
    await acquire(proxied, "another")
    proxy.drop_next_reply(to=b"lost-lease")
    try:
        (grant,) = await acquire(proxied, "lost-lease")
    except StoreUnavailable:
        (grant,) = await acquire(proxied, "lost-lease")
    assert proxy.dropped == 1
    assert await proxied.append([entry(grant, 1, "a")]) == [Verdict.ACCEPTED]


async def test_a_message_with_a_dedup_id_whose_reply_was_lost_is_sent_once(
    proxied: Any, proxy: TcpProxy
) -> None:
    await acquire(proxied, "run")
    await proxied.send("run", "first", b"1")
    proxy.drop_next_reply(to=b"lost-event")
    try:
        await proxied.send("run", "lost-event", b"2", dedup_id="x")
    except StoreUnavailable:
        await proxied.send("run", "lost-event", b"2", dedup_id="x")
    assert proxy.dropped == 1
    assert [message.name for message in await proxied.inbox("run")] == ["first", "lost-event"]


async def test_a_message_without_a_dedup_id_is_not_sent_twice(
    proxied: Any, proxy: TcpProxy
) -> None:
    """The store does not repeat it by itself: the caller decides."""
    await acquire(proxied, "run")
    await proxied.send("run", "first", b"1")
    proxy.drop_next_reply(to=b"lost-event")
    with pytest.raises(StoreUnavailable):
        await proxied.send("run", "lost-event", b"2")
    names = [message.name for message in await proxied.inbox("run")]
    assert names.count("lost-event") <= 1


async def test_a_cancelled_append_does_not_affect_others(store: Any) -> None:
    """Entries that were cancelled can be sent again, and each is stored once."""
    (grant,) = await acquire(store, "run")
    cancelled = 0
    for n in range(1, 20):
        task = asyncio.ensure_future(store.append([entry(grant, n, f"{n}")]))
        await asyncio.sleep(0.0001 * n)
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
    assert cancelled
    everything = [entry(grant, n, f"{n}") for n in range(1, 21)]
    assert await store.append(everything) == [Verdict.ACCEPTED] * 20
    assert await steps(store) == [f"{n}" for n in range(1, 21)]


async def test_the_error_of_an_unavailable_server_names_it(backend: Backend) -> None:
    """It contains the address, but not the password, and the driver's error is the cause."""
    port = free_port()
    login = "" if backend.open is libsql else "ana:secret@"
    database = "0" if backend.open is redis else "db"
    url = f"{backend.scheme}://{login}127.0.0.1:{port}/{database}"
    async with backend.open(url, **backend.fail_fast) as store:
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}") as raised:
            await store.load("run")
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is not None


async def test_a_failed_set_up_is_retried(place: Place, proxy: TcpProxy) -> None:
    """A store that was used too early works as soon as the server does."""
    proxy.refuse()
    async with place.open_through_proxy(**place.backend.fail_fast) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.save("run", snapshot("a"))
        proxy.accept()
        await save_when_available(store)
        assert await steps(store) == ["a"]


async def save_when_available(store: Any) -> None:
    """Save a run; a driver may take a moment to notice that the server is available."""
    async with asyncio.timeout(5):
        while True:
            try:
                await store.save("run", snapshot("a"))
            except StoreUnavailable:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_store_reconnects_after_an_outage(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    await acquire(proxied, "run")
    proxy.refuse()
    loading = asyncio.create_task(proxied.load("run"))
    await asyncio.sleep(0.3)
    proxy.accept()
    assert await loading is not None


async def test_concurrent_first_uses_set_the_database_up_once(place: Place) -> None:
    stores = [place.open() for _ in range(10)]
    await asyncio.gather(*(store.save(f"{n}", snapshot("a")) for n, store in enumerate(stores)))
    assert len(await stores[0].list()) == 10
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_closed_store_is_refused(place: Place) -> None:
    """Closing twice is fine."""
    store = place.open()
    await store.load("run")
    await store.close()
    with pytest.raises(StoreClosed):
        await store.load("run")
    await store.close()


async def test_leases_use_the_clock_of_the_server(place: Place) -> None:
    """Two processes whose clocks are an hour apart share leases correctly."""
    ahead = TestClock()
    await ahead.advance(HOUR)
    async with place.open(clock=TestClock()) as one, place.open(clock=ahead) as two:
        (grant,) = await acquire(one, "run")
        assert list(await two.acquire([LeaseRequest("run", "bob", HOUR)])) == [None]
        assert list(await two.claim("bob", HOUR, 10)) == []
        await one.renew([grant.lease], timedelta(milliseconds=50))
        await asyncio.sleep(0.2)
        (taken_over,) = await two.claim("bob", HOUR, 10)
        assert taken_over.lease.epoch > grant.lease.epoch
        assert abs(taken_over.now - grant.now) < timedelta(minutes=1)


async def test_a_new_run_whose_reply_was_lost_is_created_once(
    proxied: Any, proxy: TcpProxy
) -> None:
    await proxied.enqueue([NewRun("first", "order", as_json(snapshot()))])
    proxy.drop_next_reply(to=b"lost-run")
    try:
        await proxied.enqueue([NewRun("lost-run", "order", as_json(snapshot()))])
    except StoreUnavailable:
        await proxied.enqueue([NewRun("lost-run", "order", as_json(snapshot()))])
    assert proxy.dropped == 1
    assert len(await proxied.claim("bob", HOUR, 10)) == 2


def test_a_store_can_be_used_in_one_event_loop_after_another(place: Place) -> None:
    """As with several calls of `asyncio.run` in one program."""
    store = place.open()

    async def last() -> list[str]:
        keys = await steps(store, "1")
        await store.close()
        return keys

    asyncio.run(store.save("1", snapshot("a")))
    asyncio.run(store.save("2", snapshot("b")))
    assert asyncio.run(last()) == ["a"]
    gc.collect()


async def test_a_second_event_loop_at_the_same_time_is_refused(store: Any) -> None:
    """The connections belong to the first one."""
    await store.load("run")
    with pytest.raises(StoreError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(store.load("run")))
