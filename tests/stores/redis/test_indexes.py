"""Runs are found by indexes: with 50,000 runs, a call does as little as with few."""

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files

import pytest
from redis import Redis
from redis.crc import key_slot

from perdure.store import Count, Query, Rest, SupportedVersions
from perdure.stores._timestamps import from_microseconds
from perdure.stores.redis import RedisStore, redis
from perdure.stores.redis.keys import SHARDS, Keys, shard_of
from perdure.testing.conformance.harness import supports
from perdure.testing.conformance.queues import queued
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.redis import SLOTS, RedisCluster
from tests.stores.redis.kit import HOUR

MANY = 50_000
LATE = datetime(2200, 1, 1, tzinfo=UTC)
NOW = timedelta(0)

# Creates runs in one shard, by the function of the store's own scripts. Run n is updated at time n;
# statuses, queues and tags repeat.
FILL = """
local shard = shard_of(KEYS[1])
local numbers, prefix, workflow, queue, version, wakes, snapshot = unpack(ARGV)
local statuses = {'queued', 'completed', 'failed', 'waiting'}
for text in string.gmatch(numbers, '%d+') do
    local number = tonumber(text)
    now_text = text
    create(shard, prefix .. text, {
        status = statuses[number % 4 + 1], workflow = '=' .. workflow, snapshot = snapshot,
        queue = number % 1000 == 0 and 'rare' or queue, version = version,
        tags = number % 5000 == 0 and '["a=1","b=1"]' or '["b=1"]', summary = '',
        wake = wakes == '1' and text or nil,
    })
end
"""
RUN = (files("perdure.stores.redis") / "lua" / "run.lua").read_text("utf-8")


