"""How the Redis store lays runs down, finds them among many, and tells what the server promises."""

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from redis import Connection, Redis

from perdure.errors import StoreCorrupted, StoreError
from perdure.store import Entry, LeaseRequest, NewRun, Rest, Verdict
from perdure.stores import open_store
from perdure.stores.redis import RedisStore, redis
from perdure.stores.redis.keys import SHARDS, STATUSES, Keys
from perdure.stores.redis.node import pack
from perdure.stores.redis.scripts import SAVE
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.process import Server
from tests.stores.redis.kit import HOUR, leased, step, steps

NOW = timedelta(0)
MANY = 100_000
# More than a script looks at before it lets others through.
CROWD = 6_000

# Puts so many runs into each of the sorted sets, as lines of an index only.
FILL = """
for number = 1, tonumber(ARGV[1]) do
    local line = ARGV[2] .. number .. ARGV[4]
    redis.call('ZADD', KEYS[1], tonumber(ARGV[3]) + number * tonumber(ARGV[5]), line)
end
"""


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


def left_over(admin: Redis, namespace: str) -> set[str]:
    """Give the kinds of keys that are there."""
    return {key.removeprefix(namespace).split(":")[2] for key in admin.keys(f"{namespace}*")}


async def test_a_run_at_rest_is_a_hash_that_people_can_read(
    store: RedisStore, admin: Redis, keys: Keys
) -> None:
    """Its snapshot is the JSON that was recorded, to the byte."""
    (grant,) = await leased(store)
    whole = as_json(snapshot("b", "a", status="waiting"))
    rest = Rest("waiting", None, ("paid",))
    await store.append([step(grant, 1), Entry("run", grant.lease.epoch, 2, whole, rest=rest)])
    fields: Mapping[str, str] = admin.hgetall(keys.run("run"))
    assert fields["snapshot"] == whole.decode()
    assert fields["status"] == "waiting"
    assert fields["workflow"] == "order"
    assert set(fields) == {
        *("awaits", "epoch", "settled", "snapshot", "status", "updated", "workflow")
    }


async def test_a_run_that_is_gone_leaves_nothing(
    store: RedisStore, admin: Redis, redis_prefix: str
) -> None:
    """Neither by delete, nor by a rest that says so, nor by prune: only the last number given."""
    grants = await leased(store, "a", "b", "c")
    for grant in grants:
        await store.append([step(grant, 1)])
        await store.send(grant.lease.id, "paid", b"1", dedup_id="x")
    await store.delete("a")
    delete = Entry("b", grants[1].lease.epoch, 2, b"", rest=Rest("completed", delete=True))
    over = Entry("c", grants[2].lease.epoch, 2, as_json(snapshot()), rest=Rest("completed"))
    assert await store.append([delete, over]) == [Verdict.ACCEPTED] * 2
    assert await store.append([delete]) == [Verdict.UNKNOWN]
    assert await store.prune(NOW) == 1
    assert left_over(admin, redis_prefix) == {"sequence"}


async def test_a_stale_departure_is_fenced(store: RedisStore) -> None:
    """Who lost the run cannot remove it."""
    (old,) = await leased(store)
    await store.save("run", snapshot("a"))
    delete = Entry("run", old.lease.epoch, 1, b"", rest=Rest("completed", delete=True))
    assert await store.append([delete]) == [Verdict.FENCED]
    assert await steps(store) == ["a"]


@pytest.mark.parametrize("status", STATUSES)
def test_a_script_looks_at_the_list_of_every_status(status: str) -> None:
    """Before its first write: of a cluster's slot that is moving, a key may be on another node."""
    looks = [line.strip().rstrip(",") for line in SAVE.text.splitlines()]
    assert f"shard .. 'list:{status}'" in looks


async def test_a_large_batch_goes_in_portions(store: RedisStore) -> None:
    """More entries than a script is given at once are all there, in order."""
    grants = await leased(store, *(f"{n}" for n in range(1_200)))
    big = as_json(snapshot(big="x" * 1_000_000))
    entries = [step(grant, 1) for grant in grants]
    entries += [Entry("0", grants[0].lease.epoch, n, big) for n in range(2, 12)]
    entries += [step(grants[0], 12)]
    assert set(await store.append(entries)) == {Verdict.ACCEPTED}
    assert await steps(store, "0") == ["1", "big", "12"]
    assert await steps(store, "1199") == ["1"]


