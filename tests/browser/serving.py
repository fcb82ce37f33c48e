"""A dashboard under test: served by uvicorn in a thread with its own event loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any, TypeVar

import uvicorn

from perdure import Runtime, SystemClock, Worker
from perdure.dashboard import Dashboard, allow_all
from perdure.demo.services import Services
from perdure.demo.shop import WORKFLOWS
from perdure.runtime.definition import Definition
from perdure.store import Store
from perdure.stores import open_store

T = TypeVar("T")
READY_SECONDS = 20


class ServedDashboard:
    """A dashboard on the store at `store_url`, for everyone, on a port of 127.0.0.1.

    With `works`, a worker of the sample shop runs beside it. The dashboard knows the types of the
    payloads of `workflows`. Other options are passed to `Dashboard`; `auth` is `allow_all` unless
    it is given.
    """

    def __init__(
        self,
        store_url: str,
        *,
        works: bool = False,
        workflows: Sequence[Definition[Any, Any]] = (),
        **options: Any,
    ) -> None:
        self.store_url = store_url
        self._works = works
        self._workflows = workflows
        self._options: dict[str, Any] = {"auth": allow_all, "url": store_url, **options}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._store: Any = None

    def start(self) -> "ServedDashboard":
        """Return when the server accepts connections."""
        self._thread.start()
        assert self._ready.wait(READY_SECONDS), "the dashboard was not served in time"
        return self

    async def _serve(self) -> None:
        async with open_store(self.store_url) as store:
            self._store, self._loop = store, asyncio.get_running_loop()
            shown = Runtime(store, workflows=self._workflows) if self._workflows else store
            self._server = _Uvicorn(Dashboard(shown, **self._options), self._ready)
            async with shop_worker(store) if self._works else nullcontext():
                await self._server.serve()

    @property
    def url(self) -> str:
        """The address of the first page, without a slash at its end."""
        host, port = self._server.servers[0].sockets[0].getsockname()
        return f"http://{host}:{port}"

    async def run(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Return what `work` returns for the store, in the event loop of the server."""

        async def call() -> T:
            return await work(self._store)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))

    def close(self) -> None:
        """Stop the server and close the store. Open streams must not delay that."""
        self._server.should_exit = True
        self._thread.join(READY_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"


def shop_worker(store: Store) -> Worker:
    """Return a worker that executes the workflows of the sample shop."""
    services = Services(SystemClock().sleep, Random(1))
    runtime = Runtime(store, workflows=WORKFLOWS, deps=services)
    return Worker(runtime, concurrency=20, grace=0)


class _Uvicorn(uvicorn.Server):
    """Sets an event when it accepts connections."""

    def __init__(self, app: Any, ready: threading.Event) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                port=0,
                lifespan="off",
                ws="none",
                log_level="error",
                timeout_graceful_shutdown=2,
            )
        )
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._ready.set()
