"""Middleware: a user's code around each activation of a run, and around each executed step.

class Tenancy(Middleware):
    async def around_run(self, run, call):
        with tenant(run.metadata["tenant"]):
            return await call()

Context variables that it sets reach the function, its branches and the functions of its steps. A
replayed step is not executed, so `around_step` is called once per execution.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from perdure import codec
from perdure.clock import Clock, parse_iso
from perdure.engine.call import StepCall
from perdure.engine.history import History
from perdure.engine.tasks import POSITION, outside_runs
from perdure.errors import CodecError, InvalidArgument, PerdureError
from perdure.snapshot import RunStatus, created_at_of, generation_of, version_of
from perdure.validation import check_text

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[], Awaitable[Any]]

USER = "userMetadata"
"""The name under which the user's metadata is stored, separate from the engine's."""

MAX_METADATA = 8192
"""The maximum size of a run's metadata as JSON, in bytes: every rest writes it."""


class ObservedRun(Protocol):
    """What middleware can see of the execution of a run."""

    @property
    def run_id(self) -> str: ...
    @property
    def workflow(self) -> str: ...
    @property
    def payload(self) -> Any: ...
    @property
    def history(self) -> History: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def replayed(self) -> int: ...
    @property
    def stopped_by(self) -> BaseException | None: ...


class Activation(msgspec.Struct, frozen=True):
    """How this process got to execute a run: see `RunContext`."""

    epoch: int = 0
    takeovers: int = 0
    due_at: datetime | None = None


class RunContext:
    """One activation of a run: from its lease until it ends or is suspended.

    `epoch` is the fencing token of the lease, `takeovers` is how many owners in a row lost the run
    without progress. `due_at` is when the run became due, if that is known.
    """

    __slots__ = ("_run", "due_at", "epoch", "takeovers")

    def __init__(self, run: ObservedRun, activation: Activation) -> None:
        self._run = run
        self.epoch = activation.epoch
        self.takeovers = activation.takeovers
        self.due_at = activation.due_at

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._run.run_id

    @property
    def workflow(self) -> str:
        """The name of the run's workflow."""
        return self._run.workflow

    @property
    def version(self) -> int:
        """The version of the workflow that executes the run."""
        return version_of(self._run.history.metadata)

    @property
    def generation(self) -> int:
        """The generation of the run, from 1."""
        return generation_of(self._run.history.metadata)

    @property
    def payload(self) -> Any:
        """The payload with which the run was triggered."""
        return self._run.payload

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that the run was triggered with; see `update_metadata`."""
        return user_metadata(self._run.history.metadata)

    @property
    def created_at(self) -> datetime | None:
        """When the run was triggered or last restarted; `None` if that is not stored."""
        timestamp = created_at_of(self._run.history.metadata)
        return parse_iso(timestamp) if timestamp else None

    @property
    def now(self) -> datetime:
        """The current time, by the clock of the run."""
        return self._run.clock.now()

    @property
    def is_first(self) -> bool:
        """Whether nothing of the run was recorded before this activation."""
        return self._run.replayed == 0 and not len(self._run.history)

    @property
    def replayed(self) -> int:
        """How many calls were answered from their records so far."""
        return self._run.replayed

    @property
    def interrupted_by(self) -> BaseException | None:
        """Why the function was stopped before its end, or `None` if it ended normally.

        This is `Suspended`, `Cancelled`, `ContinuedAsNew`, `LeaseLost` or an error of the store.
        """
        return self._run.stopped_by

    def update_metadata(self, **values: Any) -> None:
        """Change metadata of the run; the change is stored with its next write."""
        self._run.history.set_metadata(USER, check_metadata({**self.metadata, **values}))


class StepContext:
    """A step that is executed in this activation; `key` is the key of its record."""

    __slots__ = ("_call", "run")

    def __init__(self, run: RunContext, call: StepCall) -> None:
        self.run = run
        self._call = call

    @property
    def id(self) -> str:
        """The id in the call."""
        return self._call.id

    @property
    def key(self) -> str:
        """The key of the step's record."""
        return self._call.record_key

    @property
    def kind(self) -> str:
        """`step` or `transaction`."""
        return self._call.kind

    @property
    def branch(self) -> str:
        """The path of the branch that called the step, or "" for the function itself."""
        return self._call.path

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the step's function."""
        return self._call.args

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1."""
        return self._call.attempt


class WorkerContext(Protocol):
    """A worker, as middleware sees it."""

    @property
    def id(self) -> str:
        """The worker's name."""
        ...

    @property
    def concurrency(self) -> int:
        """How many runs it executes at once."""
        ...

    @property
    def running(self) -> int:
        """How many runs it is executing."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of its runtime."""
        ...

    async def stats(self) -> Any:
        """Return the `perdure.store.Stats` of the store; `None` if the store cannot count."""
        ...

    def observe_appends(self, callback: Callable[[float], None], /) -> None:
        """Call `callback` with the duration in seconds of each write of step records."""
        ...