async def test_wants_of_all_kinds_are_answered_in_their_order(store: RedisStore) -> None:
    """New runs come as words, others with what they hold; each answer meets its want."""
    (held, free) = await leased(store, "held by ana", "free\n+ 1")
    await store.append([step(held, 1), step(free, 1)])
    await store.release([free.lease])
    ids = ("new 1", held.lease.id, "missing", free.lease.id, "new\n2")
    create = as_json(snapshot("first"))
    wants = [LeaseRequest(id, "bob", HOUR, create=create if "new" in id else None) for id in ids]
    first, *nothing, second, third = await store.acquire(wants)
    assert nothing == [None, None]
    for id, grant in zip((ids[0], ids[3], ids[4]), (first, second, third), strict=True):
        assert grant is not None
        assert grant.lease.id == id
        assert grant.created == ("new" in id)
        assert grant.snapshot == await store.load(id)
        assert grant.lease.expires_at == grant.now + HOUR


def test_a_command_is_packed_as_the_driver_does() -> None:
    """Texts as UTF-8, numbers as their digits, bytes as they are."""
    command = ("EVALSHA", "ä", 12, b"\x00\r\n$3", "", b"x" * 10_000)
    assert pack(command) == b"".join(Connection().pack_command(*command))


async def test_a_run_that_cannot_be_read_harms_no_other(
    store: RedisStore, admin: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading it says so; a claim leaves it out and logs it."""
    runs = [NewRun(id, "order", as_json(snapshot())) for id in ("good", "bad")]
    await store.enqueue(runs)
    admin.hset(keys.run("bad"), "snapshot", "{")
    with pytest.raises(StoreCorrupted, match="bad"):
        await store.load("bad")
    with caplog.at_level(logging.ERROR):
        grants = await store.claim("ana", HOUR, 10)
    assert [grant.lease.id for grant in grants] == ["good"]
    assert "'bad' cannot be read" in caplog.text


@contextmanager
def counted(admin: Redis) -> Iterator[dict[str, int]]:
    """Give how often each command was done meanwhile, also by scripts."""
    calls: dict[str, int] = {}
    admin.config_resetstat()
    yield calls
    for name, facts in admin.info("commandstats").items():
        calls[name.removeprefix("cmdstat_")] = facts["calls"]


async def test_among_many_runs_the_indexes_are_used(
    store: RedisStore, admin: Redis, keys: Keys
) -> None:
    """With 100,000 runs, list, due, claim and load do as little as with few."""
    await store.load("set up")
    (grant,) = await leased(store)
    await store.release([grant.lease], wake_at=grant.now - HOUR)
    fill = admin.register_script(FILL)
    year = 10**6 * 3600 * 24 * 365
    for shard in range(SHARDS):
        share = MANY // SHARDS
        later = int(grant.now.timestamp() * 1e6) + year
        fill([keys.list(shard, "completed")], [share, f"{shard}-", 0, "\0order", 1])
        fill(
            [keys.workflows(shard).replace(b"workflows", b"wake:=order")],
            [share, "x", later, "", 1],
        )
        admin.sadd(keys.workflows(shard), "=order")
    with counted(admin) as calls:
        assert (await store.list(limit=1))[0].id == "run"
        assert len(await store.list(status="completed", limit=10)) == 10
        assert [due.id for due in await store.due(grant.now, 10)] == ["run"]
        assert len(await store.claim("ana", HOUR, 10)) == 1
        assert await store.load("run") is not None
    assert calls["hgetall"] == 3
    assert sum(calls.values()) < 20 * SHARDS
    assert not {"scan", "keys", "zscan", "zrange", "sscan"} & set(calls)


@pytest.mark.parametrize("apart", [0, 1])
async def test_a_crowd_of_others_hides_no_run(
    store: RedisStore, admin: Redis, keys: Keys, redis_url: str, redis_prefix: str, apart: int
) -> None:
    """Runs of other prefixes and workflows are passed over, however many lie before, and also when
    all have the same time."""
    await store.load("set up")
    fill = admin.register_script(FILL)
    for shard in range(2):
        fill(
            [keys.workflows(shard).replace(b"workflows", b"wake:=order")],
            [CROWD, "other", 1, "", apart],
        )
        admin.sadd(keys.workflows(shard), "=order")
        newest = 10**16
        fill([keys.list(shard, "running")], [CROWD, "other", newest, "\0loud", apart])
    async with redis(redis_url, namespace=redis_prefix, prefix="my:") as mine:
        await mine.enqueue([NewRun("run", "order", as_json(snapshot()))])
        assert [line.id for line in await mine.list()] == ["run"]
        assert [line.id for line in await store.list(workflow="order")] == ["my:run"]
        (grant,) = await mine.claim("ana", HOUR, 3)
        assert grant.lease.id == "run"
        assert (await mine.stats()).by_status == {"running": 1}
        assert list(await mine.due(grant.now, 3)) == []
        await mine.save("run", snapshot(status="completed"))
        assert await mine.prune(NOW) == 1
    assert (await store.stats()).by_status == {"running": 2 * CROWD}


async def test_due_leaves_a_lease_that_will_end_later(store: RedisStore) -> None:
    """The end of a live lease is no wake time, also when one asks for tomorrow."""
    (grant,) = await leased(store)
    assert list(await store.due(grant.now + 2 * HOUR, 10)) == []


async def test_the_last_time_there_is_can_be_waited_for(store: RedisStore) -> None:
    """A run that sleeps until the end of time is due then."""
    last = datetime.max.replace(tzinfo=UTC)
    await store.enqueue([NewRun("run", "order", as_json(snapshot()), last)])
    assert [(due.id, due.wake_at) for due in await store.due(last, 1)] == [("run", last)]


@contextmanager
def setting(admin: Redis, **values: str) -> Iterator[None]:
    """Let the server have other settings for a while."""
    names = {name.replace("_", "-"): value for name, value in values.items()}
    before = {name: admin.config_get(name)[name] for name in names}
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
async def test_full_durability_is_refused_where_the_server_has_none(
    redis_server: Server, store: RedisStore, admin: Redis, values: dict[str, str], remedy: str
) -> None:
    """With the settings to change; once they are changed, the same store works."""
    if not redis_server.ours:
        pytest.skip("the settings of a server that is not ours are left alone")
    with setting(admin, **values), pytest.raises(StoreError, match=remedy):
        await store.save("run", snapshot("a"))
    await store.save("run", snapshot("a"))
    assert store.capabilities.survives == "power_loss"


async def test_normal_durability_takes_any_server(
    redis_server: Server, admin: Redis, redis_url: str, redis_prefix: str
) -> None:
    """And declares no more than it keeps."""
    if not redis_server.ours:
        pytest.skip("the settings of a server that is not ours are left alone")
    with setting(admin, appendfsync="everysec"):
        async with redis(redis_url, namespace=redis_prefix, durability="normal") as store:
            await store.save("run", snapshot("a"))
            assert store.capabilities.survives == "process_crash"
            assert "a power failure loses the writes of that time" in str(
                await store.durability_report()
            )


async def test_explain_tells_what_the_server_promises(store: RedisStore) -> None:
    """Of the disk and of replicas."""
    told = await store.durability_report()
    assert told.settings["appendonly"] == "yes"
    assert told.primaries == 1
    assert told.replicas == 0
    assert "a power failure loses nothing" in told.guarantees[0]
    assert "no replicas" in told.guarantees[1]
    assert str(told).startswith(f"Redis {told.version} at 127.0.0.1:")


async def test_what_may_not_be_seen_is_unknown(
    admin: Redis, redis_server: Server, redis_url: str, redis_prefix: str
) -> None:
    """Nothing is promised for a server that does not show its settings."""
    if not redis_server.ours:
        pytest.skip("a server that is not ours gets no users")
    admin.execute_command("ACL", "SETUSER", "blind", "on", ">word", "~*", "&*", "+@all", "-config")
    try:
        url = redis_url.replace("redis://", "redis://blind:word@")
        async with redis(url, namespace=redis_prefix) as store:
            told = await store.durability_report()
            assert told.settings["appendfsync"] == "unknown"
            assert "a crash of the server loses is unknown" in str(told)
            with pytest.raises(StoreError, match=r'appendonly is unknown.*durability="normal"'):
                await store.load("run")
    finally:
        admin.execute_command("ACL", "DELUSER", "blind")


async def test_a_url_opens_it(redis_url: str, redis_prefix: str) -> None:
    """By `open_store`, one server or a cluster."""
    async with open_store(redis_url, namespace=redis_prefix) as store:  # type: ignore[attr-defined]  # every store in the box has it
        assert isinstance(store, RedisStore)
        await store.save("run", snapshot("a"))
        assert await steps(store) == ["a"]
