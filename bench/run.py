"""Measure perdure beside the raw driver and beside peers, in one run, interleaved.

    python bench/run.py [--fast] [--only sqlite,postgres] [--no-peers]

Only ratios within one run count: the machine is as noisy as it is. Each number is a median.
"""

import argparse
import asyncio
import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import peers, raw, report, workloads  # noqa: E402
from perdure.store import Store  # noqa: E402
from perdure.stores import open_store  # noqa: E402
from tests.servers import mongo, mysql, postgres, redis, sqld  # noqa: E402

LENGTHS = (10, 100, 1000, 5000)
CROWDS = (1, 10, 50, 200, 1000)


@dataclass
class Plan:
    """How much is measured."""

    repeats: int = 5
    lengths: tuple[int, ...] = LENGTHS
    crowds: tuple[int, ...] = CROWDS
    due: int = 1000


@dataclass
class Place:
    """One store under measurement, and its raw driver."""

    name: str
    url: str
    version: str
    open_raw: Callable[[], Awaitable[raw.Raw]]
    options: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Store:
        return open_store(self.url, **self.options)


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def places(only: set[str]) -> Iterator[list[Place]]:
    """Start what is to be measured, and stop it again."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = [_memory(), _sqlite(folder)]
        for name, start in SERVERS.items():
            if not only or name in only:
                say(f"starting {name}")
                found.append(start(stack))
        yield [place for place in found if not only or place.name in only]


def _memory() -> Place:
    async def open_raw() -> raw.Raw:
        return raw.RawMemory()

    return Place("memory", "memory://", f"Python {platform.python_version()}", open_raw)


def _sqlite(folder: Path) -> Place:
    async def open_raw() -> raw.Raw:
        return raw.RawSqlite(folder / "raw.db")

    import sqlite3

    url = f"sqlite:///{folder}/bench.db"
    return Place("sqlite", url, f"SQLite {sqlite3.sqlite_version}, synchronous=FULL", open_raw)


def _postgres(stack: ExitStack) -> Place:
    server = postgres.PostgresServer().start()
    stack.callback(server.close)
    url = stack.enter_context(postgres.fresh_database(server))
    return Place("postgres", url, server.version, lambda: raw.RawPostgres.open(url))


def _mysql(stack: ExitStack) -> Place:
    server = mysql.MysqlServer().start()
    stack.callback(server.close)
    url = stack.enter_context(mysql.fresh_database(server))
    return Place("mysql", url, server.version, lambda: raw.RawMysql.open(url))


def _mongo(stack: ExitStack) -> Place:
    server = mongo.MongoServer().start()
    stack.callback(server.close)
    url = stack.enter_context(mongo.fresh_database(server))
    return Place("mongo", url, server.version, lambda: raw.RawMongo.open(url))


def _redis(stack: ExitStack) -> Place:
    server = redis.RedisServer().start()
    stack.callback(server.close)
    version = f"{server.version}, appendfsync always"
    return Place("redis", server.url, version, lambda: raw.RawRedis.open(server.url))


def _libsql(stack: ExitStack) -> Place:
    server = sqld.SqldServer().start()
    stack.callback(server.close)
    url = server.url
    return Place("libsql", f"libsql+{url}", server.version, lambda: raw.RawLibsql.open(url))


SERVERS: dict[str, Callable[[ExitStack], Place]] = {
    "postgres": _postgres,
    "mysql": _mysql,
    "mongo": _mongo,
    "redis": _redis,
    "libsql": _libsql,
}


class Bench:
    """The numbers of one store."""

    def __init__(self, place: Place, plan: Plan) -> None:
        self.place = place
        self.plan = plan
        self._count = 0

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{what}-{self._count}"

    async def measure(self) -> dict[str, Any]:
        """Give every number of this store, perdure and raw driver by turns."""
        store, driver = self.place.open(), await self.place.open_raw()
        try:
            await workloads.one_run(store, "warm", 20)
            numbers: dict[str, Any] = {"version": self.place.version}
            numbers["A"] = [await self._lengths(store, driver, n) for n in self.plan.lengths]
            numbers["B"] = await self._crowds(store, driver)
            numbers["turn"] = median([await workloads.loop_turn() for _ in range(5)])
            numbers["C"] = await self._median(lambda: workloads.resume(store, self._name("c")))
            numbers["start"] = await self._median(
                lambda: workloads.first_step(store, self._name("s")), 15
            )
            numbers["E"] = await self._median(
                lambda: workloads.due_runs(store, self._name("e"), self.plan.due), 3
            )
        finally:
            await driver.close()
            await store.close()
        return numbers

    async def _median(self, work: Callable[[], Awaitable[float]], times: int = 0) -> float:
        return median([await work() for _ in range(times or self.plan.repeats)])

    async def _lengths(self, store: Store, driver: raw.Raw, count: int) -> dict[str, float]:
        ours, limit = [], []
        for _ in range(max(self.plan.repeats, 30 // count)):
            run = self._name("raw")
            limit.append(
                await workloads.timed(_ones(driver, run, min(count, 1000))) / min(count, 1000)
            )
            ours.append(
                await workloads.timed(workloads.one_run(store, self._name("a"), count)) / count
            )
        took, least = median(ours) * 1e6, median(limit) * 1e6
        say(f"  A {count:>5} steps: {took:8.0f} µs a step, raw {least:8.0f}")
        return {"steps": count, "perdure": median(ours), "raw": median(limit)}

    async def _crowds(self, store: Store, driver: raw.Raw) -> dict[str, Any]:
        limits: list[float] = []
        by_crowd: dict[int, list[float]] = {runs: [] for runs in self.plan.crowds}
        for _ in range(self.plan.repeats):
            began = workloads.now()
            for batch in range(10):
                await driver.many(self._name("shared"), batch * 200, 200)
            limits.append(2000 / (workloads.now() - began))
            for runs, rates in by_crowd.items():
                rates.append(await workloads.many_runs(store, self._name("b"), runs))
        rates = {runs: median(found) for runs, found in by_crowd.items()}
        say("  B " + ", ".join(f"{runs} runs: {rate:,.0f}/s" for runs, rate in rates.items()))
        say(f"    raw driver, batches of 200: {median(limits):,.0f} rows/s")
        return {"perdure": rates, "raw": median(limits)}


async def _ones(driver: raw.Raw, run: str, count: int) -> None:
    for n in range(count):
        await driver.one(run, n)


async def engine(plan: Plan) -> dict[str, float]:
    """Measure the engine alone, in turns of the event loop."""
    turns, steps, replays, long, short = [], [], [], [], []
    for _ in range(20):
        turns.append(await workloads.loop_turn(1000))
        step, replay, bare = await workloads.plain_step(500)
        steps.append(step - bare)
        replays.append(replay)
        short.append((await workloads.plain_step(10))[0])
    long += [(await workloads.plain_step(5000))[0] for _ in range(3)]
    turn = min(turns)
    return {
        "turn": turn,
        "step": min(steps) / turn,
        "replay": min(replays) / turn,
        "5000 against 10": min(long) / min(short),
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", default=bool(os.environ.get("FAST")))
    parser.add_argument("--only", default="", help="stores, separated by commas")
    parser.add_argument("--no-peers", action="store_true")
    chosen = parser.parse_args()
    plan = (
        Plan(repeats=3, lengths=(10, 100, 1000), crowds=(1, 50, 200), due=500)
        if chosen.fast
        else Plan()
    )
    only = set(filter(None, chosen.only.split(",")))
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "perdure": importlib.metadata.version("perdure"),
        "repeats": plan.repeats,
        "stores": {},
        "peers": {},
    }
    say("engine: a step without a store")
    results["engine"] = await engine(plan)
    with places(only) as found:
        for place in found:
            say(f"{place.name}: {place.version}")
            results["stores"][place.name] = await Bench(place, plan).measure()
        if not chosen.no_peers:
            results["peers"] = peers.measure(found, say, lengths=plan.lengths[:3])
    return report.write(results, ROOT / "bench" / "results", say)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