@dataclass(frozen=True)
class Filler:
    """Creates runs by a script of its own, fast."""

    keys: Keys
    urls: tuple[str, ...]

    def fill(
        self,
        count: int = MANY,
        prefix: str = "run ",
        workflow: str = "order",
        *,
        queue: str = "",
        version: int = 0,
        is_due: bool = True,
    ) -> None:
        """Create runs 1 to `count`."""
        clients = [Redis.from_url(url) for url in self.urls]
        shards: dict[int, list[str]] = {}
        for number in range(1, count + 1):
            shards.setdefault(shard_of(f"{prefix}{number}".encode()), []).append(f"{number}")
        for shard, numbers in shards.items():
            key = self.keys.ids(shard)
            client = clients[key_slot(key) * len(clients) // SLOTS]
            flags = (f"{version}", f"{is_due:d}", as_json(snapshot()))
            values = (" ".join(numbers), prefix, workflow, queue, *flags)
            client.eval(RUN + FILL, 1, key, *values)
        for client in clients:
            client.close()


@pytest.fixture
async def store(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisStore]:
    async with redis(redis_url, namespace=redis_prefix) as store:
        await store.load("set up")
        yield store


@pytest.fixture
def admin(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def filler(redis_url: str, redis_prefix: str) -> Filler:
    return Filler(Keys(redis_prefix), (redis_url,))


@contextmanager
def counted(admin: Redis) -> Generator[dict[str, int]]:
    """Provide how often each command was executed in the block, also by scripts."""
    calls: dict[str, int] = {}
    admin.config_resetstat()
    yield calls
    for name, stats in admin.info("commandstats").items():
        calls[name.removeprefix("cmdstat_")] = stats["calls"]
    for name in ("config|resetstat", "evalsha", "eval", "info"):
        calls.pop(name, None)


def time_of(number: int) -> datetime:
    """Return when run `number` was updated."""
    return from_microseconds(number)


QUERIES = [
    Query(),
    Query(oldest_first=True),
    Query(statuses=("completed",)),
    Query(statuses=("completed", "failed"), oldest_first=True),
    Query(workflows=("order",)),
    Query(workflows=("order", "missing"), statuses=("failed",)),
    Query(tags=("a=1",)),
    Query(tags=("b=1", "a=1")),
    Query(prefix="run 4999"),
    Query(since=time_of(MANY // 2), until=time_of(MANY // 2 + 9)),
    Query(until=time_of(9), statuses=("queued",), oldest_first=True),
]


async def test_a_search_examines_only_what_it_finds(
    store: RedisStore, admin: Redis, filler: Filler
) -> None:
    """Some commands for each shard, and two for each run; a later page costs as much."""
    filler.fill()
    middle = f"{time_of(MANY // 2 + 5).isoformat()} x"
    for query in QUERIES:
        for after in (None, middle):
            with counted(admin) as calls:
                page = await store.search(query, 10, after=after)
            assert 0 < len(page.runs) <= 10 or after, query
            assert calls.get("hmget", 0) <= 2 * 12 + 2, query
            assert sum(calls.values()) < 12 * SHARDS, query
            assert not {"scan", "keys", "zscan", "zrange", "sscan", "hgetall"} & set(calls)


async def test_counts_do_not_depend_on_the_number_of_runs(
    store: RedisStore, admin: Redis, filler: Filler
) -> None:
    """One command for each list."""
    filler.fill()
    with counted(admin) as calls:
        counts = await store.counts(Query(statuses=("failed",)), 100)
        stats = await store.stats()
    assert counts == [Count("order", "failed", 100, capped=True)]
    assert sum(stats.by_status.values()) == MANY
    assert stats.by_queue[""].due == MANY - 50
    assert stats.by_queue["rare"].due == 50
    assert sum(calls.values()) < 20 * SHARDS


async def test_a_claim_examines_only_runs_that_it_can_take(
    store: RedisStore, admin: Redis, filler: Filler
) -> None:
    """Neither other workflows, nor other versions, nor other queues."""
    filler.fill(version=2)
    filler.fill(100, "other ", "other")
    filler.fill(100, "queued ", queue="emails")
    old = [SupportedVersions("order", 1, 1), SupportedVersions("missing", 1, 9)]
    with counted(admin) as calls:
        assert list(await store.claim("ana", HOUR, 100, supports=old)) == []
        assert list(await store.due(LATE, 100, supports=old)) == []
        assert list(await store.claim("ana", HOUR, 100, queues={"missing": 100})) == []
    assert "zrangebyscore" not in calls
    assert sum(calls.values()) <= 6 * SHARDS
    with counted(admin) as calls:
        grants = await store.claim(
            "ana", HOUR, 10, supports=supports("order"), queues={"rare": 3, "": 7}
        )
        due = await store.due(LATE, 10, supports=supports("order"))
    assert len(grants) == len(due) == 10
    assert sum(grant.queue == "rare" for grant in grants) == 3
    assert calls["hgetall"] == 10
    assert sum(calls.values()) < 30 * SHARDS


async def test_a_claim_from_many_queues_is_one_round_trip(store: RedisStore, admin: Redis) -> None:
    """A hundred queues, several workflows."""
    names = [f"emails/{n}" for n in range(100)]
    await store.enqueue([queued(name, name, f"{n % 5}") for n, name in enumerate(names)])
    supported = supports("0", "1", "2", "3")
    await store.claim("ana", HOUR, 1, supports=supported)
    admin.config_resetstat()
    grants = await store.claim("ana", HOUR, 50, supports=supported, queues=dict.fromkeys(names, 1))
    assert len(grants) == 50
    assert admin.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


async def test_the_wake_sets_of_a_shard_are_read_at_once(store: RedisStore, admin: Redis) -> None:
    """However many workflows a worker supports, and queues it serves."""
    names = [f"emails/{n}" for n in range(100)]
    supported = supports("0", "1", "2", "3")
    await store.claim("ana", HOUR, 1, supports=supported)
    with counted(admin) as calls:
        await store.claim(
            "ana", HOUR, 50, supports=supported, queues=dict.fromkeys(["", *names], 1)
        )
    assert calls == {"zrange": SHARDS, "time": 1}


async def test_runs_are_claimed_from_a_shard_with_many_wake_sets(store: RedisStore) -> None:
    """Then each set is looked up."""
    many = [queued(f"{n}", f"emails/{n}") for n in range(100 * SHARDS)]
    await store.enqueue([*many, queued("a"), queued("b", workflow="other")])
    grants = await store.claim(
        "ana", HOUR, 50, supports=supports("order"), queues={"": 9, "emails/7": 9, "emails/8": 9}
    )
    assert sorted(grant.lease.id for grant in grants) == ["7", "8", "a"]


async def test_runs_of_a_batch_share_the_entries_of_their_indexes(
    store: RedisStore, admin: Redis
) -> None:
    """A list and a wake set are announced once, and the server checks no keys for a cluster."""
    await store.enqueue([queued("first")])
    with counted(admin) as calls:
        await store.enqueue([queued(f"{n}") for n in range(100)])
    assert calls["sadd"] <= SHARDS
    assert calls["zadd"] <= 3 * 100 + SHARDS
    assert calls["exists"] == calls["hset"] == 100


async def test_a_queue_is_found_by_one_seek(
    store: RedisStore, admin: Redis, filler: Filler
) -> None:
    """However many runs it has."""
    filler.fill(queue="emails")
    filler.fill(100, "x ", queue="news")
    with counted(admin) as calls:
        assert list(await store.queues(LATE, 10)) == ["emails", "news", "rare"]
    assert sum(calls.values()) < 15 * SHARDS


async def test_many_queues_are_listed_in_pages(
    redis_url: str, redis_prefix: str, store: RedisStore
) -> None:
    """Also those of one prefix, behind more queues of others than a script examines."""
    names = [f"emails/{n:04}" for n in range(2_500)]
    await store.enqueue([queued(f"other {name}", name) for name in names])
    async with redis(redis_url, namespace=redis_prefix, prefix="my:") as mine:
        await mine.enqueue([queued(name, name) for name in names[::500]])
        assert list(await mine.queues(LATE, 100)) == names[::500]
        assert list(await mine.queues(LATE, 2)) == [names[0], names[500]]
        assert list(await mine.queues(LATE, 9, after=names[500])) == names[1_000::500]
    assert list(await store.queues(LATE, 3_000)) == names


async def find_all(store: RedisStore, query: Query, limit: int) -> tuple[list[str], int]:
    """Return the ids that all pages of a search find, and how many pages ended early."""
    ids: list[str] = []
    cursor, early = None, 0
    while True:
        page = await store.search(query, limit, after=cursor)
        ids += (run.id for run in page.runs)
        early += page.searched_until is not None
        if (cursor := page.cursor) is None:
            return ids, early


async def test_a_search_that_stops_early_continues_where_it_stopped(
    store: RedisStore, filler: Filler
) -> None:
    """At most 20,000 runs are examined for a page; none is skipped or repeated."""
    filler.fill()
    rare = [f"run {n}" for n in range(1_000, MANY + 1, 1_000)]
    assert await find_all(store, Query(queue="rare", oldest_first=True), 1_000) == (rare, 2)
    assert await find_all(store, Query(queue="rare"), 1_000) == (rare[::-1], 2)
    assert await find_all(store, Query(queue="none"), 5) == ([], 2)


@pytest.mark.parametrize("others", [("a ", "b "), ("y ", "z "), ("a ", "z ")])
async def test_a_search_among_runs_of_other_prefixes_continues_where_it_stopped(
    redis_url: str, redis_prefix: str, store: RedisStore, filler: Filler, others: tuple[str, str]
) -> None:
    """Also at a run whose id does not have the prefix, below it or above it."""
    for prefix in others:
        filler.fill(11_000, prefix, is_due=False)
    filler.fill(1_600, "my:", is_due=False)
    numbers = [f"{n}" for n in range(1, 1_601)]
    async with redis(redis_url, namespace=redis_prefix, prefix="my:") as mine:
        ids, early = await find_all(mine, Query(oldest_first=True), 2_000)
        assert (ids, early) == (numbers, 1)
        ids, early = await find_all(mine, Query(), 2_000)
        assert (ids, early) == (numbers[::-1], 1)
        assert [run.id for run in await mine.list(limit=5_000)] == numbers[::-1]
        counts = await mine.counts(Query(statuses=("failed",)), 9_999)
        assert list(counts) == [Count("order", "failed", 400)]


async def test_runs_of_a_prefix_are_claimed_among_many_others(
    redis_url: str, redis_prefix: str, store: RedisStore, filler: Filler
) -> None:
    """Past more due runs than a script examines, and within the limits of queues."""
    filler.fill(8_000, "a ")
    async with redis(redis_url, namespace=redis_prefix, prefix="my:") as mine:
        await mine.enqueue([queued(f"{n}") for n in range(3)])
        assert [run.id for run in await mine.due(LATE, 9)] == ["0", "1", "2"]
        (grant,) = await mine.claim("ana", HOUR, 9, queues={"": 1})
        assert grant.lease.id == "0"
        stats = await mine.stats()
        assert stats.by_status == {"running": 1, "queued": 2}
        assert (stats.by_queue[""].due, stats.by_queue[""].leased) == (2, 1)
        await mine.save("0", snapshot(status="completed"))
        assert await mine.prune(NOW) == 1
    assert (await store.stats()).by_status["queued"] == 2_000 + 2


async def test_many_runs_are_pruned(store: RedisStore, filler: Filler) -> None:
    """Some at a time, up to the limit; a dry run counts the same."""
    filler.fill(1_600)
    assert await store.prune(NOW, limit=1_000, dry_run=True) == 800
    assert await store.prune(NOW, limit=300) == 300
    assert await store.prune(NOW, limit=1_000, status="failed", tags=("b=1",)) == 250
    assert await store.prune(NOW, limit=1_000) == 250
    assert await store.prune(NOW) == 0
    assert sum((await store.stats()).by_status.values()) == 800


async def test_a_search_on_a_cluster_continues_where_it_stopped(
    redis_cluster: RedisCluster, redis_cluster_prefix: str
) -> None:
    """The walks over the shards stop at different times."""
    url = redis_cluster.url.replace("redis://", "redis+cluster://")
    urls = tuple(node.url for node in redis_cluster.nodes)
    async with redis(url, namespace=redis_cluster_prefix) as store:
        await store.enqueue([queued("new", rest=Rest("failed"))])
        Filler(Keys(redis_cluster_prefix), urls).fill(is_due=False)
        for oldest_first in (True, False):
            query = Query(queue="rare", oldest_first=oldest_first)
            ids, early = await find_all(store, query, 40)
            rare = [f"run {n}" for n in range(1_000, MANY + 1, 1_000)]
            assert ids == (rare if oldest_first else rare[::-1])
            assert early > 0
        first = await store.search(Query(statuses=("failed",)), 1)
        assert [run.id for run in first.runs] == ["new"]
