"""Many programs on a real store: worker processes, and a nemesis that disturbs them."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.process import BaseProcess
from random import Random
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from perdure import Runtime
from tests.durability.forked import forked
from tests.durability.verifier import language as lang
from tests.durability.verifier.checker import Evidence
from tests.durability.verifier.log import ErrorLog, FileLog, Line, read_log
from tests.durability.verifier.operator import Outside
from tests.durability.verifier.places import Place, create_table, rows
from tests.durability.verifier.report import Tally
from tests.durability.verifier.worker import Settings, runtime, work
from tests.servers.proxy import TcpProxy

WORKERS = 3
DEADLINE = 60.0


class Nemesis:
    """Worker processes that are killed, paused, drained, disconnected and started again."""

    def __init__(
        self, settings: Settings, random: Random, proxy: TcpProxy | None, tally: Tally
    ) -> None:
        self._settings = settings
        self._random = random
        self._proxy = proxy
        self._tally = tally
        self._context = forked()
        self._started = 0
        self._alive = [self._start() for _ in range(WORKERS)]
        self._paused: set[asyncio.Task[None]] = set()

    def _start(self) -> BaseProcess:
        self._started += 1
        settings = replace(self._settings, process=f"w{self._started}")
        process = self._context.Process(target=work, args=(settings,))
        process.start()
        return process

    async def trouble(self, seconds: float) -> None:
        """Disturb the workers for the given time."""
        until = asyncio.get_running_loop().time() + seconds
        harms = [self._kill, self._kill, self._pause, self._drain]
        harms += [self._cut, self._cut] if self._proxy is not None else []
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(self._random.uniform(0.05, 0.6))
            await self._random.choice(harms)()
        await asyncio.gather(*self._paused)

    def _take(self) -> BaseProcess:
        return self._alive.pop(self._random.randrange(len(self._alive)))

    async def _kill(self) -> None:
        victim = self._take()
        victim.kill()
        await asyncio.to_thread(victim.join)
        self._alive.append(self._start())
        self._tally.kills += 1

    async def _pause(self) -> None:
        self._paused.add(asyncio.ensure_future(self._stop_and_continue(self._take())))

    async def _stop_and_continue(self, victim: BaseProcess) -> None:
        """Stop a worker for longer than its lease, and continue it."""
        assert victim.pid is not None
        substitute = self._start()
        self._alive.append(substitute)
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.sleep(self._settings.lease + 0.7)
        os.kill(victim.pid, signal.SIGCONT)
        self._tally.pauses += 1
        self._alive.append(victim)

    async def _drain(self) -> None:
        victim = self._take()
        victim.terminate()
        self._alive.append(self._start())
        self._paused.add(asyncio.ensure_future(asyncio.to_thread(victim.join, 10)))
        self._tally.drains += 1

    async def _cut(self) -> None:
        assert self._proxy is not None
        match self._random.choice(("cut", "reply", "refuse")):
            case "cut":
                self._proxy.cut()
            case "reply":
                self._proxy.drop_next_reply()
            case _:
                self._proxy.refuse()
                await asyncio.sleep(0.3)
                self._proxy.accept()
        self._tally.cuts += 1

    async def stop(self) -> None:
        """Stop all workers, gracefully if possible."""
        for process in self._alive:
            process.terminate()
        for process in self._alive:
            await asyncio.to_thread(process.join, 5)
            process.kill()
            await asyncio.to_thread(process.join)


async def run_programs(
    place: Place, programs: Sequence[lang.Body], seed: str, trouble: float, tally: Tally
) -> list[Evidence]:
    """Run programs at the same time in disturbed processes; return what happened to each."""
    random = Random(f"cluster {seed}")
    create_table(place)
    # Programs leave failed tasks behind on purpose, including those that a retry runs here.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        settings = _settings(place, folder, seed, random)
        log = FileLog(settings.log)
        stack.callback(log.close)
        stack.enter_context(ErrorLog(log, settings.process, settings.first_run))
        client = runtime(replace(settings, always_replay=False), log)
        stack.push_async_callback(client.store.close)
        proxy = None
        if place.on_a_server:
            proxy = await stack.enter_async_context(TcpProxy.before(place.url))
            settings = replace(settings, url=place.store_url(proxy.url))
        outsides = _outsides(client, programs, seed, log, settings)
        nemesis = Nemesis(settings, random, proxy, tally)
        stack.push_async_callback(nemesis.stop)
        tally.runs += len(programs)
        troubling = asyncio.ensure_future(nemesis.trouble(trouble))
        await asyncio.gather(*(each.see_to_the_end(trouble, DEADLINE) for each in outsides))
        await troubling
        for each in outsides:
            await each.read()
        effects, lines = rows(place), read_log(settings.log)
    return [_evidence(each, lines, effects) for each in outsides]


def _settings(place: Place, folder: str, seed: str, random: Random) -> Settings:
    return Settings(
        process="op",
        store=place.store,
        url=place.store_url(),
        options=place.options,
        folder=folder,
        first_run=_run(seed, 0),
        lease=place.lease,
        suspend_after=random.choice((0.05, 0.2)),
        always_replay=random.random() < 0.15,
    )


def _run(seed: str, number: int) -> str:
    return f"s{seed}r{number}"


def _outsides(
    client: Runtime, programs: Sequence[lang.Body], seed: str, log: FileLog, settings: Settings
) -> list[Outside]:
    return [
        Outside(
            client,
            _run(seed, number),
            program,
            log,
            heal=settings.heal,
            random=Random(f"{seed} outside {number}"),
            poll=0.25,
        )
        for number, program in enumerate(programs)
    ]


def _evidence(
    outside: Outside, lines: Sequence[Line], effects: Sequence[tuple[str, str, str]] | None
) -> Evidence:
    mine = None
    if effects is not None:
        mine = [(path, token) for run, path, token in effects if run == outside.run]
    return Evidence(outside.run, outside.program, lines, outside.ends, mine, outside.children)
