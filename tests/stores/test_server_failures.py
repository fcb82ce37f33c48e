"""What every store on a server does when the server dies, the connection is cut or calls are
cancelled.

What only one database can do wrong is tested in its own folder.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from perdure.clock import SystemClock
from perdure.errors import StoreClosed, StoreError, StoreUnavailable
from perdure.store import Delivery, Entry, Grant, LeaseRequest, NewRun, Refusal, Rest, Verdict
from perdure.stores import mongo, redis
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.process import Server, free_port
from tests.servers.proxy import TcpProxy
from tests.stores.mongo.databases import ignore_driver_leaks
from tests.stores.server_backends import BACKENDS, Backend, Call, Place

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
RUNS = 200
ENTRIES = 12
NEW = as_json(snapshot())

T = TypeVar("T")

pytestmark = pytest.mark.server

# The connections of a loop that has ended are left to the garbage collector, which emits a warning.
ignore_ended_loops = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[ignore_driver_leaks] if backend.open is mongo else [])
        for name, backend in BACKENDS.items()
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture
def server(backend: Backend, request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(backend.server)
    return server


@pytest.fixture
def place(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Place]:
    options = {}
    if backend.open is redis:
        options["namespace"] = request.getfixturevalue("redis_prefix")
    yield Place(backend, request.getfixturevalue(backend.url), options)
    if backend.open is mongo:
        # Report the driver's leaks in the test that caused them, which ignores them.
        gc.collect()


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


async def acquire(store: Any, *ids: str, ttl: timedelta = HOUR) -> list[Grant]:
    requests = [LeaseRequest(id, "ana", ttl, create=NEW, workflow="order") for id in ids]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def entry(grant: Grant, n: int, key: str) -> Entry:
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(key), step=key)


def rest(grant: Grant, n: int, key: str, rest: Rest) -> Entry:
    whole = as_json(snapshot(key, status=rest.status))
    return Entry(grant.lease.id, grant.lease.epoch, n, whole, rest=rest)


async def steps(store: Any, id: str = "run") -> list[str]:
    snapshot = await store.load(id)
    assert snapshot is not None
    return list(snapshot["steps"])


async def test_acknowledged_entries_survive_kill_9_of_the_server(
    place: Place, server: Server
) -> None:
    """The server is killed while 200 runs append. Every accepted entry is stored, the store
    reconnects by itself, and callers do not notice or get `StoreUnavailable`.
    """
    async with place.open(**place.backend.retry_for(30)) as store:
        appenders = [Appender(store, g) for g in await acquire(store, *map(str, range(RUNS)))]
        working = asyncio.gather(*(appender.append() for appender in appenders))
        while sum(appender.accepted for appender in appenders) < 2 * RUNS:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.kill)
        assert not working.done()
        await asyncio.to_thread(server.ensure)
        await working
        for appender in appenders:
            keys = [f"{n}" for n in range(1, ENTRIES + 1)]
            assert await steps(store, appender.grant.lease.id) == keys
    if place.backend.hides_restarts:
        assert sum(appender.errors for appender in appenders) == 0


class Appender:
    """Appends one entry after another to a run, as the committer does."""

    def __init__(self, store: Any, grant: Grant) -> None:
        self.grant = grant
        self.accepted = 0
        self.errors = 0
        self._store = store

    async def append(self) -> None:
        """Append entries until all are accepted; one whose reply was lost is sent again."""
        while self.accepted < ENTRIES:
            n = self.accepted + 1
            try:
                verdicts = await self._store.append([entry(self.grant, n, f"{n}")])
            except StoreUnavailable:
                self.errors += 1
                await asyncio.sleep(0.05)
            else:
                assert verdicts == [Verdict.ACCEPTED]
                self.accepted = n


async def test_an_entry_whose_reply_was_lost_is_stored_once(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """The connection is cut after the commit: the store sends the entry again."""
    (grant,) = await acquire(proxied, "run")
    # Statements are prepared and scripts loaded before the reply is dropped.
    await proxied.append([entry(grant, 1, "first")])
    for n in range(2, 6):
        place.drop_reply("entry", f"lost {n}")
        assert await proxied.append([entry(grant, n, f"lost {n}")]) == [Verdict.ACCEPTED]
    assert proxy.dropped == 4
    assert await steps(proxied) == ["first", "lost 2", "lost 3", "lost 4", "lost 5"]
    if place.backend.count_entries is not None:
        assert place.backend.count_entries(place.url) == 5


async def test_a_batch_whose_reply_was_lost_is_stored_once(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """This holds for entries of several runs, for rests, and for both together."""
    one, two, *many = await acquire(proxied, "one", "two", *(f"{n}" for n in range(20)))
    # Statements are prepared and scripts loaded before the reply is dropped.
    await proxied.append([Entry("missing", 1, 1, b"{}")])
    batches = {
        "entries": [entry(one, 1, "a"), entry(two, 1, "lost entries")],
        "rest": [rest(one, 9, "lost rest", Rest("suspended"))],
        "both": [entry(two, 2, "b"), rest(two, 3, "lost both", Rest("failed"))],
        "many": [
            entry(grant, 1, "lost many") if number % 2 else rest(grant, 1, "end", Rest("completed"))
            for number, grant in enumerate(many)
        ],
    }
    for number, (name, batch) in enumerate(batches.items(), 1):
        place.drop_reply("entry" if name == "entries" else "rest", f"lost {name}")
        assert await proxied.append(batch) == [Verdict.ACCEPTED] * len(batch)
        assert proxy.dropped == number
    assert await steps(proxied, "one") == ["lost rest"]
    assert await steps(proxied, "two") == ["lost both"]
    for number, grant in enumerate(many):
        expected = "lost many" if number % 2 else "end"
        assert await steps(proxied, grant.lease.id) == [expected]


@pytest.mark.parametrize("entries", [0, 1])
async def test_a_deletion_whose_reply_was_lost_is_done(
    place: Place, proxied: Any, proxy: TcpProxy, entries: int
) -> None:
    """A store that repeats it may find no run: the verdict is then UNKNOWN."""
    (grant,) = await acquire(proxied, "lost run")
    await proxied.append([Entry("missing", 1, 1, b"{}")])
    batch = [entry(grant, n, "a") for n in range(entries)]
    place.drop_reply("deletion", "lost run")
    delete = Entry("lost run", grant.lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    verdicts = await proxied.append([*batch, delete])
    assert proxy.dropped == 1
    assert verdicts == [place.backend.deletion] * (entries + 1)
    assert await proxied.load("lost run") is None


async def call_again(backend: Backend, kind: Call, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call whose reply is lost; make it again if the store does not repeat it itself."""
    if kind not in backend.repeats:
        with pytest.raises(StoreUnavailable, match=backend.lost):
            await call()
    return await call()


