"""How the Redis store keeps runs, finds them among many, and reports the server's durability."""

import logging
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis import Connection, Redis

from perdure.errors import StoreCorrupted, StoreError
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Refusal, Rest, Verdict
from perdure.stores import open_store
from perdure.stores.redis import RedisStore, redis
from perdure.stores.redis.keys import Keys
from perdure.stores.redis.node import pack
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.redis.kit import HOUR, execute, leased, step, steps

NOW = timedelta(0)


@pytest.fixture
async def store(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisStore]:
    async with redis(redis_url, namespace=redis_prefix) as store:
        yield store


@pytest.fixture
def admin(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def keys(redis_prefix: str) -> Keys:
    return Keys(redis_prefix)


def kinds_of_keys(admin: Redis, namespace: str) -> set[str]:
    """Return the kinds of keys that exist, except for the marks of the layout."""
    keys = [str(key).removeprefix(namespace) for key in admin.keys(f"{namespace}*")]
    return {key.split(":")[3] for key in keys if ":2:" in key}


async def test_grants_of_runs_with_any_messages_are_told_apart(store: RedisStore) -> None:
    """All of them are one string, in which a payload may contain what separates the others."""
    payloads = {"none": [], "one": [b"3:a\0:"], "some": [b"", b"\r\n:\0", b"12:"]}
    await store.enqueue([NewRun(id, "order", as_json(snapshot(id))) for id in payloads])
    for id, sent in payloads.items():
        for payload in sent:
            await send_one(store, id, "a: b", payload)
    grants = await store.claim("ana", HOUR, 3)
    received = {
        grant.lease.id: [message.payload for message in grant.inbox]
        for grant in grants
        if isinstance(grant, Grant)
    }
    assert received == payloads


async def test_a_settled_run_is_a_readable_hash(
    store: RedisStore, admin: Redis, keys: Keys
) -> None:
    """Its snapshot is the JSON that was recorded, to the byte."""
    (grant,) = await leased(store)
    whole = as_json(snapshot("b", "a", status="waiting"))
    rest = Rest("waiting", None, ("paid",))
    await store.append([step(grant, 1), Entry("run", grant.lease.epoch, 2, whole, rest=rest)])
    stored = admin.hgetall(keys.run("run"))
    fields = {str(name): str(value) for name, value in stored.items()}
    assert fields["snapshot"] == whole.decode()
    assert fields["status"] == "waiting"
    assert fields["workflow"] == "order"
    assert set(fields) == {
        *("awaits", "created", "epoch", "settled", "snapshot", "status", "updated", "workflow")
    }


async def test_a_deleted_run_leaves_nothing(
    store: RedisStore, admin: Redis, redis_prefix: str
) -> None:
    """By delete, by a rest or by prune: only the last number of its shard."""
    tags = ("a=1", "b=1")
    runs = [NewRun(id, "order", as_json(snapshot()), queue="x", tags=tags) for id in "abc"]
    await store.enqueue(runs)
    grants = await leased(store, "a", "b", "c")
    for grant in grants:
        await store.append([step(grant, 1)])
        await send_one(store, grant.lease.id, "paid", b"1", dedup_id="x")
    await store.delete("a")
    delete = Entry("b", grants[1].lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    over = Entry("c", grants[2].lease.epoch, 2, as_json(snapshot()), rest=Rest("completed"))
    assert await store.append([delete, over]) == [Verdict.ACCEPTED] * 2
    assert await store.append([delete]) == [Verdict.UNKNOWN]
    assert await store.prune(NOW) == 1
    assert kinds_of_keys(admin, redis_prefix) == {"sequence"}


async def test_a_previous_owner_cannot_delete_a_run(store: RedisStore) -> None:
    """A rest with `delete` is fenced like any other."""
    (old,) = await leased(store)
    await store.save("run", snapshot("a"))
    delete = Entry("run", old.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
    assert await store.append([delete]) == [Verdict.FENCED]
    assert await steps(store) == ["a"]


async def test_a_large_batch_is_sent_in_parts(store: RedisStore) -> None:
    """More entries than one script takes are all written, in order."""
    grants = await leased(store, *(f"{n}" for n in range(1_200)))
    big = as_json(snapshot(big="x" * 1_000_000))
    entries = [step(grant, 1) for grant in grants]
    entries += [Entry("0", grants[0].lease.epoch, n, big) for n in range(2, 12)]
    entries += [step(grants[0], 12)]
    assert set(await store.append(entries)) == {Verdict.ACCEPTED}
    assert await steps(store, "0") == ["1", "big", "12"]
    assert await steps(store, "1199") == ["1"]


async def test_requests_of_all_kinds_are_answered_in_order(store: RedisStore) -> None:
    """New runs are answered by words, others by grants."""
    (owned, free) = await leased(store, "owned by ana", "free\n+ 1")
    await store.append([step(owned, 1), step(free, 1)])
    await store.release([free.lease])
    ids = ("new 1", owned.lease.id, "missing", free.lease.id, "new\n2")
    create = as_json(snapshot("first"))
    requests = [LeaseRequest(id, "bob", HOUR, create=create if "new" in id else None) for id in ids]
    first, *refusals, second, third = await store.acquire(requests)
    assert refusals == [
        Refusal(owned.lease.id, "owned", "ana", owned.lease.expires_at),
        Refusal("missing", "missing"),
    ]
    for id, grant in zip((ids[0], ids[3], ids[4]), (first, second, third), strict=True):
        assert isinstance(grant, Grant)
        assert grant.lease.id == id
        assert grant.created == ("new" in id)
        assert grant.snapshot == await store.load(id)
        assert grant.lease.expires_at == grant.now + HOUR


async def test_a_batch_takes_over_only_from_the_owners_it_names(store: RedisStore) -> None:
    """In one script, which compares each run's owner with the one named for it."""
    ids = ("a", "b", "c")
    await leased(store, *ids)
    requests = [
        LeaseRequest(id, "bob", HOUR, instead_of=owner)
        for id, owner in zip(ids, ("ana", None, "cem"), strict=True)
    ]
    first, *refusals = await store.acquire(requests)
    assert isinstance(first, Grant)
    assert first.takeovers == 1
    owners = [refusal.owner for refusal in refusals if isinstance(refusal, Refusal)]
    assert owners == ["ana", "ana"]


@pytest.mark.parametrize("workflow", ["order\n1 2", None])
async def test_a_listed_owner_may_have_any_name(store: RedisStore, workflow: str | None) -> None:
    """Also one that looks like the other parts of a line."""
    request = LeaseRequest("1 run", "1 2 ana\n", HOUR, as_json(snapshot()), workflow)
    await store.acquire([request])
    (run,) = await store.list()
    assert (run.id, run.owner, run.workflow) == ("1 run", "1 2 ana\n", workflow)
    assert await store.list(after=run.cursor) == []


def test_a_command_is_packed_as_by_the_driver() -> None:
    """Strings as UTF-8, ints as digits, bytes unchanged."""
    command = ("EVALSHA", "ä", 12, b"\x00\r\n$3", "", b"x" * 10_000)
    driver: Any = Connection
    assert pack(command) == b"".join(driver().pack_command(*command))


async def test_an_unreadable_run_does_not_affect_others(
    store: RedisStore, admin: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading it raises; a claim skips and logs it."""
    runs = [NewRun(id, "order", as_json(snapshot())) for id in ("good", "bad")]
    await store.enqueue(runs)
    admin.hset(keys.run("bad"), "snapshot", "{")
    with pytest.raises(StoreCorrupted, match="bad"):
        await store.load("bad")
    with caplog.at_level(logging.ERROR):
        grants = await store.claim("ana", HOUR, 10)
    assert [grant.lease.id for grant in grants] == ["good"]
    assert "'bad' cannot be read" in caplog.text


async def test_due_skips_live_leases(store: RedisStore) -> None:
    """The end of a live lease is not a wake time, even if the caller asks for a later time."""
    (grant,) = await leased(store)
    assert list(await store.due(grant.now + 2 * HOUR, 10)) == []


async def test_a_run_can_sleep_until_the_maximum_datetime(store: RedisStore) -> None:
    """It is due then."""
    last = datetime.max.replace(tzinfo=UTC)
    await store.enqueue([NewRun("run", "order", as_json(snapshot()), last)])
    assert [(due.id, due.wake_at) for due in await store.due(last, 1)] == [("run", last)]


@contextmanager
def setting(admin: Redis, **values: str) -> Generator[None]:
    """Change settings of the server for the block."""
    names = {name.replace("_", "-"): value for name, value in values.items()}
    before = {name: str(admin.config_get(name)[name]) for name in names}
    for name, value in names.items():
        admin.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            admin.config_set(name, value)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"appendfsync": "everysec"}, "appendfsync is everysec.*CONFIG SET appendfsync always"),
        ({"no_appendfsync_on_rewrite": "yes"}, "CONFIG SET no-appendfsync-on-rewrite no"),
        (
            {"maxmemory": "1gb", "maxmemory_policy": "allkeys-lru"},
            "CONFIG SET maxmemory-policy noeviction",
        ),
    ],
)
async def test_full_durability_is_refused_if_the_server_does_not_guarantee_it(
    redis_server: Server, store: RedisStore, admin: Redis, values: dict[str, str], remedy: str
) -> None:
    """The error names the settings; once they are changed, the same store works."""
    if not redis_server.ours:
        pytest.skip("the settings of a server that is not ours are not changed")
    with setting(admin, **values), pytest.raises(StoreError, match=remedy):
        await store.save("run", snapshot("a"))
    await store.save("run", snapshot("a"))
    assert store.capabilities.survives == "power_loss"


async def test_normal_durability_accepts_any_server(
    redis_server: Server, admin: Redis, redis_url: str, redis_prefix: str
) -> None:
    """And declares less."""
    if not redis_server.ours:
        pytest.skip("the settings of a server that is not ours are not changed")
    with setting(admin, appendfsync="everysec"):
        async with redis(redis_url, namespace=redis_prefix, durability="normal") as store:
            await store.save("run", snapshot("a"))
            assert store.capabilities.survives == "process_crash"
            assert "a power failure loses the writes of that time" in str(
                await store.durability_report()
            )


async def test_the_durability_report_covers_disk_and_replicas(store: RedisStore) -> None:
    """From the settings of the server."""
    report = await store.durability_report()
    assert report.settings["appendonly"] == "yes"
    assert report.primaries == 1
    assert report.replicas == 0
    assert "a power failure loses nothing" in report.guarantees[0]
    assert "no replicas" in report.guarantees[1]
    assert str(report).startswith(f"Redis {report.version} at 127.0.0.1:")


async def test_settings_that_cannot_be_read_are_unknown(
    admin: Redis, redis_server: Server, redis_url: str, redis_prefix: str
) -> None:
    """Nothing is guaranteed for a server that hides its settings."""
    if not redis_server.ours:
        pytest.skip("no users are created on a server that is not ours")
    execute(admin, "ACL", "SETUSER", "blind", "on", ">word", "~*", "&*", "+@all", "-config")
    try:
        url = redis_url.replace("redis://", "redis://blind:word@")
        async with redis(url, namespace=redis_prefix) as store:
            report = await store.durability_report()
            assert report.settings["appendfsync"] == "unknown"
            assert "a crash of the server loses is unknown" in str(report)
            with pytest.raises(StoreError, match=r'appendonly is unknown.*durability="normal"'):
                await store.load("run")
    finally:
        execute(admin, "ACL", "DELUSER", "blind")


async def test_open_store_accepts_a_redis_url(redis_url: str, redis_prefix: str) -> None:
    """With options."""
    async with open_store(redis_url, namespace=redis_prefix) as store:
        assert isinstance(store, RedisStore)
        await store.save("run", snapshot("a"))
        assert await steps(store) == ["a"]
