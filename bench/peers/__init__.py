"""Other libraries, each in its own virtual environment, so that they are not our dependencies.

Each runs in one long-lived child process that handles requests, so that measurements can alternate.
It is stopped in between: some poll their database all the time, at the cost of the others.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "bench"
PACKAGES = {
    "dbos": ("dbos", "psycopg[binary]"),
    "langgraph": (
        "langgraph",
        "langgraph-checkpoint-sqlite",
        "langgraph-checkpoint-postgres",
        "psycopg[binary,pool]",
    ),
}
PATIENCE = 300


class PeerFailed(Exception):
    """A library returned no value; the message is its last output."""


class Peer:
    """Another library, working on one store."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: Any) -> None:
        self.name = name
        self.version = ""
        self.workloads: frozenset[str] = frozenset()
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, name: str, url: str) -> "Peer":
        """Start the child process on a database."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the peer
        process = await asyncio.create_subprocess_exec(
            *(_python(name), "-m", f"bench.peers.{name}", url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
        )
        peer = cls(name, process, errors)
        hello = await peer._answer()
        peer.version, peer.workloads = hello["version"], frozenset(hello["workloads"])
        process.send_signal(signal.SIGSTOP)
        return peer

    async def ask(self, workload: str, size: int) -> float:
        """Return the library's value for a workload."""
        assert self._process.stdin is not None
        request = json.dumps({"workload": workload, "size": size})
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(request.encode() + b"\n")
        value: float = (await self._answer())["value"]
        self._process.send_signal(signal.SIGSTOP)
        return value

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        except TimeoutError:
            line = b""
        if not line:
            raise PeerFailed(await self.close())
        return json.loads(line)

    async def close(self) -> str:
        """Stop the child process, and return its last output."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._errors.closed:
            return ""
        with self._errors:
            self._errors.seek(0)
            return _last_line(self._errors.read().decode(errors="replace"))


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no answer")


def install(say: Callable[[str], None], names: Iterable[str] = tuple(PACKAGES)) -> list[str]:
    """Return the libraries that are available here, after installing what is missing."""
    return [name for name in names if _installed(name, say)]


def _installed(name: str, say: Callable[[str], None]) -> bool:
    mark = CACHE / name / ".installed"
    if mark.exists():
        return True
    say(f"installing {name}")
    pip = (_python(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for command in ((sys.executable, "-m", "venv", str(CACHE / name)), (*pip, *PACKAGES[name])):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            say(f"{name} cannot be installed here and is left out: {process.stderr.strip()[-200:]}")
            return False
    mark.touch()
    return True


def _python(name: str) -> str:
    return str(CACHE / name / "bin" / "python")