@pytest.mark.parametrize("kind", ["lease", "new lease"])
async def test_a_lease_whose_reply_was_lost_can_be_requested_again(
    place: Place, proxied: Any, proxy: TcpProxy, kind: Call
) -> None:
    """The same owner gets it, in the same call or in the next one, and can write."""
    await acquire(proxied, "another")
    if kind == "lease":
        await proxied.save("lost lease", snapshot())
    place.drop_reply(kind, "lost lease")
    (grant,) = await call_again(place.backend, kind, lambda: acquire(proxied, "lost lease"))
    assert proxy.dropped == 1
    assert await proxied.append([entry(grant, 1, "a")]) == [Verdict.ACCEPTED]


@pytest.mark.parametrize("count", [1, 3])
async def test_new_runs_whose_reply_was_lost_are_created_once(
    place: Place, proxied: Any, proxy: TcpProxy, count: int
) -> None:
    """With `existing=False` they are granted once, or the caller gets an error."""
    await acquire(proxied, "another")
    requests = [
        LeaseRequest(f"lost {n}", "ana", HOUR, create=NEW, existing=False) for n in range(count)
    ]
    place.drop_reply("new lease", "lost 0")
    if place.backend.creation == "error":
        with pytest.raises(StoreUnavailable, match=place.backend.lost):
            await proxied.acquire(requests)
    else:
        grants = [grant for grant in await proxied.acquire(requests) if isinstance(grant, Grant)]
        assert len(grants) == (count if place.backend.creation == "granted" else 0)
        assert all(grant.created for grant in grants)
        entries = [entry(grant, 1, "a") for grant in grants]
        assert await proxied.append(entries) == [Verdict.ACCEPTED] * len(grants)
    assert proxy.dropped == 1
    assert all(isinstance(answer, Refusal) for answer in await proxied.acquire(requests))
    assert len(await proxied.list()) == count + 1


