"""A worker process of the cluster: it runs programs until it is killed or stopped."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from perdure import Runtime, Worker
from perdure.stores import open_store
from tests.durability.verifier.interpreter import World
from tests.durability.verifier.log import ErrorLog, FileLog, Log, Witness
from tests.durability.verifier.places import INSERTS


class Settings(msgspec.Struct, frozen=True):
    """The arguments of a worker process."""

    process: str
    store: str
    url: str
    options: dict[str, Any]
    folder: str
    first_run: str
    lease: float
    suspend_after: float
    always_replay: bool

    def healed(self, run: str) -> bool:
        """Return whether an operator has fixed what makes this run fail."""
        return (Path(self.folder) / f"{run}.healed").exists()

    def heal(self, run: str) -> None:
        """Fix what makes this run fail, for all processes."""
        (Path(self.folder) / f"{run}.healed").touch()

    @property
    def log(self) -> str:
        """The file that all processes log to."""
        return f"{self.folder}/log"


def runtime(settings: Settings, log: Log) -> Runtime:
    """Return a runtime that runs programs and logs them."""
    store = open_store(settings.url, **settings.options)
    insert = INSERTS.get(settings.store)
    world = World(settings.process, log, healed=settings.healed, insert=insert, threads=True)
    return Runtime(
        Witness(store, log, settings.process),
        workflows=world.definitions(),
        lease_ttl=settings.lease,
        suspend_after=settings.suspend_after,
        always_replay=settings.always_replay,
    )


async def _main(settings: Settings) -> None:
    log = FileLog(settings.log)
    # Programs leave failed tasks behind on purpose.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with ErrorLog(log, settings.process, settings.first_run):
        working = runtime(settings, log)
        async with Worker(working, poll=0.1, grace=0.5, max_crashes=10_000) as worker:
            await worker.serve()
        await working.store.close()


def work(settings: Settings) -> None:
    """Work until the process is killed or stopped."""
    asyncio.run(_main(settings))
