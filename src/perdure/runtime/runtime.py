"""Named workflows on a store: a run can stop here and continue in another process.

runtime = Runtime(store, workflows=[welcome])
run = await runtime.trigger(welcome, Signup("a@b.c"))
await runtime.signal(run.id, "approved", {"by": "ana"})
"""

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from perdure import codec
from perdure.clock import Clock, Duration, SystemClock, as_utc, parse_duration
from perdure.durable.leases import LEASE_TTL, check_lease_ttl
from perdure.durable.session import Session, default_store, wake_workers
from perdure.engine.arguments import Arguments, check_arguments
from perdure.engine.middleware import Middleware
from perdure.errors import InvalidArgument
from perdure.events import Bus, Listener, check_listener
from perdure.retention import Keep, Over, check_keep
from perdure.runtime.changes import ChangeCheck
from perdure.runtime.client import Client, Signal, SignalResult
from perdure.runtime.definition import Definition
from perdure.runtime.deps import Dependencies
from perdure.runtime.driver import Driver
from perdure.runtime.maintenance import DeclaredPolicy, declare
from perdure.runtime.options import ClientOptions, IfExists, Start, check_options
from perdure.runtime.run import Run
from perdure.runtime.settlement import SettledRun
from perdure.runtime.sweeping import Sweep
from perdure.snapshot import is_over, rest_status
from perdure.store import (
    Delivery,
    Grant,
    LeaseRequest,
    Refusal,
    Store,
    require_schedule,
)
from perdure.validation import Reaction, check_flag, check_limit, check_reaction

P = TypeVar("P")
T = TypeVar("T")

SUSPEND_AFTER = timedelta(seconds=1)


