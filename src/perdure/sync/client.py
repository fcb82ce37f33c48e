"""The methods of `perdure.Client` as plain calls."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Self, TypeVar, Unpack, overload
from weakref import WeakSet

from perdure.clock import Duration
from perdure.engine.middleware import Middleware
from perdure.errors import PerdureError
from perdure.runtime import client as asynchronous
from perdure.runtime import schedules
from perdure.runtime.client import Signal, SignalResult
from perdure.runtime.definition import Definition
from perdure.runtime.options import StartOptions, TriggerOptions
from perdure.runtime.run import Run, T_co
from perdure.runtime.schedule_info import ScheduleChanges, ScheduleInfo, ScheduleOptions
from perdure.runtime.starter import check_list
from perdure.runtime.versions import Versions
from perdure.snapshot import RunStatus
from perdure.store import RunSummary, Store
from perdure.sync.approvals import ApprovalCalls
from perdure.sync.portal import Portal
from perdure.validation import check_id, check_user_id

P = TypeVar("P")
T = TypeVar("T")


class _Connection:
    """An asynchronous client, and the portal through which it is used in this process."""

    def __init__(
        self,
        store: Store | str,
        workflows: Iterable[Definition[Any, Any]],
        around: Iterable[Middleware],
    ) -> None:
        self.client = asynchronous.Client(store, workflows=workflows, around=around)
        # Even a store that was passed in is closed: its connections belong to the portal's loop,
        # and code without a loop has no other way to close them.
        self.portal = Portal(self.client.store.close)


class Client(ApprovalCalls):
    """Starts, signals, cancels, retries and reads runs, without an event loop.

    For Flask, Django views and scripts; any number of threads may share it. It has the same methods
    as `perdure.Client`. They run in a background thread, which the first call starts. `close` or
    `with` ends the thread and closes the store, and so does the end of the program. A forked
    process that uses the client opens the URL again.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        workflows: Iterable[Definition[Any, Any]] = (),
        around: Iterable[Middleware] = (),
    ) -> None:
        self._store = store
        self._connection = _Connection(store, workflows, around)
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.portal.stop()

    def close(self) -> None:
        """Cancel the calls that are waiting, close the store, and end the thread."""
        self._connection.portal.close()

    @property
    def _client(self) -> asynchronous.Client:
        """The asynchronous client, for a call from a thread without a running loop."""
        if not _is_in_loop():
            return self._connection.client
        raise PerdureError(
            "perdure.sync.Client was called inside an event loop, which the call would block; use "
            "perdure.Client there: run = await client.trigger(…)"
        )

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._connection.portal.call(work)

    def _reconnect_after_fork(self) -> None:
        if self._connection.portal.is_lost:
            client = self._connection.client
            self._connection = _Connection(self._store, client.registry.definitions, client.around)

    def register(self, definition: Definition[Any, Any]) -> None:
        """Register a workflow."""
        self._client.register(definition)

    def add_middleware(self, middleware: Middleware) -> None:
        """Add middleware as the outermost, for all calls from now on."""
        self._client.add_middleware(middleware)

    @overload
    def trigger(
        self,
        workflow: Definition[None, T],
        payload: None = None,
        **options: Unpack[TriggerOptions],
    ) -> Run[T]: ...
    @overload
    def trigger(
        self, workflow: Definition[P, T], payload: P, **options: Unpack[TriggerOptions]
    ) -> Run[T]: ...
    @overload
    def trigger(
        self, workflow: str, payload: Any = None, **options: Unpack[TriggerOptions]
    ) -> Run: ...
    def trigger(
        self, workflow: Any, payload: Any = None, **options: Unpack[TriggerOptions]
    ) -> Run[Any]:
        """Create a run for a worker."""
        return self._call(self._client.trigger(workflow, payload, **options))

    @overload
    def trigger_many(
        self,
        workflow: Definition[P, T],
        payloads: Iterable[P],
        *,
        run_ids: Iterable[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Run[T]]: ...
    @overload
    def trigger_many(
        self,
        workflow: str,
        payloads: Iterable[Any],
        *,
        run_ids: Iterable[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Run]: ...
    def trigger_many(
        self,
        workflow: Any,
        payloads: Iterable[Any],
        *,
        run_ids: Iterable[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Run[Any]]:
        """Create a run for each payload, in this order, up to 500 per write."""
        # Not in the event loop: the caller's iterable may be slow, or may call this client.
        payload_list = check_list(payloads, "payloads", "a list of payloads")
        ids = None if run_ids is None else check_list(run_ids, "run_ids", "a list of ids")
        return self._call(self._client.trigger_many(workflow, payload_list, run_ids=ids, **options))

    def signal(
        self, run_id: str, event: str, payload: object = None, *, dedup_id: str | None = None
    ) -> SignalResult:
        """Send an event to a run; a worker continues it."""
        return self._call(self._client.signal(run_id, event, payload, dedup_id=dedup_id))

    def signal_or_start(
        self,
        workflow: Definition[Any, Any] | str,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        start: Any = None,
        dedup_id: str | None = None,
    ) -> SignalResult:
        """Send an event to a run, creating it if it is missing and restarting it if it is over."""
        work = self._client.signal_or_start(
            workflow, run_id, event, payload, start=start, dedup_id=dedup_id
        )
        return self._call(work)

    def ask(
        self, run_id: str, event: str, payload: object = None, *, timeout: Duration | None = None
    ) -> Any:
        """Send an event to a run, and return the run's answer."""
        return self._call(self._client.ask(run_id, event, payload, timeout=timeout))

    def signal_many(self, signals: Iterable[Signal]) -> list[SignalResult]:
        """Send many events, up to 500 per write; return the outcome of each, in order."""
        signal_list = check_list(signals, "signals", "a list of Signal(run_id, event, payload)")
        return self._call(self._client.signal_many(signal_list))

    def broadcast(
        self,
        event: str,
        payload: object = None,
        *,
        workflow: str | None = None,
        tags: Mapping[str, str] | None = None,
        dedup_id: str | None = None,
    ) -> int:
        """Send an event to the open runs of a workflow, or with tags; return how many got it."""
        work = self._client.broadcast(
            event, payload, workflow=workflow, tags=tags, dedup_id=dedup_id
        )
        return self._call(work)

    def get_run(self, run_id: str) -> Run | None:
        """Return the run with its history, or `None` if there is no such run."""
        return self._call(self._client.get_run(run_id))

    def list_runs(
        self,
        *,
        workflow: str | None = None,
        status: RunStatus | None = None,
        tags: Mapping[str, str] | None = None,
        prefix: str = "",
        limit: int = 100,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Return runs, newest first; `after` is the cursor of the previous page's last run."""
        return self._call(
            self._client.list_runs(
                workflow=workflow, status=status, tags=tags, prefix=prefix, limit=limit, after=after
            )
        )

    def versions(self, workflow: Definition[Any, Any] | str) -> Versions:
        """Return how many open runs of a workflow have each version, by status."""
        return self._call(self._client.versions(workflow))

    def cancel(self, run_id: str, *, reason: str = "", undo: bool = True) -> Run:
        """Cancel a run. If another process owns the run, that process is asked to stop it."""
        return self._call(self._client.cancel(run_id, reason=reason, undo=undo))

    def retry(self, run_id: str) -> Run:
        """Let a worker continue a failed run: the steps that ended it run again."""
        return self._call(self._client.retry(run_id))

    def resume(self, run_id: str) -> Run:
        """Let a worker continue a run at once, even if it is paused."""
        return self._call(self._client.resume(run_id))

    def delete(self, run_id: str) -> bool:
        """Delete a run and everything that belongs to it; return whether it existed."""
        return self._call(self._client.delete(run_id))

    @overload
    def result(self, run: "Run[T] | RunHandle[T]", *, timeout: Duration | None = None) -> T: ...
    @overload
    def result(self, run: str, *, timeout: Duration | None = None) -> Any: ...
    def result(
        self, run: "Run[Any] | RunHandle[Any] | str", *, timeout: Duration | None = None
    ) -> Any:
        """Wait until a run is completed, in any process, and return its output.

        If the run failed, its exception is raised; if it was cancelled, `Cancelled`. `TimeoutError`
        means that the run is not over after `timeout`; the run itself is not affected.
        """
        return self._call(self._client.result(_id_of(run), timeout=timeout))

    @overload
    def watch(self, run: "Run[T] | RunHandle[T]") -> Generator[Run[T], None, None]: ...
    @overload
    def watch(self, run: str) -> Generator[Run, None, None]: ...
    def watch(self, run: "Run[Any] | RunHandle[Any] | str") -> Generator[Run[Any], None, None]:
        """Yield the run as it is now and after each change, until it is over."""
        return self._iterate(self._client.watch(_id_of(run)))

    def _iterate(self, changes: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (change := self._call(_next(changes))) is not None:
                yield change
        finally:
            self._connection.portal.discard(changes)

    @overload
    def handle(self, run_id: str, workflow: Definition[P, T]) -> "RunHandle[T]": ...
    @overload
    def handle(self, run_id: str) -> "RunHandle[Any]": ...
    def handle(self, run_id: str, workflow: Definition[Any, Any] | None = None) -> "RunHandle[Any]":
        """Return a handle of a run, with the types of `workflow`, without reading the run."""
        if workflow is not None:
            self.register(workflow)
        return RunHandle(self, check_user_id(run_id, "run_id"))

    @overload
    def schedule(
        self,
        name: str,
        workflow: Definition[None, T],
        payload: None = None,
        **options: Unpack[ScheduleOptions],
    ) -> "ScheduleHandle": ...
    @overload
    def schedule(
        self,
        name: str,
        workflow: Definition[P, T],
        payload: P,
        **options: Unpack[ScheduleOptions],
    ) -> "ScheduleHandle": ...
    @overload
    def schedule(
        self, name: str, workflow: str, payload: Any = None, **options: Unpack[ScheduleOptions]
    ) -> "ScheduleHandle": ...
    def schedule(
        self, name: str, workflow: Any, payload: Any = None, **options: Unpack[ScheduleOptions]
    ) -> "ScheduleHandle":
        """Let workers start runs of a workflow at certain times."""
        self._call(self._client.schedule(name, workflow, payload, **options))
        return ScheduleHandle(self, name)

    def get_schedule(self, name: str) -> "ScheduleHandle":
        """Return the handle of a schedule, or raise `ScheduleNotFound`."""
        self._call(self._client.get_schedule(name))
        return ScheduleHandle(self, name)

    def schedules(self) -> list[ScheduleInfo]:
        """Return all schedules, by name."""
        return self._call(self._client.schedules())


def _is_in_loop() -> bool:
    """Return whether a call would block an event loop that other code needs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    # The cells of a notebook are executed inside the loop of its kernel, and block it anyway.
    return "ipykernel" not in sys.modules


@dataclass(frozen=True, slots=True)
class RunHandle(Generic[T_co]):
    """A run by its id, and the client that reads it."""

    client: Client
    id: str

    def get(self) -> Run[T_co] | None:
        """Return the run with its history, or `None` if there is no such run."""
        return self.client.get_run(self.id)

    def result(self, *, timeout: Duration | None = None) -> T_co:
        """Wait until the run is completed, and return its output or raise its error."""
        return self.client.result(self, timeout=timeout)

    def watch(self) -> Generator[Run[T_co], None, None]:
        """Yield the run as it is now and after each change, until it is over."""
        return self.client.watch(self)

    def signal(
        self, event: str, payload: object = None, *, dedup_id: str | None = None
    ) -> SignalResult:
        """Send an event to the run."""
        return self.client.signal(self.id, event, payload, dedup_id=dedup_id)

    def cancel(self, *, reason: str = "", undo: bool = True) -> Run[T_co]:
        """Cancel the run."""
        return self.client.cancel(self.id, reason=reason, undo=undo)

    def retry(self) -> Run[T_co]:
        """Continue the run if it failed: the steps that ended it run again."""
        return self.client.retry(self.id)


@dataclass(frozen=True, slots=True)
class ScheduleHandle:
    """A schedule by its name, and the client that changes it."""

    client: Client
    name: str

    @property
    def _handle(self) -> schedules.ScheduleHandle:
        return schedules.ScheduleHandle(self.client._client, self.name)

    def get(self) -> ScheduleInfo | None:
        """Return the schedule as it is now, or `None` if it was deleted."""
        return self.client._call(self._handle.get())

    def pause(self, *, by: str = "", why: str = "") -> None:
        """Start no more runs until it is unpaused; runs that were started continue."""
        self.client._call(self._handle.pause(by=by, why=why))

    def unpause(self, *, by: str = "", why: str = "") -> None:
        """Start runs again, beginning with the next time."""
        self.client._call(self._handle.unpause(by=by, why=why))

    def trigger(self) -> Run:
        """Start a run now, for the current time, whether or not others are open."""
        return self.client._call(self._handle.trigger())

    def backfill(self, start: datetime, end: datetime) -> list[Run]:
        """Start the runs for all times from `start` to `end` now; existing runs are kept."""
        return self.client._call(self._handle.backfill(start, end))

    def update(self, **changes: Unpack[ScheduleChanges]) -> None:
        """Change the schedule from now on; options that are not passed stay as they are."""
        self.client._call(self._handle.update(**changes))

    def delete(self) -> None:
        """Delete the schedule; runs that were started continue."""
        self.client._call(self._handle.delete())


async def _next(changes: AsyncGenerator[T, None]) -> T | None:
    return await anext(changes, None)


def _id_of(run: Run[Any] | RunHandle[Any] | str) -> str:
    return check_id(run if isinstance(run, str) else getattr(run, "id", run), "run")


_clients: WeakSet[Client] = WeakSet()


def _reconnect_all() -> None:
    # Reconnect now, while the new process has only one thread, so that calls need no lock to decide
    # which of them connects. Nothing is opened before the first call.
    for client in tuple(_clients):
        client._reconnect_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reconnect_all)
