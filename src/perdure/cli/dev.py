"""`perdure dev`: worker, dashboard and reload in one command.

This process watches files and reads keys; a child runs the application (`perdure.cli.dev_child`).
The child's stdin is a pipe: `g` lets it begin, `o` opens the dashboard, and its end means that this
process is gone. A new child imports the application while the old one drains.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import click

from perdure.cli.context import Settings, command, message
from perdure.cli.failures import USAGE
from perdure.cli.serving import PORT, TOKEN
from perdure.cli.terminal import keys, within
from perdure.clock import SystemClock
from perdure.engine.tasks import detached

LOOK, GRACE, LAST_GRACE = 0.1, 1.0, 5.0
"""In seconds: how often files are checked, how long runs may continue before their leases are
released, and how long the child may then take to end.
"""

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "build", "dist", "venv", "site-packages"}

CLOCK = SystemClock()


@command
@click.argument("app", required=False, metavar="[MODULE:NAME]")
@PORT
async def dev(settings: Settings, app: str | None, port: int) -> None:
    """Run worker and dashboard, and restart them when a file changes.

    Runs continue after a restart where they were. All *.py files below the working directory are
    watched.
    """
    settings.app = app or settings.app
    happenings: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, happenings.put_nowait, "q")
    with keys(happenings):
        code = await Parent(settings, port, happenings).run()
    click.get_current_context().exit(code)


class Parent:
    """Starts the child, and restarts it on request.

    An event is a key (`o`, `r`, `q`) or the path of a file that changed.
    """

    def __init__(self, settings: Settings, port: int, happenings: asyncio.Queue[str]) -> None:
        self._settings = settings
        self._port = port
        self._happenings = happenings
        self._child: Process | None = None
        self._code = 0
        self._token = SystemRandom().randbytes(16).hex()

    async def run(self) -> int:
        """Run until `q` is pressed or a signal arrives, and return the exit code."""
        watching = detached(self._watch_files())
        try:
            await self._start()
            while (happening := await self._happenings.get()) != "q":
                await self._handle(happening)
        finally:
            watching.cancel()
            await self._stop()
        return self._code

    async def _handle(self, happening: str) -> None:
        if happening == "o":
            self._tell("o")
        elif happening == "r" or happening.endswith(".py"):
            await self._start("--since", str(CLOCK.monotonic()), "--changed", happening)

    async def _start(self, *options: str) -> None:
        app = ["--app", self._settings.app] if self._settings.app else []
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perdure", *app, "dev-child", "--port", str(self._port)),
            *options,
            stdin=PIPE,
            # After a restart, the browser stays signed in to the dashboard.
            env={**os.environ, TOKEN: self._token},
            # Ctrl-C is for this process alone, which lets the child drain.
            start_new_session=True,
        )
        await self._stop()
        self._child = child
        self._tell("g")
        detached(self._wait_for(child, is_first=not options))

    async def _wait_for(self, child: Process, is_first: bool) -> None:
        code = await child.wait()
        if child is not self._child:
            return
        if is_first and code == USAGE:
            # Changing a file does not fix a port in use or a wrong option.
            self._code = code
            self._happenings.put_nowait("q")
        else:
            text = f"The application ended with code {code}. It starts again when a file changes."
            message(self._settings, text)

    def _tell(self, key: str) -> None:
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.write(key.encode())

    async def _stop(self) -> None:
        """End the child: it drains, then releases its leases, then is killed."""
        child, self._child = self._child, None
        if child is None:
            return
        for number, grace in ((signal.SIGTERM, GRACE), (signal.SIGTERM, LAST_GRACE)):
            if await _ends(child, number, grace):
                return
        await _ends(child, signal.SIGKILL, LAST_GRACE)

    async def _watch_files(self) -> None:
        before = modified_files(Path.cwd())
        while True:
            await CLOCK.sleep(LOOK)
            now = modified_files(Path.cwd())
            if changed := sorted(path for path, _ in before.items() ^ now.items()):
                self._happenings.put_nowait(str(Path(changed[0]).relative_to(Path.cwd())))
            before = now


async def _ends(child: Process, number: signal.Signals, seconds: float) -> bool:
    """Send a signal to a child, and return whether it ends within `seconds`."""
    with suppress(ProcessLookupError):
        child.send_signal(number)
    try:
        await within(seconds, child.wait())
    except TimeoutError:
        return False
    return True


def modified_files(folder: Path) -> dict[str, int]:
    """Return when each Python file below a folder was modified."""
    times: dict[str, int] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS:
                continue
            with suppress(OSError):  # it was deleted in the meantime
                if entry.is_dir(follow_symlinks=False):
                    times |= modified_files(Path(entry.path))
                elif entry.name.endswith(".py"):
                    times[entry.path] = entry.stat().st_mtime_ns
    return times
