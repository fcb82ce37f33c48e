"""Measure perdure, the raw driver and other libraries alternately, in one run.

    python -m bench.run [--fast] [--only sqlite,postgres] [--no-peers] [--out FOLDER]

The machine may be noisy, so compare only values of the same run. Each value is a median. The
garbage collector of this process and of its workers is set as `perdure worker` sets it.
"""

import argparse
import asyncio
import importlib.metadata
import os
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import TypeAlias

from bench import migrate, peers, raw, report, search, wake_up, workers, workloads
from bench.numbers import BULK, PERDURE, RAW, SHARED, TURN, WORKS, Key, Numbers, format_value
from bench.places import STARTERS, Place, place
from bench.timing import loop_turn, now
from perdure.cli.garbage import collector_for
from perdure.runtime.definition import Definition
from perdure.store import Store, can_notify
from perdure.stores import MemoryStore

Turn: TypeAlias = Callable[[], Awaitable[float | None]]
WRITERS = 200
PEER_TURNS = 3
WARM = 600
FOOTPRINTS = (10, 100, 1000)
ROUNDS = (1000, 10_000)
BEGAN = now()


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    `peers` says which sizes of a workload other libraries take part in, and at what size: some
    would take minutes for what takes perdure a second.
    """

    repeats: int = 5
    heavy_repeats: int = 3
    lengths: tuple[int, ...] = (10, 100, 1000, 5000)
    crowds: tuple[int, ...] = (1, 10, 50, 200, 1000)
    due: int = 1000
    sleepers: int = 5000
    migrated: int = migrate.ROWS
    searched: int = 1_000_000
    shared: int = 3000
    wake_ups: int = 60
    idle_seconds: float = 20
    peers: Mapping[tuple[str, int], int] = field(
        default_factory=lambda: {
            **{("A", steps): steps for steps in (10, 100, 1000)},
            **{("B", runs): runs for runs in (10, 200)},
            ("C", 1000): 1000,
            ("due", 1000): 100,
        }
    )


FAST = Plan(
    repeats=3,
    lengths=(10, 100, 1000),
    crowds=(1, 50, 200),
    due=300,
    sleepers=2000,
    migrated=0,
    searched=0,
    shared=1000,
    wake_ups=10,
    idle_seconds=2,
    peers={("A", 10): 10, ("A", 100): 100, ("B", 50): 50, ("C", 1000): 100, ("due", 300): 30},
)


def say(text: str) -> None:
    """Print the progress."""
    print(f"[{now() - BEGAN:6.1f} s] {text}", flush=True)


async def take_turns(numbers: Numbers, repeats: int, turns: Mapping[Key, Turn]) -> None:
    """Measure every contender in each repetition, and print the medians.

    Every other repetition is in reverse order, so that no contender always follows the same other
    one.
    """
    for repeat in range(repeats):
        for key, measure in list(turns.items())[:: -1 if repeat % 2 else 1]:
            if (value := await measure()) is not None:
                numbers.add(key, value)
    lines: dict[str, list[str]] = {}
    for key in turns:
        if (value := numbers.get(*key)) is not None:
            label = WORKS[key.work].label.format(size=key.size)
            lines.setdefault(f"{key.place:<8} {label:<48}", []).append(
                f"{key.who} {format_value(key.work, value)}"
            )
    for label, values in lines.items():
        say(f"{label} {' · '.join(values)}")


async def sustained(measure: Callable[[], Awaitable[float]]) -> float:
    """Return the median of three measurements in a row: one takes a tenth of a second, and the
    first one after another contender starts with cold caches.
    """
    return median([await measure() for _ in range(3)])


@asynccontextmanager
async def opened(
    place: Place, open_raw: Callable[[], Awaitable[raw.Raw]]
) -> AsyncIterator[tuple[Store, raw.Raw]]:
    """Open the store and the raw driver, and warm them up.

    The first values of a fresh store were several times its later ones, for unknown reasons.
    """
    store, driver = place.open(), await open_raw()
    try:
        await workloads.one_run(store, "warm", WARM)
        await raw.ones(driver, "warm", WARM)
        yield store, driver
    finally:
        await driver.close()
        await store.close()


@asynccontextmanager
async def started_peers(place: Place, names: list[str]) -> AsyncIterator[list[peers.Peer]]:
    """Start the other libraries that support this kind of store; skip those that fail."""
    started: list[peers.Peer] = []
    for name in names if place.peer_url else ():
        try:
            started.append(await peers.Peer.start(name, place.peer_url.format(peer=name)))
        except peers.PeerFailed as error:
            say(f"{name} on {place.name} does not start and is left out: {error}")
    try:
        yield started
    finally:
        for peer in started:
            await peer.close()


class Bench:
    """Everything that is measured on one store."""

    def __init__(
        self,
        place: Place,
        plan: Plan,
        numbers: Numbers,
        store: Store,
        driver: raw.Raw,
        peers: list[peers.Peer],
    ) -> None:
        self._place = place
        self._plan = plan
        self._numbers = numbers
        self._store = store
        self._driver = driver
        self._peers = peers
        self._count = 0

    async def measure(self) -> None:
        """Measure every workload."""
        for steps in self._plan.lengths:
            await self._length(steps)
        await self._resume()
        for runs in self._plan.crowds:
            await self._crowd(runs)
        await self._due()
        for steps in FOOTPRINTS if self._driver.counts_writes else ():
            await self._disk(steps)
        if can_notify(self._store):
            await self._reaction()
        if self._place.name in ("sqlite", "postgres"):
            await self._sleeping()
            await self._rounds()
        if self._place.name == "postgres":
            await self._processes()

    async def _length(self, steps: int) -> None:
        turns: dict[str, Turn] = {
            RAW: lambda: raw.ones(self._driver, self._name(), min(steps, 1000)),
            PERDURE: lambda: workloads.one_run(self._store, self._name(), steps),
        }
        repeats = self._plan.repeats if steps <= 1000 else self._plan.heavy_repeats
        await self._turns("A", steps, max(repeats, min(15, 1000 // steps)), turns)

    async def _resume(self) -> None:
        turns: dict[str, Turn] = {
            TURN: loop_turn,
            PERDURE: lambda: workloads.resume(self._store, self._name(), 1000),
        }
        await self._turns("C", 1000, self._plan.repeats, turns)
        turns = {
            RAW: lambda: raw.ones(self._driver, self._name(), 2),
            PERDURE: lambda: workloads.first_step(self._store, self._name()),
        }
        await self._turns("start", 1, 25, turns)

    async def _crowd(self, runs: int) -> None:
        turns: dict[str, Turn] = {
            SHARED: lambda: sustained(lambda: raw.shared(self._driver, self._name(), runs)),
            PERDURE: lambda: sustained(
                lambda: workloads.many_runs(self._store, self._name(), runs)
            ),
        }
        if runs == WRITERS:
            turns[BULK] = lambda: raw.bulk(self._driver, self._name())
        await self._turns("B", runs, max(self._plan.repeats, 15 // runs), turns)

    async def _due(self) -> None:
        runs = self._plan.due
        turns: dict[str, Turn] = {
            SHARED: lambda: raw.shared(self._driver, self._name(), WRITERS),
            PERDURE: lambda: workloads.due_runs(self._store, self._name(), runs),
        }
        await self._turns("due", runs, self._plan.heavy_repeats, turns)
        turns = {PERDURE: lambda: workloads.signalled_runs(self._store, self._name(), runs)}
        await self._turns("signals", runs, self._plan.heavy_repeats, turns)

    async def _disk(self, steps: int) -> None:
        async def written(work: Callable[[], Awaitable[float]]) -> float:
            before = await self._driver.written()
            await work()
            return (await self._driver.written() - before) / steps

        turns: dict[str, Turn] = {
            RAW: lambda: written(lambda: raw.ones(self._driver, self._name(), steps)),
            PERDURE: lambda: written(
                lambda: workloads.one_run(self._store, self._name(), steps, keep=True)
            ),
        }
        await self._turns("disk", steps, 3, turns)

    async def _reaction(self) -> None:
        turns: dict[str, Turn] = {
            RAW: lambda: raw.ones(self._driver, self._name(), 10),
            PERDURE: lambda: workloads.reaction(self._store, self._name()),
        }
        await self._turns("react", 1, self._plan.repeats, turns)

    async def _sleeping(self) -> None:
        await self._suspended("sleeping", self._plan.sleepers, workloads.sleeping_workflow)
        await self._suspended("retrying", self._plan.sleepers, workloads.retrying_workflow)

    async def _suspended(self, work: str, runs: int, definition: Definition[None, None]) -> None:
        turns: dict[str, Turn] = {
            PERDURE: lambda: workloads.suspended_bytes(self._store, self._name(), runs, definition)
        }
        await self._turns(work, runs, 3, turns)

    async def _rounds(self) -> None:
        turns = {self._key("round", rounds): self._loop(rounds) for rounds in ROUNDS}
        await take_turns(self._numbers, 1, turns)

    def _loop(self, rounds: int) -> Turn:
        return lambda: workloads.last_rounds(self._store, self._name(), rounds)

    async def _processes(self) -> None:
        turns = {self._key("workers", n): self._workers(n) for n in (1, 2, 4)}
        await take_turns(self._numbers, self._plan.heavy_repeats, turns)

    def _workers(self, processes: int) -> Turn:
        async def turn() -> float:
            outcome = await workers.together(
                self._store, self._place.url, self._name(), processes, self._plan.shared
            )
            self._numbers.add(self._key("twice", processes), outcome.twice)
            return outcome.rate

        return turn

    async def _turns(self, work: str, size: int, repeats: int, turns: dict[str, Turn]) -> None:
        lanes = {self._key(work, size, who): turn for who, turn in turns.items()}
        await take_turns(self._numbers, repeats, {**lanes, **self._peer_turns(work, size)})

    def _peer_turns(self, work: str, size: int) -> dict[Key, Turn]:
        own_size = self._plan.peers.get((work, size))
        if own_size is None:
            return {}
        return {
            self._key(work, own_size, peer.name): self._peer_turn(peer, work, own_size)
            for peer in self._peers
            if work in peer.workloads
        }

    def _peer_turn(self, peer: peers.Peer, work: str, size: int) -> Turn:
        remaining = PEER_TURNS

        async def turn() -> float | None:
            nonlocal remaining
            remaining -= 1
            if remaining < 0 or peer not in self._peers:
                return None
            try:
                return await peer.ask(work, size)
            except peers.PeerFailed as error:
                self._peers.remove(peer)
                say(f"{peer.name} on {self._place.name} fails and is left out: {error}")
                return None

        return turn

    def _key(self, work: str, size: int, who: str = PERDURE) -> Key:
        return Key(self._place.name, work, size, who)

    def _name(self) -> str:
        self._count += 1
        return f"run-{self._count}"


async def measure_alone(numbers: Numbers) -> None:
    """Measure what needs no server: the engine without a store, and the memory store.

    The bytes passed to a store (F) are the same for all of them.
    """
    store, ids = MemoryStore(), map(str, count())
    turns: dict[Key, Turn] = {
        Key("engine", "engine", 500, TURN): loop_turn,
        Key("engine", "engine", 500): lambda: workloads.plain_step(500),
        Key("engine", "engine", 10): lambda: workloads.plain_step(10),
        Key("engine", "engine", 5000): lambda: workloads.plain_step(5000),
        Key("engine", "replay", 500): lambda: workloads.plain_replay(500),
    }
    await take_turns(numbers, 9, turns)
    turns = {
        Key("memory", "D", 1000, TURN): loop_turn,
        Key("memory", "D", 1000): lambda: workloads.one_run(store, next(ids), 1000),
        Key("memory", "call", 1000): lambda: workloads.one_run(
            store, next(ids), 1000, body=workloads.calls
        ),
        Key("memory", "ends", WRITERS): lambda: workloads.ends(store, next(ids), WRITERS),
        Key("memory", "B", WRITERS): lambda: workloads.many_runs(store, next(ids), WRITERS),
    }
    await take_turns(numbers, 9, turns)

    def handed(steps: int) -> Turn:
        return lambda: workloads.bytes_handed(store, next(ids), steps)

    turns = {Key("memory", "bytes", steps): handed(steps) for steps in FOOTPRINTS}
    await take_turns(numbers, 3, turns)


async def measure_place(
    place: Place, plan: Plan, numbers: Numbers, names: list[str]
) -> dict[str, str]:
    """Measure everything on one store; return the versions of the libraries that took part."""
    versions: dict[str, str] = {}
    if place.open_raw is not None:
        async with (
            opened(place, place.open_raw) as (store, driver),
            started_peers(place, names) as others,
        ):
            versions = {f"{peer.name} on {place.name}": peer.version for peer in others}
            await Bench(place, plan, numbers, store, driver, others).measure()
    await measure_wake_ups(place.name, place.url, plan, numbers)
    return versions


async def measure_wake_ups(name: str, url: str, plan: Plan, numbers: Numbers) -> None:
    """Measure how soon a worker starts runs, and what it costs while idle (I)."""
    measured = await wake_up.measure(url, plan.wake_ups, plan.idle_seconds, plan.heavy_repeats)
    for work, values in measured.items():
        for value in values:
            numbers.add(Key(name, work, 1), value)
        say(f"{name:<8} {WORKS[work].label:<54} {format_value(work, median(values))}")


async def measure_migration(numbers: Numbers, name: str, runs: int) -> None:
    """Measure the migration of a database of an earlier version, once: filling it takes longer."""
    turns: dict[Key, Turn] = {Key(name, "migrate", runs): lambda: migrate.first_opening(name, runs)}
    await take_turns(numbers, 1, turns)


async def measure_searches(numbers: Numbers, name: str, runs: int) -> None:
    """Measure searches among many runs (J)."""
    async for work, size, seconds in search.measure(name, runs):
        numbers.add(Key(name, work, size), seconds)
        label = WORKS[work].label.format(size=size)
        say(f"{name:<8} {label:<54} {format_value(work, seconds)}")


async def main() -> None:
    """Measure, write the results, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", default=bool(os.environ.get("FAST")))
    parser.add_argument("--only", default=",".join(STARTERS), help="stores, separated by commas")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    plan = FAST if chosen.fast else Plan()
    numbers = Numbers()
    about = report.About(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        perdure=importlib.metadata.version("perdure"),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        repeats=min(plan.repeats, plan.heavy_repeats),
    )
    names = [] if chosen.no_peers else peers.install(say)
    with collector_for(max(plan.crowds)):
        await measure_alone(numbers)
        await measure_wake_ups("memory", wake_up.MEMORY, plan, numbers)
        for name in filter(None, chosen.only.split(",")):
            say(f"starting {name}")
            with place(name) as here:
                about.places[name] = f"{here.version}; {here.settings}"
                about.peers.update(await measure_place(here, plan, numbers, names))
            if plan.migrated and name in migrate.TARGETS:
                await measure_migration(numbers, name, plan.migrated)
            if plan.searched and name in search.PLACES:
                await measure_searches(numbers, name, plan.searched)
    print(report.write(about, numbers, chosen.out))
    say("done")


if __name__ == "__main__":
    asyncio.run(main())
