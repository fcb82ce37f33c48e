"""The command as a process of its own, with or without a terminal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect

PYTHON = (sys.executable, "-m", "perdure")

APP = """
import asyncio
from pathlib import Path

from perdure import Runtime, workflow

VERSION = 1

@workflow("order")
async def order(step, payload: dict) -> str:
    await step("charge", lambda: "receipt")
    await step.sleep("settle", payload.get("settle", 0))
    return await step("ship", ship)

async def ship() -> str:
    with Path("shipped").open("a") as file:
        file.write(f"{VERSION}\\n")
    return "parcel"

@workflow("slow")
async def slow(step, seconds: float) -> None:
    Path("began").touch()
    await step("wait", lambda: asyncio.sleep(seconds))

runtime = Runtime("sqlite:///shop.db", workflows=[order, slow])
"""


def environment() -> dict[str, str]:
    """Return variables with which a child process finds perdure and the store."""
    return {
        **os.environ,
        "PERDURE_STORE": os.environ.get("PERDURE_STORE", "sqlite:///shop.db"),
        "PERDURE_BY": "ana",
        "TERM": "xterm",
    }


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = (*PYTHON, *arguments)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


@contextmanager
def background(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command until the block ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        (*PYTHON, *arguments), env=environment(), stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def on_terminal(*arguments: str, columns: int = 100) -> Iterator["pexpect.spawn[str]"]:
    """Run the command on a terminal until the block ends."""
    child = pexpect.spawn(
        PYTHON[0],
        [*PYTHON[1:], *arguments],
        env=environment(),
        encoding="utf-8",
        timeout=20,
        dimensions=(30, columns),
    )
    try:
        yield child
    finally:
        # `close(force=True)` allows a killed process a tenth of a second to end.
        if not child.terminate():
            child.kill(signal.SIGKILL)
        wait_for(lambda: not child.isalive())
        child.close()


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def write_app(folder: Path) -> Path:
    """Write the application into a folder."""
    path = folder / "orders.py"
    path.write_text(APP)
    return path
