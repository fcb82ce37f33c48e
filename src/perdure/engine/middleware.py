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
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

from perdure.engine.call import StepCall
from perdure.engine.contexts import (
    Activation,
    ObservedRun,
    RunContext,
    SentSignal,
    StepContext,
    WorkerContext,
)
from perdure.engine.tasks import POSITION, outside_runs
from perdure.engine.user_metadata import USER, check_metadata, user_metadata
from perdure.errors import InvalidArgument, PerdureError
from perdure.snapshot import RunStatus

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[], Awaitable[Any]]


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
    if not middleware:
        return await send()
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