class SentSignal(Protocol):
    """An event that is sent to a run."""

    @property
    def run_id(self) -> str: ...
    @property
    def event(self) -> str: ...


class Middleware:
    """The base class of middleware: override what you need.

    Whatever `around_run` and `around_step` return or raise becomes the outcome of the run or step,
    and is recorded. They call `call()` at most once, in their own task. A suspension, a
    cancellation and a lost lease pass through as `asyncio.CancelledError`; catching it changes
    nothing. Tasks that middleware starts are not branches of the run.
    """

    async def around_run(self, run: RunContext, call: Call) -> Any:
        """Call the workflow function; once per activation."""
        return await call()

    async def around_step(self, step: StepContext, call: Call) -> Any:
        """Execute the step, with all attempts that it makes in this activation.

        Around a transaction, it is called for each attempt, inside the transaction.
        """
        return await call()

    def after_run(self, run: RunContext, status: RunStatus | None) -> None:
        """Called when an activation has ended, and the run was stored with this status.

        The status is that of a run that has ended or waits, or `running` or `queued` if it will be
        continued at once. `None` means that nothing was stored: the lease was lost, the store
        failed, or the process is shutting down. The run continues from its records.
        """

    def on_retry(self, step: StepContext, error: Exception, delay: timedelta) -> None:
        """Called when an attempt of a step has failed, and the next one begins after `delay`."""

    async def around_signal(self, signals: Sequence[SentSignal], call: Call) -> Any:
        """Send events to runs; `call()` returns a list with the outcome of each."""
        return await call()

    async def around_worker(self, worker: WorkerContext, call: Call) -> Any:
        """Run a worker; `call()` returns when it has been drained."""
        return await call()

    def metadata(self, workflow: str, run_id: str) -> Mapping[str, Any]:
        """Return metadata for a run that the calling code is about to start.

        Metadata that was passed to `trigger` takes precedence.
        """
        return {}


class Around:
    """The middleware of one activation."""

    __slots__ = ("_after_run", "_context", "_retries", "_runs", "_steps")

    def __init__(
        self, middleware: Sequence[Middleware], run: ObservedRun, activation: Activation
    ) -> None:
        self._context = RunContext(run, activation)
        self._runs = _overriding(middleware, "around_run")
        self._steps = _overriding(middleware, "around_step")
        self._retries = _overriding(middleware, "on_retry")
        self._after_run = _overriding(middleware, "after_run")

    @property
    def has_steps(self) -> bool:
        """Whether there is middleware for steps or retries."""
        return bool(self._steps or self._retries)

    def retry(self, call: StepCall, error: Exception, delay: timedelta) -> None:
        """Report that a step is attempted again."""
        if self._retries:
            _report(self._retries, StepContext(self._context, call), error, delay)

    def after(self, status: RunStatus | None) -> None:
        """Report the status with which the run was stored."""
        # Innermost first, like the code after `call()` in `around_run`.
        _report(reversed(self._after_run), self._context, status)

    async def run(self, function: Call) -> Any:
        """Call the workflow function inside its middleware."""
        if not self._runs:
            return await function()
        branch, task = POSITION.get(), asyncio.current_task()

        async def innermost() -> Any:
            # A branch is a task, so steps called in another task would belong to another branch.
            if asyncio.current_task() is not task:
                raise PerdureError("around_run must await call() in its own task")
            token = POSITION.set(branch)
            try:
                return await function()
            finally:
                POSITION.reset(token)

        # Tasks of the middleware must not affect the numbers of branches.
        with outside_runs():
            return await _nested(self._runs, self._context, innermost)()

    async def step(self, call: StepCall, execute: Call) -> Any:
        """Execute a step inside its middleware."""
        return await _nested(self._steps, StepContext(self._context, call), execute)()