async def test_an_enqueued_run_whose_reply_was_lost_is_created_once(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """The store does not repeat it: it could not return whether the run is new."""
    await proxied.enqueue([NewRun("first", "order", NEW)])
    place.drop_reply("new run", "lost run")
    with pytest.raises(StoreUnavailable, match=place.backend.lost):
        await proxied.enqueue([NewRun("lost run", "order", NEW)])
    assert proxy.dropped == 1
    assert await proxied.enqueue([NewRun("lost run", "order", NEW)]) == [False]
    assert len(await proxied.claim("bob", HOUR, 10)) == 2


async def claim_orders(store: Any, owner: str) -> Any:
    """Claim by the name of the workflow: stores that would first have to look for it do not."""
    return await store.claim(owner, HOUR, 10, supports=supports("order"))


async def test_runs_whose_claim_was_lost_are_not_claimed_twice(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """They stay leased until the lease expires."""
    await proxied.enqueue([NewRun("first", "order", NEW)])
    assert len(await proxied.claim("bob", HOUR, 10)) == 1
    await proxied.enqueue([NewRun("run", "order", NEW)])
    place.drop_reply("claim", "lost owner")
    claims = await call_again(place.backend, "claim", lambda: claim_orders(proxied, "lost owner"))
    assert proxy.dropped == 1
    assert list(claims) == []
    assert list(await proxied.claim("cem", HOUR, 10)) == []
    assert await proxied.load("run") is not None


async def test_a_message_with_a_dedup_id_whose_reply_was_lost_is_sent_once(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """In the same call or in the next one."""
    await acquire(proxied, "run")
    await send_one(proxied, "run", "first", b"1")
    place.drop_reply("message", "lost event")
    delivery = await call_again(
        place.backend, "message", lambda: send_one(proxied, "run", "lost event", b"2", dedup_id="x")
    )
    assert delivery is Delivery.DUPLICATE
    assert proxy.dropped == 1
    messages = [(message.name, message.payload) for message in await proxied.inbox("run")]
    assert messages == [("first", b"1"), ("lost event", b"2")]


async def test_a_message_without_a_dedup_id_is_not_sent_twice(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """The store does not repeat it by itself: the caller decides."""
    await acquire(proxied, "run")
    await send_one(proxied, "run", "first", b"1")
    place.drop_reply("message", "lost event")
    with pytest.raises(StoreUnavailable, match=place.backend.lost):
        await send_one(proxied, "run", "lost event", b"2")
    assert proxy.dropped == 1
    messages = [(message.name, message.payload) for message in await proxied.inbox("run")]
    assert messages == [("first", b"1"), ("lost event", b"2")]


async def test_a_cancelled_append_does_not_affect_others(place: Place) -> None:
    """A connection whose request was cancelled is neither used again nor leaked. Entries that were
    cancelled can be sent again, also after later ones, and each is stored once.
    """
    async with place.open(**place.backend.one_connection) as store:
        (grant,) = await acquire(store, "run")
        cancelled = [await cancel(store, entry(grant, n, f"{n}"), turns=n) for n in range(1, 13)]
        for n in range(13, 33):
            # Open the next connection now, so that a request is cancelled and not a login.
            await store.load("run")
            cancelled.append(await cancel(store, entry(grant, n, f"{n}"), 0.0001 * (n - 13)))
        assert sum(cancelled) >= 3
        assert await store.append([entry(grant, 33, "33")]) == [Verdict.ACCEPTED]
        entries = [entry(grant, n, f"{n}") for n in range(1, 33)]
        assert await store.append(entries) == [Verdict.ACCEPTED] * 32
        assert await steps(store) == [f"{n}" for n in range(1, 34)]


async def cancel(store: Any, entry: Entry, seconds: float = 0, turns: int = 1) -> bool:
    """Append an entry and cancel it after a time or some turns of the event loop, when the reply
    may or may not have arrived; return whether it was cancelled.
    """
    task: asyncio.Future[Any] = asyncio.ensure_future(store.append([entry]))
    for _ in range(turns):
        await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def test_the_error_of_an_unavailable_server_names_it(backend: Backend) -> None:
    """It contains the address and how long it was tried, but not the password, and the driver's
    error is the cause.
    """
    address = f"127.0.0.1:{free_port()}"
    url = backend.address.format(address=address)
    async with backend.open(url, **backend.retry_for(0.2)) as store:
        with pytest.raises(StoreUnavailable) as raised:
            await store.load("run")
    assert raised.match(backend.unavailable.format(address=address))
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is not None


async def test_a_failed_set_up_is_retried(place: Place, proxy: TcpProxy) -> None:
    """A store that was used too early works as soon as the server does."""
    proxy.refuse()
    async with place.open_through_proxy(**place.backend.retry_for(0)) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.save("run", snapshot("a"))
        proxy.accept()
        await asyncio.sleep(place.backend.recovery)
        await store.save("run", snapshot("a"))
        assert await steps(store) == ["a"]


async def test_a_store_works_again_after_an_outage(place: Place, proxy: TcpProxy) -> None:
    """Calls fail during the outage, and no restart is needed after it."""
    backend = place.backend
    async with place.open_through_proxy(**backend.retry_for(0)) as store:
        await acquire(store, "run")
        proxy.refuse()
        error = backend.unavailable.format(address=f"127.0.0.1:{proxy.port}")
        with pytest.raises(StoreUnavailable, match=f"{error}|{backend.lost}"):
            await store.load("run")
        with pytest.raises(StoreUnavailable, match=error):
            await store.load("run")
        proxy.accept()
        await asyncio.sleep(backend.recovery)
        assert await steps(store) == []


async def test_a_first_call_waits_until_the_server_is_available(
    place: Place, proxy: TcpProxy
) -> None:
    """For as long as `connect_timeout`."""
    proxy.refuse()
    async with place.open_through_proxy() as store:
        saving = asyncio.create_task(store.save("run", snapshot("a")))
        await asyncio.sleep(0.3)
        assert not saving.done()
        proxy.accept()
        await saving
        assert await steps(store) == ["a"]


async def test_a_store_reconnects_after_an_outage(proxied: Any, proxy: TcpProxy) -> None:
    """A call waits until a short outage has ended."""
    await acquire(proxied, "run")
    proxy.refuse()
    loading = asyncio.create_task(proxied.load("run"))
    await asyncio.sleep(0.3)
    assert not loading.done()
    proxy.accept()
    assert await loading is not None


async def test_concurrent_first_uses_set_the_database_up_once(place: Place) -> None:
    """Each of twenty stores is first used by several concurrent calls."""
    stores = [place.open() for _ in range(20)]
    *created, _ = await asyncio.gather(
        *(store.enqueue([NewRun("new", "order", NEW)]) for store in stores),
        asyncio.gather(
            *(store.save(f"{n}", snapshot("a")) for n, store in enumerate(stores)),
            *(store.save("same", snapshot("a")) for store in stores),
        ),
    )
    assert sorted(created) == [[False]] * 19 + [[True]]
    assert len(await stores[0].list()) == 22
    await asyncio.gather(*(store.close() for store in stores))


@pytest.mark.parametrize("used", [True, False])
async def test_a_closed_store_raises(place: Place, used: bool) -> None:
    """Its connections are closed, which the fixture checks. Closing twice is fine."""
    store = place.open()
    if used:
        await store.load("run")
    await store.close()
    with pytest.raises(StoreClosed):
        await store.load("run")
    with pytest.raises(StoreClosed):
        await store.append([])
    await store.close()


async def test_closing_waits_for_calls_in_flight(place: Place) -> None:
    """Their connections could not be closed otherwise."""
    store = place.open()
    await store.load("run")
    call = asyncio.ensure_future(store.load("run"))
    await asyncio.sleep(0)
    await store.close()
    assert call.done()
    assert await call is None


async def test_leases_use_the_clock_of_the_server(place: Place) -> None:
    """Two processes whose clocks are two days apart share leases and due runs correctly."""
    now = SystemClock().now()
    slow, fast = TestClock(now - DAY), TestClock(now + DAY)
    async with place.open(clock=slow) as early, place.open(clock=fast) as late:
        await check_clocks(early, late, "of the slow clock")
        await check_clocks(late, early, "of the fast clock")


async def check_clocks(one: Any, two: Any, suffix: str) -> None:
    """Let `two` compete for runs that `one` has leased."""
    short = timedelta(milliseconds=50)
    renewed, expiring = f"renewed {suffix}", f"expiring {suffix}"
    (grant,) = await acquire(one, renewed)
    assert abs(grant.now - SystemClock().now()) < timedelta(seconds=30)
    (answer,) = await two.acquire([LeaseRequest(renewed, "bob", HOUR)])
    assert isinstance(answer, Refusal)
    assert list(await two.claim("bob", HOUR, 10)) == []
    grants = [grant, *await acquire(one, expiring, ttl=short)]
    (lease,) = await one.renew([grant.lease], short)
    assert lease is not None
    await asyncio.sleep(0.2)
    claims = {claim.lease.id: claim for claim in await two.claim("bob", HOUR, 10)}
    assert set(claims) == {renewed, expiring}
    for grant in grants:
        claim = claims[grant.lease.id]
        assert claim.takeovers == 1
        assert claim.lease.epoch > grant.lease.epoch
        assert abs(claim.now - grant.now) < timedelta(seconds=30)
        assert await one.append([entry(grant, 1, "a")]) == [Verdict.FENCED]
    await one.enqueue([NewRun(f"new {suffix}", "order", NEW)])
    assert len(await two.claim("bob", HOUR, 10)) == 1
    assert len(await acquire(one, f"1 {suffix}", f"2 {suffix}")) == 2


@ignore_ended_loops
def test_a_store_can_be_used_in_one_event_loop_after_another(place: Place) -> None:
    """As with several calls of `asyncio.run` in one program."""
    store = place.open()

    async def last() -> None:
        assert await store.load("1") == snapshot("a")
        assert len(await store.list()) == 2
        await store.close()

    asyncio.run(store.save("1", snapshot("a")))
    asyncio.run(store.save("2", snapshot("b")))
    asyncio.run(last())
    gc.collect()


@ignore_ended_loops
def test_a_store_can_be_closed_after_its_event_loop(place: Place) -> None:
    """Its connections ended with the loop, and cannot be closed."""
    store = place.open()
    asyncio.run(store.save("run", snapshot("a")))
    asyncio.run(store.close())
    with pytest.raises(StoreClosed):
        asyncio.run(store.load("run"))
    gc.collect()


async def test_a_second_event_loop_at_the_same_time_is_refused(store: Any) -> None:
    """The connections belong to the first one, which is not affected."""
    await store.save("run", snapshot("a"))
    with pytest.raises(StoreError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(store.load("run")))
    assert await steps(store) == ["a"]


async def test_a_replaced_document_whose_reply_was_lost_is_an_error(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """The call is not repeated: it would return `False` for its own success."""
    documents = proxied.documents
    assert await documents.replace("counter", None, "1")
    assert await documents.replace("counter", "1", "2")
    place.drop_reply("document", "lost value")
    with pytest.raises(StoreUnavailable, match=place.backend.lost):
        await documents.replace("counter", "2", "lost value")
    assert proxy.dropped == 1
    assert await documents.get("counter") == "lost value"


async def test_a_document_whose_reply_was_lost_is_set(
    place: Place, proxied: Any, proxy: TcpProxy
) -> None:
    """By the same call or by the caller's next one."""
    documents = proxied.documents
    await documents.set("counter", "1")
    place.drop_reply("document", "lost value")
    try:
        await documents.set("counter", "lost value")
    except StoreUnavailable:
        await documents.set("counter", "lost value")
    assert proxy.dropped == 1
    assert await documents.get("counter") == "lost value"
