"""Server processes for tests: start, wait until ready, `kill -9`, restart, and never outlive us."""

import atexit
import os
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol, Self, TypeVar

PATIENCE = 30.0

T = TypeVar("T")

# The kernel kills a server when the *thread* that started it ends (pdeathsig), so all of them are
# started from one thread that lives as long as this process, whichever thread calls restart().
_launcher = ThreadPoolExecutor(1, thread_name_prefix="server-launcher")


class ServerMissing(Exception):
    """The program of a server is not installed; the message says how to get it."""


class ServerFailed(Exception):
    """A server did not start, or did not stop; the message ends with its log."""


class NotReady(Exception):
    """The server responds, but does not accept work yet."""


class Server(Protocol):
    """A server as tests see it, whether we started it or the developer did.

    The methods block: in an async test call them with `asyncio.to_thread`, unless the event loop
    should be blocked.
    """

    name: str
    version: str

    @property
    def url(self) -> str: ...
    @property
    def ours(self) -> bool:
        """Whether we started it, so that it may be killed."""
        ...

    def ensure(self) -> None:
        """Restart it if a test has killed it."""
        ...

    def kill(self) -> None:
        """Kill it and all its children with SIGKILL, and wait until they are gone."""
        ...

    def stop(self) -> None:
        """Stop it gracefully, and wait until it has ended."""
        ...

    def restart(self) -> None:
        """Stop it if it runs, start it with its port and data, and wait until it is ready."""
        ...

    def close(self) -> None:
        """Stop it and remove its data."""
        ...


class LocalServer(ABC):
    """A server process that we started, with its data and log in a temporary directory."""

    name: str
    account: ClassVar[str | None] = None
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    ours: ClassVar[bool] = True

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = new_folder(self.name, self.account)
        self.version = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the program and its arguments."""

    @abstractmethod
    def probe(self) -> str:
        """Return name and version of the server, or raise one of `not_ready` until it is ready."""

    @property
    @abstractmethod
    def not_ready(self) -> tuple[type[Exception], ...]:
        """The exceptions that `probe` raises while the server is starting."""

    def prepare(self) -> None:  # noqa: B027 - most servers need no preparation
        """Create the data directory, once."""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        if not self.version:
            self.prepare()
        self._process = launch(
            self.command(), self.folder, account=self.account, death_signal=self.stop_signal
        )
        atexit.register(self.kill)
        self.version = self._until_ready()
        return self

    def ensure(self) -> None:
        if not self.running:
            self.start()

    def kill(self) -> None:
        atexit.unregister(self.kill)
        if self._process is not None and self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"{self.name} did not stop in {PATIENCE:g}s{self._log()}") from None
        atexit.unregister(self.kill)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _until_ready(self) -> str:
        def attempt() -> str:
            if not self.running:
                raise ServerFailed(f"{self.name} ended while starting{self._log()}")
            return self.probe()

        try:
            return eventually(attempt, retry_on=self.not_ready)
        except self.not_ready as error:
            raise ServerFailed(f"{self.name} does not answer: {error}{self._log()}") from error

    def _log(self) -> str:
        lines = (self.folder / "server.log").read_text(errors="replace").splitlines()
        return "\n  | ".join(["", *lines[-20:]])


def launch(
    command: Sequence[str],
    folder: Path,
    *,
    account: str | None,
    death_signal: signal.Signals,
) -> subprocess.Popen[bytes]:
    """Start a process that dies with this one; its output goes to `server.log` in `folder`."""
    prefix = ["setpriv", f"--pdeathsig={death_signal.name.removeprefix('SIG')}"]
    with (folder / "server.log").open("ab") as log:
        return _launcher.submit(
            subprocess.Popen[bytes],
            [*prefix, *identity(account), "--", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C in a terminal is sent to the whole process group, so servers get their own.
            start_new_session=True,
        ).result()


def run_once(command: Sequence[str], folder: Path, account: str | None = None) -> None:
    """Run a set-up program under the server's account, and wait for it."""
    process = subprocess.run(
        [*(["setpriv", *identity(account), "--"] if identity(account) else []), *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise ServerFailed(
            f"{command[0]} gave {process.returncode}: {process.stderr or process.stdout}"
        )


def identity(account: str | None) -> list[str]:
    """Return the setpriv arguments to become `account` or the user `nobody`, if we are root."""
    if account is None or os.geteuid() != 0:
        return []
    user = _user(account)
    return [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _user(account: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(account)
    except KeyError:
        return pwd.getpwnam("nobody")


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants with SIGKILL, and wait until none of them runs."""
    handles = _handles(pid)
    try:
        # While it is stopped, it can neither fork nor react to the death of its children.
        _send(signal.SIGSTOP, handles)
        handles += [handle for child in _descendants(pid) for handle in _handles(child)]
        _send(signal.SIGKILL, handles)
        for handle in handles:
            _await_end(handle)
    finally:
        for handle in handles:
            os.close(handle)


def _handles(pid: int) -> list[int]:
    """Return a handle that never refers to a later process with the same id, or none if it has
    ended.
    """
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []


def _send(number: signal.Signals, handles: Sequence[int]) -> None:
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _await_end(handle: int) -> None:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    waiting.poll(PATIENCE * 1000)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _descendants(pid: int) -> list[int]:
    pids: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end after it was listed and before it is read.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, listing.read_text().split()):
                pids += [child, *_descendants(child)]
    return pids


def eventually(
    attempt: Callable[[], T],
    *,
    retry_on: tuple[type[Exception], ...],
    connect_timeout: float = PATIENCE,
) -> T:
    """Return the result of `attempt`, retrying while it raises one of `retry_on`."""
    deadline = time.monotonic() + connect_timeout
    while True:
        try:
            return attempt()
        except retry_on:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def free_port() -> int:
    """Return a port on loopback that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unique_name() -> str:
    """Return a name for a test's database that no other test or test run uses."""
    return f"perdure_test_{secrets.token_hex(6)}"


def program(name: str, *, package: str, folders: str = "") -> str:
    """Return the path of a server's program in PATH or `folders`, a glob whose last match wins."""
    beside = sorted(map(str, Path("/").glob(folders.lstrip("/")))) if folders else []
    path = os.pathsep.join([*reversed(beside), os.environ.get("PATH", ""), "/usr/sbin"])
    executable = shutil.which(name, path=path)
    if executable is None:
        raise ServerMissing(f"{name} is not on this machine; run: apt-get install {package}")
    return executable


def node_package(name: str) -> Path:
    """Return the directory of an npm package that `make servers` installed."""
    cache = os.environ.get("PERDURE_NODE_CACHE") or Path(__file__).parents[2] / ".cache" / "node"
    folder = Path(cache) / "node_modules" / name
    if not folder.is_dir():
        raise ServerMissing(f"the npm package {name} is not in {cache}; run: make servers")
    return folder


def new_folder(name: str, account: str | None) -> Path:
    """Return an empty directory that the server's account owns, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name.lower()}-", dir=_root()))
    if account is not None and os.geteuid() == 0:
        user = _user(account)
        os.chown(folder, user.pw_uid, user.pw_gid)
    return folder


@cache
def _root() -> Path:
    _sweep()
    root = Path(tempfile.mkdtemp(prefix=f"perdure-servers-{os.getpid()}-"))
    root.chmod(0o755)
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _sweep() -> None:
    """Remove what a test run that was killed with SIGKILL left behind."""
    for folder in Path(tempfile.gettempdir()).glob("perdure-servers-*-*"):
        if not _exists(int(folder.name.split("-")[2])):
            shutil.rmtree(folder, ignore_errors=True)