def _report(handlers: Iterable[Callable[..., Any]], *facts: object) -> None:
    """Call handlers whose results do not matter; errors are only logged."""
    for handler in handlers:
        try:
            handler(*facts)
        except Exception:
            logger.exception("%s failed", handler.__qualname__)


def _overriding(middleware: Sequence[Middleware], name: str) -> list[Callable[..., Any]]:
    """Return this method of all middleware that overrides it."""
    # Determined once per activation, so that a step does not pay for methods that do nothing.
    default = getattr(Middleware, name)
    return [getattr(each, name) for each in middleware if getattr(type(each), name) != default]


async def send_signals(
    middleware: Sequence[Middleware], signals: Sequence[SentSignal], send: Call
) -> Any:
    """Send events to runs inside the middleware."""
    handlers = _overriding(middleware, "around_signal")
    return await _nested(handlers, signals, send)()


async def let_work(middleware: Sequence[Middleware], worker: WorkerContext, work: Call) -> None:
    """Run a worker inside its middleware."""
    await _nested(_overriding(middleware, "around_worker"), worker, work)()


def _nested(handlers: Iterable[Callable[[Any, Call], Any]], context: object, inner: Call) -> Call:
    """Return a function that calls the handlers, the first outermost, around `inner`."""
    for handler in reversed([*handlers]):
        inner = partial(handler, context, _Once(inner))
    return inner


class _Once:
    """A function that can be called only once: a second call would repeat what is recorded once."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Call) -> None:
        self._inner: Call | None = inner

    def __call__(self) -> Awaitable[Any]:
        inner, self._inner = self._inner, None
        if inner is None:
            raise PerdureError("middleware called call() twice; use Retry to repeat a step")
        return inner()


EVERYWHERE: list[Middleware] = []
"""Middleware of every new runtime and client, outside the middleware that is passed to it."""


def check_middleware(around: object) -> tuple[Middleware, ...]:
    """Return the global and the given middleware as a tuple, or raise `InvalidArgument`."""
    expected = "a list of instances of perdure.Middleware"
    if isinstance(around, str | bytes) or not isinstance(around, Iterable):
        raise InvalidArgument("around", around, expected)
    middleware = tuple(around)
    for each in middleware:
        if not isinstance(each, Middleware):
            hint = "Pass an instance, not the class" if isinstance(each, type) else ""
            raise InvalidArgument("around", each, expected, hint)
    classes = {type(each) for each in middleware}
    return (*(each for each in EVERYWHERE if type(each) not in classes), *middleware)


def user_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's part of a run's metadata."""
    own = metadata.get(USER)
    return own if type(own) is dict else {}


def check_metadata(value: object) -> dict[str, Any]:
    """Check for a small JSON object; return a copy."""
    expected = f"a JSON object of at most {MAX_METADATA} bytes"
    if not isinstance(value, Mapping):
        raise InvalidArgument("metadata", value, expected)
    for name in value:
        check_text(name, "metadata", "non-empty strings as names")
    try:
        data = codec.dumps(dict(value))
        if codec.encode(dict(value)) != codec.loads(data) or len(data) > MAX_METADATA:
            raise InvalidArgument("metadata", value, expected)
    except CodecError as error:
        raise InvalidArgument("metadata", value, expected, str(error)) from error
    metadata: dict[str, Any] = codec.loads(data)
    return metadata


def add_metadata(
    metadata: dict[str, Any], around: Sequence[Middleware], workflow: str, run_id: str
) -> None:
    """Add the metadata that middleware stores with a run that is about to start."""
    own_metadata: dict[str, Any] = {}
    for each in around:
        own_metadata.update(each.metadata(workflow, run_id))
    if own_metadata:
        # The caller's metadata is checked separately, so that middleware cannot make it too large.
        metadata[USER] = {**check_metadata(own_metadata), **user_metadata(metadata)}
