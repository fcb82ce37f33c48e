"""Limits under many kills: `python -m tests.durability.queue_chaos sqlite postgres --kills 100`.

It prints what was measured for each store, and exits with 1 if a limit was broken, a slot came back
late or too few were in use. It takes about two minutes for each store.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec

from perdure import Runtime
from perdure.clock import SystemClock
from perdure.runtime.definition import Definition
from perdure.store import require_queues
from perdure.stores import open_store
from tests.durability.forked import forked
from tests.durability.lease_history import most_at_once, most_within
from tests.durability.lease_log import (
    Held,
    longest_until_back,
    processes_in_a_call,
    read_leases,
    share_held,
)
from tests.durability.queue_load import LEASE, RATE, SLOTS, Load, paced, slots, work
from tests.durability.verifier.places import PLACES, Place

WORKERS = 4
BACKLOG = 200
WARM_UP = 2.0
TTL, SECOND = timedelta(seconds=LEASE), timedelta(seconds=1)

Window = tuple[datetime, datetime]
now: Callable[[], datetime] = SystemClock().now


class Fact(msgspec.Struct):
    """A measured value, and whether it is acceptable."""

    what: str
    value: str
    is_right: bool = True

    def __str__(self) -> str:
        return f"{self.what:44} {self.value:>12}{'' if self.is_right else '   WRONG'}"


class Workers:
    """Worker processes; `gone` is when each that was killed last worked."""

    def __init__(self, load: Load, queue: str) -> None:
        self._arguments = (load, queue)
        self._random = Random()
        self._stopped: set[int] = set()
        self.gone: dict[int, datetime] = {}
        self.alive = [self._start() for _ in range(WORKERS)]

    def _start(self) -> BaseProcess:
        process = forked().Process(target=work, args=self._arguments)
        process.start()
        return process

    def _pick(self) -> tuple[BaseProcess, int]:
        running = [(each, each.pid or 0) for each in self.alive if each.pid not in self._stopped]
        return self._random.choice(running)

    def kill_one(self) -> None:
        """Kill a worker and start another."""
        victim, pid = self._pick()
        victim.kill()
        victim.join()
        self.gone[pid] = now()
        self.alive.remove(victim)
        self.alive.append(self._start())

    def stop_one(self) -> None:
        """Stop a worker for longer than its leases last."""
        _, pid = self._pick()
        self._stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(LEASE * 1.5, self._continue, pid)

    def _continue(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)

    def end(self) -> None:
        """Kill all workers."""
        for process in self.alive:
            process.kill()
            process.join()


class Feed:
    """Keeps enough runs waiting that there is always work."""

    def __init__(self, runtime: Runtime, definition: Definition[str, None], log: str) -> None:
        self._runtime, self._definition, self._log = runtime, definition, log

    async def fill(self) -> None:
        queue = {self._definition.name: BACKLOG}
        waiting = len(await require_queues(self._runtime.store).due(now(), BACKLOG, queues=queue))
        if waiting < BACKLOG:
            await self._runtime.trigger_many(self._definition, [self._log] * BACKLOG)

    async def keep_full(self) -> None:
        while True:
            await self.fill()
            await asyncio.sleep(0.1)


async def disturb_slots(workers: Workers, kills: int, pause: float) -> None:
    """Kill workers one after another, and stop another one every sixth time."""
    for number in range(kills):
        await asyncio.sleep(pause)
        workers.kill_one()
        if number % 6 == 5:
            workers.stop_one()


async def disturb_rate(workers: Workers, seconds: float) -> None:
    """Kill one worker in the middle."""
    await asyncio.sleep(seconds / 2)
    workers.kill_one()
    await asyncio.sleep(seconds / 2)


def judge_slots(log: Path, window: Window, gone: dict[int, datetime]) -> list[Fact]:
    """Return what the leases say about the limit of runs at once."""
    leases = read_leases(log)
    unseen = [gone[pid] for pid in processes_in_a_call(log) if pid in gone]
    spans = [lease.span for lease in leases]
    alive = [(each.begin, min(each.end, gone.get(each.pid, each.end))) for each in leases]
    most, back = most_at_once(spans), longest_until_back(leases, TTL, window[1], unseen)
    hit = {each.pid for each in leases if each.begin < gone.get(each.pid, each.begin) < each.end}
    held, working = share_held(spans, SLOTS, window), share_held(alive, SLOTS, window)
    return [
        Fact("leases of permits", f"{len(leases):,}"),
        Fact("workers killed, and with permits", f"{len(gone)}, {len(hit)}", bool(hit)),
        Fact("killed during a call", f"{len(unseen)}"),
        Fact("holders at once at most", f"{most} of {SLOTS}", most == SLOTS),
        Fact("back after the last renewal, at most", f"{_seconds(back)}", back <= TTL + SECOND),
        Fact("held on average", f"{held:.1%}", held >= 0.95),
        Fact("held by processes that were alive", f"{working:.1%}"),
    ]


def judge_rate(leases: Sequence[Held], window: Window, begun: Sequence[datetime]) -> list[Fact]:
    """Return what the leases say about the limit of runs per second."""
    # A permit that was returned was not used for a run.
    granted = [each.begin for each in leases if not each.is_returned]
    most = most_within(granted, SECOND)
    mean = mean_rate([time for time in begun if window[0] <= time < window[1]])
    return [
        Fact("runs begun", f"{len(begun):,}"),
        Fact("permits used in one second at most", f"{most}", most <= RATE),
        Fact(f"{RATE + 1} runs began within, at least", _seconds(shortest(begun, RATE + 1))),
        Fact("runs begun per second on average", f"{mean:.1f}", mean >= 0.98 * RATE),
    ]


def shortest(times: Sequence[datetime], count: int) -> timedelta:
    """Return the shortest time in which so many of the times are.

    A run begins a little after its permit was granted, so this can be less than the rate's period.
    """
    ordered = sorted(times)
    pairs = zip(ordered, ordered[count - 1 :], strict=False)
    return min((last - first for first, last in pairs), default=timedelta.max)


def mean_rate(times: Sequence[datetime]) -> float:
    """Return the runs per second, from the time in which as many as the rate began.

    Runs begin in bursts, so their number would depend on where the window begins.
    """
    ordered = sorted(times)
    pairs = list(zip(ordered, ordered[RATE:], strict=False))
    total = sum((last - first for first, last in pairs), timedelta(0))
    return RATE * len(pairs) / total.total_seconds()


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():.2f} s"


def begin_times(log: str) -> list[datetime]:
    """Return when the steps began."""
    booted = now() - timedelta(seconds=SystemClock().monotonic())
    lines = Path(log).read_text().splitlines()
    return [booted + timedelta(microseconds=int(line.split(" ", 1)[0]) / 1000) for line in lines]


async def under_load(
    load: Load,
    definition: Definition[str, None],
    disturb: Callable[[Workers], Awaitable[None]],
) -> tuple[Window, dict[int, datetime]]:
    """Disturb workers while there is work; return when that was, and when each was killed."""
    async with open_store(load.url, **load.options) as store:
        feed = Feed(Runtime(store, workflows=[definition]), definition, load.steps)
        await feed.fill()
        workers = Workers(load, definition.name)
        feeding = asyncio.ensure_future(feed.keep_full())
        try:
            await asyncio.sleep(WARM_UP)
            first = now()
            await disturb(workers)
            return (first, now()), workers.gone
        finally:
            feeding.cancel()
            workers.end()


async def hold_slots(place: Place, folder: Path, kills: int, pause: float) -> list[Fact]:
    """Kill and stop workers that share slots."""
    load = _load(place, folder / "slots")
    window, gone = await under_load(load, slots, partial(disturb_slots, kills=kills, pause=pause))
    return judge_slots(Path(load.leases), window, gone)


async def keep_pace(place: Place, folder: Path, seconds: float) -> list[Fact]:
    """Start as many runs as the rate permits, and kill one worker."""
    load = _load(place, folder / "paced")
    window, _ = await under_load(load, paced, partial(disturb_rate, seconds=seconds))
    return judge_rate(read_leases(Path(load.leases)), window, begin_times(load.steps))


def _load(place: Place, folder: Path) -> Load:
    folder.mkdir()
    return Load(place.store_url(), place.options, f"{folder}/leases.log", f"{folder}/steps.log")


async def measure(name: str, kills: int, pause: float, seconds: float) -> list[Fact]:
    """Return what was measured on one store."""
    with PLACES[name]() as place, TemporaryDirectory() as folder:
        facts = await hold_slots(place, Path(folder), kills, pause) if kills else []
        return facts + (await keep_pace(place, Path(folder), seconds) if seconds else [])


def main() -> int:
    """Measure the stores that the command line names; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="queue_chaos", description=__doc__)
    parser.add_argument("stores", nargs="+", choices=PLACES)
    parser.add_argument("--kills", type=int, default=100, help="of workers that share slots")
    parser.add_argument("--pause", type=float, default=0.6, help="seconds between two kills")
    parser.add_argument("--seconds", type=float, default=60, help="of runs at a limited rate")
    options = parser.parse_args()
    is_right = True
    for name in options.stores:
        facts = asyncio.run(measure(name, options.kills, options.pause, options.seconds))
        print(f"{name}\n" + "\n".join(f"  {fact}" for fact in facts), flush=True)
        is_right = is_right and all(fact.is_right for fact in facts)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
