"""Start runs: what `trigger` and `trigger_many` write, and what they do if an id is taken."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from random import Random, SystemRandom
from typing import Any, NamedTuple, Self, TypeVar, Unpack, overload

from perdure import codec
from perdure.clock import Clock, Duration, SystemClock
from perdure.durable.leases import LEASE_TTL
from perdure.durable.run import already_running
from perdure.durable.session import Session, borrow, wake_workers
from perdure.engine.middleware import Middleware, add_metadata, check_middleware
from perdure.errors import CodecError, InvalidArgument, RunNotFound
from perdure.runtime import transitions
from perdure.runtime.definition import Definition
from perdure.runtime.options import (
    ClientOptions,
    IfExists,
    Plan,
    Start,
    StartOptions,
    check_options,
    new_start,
)
from perdure.runtime.reader import Reader
from perdure.runtime.run import Run
from perdure.snapshot import new_uuid
from perdure.store import (
    Grant,
    LeaseRequest,
    Store,
    check_store,
    require_journal,
    require_lease,
    require_schedule,
    require_transactional_enqueue,
)
from perdure.validation import check_random, check_user_id

P = TypeVar("P")
T = TypeVar("T")

BATCH = 500
"""The maximum number of runs or messages in one write."""

PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.5)
"""How long, in seconds, a call waits for another process to finish changing a run."""


class ChangedRun(NamedTuple):
    """A run, and whether this call made it due."""

    run: Run
    is_due: bool


class Starter(Reader):
    """Creates runs in a store, for workers."""

    def __init__(
        self,
        store: Store | str,
        *,
        workflows: Iterable[Definition[Any, Any]] = (),
        around: Iterable[Middleware] = (),
        clock: Clock = SystemClock(),
        random: Random | None = None,
    ) -> None:
        super().__init__(_open(store), workflows, clock)
        self.around = check_middleware(around)
        self._owns_store = isinstance(store, str)
        # For display only; it may contain a password.
        self.url = store if isinstance(store, str) else ""
        for require in (require_journal, require_lease, require_schedule):
            require(self.store, type(self).__name__)
        self.lease_ttl = LEASE_TTL
        self.random = SystemRandom() if random is None else check_random(random)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store if it was opened from a URL."""
        if self._owns_store:
            await self.store.close()

    def register(self, definition: Definition[Any, Any]) -> None:
        """Register a workflow."""
        self.registry.add(definition)

    def add_middleware(self, middleware: Middleware) -> None:
        """Add middleware as the outermost, for everything from now on."""
        self.around = check_middleware([middleware, *self.around])

    def session(self) -> Session:
        """Return the session through which this client writes; enter it to use it."""
        return borrow(self.store, self.clock, self.lease_ttl)

    @overload
    async def trigger(
        self,
        workflow: Definition[None, T],
        payload: None = None,
        **options: Unpack[ClientOptions],
    ) -> Run[T]: ...
    @overload
    async def trigger(
        self, workflow: Definition[P, T], payload: P, **options: Unpack[ClientOptions]
    ) -> Run[T]: ...
    @overload
    async def trigger(
        self, workflow: str, payload: Any = None, **options: Unpack[ClientOptions]
    ) -> Run: ...
    async def trigger(
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
    ) -> Run:
        """Create a run for a worker, due at once, `at` a time or after a `delay`.

        The payload is checked before anything is written. Each level of `priority` puts the run a
        day ahead of others that are due. If a run with this id exists and has the same workflow and
        payload, it is returned; otherwise `RunConflict` is raised. With `if_exists="return"` the
        payload may differ, with `"error"` an existing run is always a conflict, and with
        `"restart_if_over"` a finished run starts over. `metadata` is a small JSON object that is
        stored with the run, for middleware and for people.

        With a `connection` to the store's database, of its driver or of SQLAlchemy, the run is
        created in the open transaction of that connection: it exists if and only if the transaction
        is committed.
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
        start = self._start(workflow, payload, run_id, plan)
        if connection is not None:
            return await self._create_in(connection, start)
        [run] = await self._create([start])
        return run

    @overload
    async def trigger_many(
        self,
        workflow: Definition[P, T],
        payloads: Iterable[P],
        *,
        run_ids: Iterable[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Run[T]]: ...
    @overload
    async def trigger_many(
        self,
        workflow: str,
        payloads: Iterable[Any],
        *,
        run_ids: Iterable[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Run]: ...
    async def trigger_many(
        self,
        workflow: Definition[Any, Any] | str,
        payloads: Iterable[Any],
        *,
        run_ids: Iterable[str] | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Run]:
        """Create a run for each payload, in order, up to 500 per write.

        All payloads are checked first. `run_ids` has one id for each payload. The options are the
        same as in `trigger`. If `RunConflict` is raised, the runs before the conflict, and those in
        the same write, were created.
        """
        plan = check_options(self.clock.now(), **options)
        payload_list = check_list(payloads, "payloads", "a list of payloads")
        ids: Iterable[str | None] = repeat(None, len(payload_list))
        if run_ids is not None:
            ids = check_list(run_ids, "run_ids", "a list of ids")
            if len(ids) != len(payload_list) or len(set(ids)) != len(ids):
                expected = f"{len(payload_list)} different ids, one per payload"
                raise InvalidArgument("run_ids", run_ids, expected)
        pairs = zip(payload_list, ids, strict=True)
        starts = [self._start(workflow, payload, run_id, plan) for payload, run_id in pairs]
        runs: list[Run] = []
        for first in range(0, len(starts), BATCH):
            runs += await self._create(starts[first : first + BATCH])
        return runs

    async def _create(self, starts: Sequence[Start]) -> list[Run]:
        """Create runs in one write; return them, or the existing runs with their ids."""
        store = require_schedule(self.store)
        new = [start.new_run() for start in starts]
        answers = await store.enqueue(new)
        wake_workers(self.store)
        runs: list[Run] = []
        for start, run, is_new in zip(starts, new, answers, strict=True):
            if is_new:
                runs.append(self._run(run.id, codec.loads(run.snapshot)))
            else:
                runs.append((await self._existing(start)).run)
        return runs

    async def _create_in(self, connection: Any, start: Start) -> Run:
        """Create a run in the caller's transaction; return it, or the existing run with its id."""
        store = require_transactional_enqueue(self.store, "trigger(connection=…)")
        if start.plan.if_exists == "restart_if_over":
            hint = "A finished run is restarted by a separate write"
            expected = '"return" or "error" beside connection='
            raise InvalidArgument("if_exists", start.plan.if_exists, expected, hint)
        new = start.new_run()
        [existing] = await store.enqueue_in(connection, [new])
        if existing is None:
            return self._run(new.id, codec.loads(new.snapshot))
        start.check_conflict(existing)
        return self._run(new.id, existing)

    async def _existing(self, start: Start) -> ChangedRun:
        """Return the existing run with this id, restarted if requested."""
        is_owned = await self._is_owned(start.run_id)
        snapshot = await self._load(start.run_id)
        if not start.is_start_of(snapshot):
            if start.restarts(snapshot):
                return await self._restart(start)
            start.check_conflict(snapshot)
        return ChangedRun(await self._current(start.run_id, snapshot, is_owned), False)

    async def _restart(self, start: Start) -> ChangedRun:
        async with self.session() as session:
            grant = await self._acquire_over(session, start)
            if not start.restarts(grant.snapshot):
                # Another process has restarted the run since we read it.
                lease, wake_at = grant.lease, start.plan.wake_at
                await require_lease(self.store).release([lease], wake_at=wake_at)
                start.check_conflict(grant.snapshot)
                return ChangedRun(self._run(start.run_id, grant.snapshot), False)
            data = await transitions.restart(session, grant, start)
        if data is None:
            return await self._existing(start)
        wake_workers(self.store)
        return ChangedRun(self._run(start.run_id, codec.loads(data)), True)

    async def _acquire_over(self, session: Session, start: Start) -> Grant:
        """Lease a run that is over, waiting while another process is changing it."""
        pauses = iter(PAUSES)
        while True:
            grant = await session.acquire(self._lease_request(start.run_id))
            if isinstance(grant, Grant):
                return grant
            if grant.reason == "missing":
                raise RunNotFound(start.run_id)
            pause = next(pauses, None)
            if pause is None:
                raise already_running(grant)
            await self.clock.sleep(pause)

    def _lease_request(self, run_id: str) -> LeaseRequest:
        return transitions.lease_request(run_id, self.random, self.lease_ttl)

    def _start(
        self,
        workflow: Definition[Any, Any] | str,
        payload: object,
        run_id: str | None,
        plan: Plan,
    ) -> Start:
        target, data = self._encode_start(workflow, payload)
        name = target if isinstance(target, str) else target.name
        if run_id is None:
            run_id = f"{name}:{new_uuid(self.random)}"
        run_id = check_user_id(run_id, "run_id")
        start = new_start(target, data, run_id, plan, self.clock.now(), self.random)
        add_metadata(start.metadata, self.around, name, run_id)
        return start

    def _encode_start(
        self, workflow: Definition[Any, Any] | str, payload: object
    ) -> tuple[Definition[Any, Any] | str, Any]:
        """Return a workflow, or its name if it is unknown, and its payload as JSON."""
        if isinstance(workflow, str):
            definition = self.registry.find(workflow)
            if definition is None:
                return check_user_id(workflow, "workflow"), encode_payload(payload)
        else:
            if not isinstance(workflow, Definition):
                expected = "a function decorated with @workflow, or the name of a workflow"
                raise InvalidArgument("workflow", workflow, expected)
            definition = workflow
            self.registry.add(definition)
        return definition, definition.encode_payload(payload)


def _open(store: Store | str) -> Store:
    if not isinstance(store, str):
        return check_store(store)
    from perdure.stores import open_store

    return open_store(store)


def check_list(items: Iterable[T], parameter: str, expected: str) -> list[T]:
    """Return the items as a list; raise if they are a string or not iterable."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InvalidArgument(parameter, items, expected)
    return list(items)


def encode_payload(payload: object) -> Any:
    """Encode a payload of unknown type."""
    try:
        return codec.encode(payload, type(payload))
    except CodecError as error:
        expected = "a value that survives being stored as JSON"
        raise InvalidArgument("payload", payload, expected, str(error)) from error