class Runtime(Client):
    """A client that also executes runs: it calls the functions of its workflows.

    ```python
    runtime = Runtime("sqlite:///orders.db", workflows=[order])
    ```

    `deps` becomes `step.deps`: a value, an async context manager, or a function without arguments
    that returns one. A context manager is entered while runs are executed: once for all runs inside
    `async with runtime` or with a worker, otherwise for each call that executes a run. `around` is
    middleware, outermost first: it is called around each activation of a run and around each
    executed step. `lease_ttl` is how long a run stays with a process that died. Waits shorter than
    `suspend_after` are spent in memory. `on_definition_change` is what to do with a run whose
    function has changed since it was started, while the version is the same: `"warn"`, `"ignore"`,
    or `"error"`, which leaves the run to another process. `record_arguments` is how much of the
    arguments of steps is recorded for people who look at the run: nothing, a `"preview"` of some
    256 bytes per step, or `"full"`. `callback_url` is the address of a
    `perdure.callbacks.CallbackApp`, which receives answers. `always_replay` suspends and replays a
    run after every step: a hard test of a workflow, and slow. `keep` is how long workers keep the
    finished runs of workflows without their own `keep`.
    """

    def __init__(
        self,
        store: Store | str | None = None,
        *,
        workflows: Iterable[Definition[Any, Any]] = (),
        deps: object = None,
        around: Iterable[Middleware] = (),
        lease_ttl: Duration = LEASE_TTL,
        suspend_after: Duration = SUSPEND_AFTER,
        on_event: Listener | None = None,
        on_definition_change: Reaction = "warn",
        record_arguments: Arguments = "off",
        callback_url: str = "",
        clock: Clock = SystemClock(),
        random: Random | None = None,
        always_replay: bool = False,
        keep: Keep | Literal["result"] | None = None,
    ) -> None:
        store = default_store() if store is None else store
        super().__init__(store, workflows=workflows, around=around, clock=clock, random=random)
        self.lease_ttl = check_lease_ttl(lease_ttl)
        self._bus = Bus()
        if on_event is not None:
            self._bus.subscribe(check_listener(on_event))
        self.driver = Driver(
            store=self.store,
            registry=self.registry,
            random=self.random,
            bus=self._bus,
            lease_ttl=self.lease_ttl,
            suspend_after=parse_duration(suspend_after, "suspend_after"),
            always_replay=check_flag(always_replay, "always_replay"),
            arguments=check_arguments(record_arguments, "record_arguments"),
            changes=ChangeCheck(check_reaction(on_definition_change, "on_definition_change")),
            deps=Dependencies(deps),
            around=self.around,
            keep=check_keep(keep),
            callback_url=_check_url(callback_url),
        )

    async def __aenter__(self) -> Self:
        await self.driver.deps.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.driver.deps.__aexit__()
        await self.close()

    def add_middleware(self, middleware: Middleware) -> None:
        """Add middleware as the outermost, for everything from now on."""
        super().add_middleware(middleware)
        self.driver = replace(self.driver, around=self.around)

    @overload
    async def trigger(
        self,
        workflow: Definition[None, T],
        payload: None = None,
        *,
        wait: bool = True,
        **options: Unpack[ClientOptions],
    ) -> Run[T]: ...
    @overload
    async def trigger(
        self,
        workflow: Definition[P, T],
        payload: P,
        *,
        wait: bool = True,
        **options: Unpack[ClientOptions],
    ) -> Run[T]: ...
    @overload
    async def trigger(
        self,
        workflow: str,
        payload: Any = None,
        *,
        wait: bool = True,
        **options: Unpack[ClientOptions],
    ) -> Run: ...
    # A TypedDict cannot say that it has no more keys, so pyright fears another `wait` among them.
    async def trigger(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        workflow: Definition[Any, Any] | str,
        payload: Any = None,
        *,
        run_id: str | None = None,
        at: datetime | None = None,
        delay: Duration | None = None,
        priority: int | None = None,
        tags: Mapping[str, str] | None = None,
        deadline: Duration | datetime | None = None,
        metadata: Mapping[str, Any] | None = None,
        if_exists: IfExists | None = None,
        connection: Any = None,
        wait: bool = True,
    ) -> Run:
        """Start a run and execute it until it ends or is suspended.

        ```python
        run = await runtime.trigger(order, 4200, run_id="order-1")
        ```

        With `wait=False` it is only created, for a worker. The payload is checked before anything
        is written, and the run is durable before the first line of the function. Some runs are
        always left to a worker: those with `at` or `delay`, those in a queue (they must not
        overtake others), and those created in the caller's transaction with `connection`. The
        options are the same as in `Client.trigger`; an existing run is returned as it is.
        """
        plan = check_options(
            self.clock.now(),
            at=at,
            delay=delay,
            priority=priority,
            tags=tags,
            deadline=deadline,
            metadata=metadata,
            if_exists=if_exists,
        )
        wait = check_flag(wait, "wait") and connection is None
        if wait and isinstance(workflow, str):
            workflow = self.registry.newest(workflow)
        start = self._start(workflow, payload, run_id, plan)
        if connection is not None:
            return await self._create_in(connection, start)
        if wait and plan.wake_at is None and not start.queue:
            return await self._create_and_execute(start)
        [run] = await self._create([start])
        return run

    async def _create_and_execute(self, start: Start) -> Run:
        request = self.driver.request(start.run_id, start.snapshot)
        # Here and below, the dependencies are entered first, so that no lease expires in the
        # meantime, and no run has been claimed if this fails.
        async with self.driver.deps, self.session() as session:
            grant = await session.acquire(request)
            if isinstance(grant, Refusal) and start.is_start_of(await self._load(start.run_id)):
                # This call created the run, but the reply was lost: the same owner may ask again.
                second_request = LeaseRequest(request.id, request.owner, request.ttl)
                grant = await session.acquire(second_request)
            if isinstance(grant, Refusal):
                run, is_due = await self._existing(start)
                return await self._execute(start.run_id) if is_due else run
            return await self._run_after(start.run_id, self.driver.continue_run(session, grant))

    async def signal(
        self,
        run_id: str,
        event: str,
        payload: object = None,
        *,
        dedup_id: str | None = None,
        wait: bool = True,
    ) -> SignalResult:
        """Send an event to a run, and continue the run as `resume` does.

        ```python
        sent = await runtime.signal("order-1", "paid", {"cents": 4200}, dedup_id="event-7")
        assert sent.delivery is Delivery.DELIVERED
        ```

        The event is neither lost nor duplicated, whether or not the run waits for it yet. If the
        run does not exist or is over, only `delivery` says so. With `wait=False` the run is left to
        a worker, and is not loaded.
        """
        if not check_flag(wait, "wait"):
            return await super().signal(run_id, event, payload, dedup_id=dedup_id)
        signal = Signal(run_id, event, payload, dedup_id)
        [result] = await self._send([signal], for_workers=False)
        if result.delivery is Delivery.UNKNOWN:
            return result
        if result.delivery is Delivery.OVER:
            return replace(result, run=await self.get_run(run_id))
        return replace(result, run=await self._continue(run_id, even_paused=False))

    async def resume(self, run_id: str, *, wait: bool = True) -> Run:
        """Continue a run as far as possible, even if it is paused.

        A run that is over, or owned by another process, is returned as it is. With `wait=False`, a
        worker continues the run.
        """
        if not check_flag(wait, "wait"):
            return await super().resume(run_id)
        return await self._continue(run_id, even_paused=True)

    async def cancel(
        self, run_id: str, *, reason: str = "", undo: bool = True, wait: bool = True
    ) -> Run:
        """Cancel a run. If another process owns the run, that process is asked to stop it.

        Steps that can be undone are undone first, unless `undo=False`, which also ends a run that
        is being rolled back. With `wait=False`, a worker undoes them.
        """
        if not check_flag(wait, "wait"):
            return await super().cancel(run_id, reason=reason, undo=undo)
        run = await self._cancel(run_id, reason, undo)
        return run if run.over else await self._continue(run_id, even_paused=False)

    async def retry(self, run_id: str, *, wait: bool = True) -> Run:
        """Continue a failed run: the steps that ended it run again, finished steps do not.

        With `wait=False`, a worker continues it.
        """
        if not check_flag(wait, "wait"):
            return await super().retry(run_id)
        run, is_due = await self._retry(run_id)
        return await self._execute(run_id) if is_due else run

    async def _continue(self, run_id: str, *, even_paused: bool) -> Run:
        snapshot = await self._load(run_id)
        status = rest_status(snapshot)
        if is_over(status) or (status == "paused" and not even_paused):
            return self._run(run_id, snapshot)
        return await self._execute(run_id)

    async def _execute(self, run_id: str) -> Run:
        async with self.driver.deps, self.session() as session:
            grant = await session.acquire(self.driver.request(run_id))
            if isinstance(grant, Refusal):
                return await self._require(run_id)
            if grant.queue:
                return await self._leave_to_worker(session, grant)
            return await self._run_after(run_id, self.driver.continue_run(session, grant))

    async def _leave_to_worker(self, session: Session, grant: Grant) -> Run:
        """Make a run in a queue due; it has to wait for its turn, and needs permits."""
        run, is_due = await self._make_due(session, grant, retries=False)
        if is_due:
            wake_workers(self.store)
        return run

    async def sweep(self, now: datetime | None = None, *, limit: int = 100) -> list[Run]:
        """Continue up to `limit` runs that are due at `now`, and return them.

        A run that cannot be executed is logged, and does not affect others.
        """
        if check_limit(limit) == 0:
            raise InvalidArgument("limit", limit, "an int >= 1")
        store = require_schedule(self.store, "Runtime.sweep")
        at = self.clock.now() if now is None else as_utc(now, "now")
        due_runs = await store.due(at, limit, supports=self.registry.all_supported_versions)
        queues = self.registry.queues
        if not due_runs and not queues:
            return []
        async with self.driver.deps, self.session() as session:
            sweep = Sweep(self.driver, session, self.clock, at, self._run_after)
            runs = await sweep.continue_runs([run.id for run in due_runs])
            if queues and len(runs) < limit:
                runs += await sweep.continue_queues(limit - len(runs))
        return runs

    async def declare_schedules(self) -> None:
        """Create the schedules that the workflows declare, or update those of a lower version.

        Workers do this when they start.
        """
        await self._declare_schedules()

    async def declare_retention(self) -> None:
        """Declare the retention policies of these workflows, for workers to apply from now on.

        Workers do this when they start. Of several versions of a workflow, the highest counts, and
        of several processes with that version, the last one that declared it.
        """
        newest = [self.registry.newest(name) for name in self.registry.names]
        policies = {each.name: self._policy_of(each) for each in newest}
        if policies:
            await declare(self.store, policies, self.clock.now(), self.random)

    def _policy_of(self, definition: Definition[Any, Any]) -> DeclaredPolicy:
        keep = definition.keep or self.driver.keep
        if keep is None:
            return DeclaredPolicy(definition.version)
        seconds: dict[Over, float] = {
            status: span.total_seconds() for status, span in keep.spans.items()
        }
        return DeclaredPolicy(definition.version, seconds)

    async def flush(self) -> None:
        """Wait until `on_event` has handled all events so far."""
        await self._bus.flush()

    async def _run_after(self, run_id: str, execution: Awaitable[SettledRun | None]) -> Run:
        """Return a run as it was written, or as it is stored if another owner took it over."""
        settled_run = await execution
        if settled_run is None:
            return await self._require(run_id)
        return self._run(run_id, codec.loads(settled_run.data))


def _check_url(url: object) -> str:
    """Return the URL of a callback app with a trailing slash."""
    expected = "a URL that begins with http:// or https://"
    if not isinstance(url, str) or (url and not url.startswith(("http://", "https://"))):
        raise InvalidArgument("callback_url", url, expected)
    return url if url.endswith("/") or not url else f"{url}/"
