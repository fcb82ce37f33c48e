"""The user's handle on a run: each call of a method is recorded.

user = await step("fetch-user", fetch_user, "123")
order = await step("create-order", lambda: create_order(user), key="order:1")
await step.sleep("settle", "1d")
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, overload

from perdure.clock import Cron, Duration, as_utc, isoformat, parse_duration
from perdure.engine.branches import Branch, Leaf
from perdure.engine.call import StepCall, idempotency_key
from perdure.engine.tasks import POSITION, Task, cancel_and_wait
from perdure.engine.values import RunValues
from perdure.engine.waiting import race, transact, wait
from perdure.errors import InvalidArgument, InvalidDuration, PerdureError
from perdure.result import Err, Ok
from perdure.retry import Retry, Timeout, as_retry, as_timeout
from perdure.snapshot import PendingWait
from perdure.validation import check_errors, check_event, check_int, check_unreserved

if TYPE_CHECKING:
    # Type checkers bring it along; Python itself has defaults of type variables from 3.13 on.
    from typing_extensions import TypeVar as TypeVarWithDefault

    D_co = TypeVarWithDefault("D_co", default=Any, covariant=True)
else:
    D_co = TypeVar("D_co", covariant=True)

T = TypeVar("T")
U = TypeVar("U")
Args = TypeVarTuple("Args")
Errors = Sequence[type[BaseException]]


class Step(RunValues, Generic[D_co]):
    """Runs steps of one run; given to the workflow function as its first argument.

    `Step[Shop]` says that `step.deps` is a `Shop`.
    """

    __slots__ = ()

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._run.run_id

    @property
    def payload(self) -> Any:
        """The payload the run was triggered with."""
        return self._run.payload

    @property
    def deps(self) -> D_co:
        """What the runtime or the caller provided for its functions: clients, settings."""
        deps: D_co = self._run.deps
        return deps

    @property
    def attempt(self) -> int:
        """Which attempt of the step this is, from 1; for use inside a step's function."""
        call = POSITION.get()
        return call.attempt if isinstance(call, Leaf) else 1

    @property
    def idempotency_key(self) -> str:
        """A string that is the same for every attempt of this step in this run, also after a crash.

        Pass it to services that accept an idempotency key. It is 32 hexadecimal digits, different
        for each run, step and generation. For use inside a step's function.
        """
        call = POSITION.get()
        if not isinstance(call, Leaf):
            raise PerdureError(
                "step.idempotency_key belongs to a step: ask for it inside the step's function, "
                "for example step('pay', lambda: pay(amount, step.idempotency_key))"
            )
        run = self._run
        return idempotency_key(run.run_id, run.history.generation, call.path, call.call)

    # A Result is a value too: the first overload that fits unwraps it.
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], Awaitable[T]],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], Ok[T] | Err[Any]],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self,
        id: str,
        fn: Callable[[*Args], T],
        /,
        *args: *Args,
        key: str | None = ...,
        ttl: Duration | None = ...,
        retry: Retry | int | None = ...,
        timeout: Timeout | Duration | None = ...,
        returns: type[Any] | None = ...,
        errors: Errors = ...,
    ) -> Coroutine[Any, Any, T]: ...
    def __call__(  # type: ignore[misc]  # mypy loses `*args: *Args` in an implementation
        self,
        id: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        key: str | None = None,
        ttl: Duration | None = None,
        retry: Retry | int | None = None,
        timeout: Timeout | Duration | None = None,
        returns: type[Any] | None = None,
        errors: Errors = (),
    ) -> Coroutine[Any, Any, Any]:
        """Return the value of `fn(*args)`, from its record if the step was done before.

        `key` is an identity in the whole run: a second call with it returns the recorded value.
        `returns` is the type of the value if the annotation of `fn` does not say it; `errors` are
        exception classes that keep their type when they are read from a record. A returned `Err`
        raises `StepFailed`; if the function does not catch that, the run ends with that `Err`.
        """
        run = self._run
        call = run.call(id, fn, args, key)
        if retry is not None:
            call.retries = as_retry(retry)
        if timeout is not None:
            call.timeout = as_timeout(timeout)
        if ttl is not None:
            call.ttl = parse_duration(ttl, "ttl")
        if errors:
            call.errors = check_errors(errors)
        if returns is not None:
            call.returns = returns
        return run.perform(call)

    def sleep(self, id: str, duration: Duration | Cron, /) -> Coroutine[Any, Any, None]:
        """Sleep for a duration, or until the next time of a cron expression.

        The wake time is fixed by the first call, however often the run resumes.
        """
        call = self._run.call(id, self.sleep)
        call.kind = "sleep"
        return wait(self._run, call, self._wait(call, duration))

    @overload
    def wait_for_event(
        self, id: str, name: str, /, *, timeout: Duration | None = ..., returns: type[T]
    ) -> Coroutine[Any, Any, T | None]: ...
    @overload
    def wait_for_event(
        self, id: str, name: str, /, *, timeout: Duration | None = ..., returns: None = ...
    ) -> Coroutine[Any, Any, Any]: ...
    def wait_for_event(
        self,
        id: str,
        name: str,
        /,
        *,
        timeout: Duration | None = None,
        returns: type[Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Return the payload of the run's next event of this name, or `None` after the timeout."""
        name = check_event(name, "name")
        call = self._run.call(id, self.wait_for_event)
        call.kind = "event"
        call.returns = returns
        return wait(self._run, call, self._wait(call, timeout, event=name))

    def sleep_until(self, id: str, time: datetime, /) -> Coroutine[Any, Any, None]:
        """Sleep until a time, given with its time zone; do not sleep if it is past.

        The time is fixed by the first call, however often the run resumes.
        """
        until = as_utc(time, "time")
        call = self._run.call(id, self.sleep_until)
        call.kind = "sleep"
        pending: PendingWait = {"id": call.wait_id(), "kind": "sleep", "wakeAt": isoformat(until)}
        return wait(self._run, call, pending)

    def _wait(
        self, call: StepCall, duration: Duration | Cron | None, event: str | None = None
    ) -> PendingWait:
        pending: PendingWait = {"id": call.wait_id(), "kind": "sleep" if event is None else "event"}
        if event is not None:
            pending["event"] = event
        if duration is not None or event is None:
            parameter = "duration" if event is None else "timeout"
            pending["wakeAt"] = isoformat(self._until(duration, parameter))
        return pending

    def _until(self, duration: Any, parameter: str) -> datetime:
        now = self._run.clock.now()
        if isinstance(duration, Cron):
            return duration.next(now)
        try:
            return now + parse_duration(duration, parameter)
        except OverflowError:
            expected = "a duration that ends before the year 10000"
            raise InvalidDuration(parameter, duration, expected) from None

    def all(
        self, thunks: Mapping[str, Callable[[], Any]], /
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """Run a step for each name concurrently, and return the values by name.

        All are awaited, so that finished work is recorded; then the first failure, in the order of
        the names, is raised.
        """
        branch = self._run.branches.current(self._run.run_id, "step.all")
        return self._all(branch, _thunks(thunks))

    async def _all(self, branch: Branch, thunks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        run = self._run
        calls = {name: run.call(name, thunk, branch=branch) for name, thunk in thunks.items()}
        tasks = {name: branch.child(name).spawn(run.perform(call)) for name, call in calls.items()}
        await _wait_all(tasks.values())
        return {name: task.result() for name, task in tasks.items()}

    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Coroutine[Any, Any, Ok[U] | Err[Any]]],
        /,
        *,
        concurrency: int = ...,
    ) -> Coroutine[Any, Any, list[U]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Awaitable[U]],
        /,
        *,
        concurrency: int = ...,
    ) -> Coroutine[Any, Any, list[U]]: ...
    @overload
    def map(
        self,
        id: str,
        items: Iterable[T],
        fn: Callable[[T], Ok[U] | Err[Any]],
        /,
        *,
        concurrency: int = ...,
    ) -> Coroutine[Any, Any, list[U]]: ...
    @overload
    def map(
        self, id: str, items: Iterable[T], fn: Callable[[T], U], /, *, concurrency: int = ...
    ) -> Coroutine[Any, Any, list[U]]: ...
    def map(
        self,
        id: str,
        items: Iterable[Any],
        fn: Callable[[Any], Any],
        /,
        *,
        concurrency: int = 10,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Run a step for each item, up to `concurrency` at once; return the values in order."""
        check_int(concurrency, "concurrency")
        if not isinstance(items, Iterable):
            raise InvalidArgument("items", items, "an iterable")
        call = self._run.call(id, fn)
        branch = call.branch.child(call.call)
        return self._map(branch, id, list(items), fn, concurrency)

    async def _map(
        self, branch: Branch, id: str, items: list[Any], fn: Callable[..., Any], concurrency: int
    ) -> list[Any]:
        run = self._run
        queue = deque(enumerate(items))
        values: list[Any] = [None] * len(items)

        async def work() -> None:
            while queue:
                index, item = queue.popleft()
                call = run.call(f"{id}[{index}]", fn, (item,), branch=branch)
                values[index] = await run.perform(call)

        workers = range(min(concurrency, len(items)))
        tasks = [branch.child(f"worker{n}").spawn(work()) for n in workers]
        await _wait_all(tasks)
        for task in tasks:
            task.result()
        return values

    def race(
        self, id: str, thunks: Mapping[str, Callable[[], Any]], /
    ) -> Coroutine[Any, Any, tuple[str, Any]]:
        """Run a branch for each name; return the name and the value of the first to finish.

        The others are cancelled. The winner is recorded: a replay returns the same one. A branch
        may call steps, sleep, or wait for events.
        """
        branches = _thunks(thunks)
        if not branches:
            raise InvalidArgument("thunks", thunks, "at least one branch")
        call = self._run.call(id, self.race)
        call.kind = "race"
        return race(self._run, call, branches)

    @overload
    def transaction(
        self,
        id: str,
        fn: Callable[[Any, *Args], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        /,
        *args: *Args,
        returns: type[Any] | None = ...,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def transaction(
        self,
        id: str,
        fn: Callable[[Any, *Args], Awaitable[T]],
        /,
        *args: *Args,
        returns: type[Any] | None = ...,
    ) -> Coroutine[Any, Any, T]: ...
    def transaction(  # type: ignore[misc]  # mypy loses `*args: *Args` in an implementation
        self,
        id: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        returns: type[Any] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Return the value of `fn(connection, *args)`, whose writes commit with the step's record.

        The connection is the store's own: either both are committed or neither, exactly once.
        """
        call = self._run.call(id, fn, args)
        call.kind = "transaction"
        call.returns = returns
        return transact(self._run, call)


async def _wait_all(tasks: Iterable[Task]) -> None:
    pending = list(tasks)
    if not pending:
        return
    try:
        await asyncio.wait(pending)
    finally:
        await cancel_and_wait(pending)


def _thunks(thunks: object) -> dict[str, Callable[[], Any]]:
    expected = "a mapping of names to functions without arguments"
    if not isinstance(thunks, Mapping):
        raise InvalidArgument("thunks", thunks, expected)
    for name, thunk in thunks.items():
        if not isinstance(name, str) or not name or not callable(thunk):
            raise InvalidArgument(f"thunks[{name!r}]", thunk, expected)
        check_unreserved(name, "thunks")
    return dict(thunks)
