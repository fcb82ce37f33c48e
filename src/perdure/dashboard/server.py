"""A standalone server for the dashboard, for the commands `dashboard`, `dev` and `demo`."""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from random import Random, SystemRandom
from typing import Any

from perdure.clock import Clock, SystemClock
from perdure.dashboard.access import Auth
from perdure.dashboard.app import Dashboard
from perdure.dashboard.board import Stores
from perdure.dashboard.login import OneTimeToken
from perdure.errors import InvalidArgument, MissingDependency

_POLL = 0.01


@asynccontextmanager
async def serve(
    runtime_or_store: Stores,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    auth: Auth | None = None,
    person: str = "local",
    token: str | None = None,
    random: Random | None = None,
    clock: Clock = SystemClock(),
    **options: Any,
) -> AsyncGenerator[str, None]:
    """Serve a dashboard while the block runs, and yield the URL to open.

    Without `auth` the URL contains a token that lets one browser in, as `person`, and `host` must
    be this machine. A process that restarts passes the same `token`, so that its browser stays
    signed in. With port 0, any free port is used. `options` are passed to `Dashboard`.
    """
    if auth is None and not _is_local(host):
        hint = "Pass auth= to serve other machines"
        raise InvalidArgument("host", host, "an address of this machine", hint)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    token = token or (random or SystemRandom()).randbytes(16).hex()
    hosts = () if auth else [f"{name}:{port}" for name in (host, "localhost", "127.0.0.1", "[::1]")]
    hook = auth or OneTimeToken(token, person=person, port=port)
    app = Dashboard(runtime_or_store, auth=hook, hosts=hosts, clock=clock, random=random, **options)
    shown = f"[{host}]" if ":" in host else host
    async with _serving(app, listening, clock):
        yield f"http://{shown}:{port}/" + ("" if auth else f"?token={token}")


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        # For this error, asyncio's text differs from the system's.
        in_use = error.errno == errno.EADDRINUSE
        reason = "Another process uses it" if in_use else error.strerror
        hint = f"{reason}. Choose another port, or 0 for any free one"
        raise InvalidArgument("port", port, "a free port", hint) from error


@asynccontextmanager
async def _serving(
    app: Dashboard, listening: socket.socket, clock: Clock
) -> AsyncGenerator[None, None]:
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependency("uvicorn", "dashboard") from error

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            # The command handles signals itself: beside this server it runs a worker.
            yield

    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_level="warning",
        server_header=False,
        # Streams that browsers keep open must not delay the end.
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started and not task.done():
            await clock.sleep(_POLL)
        yield
    finally:
        server.should_exit = True
        await task
